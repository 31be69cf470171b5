"""One row about the machine per sample: CPU, memory and its nearest limit, pressure, disks and network.

Writes    host
Costs     about a dozen small files of /proc, /sys and the cgroup: 0.5 ms
Blind to  limits of other cgroup controllers, and of a cgroup namespace's parents, which the kernel hides
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from . import cgroup
from .procfs import kib_table, read_text

SECTOR_BYTES = 512  # /proc/diskstats counts in these whatever the disk's own sector is
_STACKED = ("loop", "ram", "zram", "dm-", "md")  # their traffic is counted again on the disks below them


@dataclass(frozen=True)
class HostSample:
    """The columns of `nodetables.HOST` after `node`, in their order."""

    cpu_ratio: float
    cores: int
    load1: float
    memory_total_bytes: int
    memory_available_bytes: int
    cgroup_limit_bytes: int
    cgroup_used_bytes: int
    cgroup_oom_kills: int
    shm_total_bytes: int
    shm_used_bytes: int
    swap_used_bytes: int
    pressure_memory_ratio: float
    disk_free_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    net_sent_bytes: int
    net_received_bytes: int

    def columns(self) -> tuple[Any, ...]:
        return astuple(self)


class Host:
    """Samples one machine. `root` is / except in tests; `store` the folder whose file system is watched."""

    def __init__(self, store: Path, root: Path = Path("/")) -> None:
        self.root, self.store = root, store
        self.cgroup = cgroup.locate(root)
        self._cpu = cpu_ticks(read_text(root / "proc/stat"))

    def sample(self) -> HostSample:
        proc = self.root / "proc"
        memory = kib_table(read_text(proc / "meminfo"))
        limit = cgroup.memory(self.cgroup)
        read, written = disk_bytes(read_text(proc / "diskstats"), self.root / "sys/block")
        sent, received = net_bytes(read_text(proc / "net/dev"))
        shm_total, shm_used = shared_bytes(self.root / "dev/shm")
        return HostSample(
            cpu_ratio=self._cpu_ratio(read_text(proc / "stat")),
            cores=len(os.sched_getaffinity(0)),
            load1=load1(read_text(proc / "loadavg")),
            memory_total_bytes=memory.get("MemTotal", -1),
            memory_available_bytes=memory.get("MemAvailable", -1),
            cgroup_limit_bytes=limit.limit_bytes,
            cgroup_used_bytes=limit.used_bytes,
            cgroup_oom_kills=limit.oom_kills,
            shm_total_bytes=shm_total,
            shm_used_bytes=shm_used,
            swap_used_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
            pressure_memory_ratio=self._pressure(),
            disk_free_bytes=free_bytes(self.store),
            disk_read_bytes=read,
            disk_written_bytes=written,
            net_sent_bytes=sent,
            net_received_bytes=received,
        )

    def oom_kills(self) -> int:
        return cgroup.memory(self.cgroup).oom_kills

    def _cpu_ratio(self, stat: str) -> float:
        busy, total = cpu_ticks(stat)
        (busy_before, total_before), self._cpu = self._cpu, (busy, total)
        spent = total - total_before
        return min(1.0, max(0.0, (busy - busy_before) / spent)) if spent > 0 else 0.0

    def _pressure(self) -> float:
        own = read_text(self.cgroup.folder / "memory.pressure") if self.cgroup else ""
        return cgroup.pressure_ratio(own or read_text(self.root / "proc/pressure/memory"))


def cpu_ticks(stat: str) -> tuple[int, int]:
    """(busy, total) ticks of all cores since boot; idle and waiting for disks are not busy."""
    words = next((line.split()[1:9] for line in stat.splitlines() if line.startswith("cpu ")), [])
    ticks = [int(w) for w in words]  # user nice system idle iowait irq softirq steal; guest time is within user
    return (sum(ticks) - sum(ticks[3:5]), sum(ticks)) if ticks else (0, 0)


def load1(loadavg: str) -> float:
    words = loadavg.split()
    return float(words[0]) if words else -1.0


def disk_bytes(diskstats: str, block: Path) -> tuple[int, int]:
    """(read, written) bytes of all whole disks since boot; (-1, -1) when the kernel shows none."""
    disks = [
        fields
        for fields in (line.split() for line in diskstats.splitlines())
        if len(fields) > 9 and not fields[2].startswith(_STACKED) and (block / fields[2]).exists()
    ]
    if not disks:
        return -1, -1
    return sum(int(d[5]) for d in disks) * SECTOR_BYTES, sum(int(d[9]) for d in disks) * SECTOR_BYTES


def net_bytes(dev: str) -> tuple[int, int]:
    """(sent, received) bytes of all interfaces but loopback since boot."""
    sent = received = 0
    for line in dev.splitlines():
        name, colon, rest = line.partition(":")
        numbers = rest.split()
        if colon and name.strip() != "lo" and len(numbers) >= 9:
            received, sent = received + int(numbers[0]), sent + int(numbers[8])
    return sent, received


def shared_bytes(folder: Path) -> tuple[int, int]:
    """(size, in use) of the file system that shared memory lives in; (-1, -1) when it can't be asked."""
    try:
        s = os.statvfs(folder)
    except OSError:
        return -1, -1
    return s.f_blocks * s.f_frsize, (s.f_blocks - s.f_bfree) * s.f_frsize


def free_bytes(folder: Path) -> int:
    """Room for an ordinary user on the folder's file system; -1 when it can't be asked."""
    try:
        s = os.statvfs(folder)
    except OSError:
        return -1
    return s.f_bavail * s.f_frsize
