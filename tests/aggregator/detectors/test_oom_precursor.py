"""OOM_PRECURSOR from rows of memory, and its statistics by themselves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import oom_precursor

MIB = 1 << 20
LIMIT = 1000 * MIB


def grow(usage: Callable[[int], float], steps: int = 60, ranks: int = 2, limit: int = LIMIT) -> Rows:
    """Ranks whose address space is `usage(step)` MiB at each step, below `limit`."""
    rows = Rows()
    for rank in range(ranks):
        for step in range(1, steps + 1):
            rows.add("step", rank=rank, step=step)
            rows.add(
                "memory",
                rank=rank,
                step=step,
                vms_bytes=int(usage(step) * MIB),
                rss_bytes=50 * MIB,
                limit_as_bytes=limit,
            )
    return rows


def judge(rows: Rows, world_size: int = 2) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(oom_precursor, world_size=world_size)
    return outcomes["OOM_PRECURSOR"], [f for _, f in found]


def test_steady_growth_that_came_most_of_the_way_is_found_on_all_its_ranks() -> None:
    _, (f,) = judge(grow(lambda s: 200 + 10 * s))
    assert (f.ranks, f.first_step, f.severity, f.evidence_state) == ((0, 1), 1, "warning", "INFERRED")
    assert "near step 80" in f.summary or "near step 81" in f.summary


def test_growth_that_was_seen_near_the_limit_is_observed() -> None:
    _, (f,) = judge(grow(lambda s: 380 + 10 * s))
    assert f.evidence_state == "OBSERVED"


def test_growth_with_more_room_left_than_was_used_up_is_silent() -> None:
    assert judge(grow(lambda s: 200 + 2 * s)) == ("CLEAR", [])


def test_a_cache_that_fills_and_levels_off_is_silent() -> None:
    assert judge(grow(lambda s: 200 + 600 * (1 - 0.9**s), steps=100)) == ("CLEAR", [])
    assert judge(grow(lambda s: 200 + 12 * min(s, 50), steps=200)) == ("CLEAR", [])


def test_memory_that_swings_is_silent() -> None:
    chance = random.Random(1)
    assert judge(grow(lambda s: 500 + chance.gauss(0, 30), steps=200)) == ("CLEAR", [])


def test_fewer_than_20_steps_are_too_few() -> None:
    assert judge(grow(lambda s: 200 + 40 * s, steps=19)) == ("INSUFFICIENT_EVIDENCE", [])


def test_no_limit_is_no_evidence() -> None:
    assert judge(grow(lambda s: 200 + 10 * s, limit=-1)) == ("INSUFFICIENT_EVIDENCE", [])


def test_steps_before_the_limit_was_set_do_not_count() -> None:
    rows = grow(lambda s: 200 + 10 * s)
    rows.connection.execute("UPDATE memory SET limit_as_bytes = -1 WHERE step <= 50")
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_only_the_rank_that_grows_is_named() -> None:
    rows = grow(lambda s: 200, ranks=3)
    rows.connection.execute(f"UPDATE memory SET vms_bytes = vms_bytes + step * {10 * MIB} WHERE rank = 1")
    assert [f.ranks for f in judge(rows, 3)[1]] == [(1,)]


@pytest.mark.parametrize(
    ("subject", "columns"),
    [
        ("cgroup memory", lambda used: {"cgroup_limit_bytes": LIMIT, "cgroup_used_bytes": used}),
        ("physical memory", lambda used: {"memory_total_bytes": LIMIT, "memory_available_bytes": LIMIT - used}),
    ],
)
def test_a_nodes_limit_names_its_ranks_whose_memory_grows(
    subject: str, columns: Callable[[int], dict[str, Any]]
) -> None:
    rows = Rows()
    for step in range(1, 61):
        for rank in range(3):
            rss = (100 + (8 * step if rank == 1 else 0)) * MIB
            rows.add("step", rank=rank, step=step)
            rows.add("memory", rank=rank, step=step, rss_bytes=rss, vms_bytes=rss, limit_as_bytes=-1)
        rows.add("host", rank=-1, **columns((300 + 8 * step) * MIB))
    for rank in range(3):
        rows.add("proc", rank=rank, limit_data_bytes=-1)
    _, (f,) = judge(rows, 3)
    assert (f.ranks, f.subject) == ((1,), subject)


def test_the_data_segment_is_judged_by_the_launchers_samples() -> None:
    rows = Rows()
    for step in range(1, 61):
        rows.add("step", step=step)
        rows.add("memory", step=step, rss_bytes=MIB, vms_bytes=MIB, limit_as_bytes=-1)
        rows.add("proc", data_bytes=(200 + 10 * step) * MIB, limit_data_bytes=LIMIT, limit_as_bytes=-1)
    _, (f,) = judge(rows, 1)
    assert (f.ranks, f.subject) == ((0,), "data segment (RLIMIT_DATA)")


GIB = 1 << 30
ON_DEVICE = {"cuda_total_bytes": 80 * GIB, "cuda_reserved_bytes": 70 * GIB, "cuda_allocated_bytes": 60 * GIB,
             "cuda_inactive_split_bytes": GIB, "cuda_allocated_peak_bytes": 66 * GIB}  # fmt: skip


def device(steps: int = 60, ranks: int = 3, **columns: str) -> Rows:
    """Ranks with a device each; `columns` are SQL expressions for rank 1."""
    rows = grow(lambda s: 200, steps, ranks, limit=-1)
    for name, value in ON_DEVICE.items():
        rows.connection.execute(f"UPDATE memory SET {name} = {value}")
    for name, text in columns.items():
        rows.connection.execute(f"UPDATE memory SET {name} = {text} WHERE rank = 1")
    return rows


def test_a_device_that_is_used_well_is_silent() -> None:
    assert judge(device(), 3) == ("CLEAR", [])
    assert (
        judge(device(cuda_allocated_peak_bytes=f"CASE WHEN step < 5 THEN step * {15 * GIB} ELSE {79 * GIB} END"), 3)[1]
        == []
    )
    assert judge(device(cuda_retries="CASE WHEN step > 3 THEN 2 ELSE 0 END"), 3)[1] == []  # while kernels were tuned


def test_flushes_of_the_cache_after_the_start_are_observed() -> None:
    _, (f,) = judge(device(cuda_retries="step // 20"), 3)
    assert (f.ranks, f.first_step, f.severity, f.evidence_state) == ((1,), 20, "warning", "OBSERVED")
    assert f.subject == "allocator retries"
    _, (f,) = judge(device(cuda_retries="CASE WHEN step > 30 THEN 1 ELSE 0 END"), 3)
    assert f.severity == "note"


def test_fragments_are_a_warning_together_with_a_flush() -> None:
    full = {"cuda_reserved_bytes": str(78 * GIB), "cuda_inactive_split_bytes": str(9 * GIB)}
    _, (f,) = judge(device(**full), 3)
    assert (f.subject, f.severity) == ("fragmentation", "note")
    _, several = judge(device(**full, cuda_retries="step // 20"), 3)
    assert {(f.subject, f.severity) for f in several} == {
        ("fragmentation", "warning"),
        ("allocator retries", "warning"),
    }
    rows = device(**full)
    for rank in range(3):
        rows.add("identity", rank=rank, key="env.PYTORCH_CUDA_ALLOC_CONF", value="expandable_segments:True")
    assert judge(rows, 3)[1] == []


def test_peaks_that_rise_by_more_than_is_left() -> None:
    rising = f"CASE WHEN step < 20 THEN {50 * GIB} WHEN step < 40 THEN {63 * GIB} ELSE {76 * GIB} END"
    _, (f,) = judge(device(cuda_allocated_peak_bytes=rising), 3)
    assert (f.ranks, f.subject, f.severity, f.evidence_state) == ((1,), "headroom", "warning", "INFERRED")
    reset = f"CASE WHEN step % 20 = 0 THEN {10 * GIB} ELSE {76 * GIB} END"  # the program resets its peak
    assert judge(device(cuda_allocated_peak_bytes=reset), 3)[1] == []


def test_other_processes_on_the_device_are_named_and_take_from_its_room() -> None:
    rising = f"CASE WHEN step < 20 THEN {50 * GIB} WHEN step < 40 THEN {52 * GIB} ELSE {54 * GIB} END"
    rows = device(cuda_allocated_peak_bytes=rising)
    assert judge(rows, 3)[1] == []
    for of_pid, rank, used in ((11, 1, 70), (777, -1, 25)):
        rows.add("gpu_proc", rank=rank, device=4, of_pid=of_pid, memory_used_bytes=used * GIB)
    _, (f,) = judge(rows, 3)
    assert "process 777: 25600 MiB" in f.summary


def test_device_memory_that_nears_its_end() -> None:
    _, found = judge(device(cuda_allocated_bytes=f"{20 * GIB} + step * {700 << 20}"), 3)
    assert [(f.ranks, f.subject) for f in found] == [((1,), "device memory")]


# ---------------------------------------------------------------- within the first pass over the data


def reading(rows: Rows, batches: int, until: int = 60, passes: int = 1, grad: bool = True) -> Rows:
    """Both ranks read one batch a step."""
    for rank in (0, 1):
        for iterator in range(passes):
            rows.add("loader", rank=rank, iterator=iterator, batches=batches)
            for index in range(min(batches, until)):
                rows.add("batch", rank=rank, step=index + 1, index=index, iterator=iterator, grad_enabled=grad)
    return rows


def live(rows: Rows, status: str = "running") -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(oom_precursor, world_size=2, status=status)
    return outcomes["OOM_PRECURSOR"], [f for _, f in found]


def test_growth_that_may_be_a_cache_of_data_still_to_come_waits_for_the_end_of_the_first_pass() -> None:
    growth = lambda s: 200 + 10 * s  # noqa: E731  full at step 80
    assert live(reading(grow(growth), batches=70)) == ("INSUFFICIENT_EVIDENCE", [])


@pytest.mark.parametrize(
    ("batches", "passes", "grad", "status"),
    [(200, 1, True, "running"), (30, 2, True, "running"), (60, 1, True, "running"), (70, 1, False, "running"),
     (-1, 1, True, "running"), (70, 1, True, "killed"), (70, 1, True, "finished")],
)  # fmt: skip
def test_growth_that_outruns_the_pass_or_goes_on_after_it_is_told(
    batches: int, passes: int, grad: bool, status: str
) -> None:
    rows = reading(grow(lambda s: 200 + 10 * s), batches, passes=passes, grad=grad, until=60 if batches > 0 else 0)
    assert [f.severity for f in live(rows, status)[1]] == ["warning"]


def test_usage_that_is_near_the_limit_already_is_told_at_once() -> None:
    assert live(reading(grow(lambda s: 380 + 10 * s), batches=70))[1]
