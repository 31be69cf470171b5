"""MEMORY_IMBALANCE from rows of memory and tensor."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import memory_imbalance

MIB, GIB = 1 << 20, 1 << 30


def hold(sizes: Sequence[float], steps: int = 20, params: Sequence[int] = ()) -> Rows:
    """Ranks that hold so many MiB each, give or take one."""
    rows = Rows()
    for rank, size in enumerate(sizes):
        rows.add("tensor", rank=rank, generation=1, kind="param", name="w", numel=params[rank] if params else 100)
        for step in range(1, steps + 1):
            rows.add("step", rank=rank, step=step)
            rows.add("memory", rank=rank, step=step, anon_bytes=int((size + step % 2) * MIB), cuda_reserved_bytes=-1)
    return rows


def judge(rows: Rows, world_size: int) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(memory_imbalance, world_size=world_size)
    return outcomes["MEMORY_IMBALANCE"], [f for _, f in found]


def test_the_rank_that_holds_far_more_is_named() -> None:
    _, (f,) = judge(hold([220, 900, 225, 219]), 4)
    assert (f.ranks, f.first_step, f.severity, f.evidence_state) == ((1,), None, "warning", "INFERRED")
    assert "4.1 times as much" in f.summary


def test_two_of_five_are_both_named() -> None:
    assert judge(hold([220, 900, 225, 950, 219]), 5)[1][0].ranks == (1, 3)


def test_of_two_ranks_both_are_named() -> None:
    _, (f,) = judge(hold([220, 900]), 2)
    assert f.ranks == (0, 1)
    assert any("which of the two" in c for c in f.cannot_conclude)


@pytest.mark.parametrize(
    "sizes",
    [
        [220, 221, 222],
        [300, 220, 220, 220],  # rank 0 logs
        [440, 220, 220],  # twice as much, yet no more than a library or two
        [5000, 4000, 4100, 3900],  # a quarter more
        [220, 900, 900],  # one that holds less
        [220, 700, 1400, 900],  # all differ
        [220, 230],
    ],
)
def test_what_ranks_may_differ_by_is_silent(sizes: list[float]) -> None:
    assert judge(hold(sizes), len(sizes)) == ("CLEAR", [])


def test_stages_that_hold_other_models_are_no_peers() -> None:
    outcome, found = judge(hold([220, 900, 220], params=[100, 800, 100]), 3)
    assert (outcome, found) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_start_that_took_more_is_silent() -> None:
    rows = hold([220, 220, 220])
    rows.connection.execute(f"UPDATE memory SET anon_bytes = anon_bytes + {GIB} WHERE rank = 0 AND step <= 8")
    assert judge(rows, 3) == ("CLEAR", [])


def test_devices_are_compared_by_a_tenth_of_their_memory() -> None:
    rows = hold([220, 220, 220])
    rows.connection.execute(f"UPDATE memory SET cuda_total_bytes = {80 * GIB}, cuda_reserved_bytes = {6 * GIB}")
    assert judge(rows, 3) == ("CLEAR", [])
    rows.connection.execute(f"UPDATE memory SET cuda_reserved_bytes = {13 * GIB} WHERE rank = 2")
    assert judge(rows, 3) == ("CLEAR", [])  # 7 GiB more: below a tenth
    rows.connection.execute(f"UPDATE memory SET cuda_reserved_bytes = {16 * GIB} WHERE rank = 2")
    _, (f,) = judge(rows, 3)
    assert (f.ranks, f.subject) == ((2,), "device memory")


def test_too_few_samples_and_missing_ranks_are_no_evidence() -> None:
    assert judge(hold([220, 900, 220], steps=9), 3) == ("INSUFFICIENT_EVIDENCE", [])
    assert judge(hold([220, 220, 220]), 4) == ("INSUFFICIENT_EVIDENCE", [])
    assert judge(hold([220]), 1) == ("INSUFFICIENT_EVIDENCE", [])
