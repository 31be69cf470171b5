"""Asks ranks for the Python stack of their training thread, whatever they are stuck in: `rankagent/stacks` answers.

A signal is only sent to a process that is known to catch it: its own page names the signal, /proc says that a handler
stands, that the answer would go to our file, and a pidfd makes sure that it is still the same process.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tdbg.rankagent import contract
from tdbg.rankagent.readback import read_state
from tdbg.rankagent.record import State

from .node.procfs import read_text

MOST_BYTES = 1 << 20  # of answers that are kept in a rank's file
PAUSE_SECONDS = 0.005
FRAMES = 60  # innermost ones that are kept
_HEAD = re.compile(rb"^(?:Stack|(?:Current thread|Thread) 0x[0-9a-f]+.*) \(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_OURS = os.path.dirname(os.path.abspath(contract.__file__))


@dataclass
class _Asked:
    """A process that was asked: its file, how long that was before, and how long it is now."""

    path: Path
    before: int
    now: int


def ask(processes: Iterable[tuple[int, Path]], seconds: float) -> dict[int, str]:
    """Frames by pid, of those of (pid, record folder) that answer within `seconds` in all."""
    deadline = time.monotonic() + seconds
    asked: dict[int, _Asked] = {}
    for pid, folder in processes:
        before = _signal(pid, folder)
        if before >= 0:
            asked[pid] = _Asked(folder / contract.STACKS, before, before)
    frames: dict[int, str] = {}
    while asked and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
        for pid, of in list(asked.items()):
            size = _size(of.path)
            if size > of.before and size == of.now:  # it has written, and goes on no more
                frames[pid] = _answer(of)
                del asked[pid]
            of.now = size
    return frames


def _signal(pid: int, folder: Path) -> int:
    """Send the signal if it is safe to; the length of the file before, -1 when it was not sent."""
    state = read_state(folder)
    if state is None or state.closed or state.signal <= 0 or state.pid != pid:
        return -1
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # gone, or a kernel without pidfds: then its number may be another's by now
        return -1
    try:
        path = folder / contract.STACKS
        ours, theirs = os.stat(path), os.stat(f"/proc/{pid}/fd/{state.stacks_fd}")
        if (ours.st_dev, ours.st_ino) != (theirs.st_dev, theirs.st_ino) or not catches(pid, state.signal):
            return -1
        if ours.st_size > MOST_BYTES:
            os.truncate(path, 0)  # it is opened for appending
        size = _size(path)
        _send(pid, pidfd, state)
        return size
    except OSError:
        return -1
    finally:
        os.close(pidfd)


def _send(pid: int, pidfd: int, state: State) -> None:
    """To the training thread; a process's main thread gets what is sent to the process."""
    if state.thread in (0, pid):
        signal.pidfd_send_signal(pidfd, state.signal)
        return
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc 2.30
    if tgkill is None:
        raise OSError("this C library has no tgkill")
    tgkill(pid, state.thread, state.signal)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal and its main thread lets it in."""
    masks = dict.fromkeys(("SigCgt", "SigBlk"), 0)
    for line in read_text(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name in masks:
            masks[name] = int(value, 16)
    bit = 1 << (number - 1)
    return bool(masks["SigCgt"] & bit) and not masks["SigBlk"] & bit


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _answer(of: _Asked) -> str:
    with of.path.open("rb") as f:
        f.seek(of.before)
        return frames_of(f.read(MOST_BYTES))


def frames_of(dump: bytes) -> str:
    """The first stack of faulthandler's output as 'file:line function' lines, outermost first, without our own."""
    head = _HEAD.search(dump)
    found: list[str] = []
    for line in dump[head.end() if head else 0 :].decode("utf-8", "replace").splitlines()[1 if head else 0 :]:
        m = _FRAME.match(line)
        if m is None:
            break
        if not m[1].startswith(_OURS + os.sep):
            found.append(f"{m[1]}:{m[2]} {m[3]}")
    return "\n".join(reversed(found[:FRAMES]))
