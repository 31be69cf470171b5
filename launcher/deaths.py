"""When each rank's process ended, to the millisecond, and with which code.

A thread sleeps in `poll` on one pidfd a process: it costs nothing until a process ends, and two deaths that are some
milliseconds apart keep their order, which is what tells the rank that failed from those that fell with it. Without
pidfds (Linux before 5.3, some sandboxes) the processes are looked at ten times a second.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .torchelastic import UNKNOWN_EXIT, peek_exit_code

POLL_SECONDS = 0.1  # without pidfds; torchelastic itself looks this often
SETTLE_NS = 2_000_000_000  # how long a code may stay unknown: torchelastic looks every 0.1 s and then tells us


@dataclass
class Process:
    """One process that is followed. `exit_code` is None until known, `ended_ns` 0 while it runs."""

    rank: int
    attempt: int
    pid: int
    ended_ns: int = 0
    exit_code: int | None = None
    stopped: bool = False
    settled: bool = False  # no better answer about its end will come


class Deaths:
    """Follows processes. Every method may be called from any thread; `on_death` is called in the watching thread."""

    def __init__(self, on_death: Callable[[], None], now_ns: Callable[[], int] = time.time_ns) -> None:
        self._on_death, self._now_ns = on_death, now_ns
        self._lock = threading.Lock()
        self._running: dict[int, Process] = {}
        self._ended: dict[int, Process] = {}
        self._ending = False
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pidfds: dict[int, int] = {}  # fd -> pid; the watching thread's own
        self._thread = threading.Thread(target=self._watch, name="tdbg-deaths", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Processes that still run are forgotten."""
        with self._lock:
            if self._wake_write < 0:
                return
            self._ending = True
            self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            with self._lock:
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_write = -1

    def follow(self, processes: Iterable[Process]) -> None:
        with self._lock:
            self._running.update({p.pid: p for p in processes})
            self._wake()

    def stopping(self, ended: Mapping[int, int]) -> None:
        """From here on, whatever ends was stopped by the launcher; `ended` had gone before.

        torchelastic stops a group more than once; what the first time stopped stays so.
        """
        with self._lock:
            for pid, process in self._running.items():
                process.stopped = process.stopped or (pid not in ended and runs(pid))
        self.codes(ended)

    def codes(self, codes: Mapping[int, int]) -> None:
        """Exit codes by pid, as torchelastic reports them."""
        with self._lock:
            for pid, code in codes.items():
                process = self._running.get(pid) or self._ended.get(pid)
                if process is not None:
                    process.exit_code, process.settled = code, True

    def running(self) -> list[Process]:
        with self._lock:
            return list(self._running.values())

    def take(self, last: bool = False) -> list[Process]:
        """Processes that ended and whose code is known or won't be, in the order of their end; each is given once.

        `last`: nothing more will be reported, so give also those that still wait for a code, or were not noticed yet.
        """
        before = self._now_ns() - SETTLE_NS
        with self._lock:
            for pid in list(self._running) if last else ():
                if self._running[pid].settled or not runs(pid):
                    self._note_end(pid)
            ready = [p for p in self._ended.values() if last or p.settled or p.ended_ns < before]
            for p in ready:
                del self._ended[p.pid]
        for p in ready:
            p.exit_code = UNKNOWN_EXIT if p.exit_code is None else p.exit_code
        return sorted(ready, key=lambda p: p.ended_ns)

    def waiting(self) -> bool:
        """Whether some process has ended whose code may still come."""
        with self._lock:
            return bool(self._ended)

    def _note_end(self, pid: int) -> None:
        process = self._running.pop(pid, None)
        if process is not None:
            process.ended_ns = self._now_ns()
            if process.exit_code is None:
                process.exit_code = peek_exit_code(pid)
                process.settled = process.exit_code is not None
            self._ended[pid] = process

    def _wake(self) -> None:
        if self._wake_write < 0:
            return
        with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-ups already
            os.write(self._wake_write, b"x")

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        try:
            while not self._ending:
                blind = self._open_pidfds(poll)
                ready = {fd for fd, _ in poll.poll(POLL_SECONDS * 1000 if blind else None)}
                gone = [self._pidfds[fd] for fd in ready if fd in self._pidfds]
                gone += [pid for pid in blind if not runs(pid)]
                with self._lock:
                    for pid in gone:
                        self._note_end(pid)
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                for fd in ready & set(self._pidfds):
                    poll.unregister(fd)
                    os.close(fd)
                    del self._pidfds[fd]
                if gone:
                    self._on_death()
        finally:
            for fd in self._pidfds:
                os.close(fd)

    def _open_pidfds(self, poll: select.poll) -> list[int]:
        """Open what is missing; gives the processes that have to be watched without."""
        blind = []
        with self._lock:
            missing = set(self._running) - set(self._pidfds.values())
        for pid in missing:
            try:
                fd = os.pidfd_open(pid)
            except OSError:  # already gone and waited for, or a kernel without pidfds
                blind.append(pid)
                continue
            self._pidfds[fd] = pid
            poll.register(fd, select.POLLIN)
        return blind


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
