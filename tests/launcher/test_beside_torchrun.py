"""`tdbg-run` beside `torchrun` on the same tiny scripts: same stdout, same exit code, same signals.

The scripts don't import torch (a rank would take seconds), so nothing is recorded but how the processes ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

TORCHRUN, TDBG_RUN = ("-m", "torch.distributed.run"), ("-m", "tdbg.launcher.run")
ENV = {k: v for k, v in os.environ.items() if not k.startswith("TDBG_")} | {"OMP_NUM_THREADS": "1"}

SCRIPT = """
import os, signal, sys, time
what, rank = sys.argv[1], int(os.environ["RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for r in range(2):  # one after the other, so that the output can be compared byte for byte
    if r == rank:
        print(rank, sys.argv[1:], os.getcwd() == os.environ["PWD"], __name__, flush=True)
    time.sleep(0.3)
if what == "raise" and rank == 1: raise ValueError("planted")
if what == "exit3" and rank == 0: sys.exit(3)
if what == "kill" and rank == 1: os.kill(os.getpid(), signal.SIGKILL)
if what == "once" and attempt == 0 and rank == 0: sys.exit(9)
if what in ("kill", "raise", "exit3", "wait"): time.sleep(60)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").write_text("")
    (tmp_path / "jobs" / "main.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(here: Path, launcher: tuple[str, ...], *argv: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, *argv], cwd=here, env=ENV | {"PWD": str(here)} | env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def run_of(here: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """run.json, node-00000.json and the exit rows by order of end of the only run."""
    (run,) = (here / "tdbg_runs").iterdir()
    rows = [r for p in run.glob("tables/exit/node=*/*.parquet") for r in pq.read_table(p).to_pylist()]
    node = json.loads((run / "node-00000.json").read_text())
    return json.loads((run / "run.json").read_text()), node, sorted(rows, key=lambda r: r["ended_ns"])


def both(here: Path, *argv: str) -> tuple[tuple[int, str, str], tuple[int, str, str]]:
    plain = start(here, TORCHRUN, *argv)
    watched = start(here, TDBG_RUN, *argv)
    return finish(plain), finish(watched)


def comparable(stderr: str) -> list[str]:
    """torchrun's own lines without what differs between any two runs: times, pids, source lines, our own lines."""
    lines = [line for line in stderr.splitlines() if not line.startswith("tdbg-run: ")]
    report = lines[next((i for i, line in enumerate(lines) if line.startswith("=====")), 0) :]
    return [re.sub(r"\d{2,}|\d\d:\d\d:\d\d", "N", line) for line in report]


ONE, TWO = ("--nproc-per-node", "1"), ("--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("argv", "status", "codes"),
    [
        ((*TWO, "job.py", "ok", "--tdbg-live", "-x"), "finished", [0, 0]),
        ((*TWO, "job.py", "exit3"), "failed", [3, -15]),
        ((*TWO, "job.py", "raise"), "failed", [1, -15]),
        ((*TWO, "job.py", "kill"), "failed", [-9, -15]),
        ((*ONE, "-m", "jobs.main", "ok"), "finished", [0]),
        ((*ONE, "--no-python", sys.executable, "-u", "job.py", "ok"), "finished", [0]),
        (("--standalone", *ONE, "missing.py"), "failed", [2]),
    ],
)
def test_output_exit_code_and_report_are_torchruns(
    here: Path, argv: tuple[str, ...], status: str, codes: list[int]
) -> None:
    plain, watched = both(here, *argv)
    assert watched[:2] == plain[:2]
    assert comparable(watched[2]) == comparable(plain[2])
    run, _, exits = run_of(here)
    assert (run["status"], run["exit_code"]) == (status, watched[0])
    assert run["end_ns"] > run["start_ns"]
    assert [e["exit_code"] for e in exits] == codes
    assert [e["stopped_by_launcher"] for e in exits] == [c == -15 for c in codes]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_both_alike(here: Path, number: signal.Signals) -> None:
    ended = []
    for process in [start(here, launcher, *TWO, "job.py", "wait") for launcher in (TORCHRUN, TDBG_RUN)]:
        assert process.stdout is not None
        first = process.stdout.readline() + process.stdout.readline()
        time.sleep(0.5)
        os.kill(process.pid, number)
        code, out, err = finish(process)
        ended.append((code, first + out))
        assert "SignalException" in err
    assert ended[0] == ended[1]
    run, _, exits = run_of(here)
    assert run["status"] == "killed"
    assert [(e["exit_code"], e["stopped_by_launcher"]) for e in exits] == [(-number, True)] * 2


def test_a_restart_is_a_second_attempt_with_its_own_deaths(here: Path) -> None:
    plain, watched = both(here, *TWO, "--max-restarts", "1", "job.py", "once")
    assert watched[:2] == plain[:2]
    assert watched[0] == 0
    _, node, exits = run_of(here)
    assert [a["attempt"] for a in node["attempts"]] == [0, 1]
    assert node["attempts"][0]["ranks"]["0"]["exit_code"] == 9
    assert [r["exit_code"] for r in node["attempts"][1]["ranks"].values()] == [0, 0]
    assert sorted((e["attempt"], e["rank"]) for e in exits) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_console_ends_as_torchruns_does_on_wrong_arguments(here: Path) -> None:
    plain, watched = both(here, "--nproc-per-node")
    assert watched[:2] == plain[:2]
    assert watched[0] == 2
    code, _, err = finish(start(here, TDBG_RUN, "--tdbg-nonsense", "job.py", "ok"))
    assert code == 2
    assert "unknown option --tdbg-nonsense" in err
    assert "Traceback" not in err
    assert not (here / "tdbg_runs").exists()


def test_help_is_torchruns_followed_by_ours(here: Path) -> None:
    plain, watched = both(here, "--help")
    assert watched[0] == plain[0] == 0
    assert watched[1].split("\ntdbg options")[0].strip() == plain[1].strip()
    assert "--tdbg-watch-steps" in watched[1]


def test_a_store_that_can_not_be_written_costs_one_line(here: Path) -> None:
    (here / "file").write_text("")
    plain = start(here, TORCHRUN, *ONE, "job.py", "exit3")
    watched = finish(start(here, TDBG_RUN, "--tdbg-dir", "file/store", *ONE, "job.py", "exit3"))
    assert watched[:2] == finish(plain)[:2]
    assert [line for line in watched[2].splitlines() if line.startswith("tdbg-run")] == [
        f"tdbg-run: not recording: {here / 'file'}: File exists (--tdbg-dir gives another store)"
    ]


def test_off_is_plain_torchrun(here: Path) -> None:
    code, out, err = finish(start(here, TDBG_RUN, *ONE, "job.py", "ok", TDBG_OFF="1"))
    assert (code, "tdbg" in err) == (0, False)
    assert out
    assert not (here / "tdbg_runs").exists()


def test_another_launcher_runs_under_exec_with_the_environment_set(here: Path) -> None:
    code = "import os, sys; print(os.environ['TDBG_NODE'], os.environ['TDBG_WATCH_STEPS']); sys.exit(4)"
    argv = ("--tdbg-exec", "--tdbg-watch-steps", "7", "--tdbg-run-name", "by-exec", "--", sys.executable, "-c", code)
    assert finish(start(here, TDBG_RUN, *argv))[:2] == (4, "0 7\n")
    run, _, _ = run_of(here)
    assert (run["id"], run["status"], run["exit_code"]) == ("by-exec", "failed", 4)
    assert run["settings"]["watch_steps"] == 7


def test_a_torch_that_is_too_old_or_broken_is_said_in_one_line(here: Path) -> None:
    fake = here / "old" / "torch"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("__version__ = '2.3.1+cpu'\n")
    code, _, err = finish(start(here, TDBG_RUN, "job.py", "ok", PYTHONPATH=str(fake.parent)))
    assert code == 1
    assert "torch 2.3.1+cpu is too old" in err
    (fake / "__init__.py").write_text("raise ImportError('libfoo.so: cannot open')\n")
    code, _, err = finish(start(here, TDBG_RUN, "job.py", "ok", PYTHONPATH=str(fake.parent)))
    assert code == 1
    assert "libfoo.so: cannot open" in err
    assert "Traceback" not in err
