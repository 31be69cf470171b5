"""Writes the node's samples as rows, joined to ranks by process id, and says how soon the next sample is due.

Usually that is after TDBG_SAMPLE_SECONDS. When memory grows so fast that its limit could be reached within a few
samples, they come closer together, so that the way into an out-of-memory kill is in the data.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tdbg.rankagent.nodetables import GPU, GPU_EVENT, GPU_PROC, HOST, PROC
from tdbg.rankagent.record import Recorder

from .node.gpu import Gpus
from .node.host import Host
from .node.process import Tree, resident_bytes, sample_process

FASTEST_SECONDS = 0.1
SAMPLES_TO_LIMIT = 20  # enough points for a trend to be told from a step, whatever the speed
FAST_SHARE = 0.02  # of one core that sampling may take while it runs fast: memory can hover below a limit for hours


@dataclass(frozen=True)
class Target:
    """A rank's process to sample; `step` is the last step it has completed."""

    rank: int
    attempt: int
    pid: int
    step: int


@dataclass(frozen=True)
class Room:
    """What is used of something that has a limit, in bytes."""

    used: int
    limit: int


Rooms = Mapping[tuple[str, int], Room]


def next_interval(before: Rooms, now: Rooms, elapsed_s: float, usual_s: float, cost_s: float = 0.0) -> float:
    """Seconds until the next sample, from how fast each limit is approached. `cost_s` is what one sample takes."""
    wanted = usual_s
    for key, room in now.items():
        if key not in before or elapsed_s <= 0:
            continue
        growth = (room.used - before[key].used) / elapsed_s
        if growth > 0:
            wanted = min(wanted, max(0, room.limit - room.used) / growth / SAMPLES_TO_LIMIT)
    return min(usual_s, max(wanted, FASTEST_SECONDS, cost_s / FAST_SHARE))


class Sampler:
    """Samples host and processes each time, GPUs at the usual interval only (milliseconds a device)."""

    def __init__(
        self, recorder: Recorder, node: int, usual_s: float, host: Host, tree: Tree, gpus: Gpus | None
    ) -> None:
        self._recorder, self._node, self._usual_s = recorder, node, usual_s
        self.host, self._tree, self._gpus = host, tree, gpus
        self._rooms: Rooms = {}
        self._last_s = self._gpu_due_s = 0.0
        self.oom_kills: int = host.oom_kills()  # as of the last sample

    def sample(self, targets: Sequence[Target]) -> float:
        """Write one sample; gives the seconds until the next one."""
        start = time.monotonic()
        rooms: dict[tuple[str, int], Room] = {}
        host = self.host.sample()
        self.oom_kills = host.cgroup_oom_kills
        self._recorder.attempt = max((t.attempt for t in targets), default=self._recorder.attempt)
        self._write_host(host.columns())
        if host.memory_total_bytes > 0 and host.memory_available_bytes >= 0:
            total = host.memory_total_bytes
            rooms["host", -1] = Room(total - host.memory_available_bytes, total)
        if host.cgroup_used_bytes >= 0:
            rooms["cgroup", -1] = Room(host.cgroup_used_bytes, host.cgroup_limit_bytes)
        for target in targets:
            self._sample_process(target, rooms)
        cost = time.monotonic() - start
        if self._gpus is not None and start >= self._gpu_due_s:
            self._gpu_due_s = start + self._usual_s * 0.9  # a timer that is a little early must not skip a turn
            self._sample_gpus(self._gpus, targets)
        elapsed = start - self._last_s if self._rooms else 0.0
        interval = next_interval(self._rooms, rooms, elapsed, self._usual_s, cost)
        self._rooms, self._last_s = rooms, start
        return interval

    def _write_host(self, columns: tuple[object, ...]) -> None:
        self._recorder.write(HOST, 0, (self._node, *columns))

    def _sample_process(self, target: Target, rooms: dict[tuple[str, int], Room]) -> None:
        found = sample_process(target.pid)
        if found is None:
            return
        workers = self._tree.below(target.pid)
        sizes = [resident_bytes(w) for w in workers]
        columns = found.columns(target.pid, len(workers), sum(rss for rss, _ in sizes), sum(own for _, own in sizes))
        self._recorder.attempt = target.attempt
        self._recorder.write(PROC, target.step, (self._node, *columns), rank=target.rank)
        if found.limit_as_bytes > 0:
            rooms["as", target.pid] = Room(found.vms_bytes, found.limit_as_bytes)
        if found.limit_data_bytes > 0:
            rooms["data", target.pid] = Room(found.data_bytes, found.limit_data_bytes)

    def _sample_gpus(self, gpus: Gpus, targets: Sequence[Target]) -> None:
        ranks = {pid: t for t in targets for pid in (t.pid, *self._tree.below(t.pid))}
        for event in gpus.events():
            self._recorder.write(GPU_EVENT, 0, (self._node, event.device, event.xid))
        for device in gpus.devices:
            self._recorder.write(GPU, 0, (self._node, *gpus.sample(device).columns()), (device.uuid, device.name))
            for p in gpus.processes(device):
                of = ranks.get(p.pid)
                row = (self._node, p.device, p.pid, p.memory_used_bytes)
                self._recorder.write(GPU_PROC, of.step if of else 0, row, rank=of.rank if of else -1)

    def close(self) -> None:
        if self._gpus is not None:
            self._gpus.close()
