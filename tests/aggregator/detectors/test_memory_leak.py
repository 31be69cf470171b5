"""MEMORY_LEAK from rows of memory."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import memory_leak

MIB = 1 << 20
Usage = Callable[[int], float]


def held(
    usage: Usage, steps: int = 80, ranks: int = 3, leaking: tuple[int, ...] = (0, 1, 2), base: float = 250
) -> Rows:
    """Ranks whose own memory is `usage(step)` MiB, those that do not leak hold `base`."""
    rows = Rows()
    for rank in range(ranks):
        for step in range(1, steps + 1):
            used = usage(step) if rank in leaking else base
            rows.add("step", rank=rank, step=step)
            rows.add("memory", rank=rank, step=step, anon_bytes=int(used * MIB), rss_bytes=int((used + 80) * MIB),
                     cuda_allocated_bytes=-1)  # fmt: skip
    return rows


def judge(rows: Rows, world_size: int = 3) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(memory_leak, world_size=world_size)
    return outcomes["MEMORY_LEAK"], [f for _, f in found]


def test_what_is_kept_at_every_step_is_found_with_its_ranks() -> None:
    _, (f,) = judge(held(lambda s: 250 + 2 * s, leaking=(1,)))
    assert (f.ranks, f.first_step, f.severity, f.evidence_state) == ((1,), 1, "warning", "INFERRED")
    assert "2 MiB a step" in f.summary
    assert f.subject == "host memory"


def test_jitter_and_growth_at_every_fifth_step_do_not_hide_it() -> None:
    chance = random.Random(2)
    assert judge(held(lambda s: 250 + 2 * s + chance.uniform(-1, 1)))[1]
    assert judge(held(lambda s: 250 + 10 * (s // 5), steps=100))[1]


def test_growth_that_began_late_is_found_near_its_beginning() -> None:
    _, (f,) = judge(held(lambda s: 250 + 3 * max(0, s - 60), steps=140))
    assert 55 <= (f.first_step or 0) <= 66


def test_the_device_is_judged_by_what_tensors_hold() -> None:
    rows = held(lambda s: 250)
    rows.connection.execute(f"UPDATE memory SET cuda_allocated_bytes = {1000 * MIB} + step * {5 * MIB} WHERE rank = 2")
    _, (f,) = judge(rows)
    assert (f.ranks, f.subject) == ((2,), "device memory")


@pytest.mark.parametrize(
    "usage",
    [
        lambda s: 250 + 200 * (1 - 0.9**s),  # a cache that levels off
        lambda s: 250 + 5 * min(s, 40),  # the first epoch of two
        lambda s: 250 + 60 * (s >= 40),  # an evaluation, whose memory stays with the allocator
        lambda s: 250 + 60 * (s // 20),  # one after each of several epochs
        lambda s: 250 + 0.05 * s,  # numbers in a list
        lambda s: 250 + 30 * s / 3000,  # a page or two a step, however long
        lambda s: 2000 + 0.9 * s,  # below a twentieth of what is held
        lambda s: 250 + 100 * (s % 25 == 0),  # checkpoints
        lambda s: 450 - 2 * s,
        lambda s: 250 + 20 * (s // 13) + (s % 13) * 0.1,  # arenas
    ],
)
def test_healthy_growth_is_silent(usage: Usage) -> None:
    assert judge(held(usage)) == ("CLEAR", [])


def test_memory_that_wanders_is_silent() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        walk = [250.0]
        for _ in range(80):
            walk.append(walk[-1] + chance.gauss(0.1, 4))
        assert judge(held(lambda s, walk=walk: walk[s])) == ("CLEAR", []), seed  # type: ignore[misc]


def test_pages_of_files_do_not_count() -> None:
    rows = held(lambda s: 250)
    rows.connection.execute(f"UPDATE memory SET rss_bytes = rss_bytes + step * {10 * MIB}")
    assert judge(rows) == ("CLEAR", [])


def test_shared_memory_counts() -> None:
    rows = held(lambda s: 250)
    rows.connection.execute(f"UPDATE memory SET shared_bytes = step * {4 * MIB}")
    assert len(judge(rows)[1]) == 1


def test_a_data_sets_cache_that_fills_is_no_evidence_and_growth_after_it_is() -> None:
    rows = held(lambda s: 250 + 4 * s)
    rows.connection.execute("UPDATE memory SET dataset_items = step * 8")
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])
    rows.connection.execute("UPDATE memory SET dataset_items = least(step, 40) * 8")
    _, (f,) = judge(rows)
    assert f.first_step == 40


def test_too_few_samples_or_ranks_are_no_evidence() -> None:
    assert judge(held(lambda s: 250 + 20 * s, steps=23)) == ("INSUFFICIENT_EVIDENCE", [])
    assert judge(held(lambda s: 250), world_size=4) == ("INSUFFICIENT_EVIDENCE", [])
    rows = held(lambda s: 250)
    rows.connection.execute("UPDATE memory SET anon_bytes = -1")
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


@pytest.mark.parametrize(
    ("status", "passes", "told"), [("running", 1, False), ("running", 2, True), ("finished", 1, True)]
)
def test_within_the_first_pass_of_a_run_that_goes_on_a_cache_may_be_filling(
    status: str, passes: int, told: bool
) -> None:
    rows = held(lambda s: 250 + 2 * s)
    for rank in range(3):
        for iterator in range(passes):
            rows.add("loader", rank=rank, iterator=iterator, batches=100)
        for step in range(1, 81):
            rows.add("batch", rank=rank, step=step, index=step - 1)
    outcomes, found = rows.judge(memory_leak, world_size=3, status=status)
    assert bool(found) == told
    assert told or outcomes["MEMORY_LEAK"] == "INSUFFICIENT_EVIDENCE"


def test_the_device_keeps_no_cache_of_data_that_nobody_sees() -> None:
    rows = held(lambda s: 250)
    rows.connection.execute(f"UPDATE memory SET cuda_allocated_bytes = {1000 * MIB} + step * {5 * MIB} WHERE rank = 2")
    rows.add("loader", rank=2, batches=100).add("batch", rank=2, step=1)
    assert [f.ranks for _, f in rows.judge(memory_leak, world_size=3, status="running")[1]] == [(2,)]
