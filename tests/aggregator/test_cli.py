"""The commands: what they print, their JSON, their exit status; errors are one or two lines, never a traceback."""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.rows import Rows
from kit.runs import write_run
from tdbg.aggregator import commands
from tdbg.aggregator.cli import COMMANDS, load, main, parser

Copy = Callable[[str], Path]
EVIL = "evil\x1b[2J\x1b]0;title\x07\u202e[bold red]name"


def _json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> dict[str, Any]:
    assert main(argv) == status
    loaded = json.loads(capsys.readouterr().out, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert isinstance(loaded, dict)
    return loaded


def _text(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert main(argv) == status
    return capsys.readouterr().out


def _error(capsys: pytest.CaptureFixture[str], *argv: str, status: int) -> str:
    assert main(argv) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert 1 <= len(err.splitlines()) <= 2
    assert err.startswith("tdbg: ")
    return err


def test_the_verdicts_object_has_exactly_the_fields_of_the_contract(templates: Path, capsys: Any) -> None:
    v = _json(capsys, "--store", str(templates), "verdicts", "faulty", "--json")
    assert v["schema"] == "tdbg.verdicts/1"
    assert (v["run"], v["status"], v["world_size"], v["steps"]) == ("faulty", "finished", 3, 24)
    assert v["data_quality"] == {"complete": True, "warnings": [], "dropped_events": 0, "ranks_seen": [0, 1, 2],
                                 "last_step": {"0": 24, "1": 24, "2": 24}}  # fmt: skip
    assert all(set(r) == {"reason_code", "outcome", "why", "checked"} for r in v["verdicts"])
    assert all(set(r["checked"]) == {"steps", "ranks"} for r in v["verdicts"])
    (i,) = v["incidents"]
    assert set(i) == {"id", "reason_code", "severity", "evidence_state", "ranks", "first_step", "attempt",
                      "subject", "last_good_step", "last_step", "summary", "evidence", "cannot_conclude",
                      "next_check"}  # fmt: skip
    assert (i["reason_code"], i["severity"], i["evidence_state"], i["ranks"]) == (
        "PARAM_DESYNC",
        "critical",
        "OBSERVED",
        [2],
    )
    assert all(set(e) == {"rank", "step", "metric", "value", "expected"} for e in i["evidence"])


def test_incidents_is_the_same_object_without_verdicts(templates: Path, capsys: Any) -> None:
    v = _json(capsys, "--store", str(templates), "verdicts", "faulty", "--json")
    i = _json(capsys, "--store", str(templates), "incidents", "faulty", "--json")
    del v["verdicts"]
    assert i == v


def test_one_incident_is_shown_in_full_by_a_prefix_of_its_id(templates: Path, capsys: Any) -> None:
    one = _json(capsys, "--store", str(templates), "incident", "faulty", "PARAM", "--json")["incident"]
    text = _text(capsys, "--store", str(templates), "incident", "faulty", one["id"])
    assert one["id"] in text
    assert one["summary"] in text
    assert text.count("rank 2 step") == len([e for e in one["evidence"] if e["rank"] == 2]) > 0
    err = _error(capsys, "--store", str(templates), "incident", "faulty", "HANG", status=2)
    assert one["id"] in err


def test_the_exit_code_is_1_only_when_asked_for_and_only_above_a_note(templates: Path, capsys: Any) -> None:
    store = ("--store", str(templates))
    for argv, status in (
        (("verdicts", "faulty"), 0), (("verdicts", "faulty", "--exit-code"), 1),
        (("verdicts", "faulty", "--exit-code", "--json"), 1), (("verdicts", "healthy", "--exit-code"), 0),
        (("incidents", "faulty", "--exit-code"), 1), (("incident", "faulty", "PARAM", "--exit-code"), 1),
    ):  # fmt: skip
        assert main([*store, *argv]) == status, argv
    capsys.readouterr()


def test_the_runs_of_a_store_are_listed_and_a_broken_one_is_a_line(run_of: Copy, tmp_path: Path, capsys: Any) -> None:
    store = run_of("faulty").parent
    broken = store / "broken"
    broken.mkdir()
    (broken / "run.json").write_text('{"schema": "tdbg.run/9", "format": 9}')
    rows = {r["run"]: r for r in _json(capsys, "--store", str(store), "runs", "--json")["runs"]}
    faulty = rows["faulty"]
    assert (faulty["script"], faulty["world_size"], faulty["steps"], faulty["incidents"]) == ("train.py", 3, 24, 1)
    assert rows["broken"]["status"] == "unreadable"
    text = _text(capsys, "--store", str(store), "runs")
    assert [line.split()[0] for line in text.splitlines()[1:]] == list(rows)


def test_the_summary_says_where_what_and_how_to_read_more(templates: Path, capsys: Any) -> None:
    faulty = _text(capsys, "--store", str(templates), "verdicts", "faulty", "--summary")
    assert "run faulty: finished, 3 ranks, 24 steps" in faulty
    assert "critical: PARAM_DESYNC, rank 2, from step 9" in faulty
    assert f"read more: tdbg --store {templates} verdicts faulty" in faulty
    healthy = _text(capsys, "verdicts", str(templates / "healthy"), "--summary")
    assert "no incident; " in healthy
    assert "data quality: complete" in healthy
    assert f"read more: tdbg verdicts {templates / 'healthy'}" in healthy
    assert all(line.startswith("tdbg: ") for line in (faulty + healthy).splitlines())


def test_ranks_and_metrics_show_each_rank(templates: Path, capsys: Any) -> None:
    store = ("--store", str(templates))
    ranks = _json(capsys, *store, "ranks", "faulty", "--json")["ranks"]
    assert [(r["rank"], r["steps"], r["apart"]) for r in ranks] == [(0, 24, ""), (1, 24, ""), (2, 24, "PARAM_DESYNC")]
    metrics = _json(capsys, *store, "metrics", "faulty", "loss", "--json")
    assert len(metrics["rows"]) == 72
    assert {r["metric"] for r in metrics["rows"]} == {"loss"}
    assert len(_text(capsys, *store, "metrics", "faulty", "loss").splitlines()) == 26
    every = _json(capsys, *store, "metrics", "faulty", "--json")
    assert {"loss", "grad_norm", "step_ns", "rss_bytes", "lr"} <= {r["metric"] for r in every["rows"]}
    assert every["units"]["step_ns"] == "ns"
    assert "there are: loss" in _error(capsys, *store, "metrics", "faulty", "speed", status=2)


def test_the_timeline_is_a_line_an_event(templates: Path, capsys: Any) -> None:
    t = _json(capsys, "--store", str(templates), "timeline", "faulty", "--json")
    assert t["schema"] == "tdbg.timeline/1"
    assert {"attempt", "step", "last_step", "time_ns", "ranks", "kind", "what"} == set(t["events"][0])
    assert "PARAM_DESYNC (critical)" in _text(capsys, "--store", str(templates), "timeline", "faulty")


def test_compare_says_where_two_runs_part_in_the_contracts_words(templates: Path, capsys: Any) -> None:
    c = _json(capsys, "--store", str(templates), "compare", "faulty", "faulty", "--json")
    assert {"schema", "outcome", "first_step", "metric", "subject", "ranks", "identity_differences", "why"} <= set(c)
    assert (c["schema"], c["outcome"], c["first_step"]) == ("tdbg.compare/1", "IDENTICAL", None)
    text = _text(capsys, "--store", str(templates), "compare", "faulty", "healthy")
    assert text.startswith("WITHIN_NOISE: bits differ from step 9 on")  # of a parameter, and no loss follows
    _error(capsys, "--store", str(templates), "compare", "faulty", "nowhere", status=3)


def test_sql_prints_a_table_or_json_rows(templates: Path, capsys: Any) -> None:
    query = "SELECT rank, max(step) AS last, 'nan'::DOUBLE AS odd FROM step GROUP BY rank ORDER BY rank"
    found = _json(capsys, "sql", str(templates / "healthy"), query, "--json")
    assert found["columns"] == ["rank", "last", "odd"]
    assert found["rows"] == [[0, 24, "NaN"], [1, 24, "NaN"], [2, 24, "NaN"]]
    text = _text(capsys, "sql", str(templates / "healthy"), query)
    assert text.splitlines()[0].split() == ["rank", "last", "odd"]
    assert text.splitlines()[-1] == "(3 rows)"


@pytest.mark.parametrize("query", [
    "SELEC 1", "SELECT * FROM nowhere", "DROP VIEW step", "CREATE TABLE t AS SELECT 1", "", "SELECT 1; SELECT 2",
    "COPY (SELECT 1) TO '{run}/run.json'", "EXPLAIN ANALYZE COPY (SELECT 1) TO '{run}/run.json'",
    "SELECT * FROM read_text('/etc/hostname')", "SET threads = 1", "ATTACH '{run}/x.db'",
    "SELECT 'x'::INT",
])  # fmt: skip
def test_sql_only_reads_and_only_this_run(run_of: Copy, capsys: Any, query: str) -> None:
    run = run_of("healthy")
    before = (run / "run.json").read_text()
    _error(capsys, "sql", str(run), query.replace("{run}", str(run)), status=2)
    assert (run / "run.json").read_text() == before
    assert not (run / "x.db").exists()


def test_a_missing_or_foreign_run_is_status_3(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").mkdir()
    for argv in (("verdicts", "nothing"), ("verdicts", str(tmp_path / "empty")), ("ranks", "latest"),
                 ("verdicts", str(tmp_path / "no" / "where"))):  # fmt: skip
        _error(capsys, "--store", str(tmp_path), *argv, status=3)
    assert "no store at" in _error(capsys, "--store", str(tmp_path / "none"), "runs", status=3)


@pytest.mark.parametrize("argv", [[], ["verdict", "x"], ["verdicts"], ["verdicts", "x", "--jso"], ["--nope"]])
def test_a_wrong_command_line_is_status_2(argv: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert capsys.readouterr().out == ""


def test_an_error_of_a_hostile_name_is_safe_to_print(tmp_path: Path, capsys: Any) -> None:
    assert "\x1b" not in _error(capsys, "--store", str(tmp_path), "verdicts", EVIL, status=3)


def test_names_from_a_run_reach_neither_terminal_nor_json_unescaped(tmp_path: Path, capsys: Any) -> None:
    rows = Rows()
    for rank in range(3):
        rows.add("identity", rank=rank, pid=100 + rank, key=f"env.{EVIL}", value=f"{rank}{EVIL}", rule="must")
        rows.add("step", rank=rank, pid=100 + rank, step=1)
    run = write_run(tmp_path, rows, script=EVIL)
    for argv in (
        ("verdicts",),
        ("verdicts", "--summary"),
        ("incidents",),
        ("ranks",),
        ("watch",),
        ("verdicts", "--json"),
    ):
        text = _text(capsys, argv[0], str(run), *argv[1:])
        assert not {"\x1b", "\x07", "\u202e"} & set(text), argv
    assert "\x1b" not in _text(capsys, "--store", str(tmp_path), "runs")
    assert "\x1b" not in _text(capsys, "sql", str(run), "SELECT key, value FROM identity")


def test_watch_without_a_terminal_prints_one_screen(templates: Path, capsys: Any) -> None:
    text = _text(capsys, "--store", str(templates), "watch", "faulty")
    assert "what sets it apart" in text
    assert "PARAM_DESYNC" in text
    assert "\x1b" not in text
    looked = _json(capsys, "--store", str(templates), "watch", "faulty", "--json")
    assert looked["schema"] == "tdbg.watch/1"
    assert len(looked["ranks"]) == 3


def _tdbg(*argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tdbg.aggregator.cli", *argv], capture_output=True, text=True,
                          timeout=60, **more)  # fmt: skip


def test_the_module_runs_as_a_program_also_where_the_encoding_is_ascii(templates: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "TDBG_DIR": str(templates)}
    done = _tdbg("sql", "healthy", "SELECT 'größer' AS x", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "gr\\xf6\\xdfer" in done.stdout


def test_a_reader_that_stops_reading_is_no_error(templates: Path) -> None:
    command = f"'{sys.executable}' -m tdbg.aggregator.cli --store '{templates}' metrics healthy | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.strip() == "loss"


def test_a_wrong_command_line_is_reported_before_anything_heavy_is_imported() -> None:
    code = ("import sys; from tdbg.aggregator.cli import parser; parser(); "
            "print(sorted({'duckdb', 'jinja2', 'matplotlib', 'pyarrow', 'rich', 'torch'}"
            " & set(sys.modules)))")  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_reading_a_sealed_run_imports_neither_pyarrow_nor_rich_nor_torch(templates: Path) -> None:
    code = ("import sys; from tdbg.aggregator.cli import main; main(sys.argv[1:]); "
            "print(sorted({'pyarrow', 'rich', 'torch'} & set(sys.modules)))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, "verdicts", str(templates / "healthy"), "--summary"],
                          capture_output=True, text=True)  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_command_file_is_a_command() -> None:
    assert sorted(m.name for m in pkgutil.iter_modules(commands.__path__)) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_examples_that_its_parser_takes(name: str, capsys: Any) -> None:
    _, examples, lines = (inspect.getdoc(load(name)) or "").partition("Examples:\n\n")
    assert examples
    for line in lines.splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "tdbg"
        assert parser().parse_args(words).command is load(name)
    with pytest.raises(SystemExit) as e:
        main([name, "--help"])
    assert e.value.code == 0
    assert lines in capsys.readouterr().out
