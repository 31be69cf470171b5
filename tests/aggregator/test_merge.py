"""Node-local folders brought together: as one shared folder would have been, or nothing and a reason."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.healthy import healthy
from kit.plants import PLANTS
from kit.runs import write_run
from tdbg.aggregator.cli import main

RANKS = 4


def _node(store: Path, node: int, *ranks: int, status: str = "finished", **about: Any) -> Path:
    """The folder that the launcher of one node leaves: its own ranks, run.json, its node file."""
    rows = healthy(RANKS)
    PLANTS["PARAM_DESYNC"].apply(rows)
    for (name,) in rows.connection.execute(
        "SELECT table_name FROM information_schema.columns WHERE column_name = 'rank' AND table_name IN (SELECT "
        "table_name FROM information_schema.tables WHERE table_type = 'BASE TABLE')"
    ).fetchall():
        rows.connection.execute(f'DELETE FROM "{name}" WHERE rank NOT IN ({", ".join(map(str, (-1, *ranks)))})')
    run = write_run(store, rows, about.pop("name", "job-17"), status=status, world_size=RANKS, nnodes="2", **about)
    described = json.loads((run / "node-00000.json").read_text())
    (run / "node-00000.json").unlink()
    (run / f"node-{node:05d}.json").write_text(json.dumps(described | {"node": node}))
    for folder in run.glob("**/node=00000"):
        folder.rename(folder.with_name(f"node={node:05d}"))
    for folder in run.glob("records/node-00000.*"):
        folder.rename(folder.with_name(folder.name.replace("00000", f"{node:05d}", 1)))
    return run


def _judged(run: Path, capsys: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["verdicts", str(run), "--json"]) == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


def _merge(capsys: Any, *words: object, status: int = 0) -> str:
    capsys.readouterr()
    assert main(["merge", *map(str, words)]) == status
    out, err = capsys.readouterr()
    if status:
        assert (out, len(err.splitlines())) == ("", 2)
    return out or err


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    return _node(tmp_path / "a", 0, 0, 1), _node(tmp_path / "b", 1, 2, 3)


def test_a_merged_run_is_judged_as_a_shared_folder_would_be(
    nodes: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    before = {p: p.read_bytes() for n in nodes for p in n.rglob("*") if p.is_file()}
    said = json.loads(_merge(capsys, *nodes, "-o", tmp_path / "m" / "job-17", "--json"))
    assert (said["schema"], said["run"], said["nodes"], said["ranks"], said["missing_nodes"]) == (
        "tdbg.merge/1", "job-17", [0, 1], [0, 1, 2, 3], 0,
    )  # fmt: skip
    rows = healthy(RANKS)
    PLANTS["PARAM_DESYNC"].apply(rows)
    whole = _judged(write_run(tmp_path / "w", rows, "job-17"), capsys)
    merged = _judged(tmp_path / "m" / "job-17", capsys)
    for key in ("status", "world_size", "steps", "incidents", "verdicts", "data_quality"):
        assert merged[key] == whole[key], key
    assert merged["data_quality"]["complete"]
    assert before == {p: p.read_bytes() for n in nodes for p in n.rglob("*") if p.is_file()}
    for path in [tmp_path / "m" / "job-17", *(tmp_path / "m" / "job-17").rglob("*")]:
        assert not path.is_dir() or path.stat().st_mode & 0o077 == 0  # a link keeps its file's mode


def test_one_node_alone_is_incomplete_and_so_is_a_merge_that_lacks_a_node(
    nodes: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    assert not _judged(nodes[0], capsys)["data_quality"]["complete"]
    three = _node(tmp_path / "c", 1, 2)  # rank 3 is on a node that is not given
    text = _merge(capsys, nodes[0], three, "-o", tmp_path / "m")
    assert "ranks 0-2" in text
    judged = _judged(tmp_path / "m", capsys)
    assert not judged["data_quality"]["complete"]
    assert not any(v["outcome"] == "CLEAR" for v in judged["verdicts"])


def test_the_gravest_end_is_that_of_the_run(nodes: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    failed = _node(tmp_path / "f", 1, 2, 3, status="failed")
    _merge(capsys, nodes[0], failed, "-o", tmp_path / "m")
    assert _judged(tmp_path / "m", capsys)["status"] == "failed"


def test_it_goes_into_the_store_under_the_runs_id(nodes: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    assert main(["--store", str(tmp_path / "s"), "merge", *map(str, nodes)]) == 0
    assert (tmp_path / "s" / "job-17" / "run.json").exists()
    assert os.listdir(tmp_path / "s") == ["job-17"]
    assert main(["--store", str(tmp_path / "s"), "runs"]) == 0
    assert "job-17" in capsys.readouterr().out


Harm = Callable[[Path, Path], None]


def _other_job(a: Path, b: Path) -> None:
    _rewrite(b / "run.json", id="job-18")


def _other_size(a: Path, b: Path) -> None:
    _rewrite(b / "run.json", world_size=8)


def _yesterday(a: Path, b: Path) -> None:
    day = 86_400 * 10**9
    raw = json.loads((b / "run.json").read_text())
    _rewrite(b / "run.json", start_ns=raw["start_ns"] - day, end_ns=raw["end_ns"] - day, id="job-17-2")


def _no_about(a: Path, b: Path) -> None:
    (b / "run.json").write_text("{")


def _same_rank(a: Path, b: Path) -> None:
    part = next(a.glob("tables/step/rank=00000/*.parquet"))
    other = b / part.relative_to(a)
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_bytes(part.read_bytes() + b"x")


def _same_node(a: Path, b: Path) -> None:
    shutil.copy(b / "node-00001.json", b / "node-00000.json")


def _rewrite(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_other_job, "the id is 'job-17' and 'job-18'"),
        (_other_size, "the world size is 4 and 8"),
        (_yesterday, "not of one run: the start"),
        (_no_about, "no readable run.json"),
        (_same_rank, "both hold tables/step/rank=00000"),
        (_same_node, "both hold node-00000.json"),
    ],
)
def test_what_does_not_belong_together_is_refused_and_nothing_is_left(
    nodes: tuple[Path, Path], tmp_path: Path, capsys: Any, harm: Harm, words: str
) -> None:
    harm(*nodes)
    (tmp_path / "out").mkdir()
    assert words in _merge(capsys, *nodes, "-o", tmp_path / "out" / "m", status=3)
    assert os.listdir(tmp_path / "out") == []


def test_a_target_that_exists_one_folder_alone_and_a_foreign_one_are_refused(
    nodes: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "there").mkdir()
    assert "is there already" in _merge(capsys, *nodes, "-o", tmp_path / "there", status=3)
    assert "two nodes or more" in _merge(capsys, nodes[0], nodes[0], "-o", tmp_path / "x", status=3)
    assert "is not a run" in _merge(capsys, nodes[0], tmp_path / "there", "-o", tmp_path / "x", status=3)


def test_a_disk_that_fails_leaves_nothing(
    nodes: tuple[Path, Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "here")

    monkeypatch.setattr(shutil, "copyfile", full)
    (tmp_path / "out").mkdir()
    assert "No space left" in _merge(capsys, *nodes, "-o", tmp_path / "out" / "m", status=3)
    assert os.listdir(tmp_path / "out") == []


def test_links_out_of_a_folder_are_not_followed(nodes: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "secret").write_text("s")
    (nodes[1] / "records" / "leak").symlink_to(tmp_path / "secret")
    (nodes[1] / "tables" / "more").symlink_to(tmp_path)
    _merge(capsys, *nodes, "-o", tmp_path / "m")
    assert not list((tmp_path / "m").rglob("leak")) + list((tmp_path / "m").rglob("more"))
