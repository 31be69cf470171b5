"""What the kernel says of the training thread: time on a core, and time in which it was ready to run but got none.

On a machine with more to do than cores, wall times of the ranks differ by who was let in first. This tells such waiting
from work. One read of a file that stays open, 3 us; only Linux has it.
"""

from __future__ import annotations

import os

UNKNOWN = (-1, -1)


class ThreadClock:
    """`lap()` gives (ns on a core, ns waiting for one) of the thread that made it since the lap before; `waited()` the
    wait since the last look of either kind."""

    def __init__(self, path: str = "/proc/thread-self/schedstat") -> None:
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1
        self._last = self._read()
        self._seen = max(self._last[1], 0)

    def lap(self) -> tuple[int, int]:
        before, now = self._last, self._read()
        self._last, self._seen = now, max(now[1], 0)
        return UNKNOWN if before == UNKNOWN or now == UNKNOWN else (now[0] - before[0], now[1] - before[1])

    def waited(self) -> int:
        now = max(self._read()[1], self._seen)
        waited, self._seen = now - self._seen, now
        return waited

    def _read(self) -> tuple[int, int]:
        if self._file < 0:
            return UNKNOWN
        try:
            on, waiting, _ = os.pread(self._file, 96, 0).split()
        except (OSError, ValueError):
            self.close()
            return UNKNOWN
        return int(on), int(waiting)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
