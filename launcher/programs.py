"""Starts `tdbg` as a program: the launcher never imports the analysis, so nothing of it can disturb torchrun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

SUMMARY_SECONDS = 60.0  # verdicts of 1,000 ranks and 1,000 steps are to take 20 s
SUMMARY_SECONDS_AFTER_SIGNAL = (
    8.0  # with sealing well inside the 30 s that schedulers leave between SIGTERM and SIGKILL
)


def tdbg_command(store: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "tdbg.aggregator.cli", "--store", str(store), *arguments]


def print_summary(run: Path, env: Mapping[str, str], seconds: float, say: Callable[[str], None]) -> None:
    """Write what `tdbg verdicts RUN --summary` prints to stderr; when that fails, one line of where to look."""
    try:
        done = subprocess.run(
            tdbg_command(run.parent, "verdicts", run.name, "--summary"),
            cwd=run,  # `-m` puts the cwd on the path: nothing of the user's may stand there
            env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        say(f"recorded in {run}; the summary took more than {seconds:.0f} s: tdbg verdicts {run}")
        return
    except OSError as e:
        say(f"recorded in {run}; the summary could not be started: {e}")
        return
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit {done.returncode}"]
        say(f"recorded in {run}; the summary could not be made: {lines[-1]}")
        return
    sys.stderr.write((done.stdout + done.stderr).decode(errors="replace"))
    sys.stderr.flush()


def start_watch(run: Path, env: Mapping[str, str], say: Callable[[str], None]) -> subprocess.Popen[bytes] | None:
    """The live screen on the terminal that stderr is; None where it is no terminal."""
    if not sys.stderr.isatty():
        say("--tdbg-live: stderr is not a terminal, so there is no live screen; tdbg watch shows it elsewhere")
        return None
    return subprocess.Popen(
        tdbg_command(run.parent, "watch", run.name),
        cwd=run, env=dict(env), stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(),
    )  # fmt: skip


def stop_watch(watch: subprocess.Popen[bytes] | None) -> None:
    if watch is None or watch.poll() is not None:
        return
    watch.terminate()
    try:
        watch.wait(timeout=2.0)  # it redraws every second and puts the terminal back when told to go
    except subprocess.TimeoutExpired:
        watch.kill()
