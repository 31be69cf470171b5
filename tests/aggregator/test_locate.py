"""RUN on the command line: id, prefix, path, latest; foreign and empty folders are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tdbg.aggregator.locate import resolve, run_dirs, store_dir
from tdbg.rankagent.contract import TdbgError


def _run(store: Path, name: str, start_ns: int) -> Path:
    folder = store / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"schema": "tdbg.run/1", "start_ns": start_ns}))
    return folder


def test_an_id_a_unique_prefix_a_path_and_latest_name_a_run(tmp_path: Path) -> None:
    newest = _run(tmp_path, "alpha-1", 300)
    older = _run(tmp_path, "beta-1", 200)
    assert resolve(tmp_path, "beta-1") == older
    assert resolve(tmp_path, "be") == older
    assert resolve(tmp_path, str(older)) == older
    assert resolve(tmp_path, "latest") == newest
    assert run_dirs(tmp_path) == [older, newest]


def test_an_id_wins_over_the_longer_ids_that_begin_with_it(tmp_path: Path) -> None:
    exact = _run(tmp_path, "job", 1)
    _run(tmp_path, "job-2", 2)
    assert resolve(tmp_path, "job") == exact


@pytest.mark.parametrize("name", ["ga", "", "latest", "."])
def test_a_run_that_is_not_there_is_named_in_the_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(TdbgError) as error:
        resolve(tmp_path, name)
    assert error.value.hint


def test_an_ambiguous_prefix_lists_what_it_fits(tmp_path: Path) -> None:
    _run(tmp_path, "job-1", 1)
    _run(tmp_path, "job-2", 2)
    with pytest.raises(TdbgError, match="job-1, job-2"):
        resolve(tmp_path, "job")


def test_empty_and_foreign_folders_are_no_runs(tmp_path: Path) -> None:
    empty, foreign = tmp_path / "empty", tmp_path / "foreign"
    empty.mkdir()
    (foreign / "tables" / "oak" / "legs").mkdir(parents=True)
    (foreign / "records" / "vinyl").mkdir(parents=True)
    (foreign / "run.json").write_text('{"name": "somebody else\'s"}')
    for folder in (empty, foreign):
        with pytest.raises(TdbgError, match="is not a run"):
            resolve(tmp_path, str(folder))
    assert run_dirs(tmp_path) == []


def test_a_missing_store_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TdbgError, match="no store at") as error:
        run_dirs(tmp_path / "nowhere")
    assert "--store" in error.value.hint


def test_the_flag_wins_over_the_variable_over_the_default() -> None:
    assert store_dir("a", {"TDBG_DIR": "b"}) == Path("a")
    assert store_dir(None, {"TDBG_DIR": "b"}) == Path("b")
    assert store_dir(None, {}) == Path("tdbg_runs")
