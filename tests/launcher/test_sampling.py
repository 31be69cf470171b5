"""When the next sample is due, and which rank a row belongs to."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tdbg.launcher.node.gpu import Gpus
from tdbg.launcher.node.host import Host
from tdbg.launcher.node.process import Tree
from tdbg.launcher.sampling import Room, Sampler, Target, next_interval
from tdbg.rankagent import contract
from tdbg.rankagent.record import Recorder

GIB = 1 << 30


def interval(before: int, now: int, limit: int, elapsed: float = 1.0, cost: float = 0.0) -> float:
    key = ("as", 1)
    return next_interval({key: Room(before, limit)}, {key: Room(now, limit)}, elapsed, 1.0, cost)


def test_steady_memory_is_sampled_at_the_usual_interval() -> None:
    assert interval(5 * GIB, 5 * GIB, 10 * GIB) == 1.0
    assert interval(5 * GIB, 4 * GIB, 10 * GIB) == 1.0


def test_growth_that_leaves_little_time_brings_twenty_samples_before_the_limit() -> None:
    assert interval(1 * GIB, 2 * GIB, 12 * GIB) == 0.5
    assert interval(1 * GIB, 2 * GIB, 12 * GIB, elapsed=0.5) == 0.25
    assert interval(1 * GIB, 2 * GIB, 1000 * GIB) == 1.0


def test_sampling_is_never_faster_than_ten_a_second_nor_dearer_than_its_share() -> None:
    assert interval(8 * GIB, 9 * GIB, 9 * GIB) == 0.1
    assert interval(8 * GIB, 9 * GIB, 9 * GIB, cost=0.01) == 0.5
    assert interval(8 * GIB, 9 * GIB, 9 * GIB, cost=5.0) == 1.0


def test_a_process_seen_for_the_first_time_changes_nothing() -> None:
    assert next_interval({}, {("as", 1): Room(9, 10)}, 1.0, 1.0) == 1.0


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(contract.process_dir(tmp_path, "node", 0, 0, os.getpid()), rank=-1, attempt=0)


def test_rows_are_joined_to_ranks_by_pid(
    tmp_path: Path, recorder: Recorder, fake_nvml: ModuleType, rows_of: Any
) -> None:
    me = os.getpid()
    nvml = fake_nvml.FakeNvml(pids=(me,))
    nvml.events = [(1, 8, 79)]
    gpus = Gpus(nvml)
    sampler = Sampler(recorder, 2, 1.0, Host(tmp_path), Tree(), gpus)
    sampler.sample([Target(rank=5, attempt=1, pid=me, step=33), Target(rank=6, attempt=1, pid=2**22 + 1, step=0)])
    folder = Path(recorder.folder)
    (host,) = rows_of(folder, "host")
    assert (host["rank"], host["node"]) == (-1, 2)
    assert host["memory_total_bytes"] > 0
    (proc,) = rows_of(folder, "proc")
    assert (proc["rank"], proc["attempt"], proc["step"], proc["of_pid"]) == (5, 1, 33, me)
    assert proc["rss_bytes"] > 1 << 20
    assert [g["uuid"] for g in rows_of(folder, "gpu")] == ["GPU-0", "GPU-1"]
    assert [(g["rank"], g["of_pid"], g["memory_used_bytes"]) for g in rows_of(folder, "gpu_proc")] == [
        (5, me, GIB),
        (-1, 999_999, -1),
    ]
    assert [(e["rank"], e["node"], e["device"], e["xid"]) for e in rows_of(folder, "gpu_event")] == [(-1, 2, 1, 79)]
    assert 0 < proc["anon_bytes"] < proc["rss_bytes"]
    assert recorder.dropped == 0


def test_devices_are_asked_at_the_usual_interval_even_when_memory_is_sampled_faster(
    tmp_path: Path, recorder: Recorder, fake_nvml: ModuleType, rows_of: Any
) -> None:
    sampler = Sampler(recorder, 0, 60.0, Host(tmp_path), Tree(), Gpus(fake_nvml.FakeNvml()))
    for _ in range(3):
        sampler.sample([])
    assert len(rows_of(Path(recorder.folder), "host")) == 3
    assert len(rows_of(Path(recorder.folder), "gpu")) == 2
