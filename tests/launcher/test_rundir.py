"""Run ids, the run folder and its JSON files."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from tdbg.launcher import rundir


def test_a_fresh_id_has_time_script_and_four_hex_digits() -> None:
    assert re.fullmatch(r"\d{8}-\d{6}-train-[0-9a-f]{4}", rundir.fresh_id("/x/train.py", 1e9))
    assert rundir.fresh_id("t.py", 1e9) != rundir.fresh_id("t.py", 1e9)


@pytest.mark.parametrize(
    ("name", "plain"),
    [("a b/c", "a-b-c"), ("../up", "up"), (".hidden", "hidden"), ("", "run"), ("exp_1.2", "exp_1.2"), ("ü", "run")],
)
def test_names_are_made_fit_for_a_folder(name: str, plain: str) -> None:
    assert rundir.plain(name) == plain


def test_nodes_agree_on_an_id_without_talking() -> None:
    assert rundir.shared_id({"SLURM_JOB_ID": "9"}, "job-7", "h:1", "t.py") == "job-7"
    slurm = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}
    assert rundir.shared_id(slurm, "none", "h:1", "t.py") == "slurm-9-0"
    same = rundir.shared_id({}, "none", "host:29500", "t.py")
    assert same == rundir.shared_id({}, "", "host:29500", "t.py")
    assert same != rundir.shared_id({}, "none", "host:29501", "t.py")


def test_the_node_has_torchruns_index_the_schedulers_or_one_from_its_name() -> None:
    assert rundir.node_index({"SLURM_NODEID": "4"}, None, 1, "h") == 0
    assert rundir.node_index({"SLURM_NODEID": "4"}, 2, 8, "h") == 2
    assert rundir.node_index({"SLURM_NODEID": "4"}, None, 8, "h") == 4
    named = rundir.node_index({}, None, 8, "h")
    assert named == rundir.node_index({}, None, 8, "h") != rundir.node_index({}, None, 8, "g")
    assert 10_000 <= named < 2**31
    many = {rundir.node_index({}, None, 1000, f"host {pid} 17") for pid in range(1000)}
    assert len(many) == 1000  # two launchers with one index would write one file


def test_run_folders_are_private(tmp_path: Path) -> None:
    folder = rundir.make_run_folder(tmp_path / "store", "r", shared=False)
    for f in (tmp_path / "store", folder, folder / "records", folder / "tables"):
        assert f.stat().st_mode & 0o777 == 0o700


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    names = [rundir.make_run_folder(tmp_path, "r", shared=False).name for _ in range(3)]
    assert names == ["r", "r-2", "r-3"]


def test_the_second_node_joins_the_first_ones_folder(tmp_path: Path) -> None:
    first = rundir.make_run_folder(tmp_path, "r", shared=True)
    assert rundir.make_run_folder(tmp_path, "r", shared=True) == first


def test_a_rendezvous_id_used_again_after_the_run_ended_makes_a_new_run(tmp_path: Path) -> None:
    first = rundir.make_run_folder(tmp_path, "r", shared=True)
    rundir.run_json(first).update(end_ns=1)
    assert rundir.make_run_folder(tmp_path, "r", shared=True).name == "r-2"


def test_a_run_whose_nodes_fell_silent_is_not_joined(tmp_path: Path) -> None:
    rundir.run_json(tmp_path).write()
    rundir.node_json(tmp_path, 0, "h").write()
    assert rundir.still_running(tmp_path)
    assert not rundir.still_running(tmp_path, now_ns=time.time_ns() + 2 * rundir.ALIVE_NS)


def test_only_one_of_the_nodes_creates_run_json(tmp_path: Path) -> None:
    assert rundir.run_json(tmp_path, script="a").create()
    assert not rundir.run_json(tmp_path, script="b").create()
    assert json.loads((tmp_path / "run.json").read_text())["script"] == "a"


def test_run_json_has_the_promised_keys(tmp_path: Path) -> None:
    rundir.run_json(tmp_path).write()
    assert list(json.loads((tmp_path / "run.json").read_text())) == [
        "schema", "format", "id", "command", "script", "cwd", "start_ns", "end_ns", "status", "exit_code",
        "world_size", "nnodes", "nproc_per_node", "max_restarts", "host", "user", "launcher_pid", "versions",
        "revision", "settings",
    ]  # fmt: skip


def test_a_rewrite_that_fails_leaves_the_old_file_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = rundir.node_json(tmp_path, 0, "h")
    file.write()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        file.update(host="other")
    assert os.listdir(tmp_path) == ["node-00000.json"]
    assert json.loads((tmp_path / "node-00000.json").read_text())["host"] == "h"
