"""One row per rank process and sample: memory of the process and of those below it, its limits, its CPU time.

Writes    proc
Costs     four small files a rank, one a worker; the process tree is one pass over /proc, held under 0.2 % of a core
Blind to  pages that a forked worker still shares with its parent: each process counts them as its own
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .procfs import kib_table, read_text

TREE_SHARE = 0.002  # of one core that walking all processes may take; a busy login node has thousands
TREE_SECONDS = 1.0  # workers come and go with epochs, not faster
_TICKS = os.sysconf("SC_CLK_TCK")
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render")  # as they are opened by CUDA, ROCm, and graphics drivers


@dataclass(frozen=True)
class ProcessSample:
    """What /proc says about one process; -1 for a limit that is none and for what is not told."""

    rss_bytes: int
    anon_bytes: int
    shared_bytes: int
    vms_bytes: int
    data_bytes: int
    limit_as_bytes: int
    limit_data_bytes: int
    cpu_seconds: float
    threads: int
    files: int

    def columns(self, pid: int, workers: int, workers_rss_bytes: int, workers_own_bytes: int) -> tuple[Any, ...]:
        """The columns of `nodetables.PROC` after `node`, in their order."""
        return (pid, self.rss_bytes, self.anon_bytes, self.shared_bytes, self.vms_bytes, workers, workers_rss_bytes,
                workers_own_bytes, self.limit_as_bytes, self.limit_data_bytes, self.data_bytes, self.cpu_seconds,
                self.threads, self.files)  # fmt: skip


def sample_process(pid: int, root: Path = Path("/")) -> ProcessSample | None:
    """None when the process has ended."""
    folder = root / "proc" / str(pid)
    status = kib_table(read_text(folder / "status"))
    if "VmRSS" not in status:  # ended, or a zombie, which has no memory
        return None
    return ProcessSample(
        rss_bytes=status["VmRSS"],
        anon_bytes=status.get("RssAnon", -1),
        shared_bytes=status.get("RssShmem", -1),
        vms_bytes=status.get("VmSize", -1),
        data_bytes=status.get("VmData", -1),
        limit_as_bytes=_limit(pid, resource.RLIMIT_AS),
        limit_data_bytes=_limit(pid, resource.RLIMIT_DATA),
        cpu_seconds=cpu_seconds(read_text(folder / "stat")),
        threads=status.get("Threads", -1),
        files=_open_files(folder / "fd"),
    )


def resident_bytes(pid: int, root: Path = Path("/")) -> tuple[int, int]:
    """(resident memory, of it what belongs to no file and no shared memory); (0, 0) when the process has ended."""
    words = read_text(root / "proc" / str(pid) / "statm").split()
    if len(words) < 3:
        return 0, 0
    page = resource.getpagesize()
    return int(words[1]) * page, (int(words[1]) - int(words[2])) * page


def _limit(pid: int, what: int) -> int:
    try:
        soft, _ = resource.prlimit(pid, what)
    except (OSError, ValueError):  # ended meanwhile, or another user's
        return -1
    return -1 if soft == resource.RLIM_INFINITY else soft


def cpu_seconds(stat: str) -> float:
    """User and system time from /proc/PID/stat; the command in brackets may itself hold brackets and blanks."""
    words = stat.rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / _TICKS if len(words) > 12 else 0.0


def _open_files(folder: Path) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return -1


def parents(root: Path = Path("/")) -> dict[int, int]:
    """Parent of every process."""
    found = {}
    for entry in os.listdir(root / "proc"):
        if entry.isdecimal():
            words = read_text(f"{root}/proc/{entry}/stat").rpartition(")")[2].split(None, 2)
            if len(words) > 1:
                found[int(entry)] = int(words[1])
    return found


def below(pid: int, parent: Mapping[int, int]) -> list[int]:
    """All descendants of a process."""
    children: dict[int, list[int]] = {}
    for child, p in parent.items():
        children.setdefault(p, []).append(child)
    found, left = [], [pid]
    while left:
        more = children.get(left.pop(), [])
        found += more
        left += more
    return found


class Tree:
    """Who is whose child, looked up again when due: once a second, less often where there are many processes."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.perf_counter) -> None:
        self._root, self._clock = root, clock
        self._parents: dict[int, int] = {}
        self._due = 0.0

    def below(self, pid: int) -> list[int]:
        """Descendants of a process, as of the last look."""
        start = self._clock()
        if start >= self._due:
            self._parents = parents(self._root)
            now = self._clock()
            self._due = now + max(TREE_SECONDS, (now - start) / TREE_SHARE)
        return below(pid, self._parents)


@dataclass(frozen=True)
class Work:
    """What a process and those below it have used so far. `busy_ns` counts waiting for a core as well."""

    busy_ns: int = 0
    below_ns: int = 0
    io_bytes: int = -1
    state: str = ""

    def since(self, before: Work) -> Work:
        """What was used between two looks. A worker that ended in between takes its share with it."""
        known = self.io_bytes >= 0 and before.io_bytes >= 0
        return Work(max(0, self.busy_ns - before.busy_ns), max(0, self.below_ns - before.below_ns),
                    max(0, self.io_bytes - before.io_bytes) if known else -1, self.state)  # fmt: skip


def work(pid: int, workers: Iterable[int], root: Path = Path("/")) -> Work:
    """Look at a process and those below it."""
    workers = list(workers)
    stat = read_text(root / "proc" / str(pid) / "stat")
    waited = read_text(root / "proc" / str(pid) / "schedstat").split()  # of the main thread: on a core, waiting for one
    own = cpu_seconds(stat) * 1e9 + (int(waited[1]) if len(waited) > 1 else 0)
    below_s = sum(cpu_seconds(read_text(root / "proc" / str(w) / "stat")) for w in workers)
    moved = [_io_bytes(p, root) for p in (pid, *workers)]
    io_bytes = sum(m for m in moved if m > 0) if moved[0] >= 0 else -1
    return Work(int(own), int(below_s * 1e9), io_bytes, stat.rpartition(")")[2].strip()[:1])


def _io_bytes(pid: int, root: Path) -> int:
    counted = kib_table(read_text(root / "proc" / str(pid) / "io"))
    return counted["rchar"] + counted.get("wchar", 0) if "rchar" in counted else -1


def holds_device(pid: int) -> bool:
    """Whether the process has an accelerator open."""
    folder = f"/proc/{pid}/fd"
    try:
        return any(os.readlink(f"{folder}/{fd}").startswith(DEVICES) for fd in os.listdir(folder))
    except OSError:
        return False
