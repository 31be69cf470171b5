"""What a rank left for the launcher to take over: its last collectives, written by a thread of its own when asked.

A rank that hangs in a collective, or is about to be stopped because another one failed, can't write rows itself. It is
asked through a FIFO of its record folder (`rankagent.asked`) and answers with a small file, whose rows are then written
into the launcher's own record under the rank's number.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from tdbg.rankagent.record import Recorder
from tdbg.rankagent.tables import known_tables

FIFO, ANSWER = "ask", "flight.json"
WAIT_SECONDS = 0.3  # an answer takes some ms, 75 with a full recorder; the job has failed already
LOOK_SECONDS = 0.01


def ask(folders: Iterable[Path]) -> list[Path]:
    """Ask these ranks; gives the folders of those that can answer."""
    return [f for f in folders if _ask(f)]


def _ask(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        (folder / ANSWER).unlink()  # of a rank that was stopped and answered too late
    try:
        fd = os.open(folder / FIFO, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # ENXIO when nobody reads
    except OSError:
        return False
    try:
        os.write(fd, b"?")
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def wait(folders: Iterable[Path], seconds: float = WAIT_SECONDS) -> set[Path]:
    """Wait until each has answered, at most so long; gives the folders of those that have."""
    folders = list(folders)
    deadline = time.monotonic() + seconds
    left = list(folders)
    while left and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        left = [f for f in left if not (f / ANSWER).exists()]
    return set(folders) - set(left)


def take(folder: Path, recorder: Recorder, rank: int, attempt: int) -> bool:
    """Write a rank's answer as rows and remove it; False without one."""
    path = folder / ANSWER
    if not path.exists():
        return False
    table = known_tables()["collective"]
    before, recorder.attempt = recorder.attempt, attempt
    try:
        for step, fixed, variable in json.loads(path.read_text(encoding="utf-8")):
            recorder.write(table, step, fixed, variable, rank=rank)
    finally:
        recorder.attempt = before
        with contextlib.suppress(OSError):
            path.unlink()
    return True


def forget(folder: Path) -> None:
    """The rank has ended: nobody reads its FIFO any more, and a copy of the run should not meet one."""
    with contextlib.suppress(OSError):
        (folder / FIFO).unlink()
