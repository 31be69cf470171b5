"""SHARD_UNEVEN from the batches of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import shard_uneven


def train(ranks: Sequence[Sequence[int]], planned: Sequence[int] | None = None, whole: bool = True, passes: int = 1,
          **loader: Any) -> Rows:  # fmt: skip
    """Ranks that train on batches of these sizes. `planned`: len(loader) by rank; unknown where it is left out."""
    rows = Rows()
    for rank, sizes in enumerate(ranks):
        for k in range(passes):
            rows.add("loader", rank=rank, iterator=k, sampler_class="RandomSampler", **loader,
                     batches=planned[rank] if planned else -1)  # fmt: skip
            done = k * len(sizes)
            for index, size in enumerate(sizes):
                rows.add("batch", rank=rank, iterator=k, index=index, step=done + index + 1, samples=size,
                         backwards=done + index)  # fmt: skip
            if whole:
                rows.add("batch", rank=rank, iterator=k, index=len(sizes), step=done + len(sizes),
                         backwards=done + len(sizes), end="StopIteration")  # fmt: skip
    return rows


def judge(rows: Rows, world_size: int = 3, **facts: Any) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(shard_uneven, world_size=world_size, **facts)
    return outcomes["SHARD_UNEVEN"], [f for _, f in found]


def test_equal_shards_are_clear() -> None:
    assert judge(train([[8] * 10] * 3, planned=[10] * 3)) == ("CLEAR", [])


def test_one_sample_more_or_a_shorter_last_batch_is_no_fault() -> None:
    assert judge(train([[8] * 9 + [3], [8] * 9 + [3], [8] * 9 + [2]])) == ("CLEAR", [])
    assert judge(train([[8] * 9 + [1]] * 3)) == ("CLEAR", [])


def test_one_batch_more_on_one_rank_names_it() -> None:
    _, (f,) = judge(train([[8] * 10, [8] * 10, [8] * 10 + [1]]))
    assert (f.ranks, f.severity, f.first_step, f.evidence_state) == ((2,), "warning", 10, "OBSERVED")


def test_two_ranks_with_different_numbers_are_both_named() -> None:
    _, (f,) = judge(train([[8] * 10, [8] * 12]), 2)
    assert f.ranks == (0, 1)


def test_plans_that_differ_are_found_before_the_pass_ends() -> None:
    rows = train([[8] * 4] * 2, planned=[10, 12], whole=False)
    _, (f,) = judge(rows, 2, status="failed")
    assert (f.ranks, f.severity, f.first_step) == ((0, 1), "warning", 1)


def test_a_loop_that_stops_at_the_shortest_plan_is_at_most_a_note() -> None:
    _, (f,) = judge(train([[8] * 10] * 2, planned=[10, 12], whole=False, passes=2), 2, status="finished")
    assert f.severity == "note"


def test_a_smaller_constant_batch_size_names_its_rank() -> None:
    _, (f,) = judge(train([[4] * 20, [12] * 20, [12] * 20], whole=False))
    assert (f.ranks, f.first_step, f.severity) == ((0,), 1, "warning")
    assert [(e.value, e.expected) for e in f.evidence if e.rank == 0] == [("4", "12")]


def test_batch_sizes_that_vary_by_design_are_not_compared() -> None:
    assert judge(train([[3, 9, 5, 7, 4, 8], [9, 2, 6, 6, 5, 8], [4] * 6], whole=False))[1] == []
    varying = train([[3, 9, 5, 7, 4, 8], [9, 2, 6, 6, 5, 8]], whole=False)
    assert judge(varying, 2) == ("INSUFFICIENT_EVIDENCE", [])


def test_fewer_than_five_batches_do_not_make_a_size_constant() -> None:
    assert judge(train([[4] * 5, [12] * 5], whole=False), 2) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_last_batch_much_shorter_on_one_rank_is_a_note() -> None:
    _, (f,) = judge(train([[8] * 9 + [8], [8] * 9 + [1]]), 2)
    assert (f.severity, f.ranks) == ("note", (0, 1))


def test_join_handles_uneven_shards() -> None:
    rows = train([[8] * 10, [8] * 12])
    rows.add("event", rank=0, kind="join")
    assert judge(rows, 2) == ("NOT_APPLICABLE", [])


def test_ranks_that_nothing_couples_may_have_what_they_like() -> None:
    rows = train([[8] * 10, [8] * 12])
    for rank in range(2):
        rows.add("tensor", rank=rank, kind="param", sharing="plain", peers="")
    assert judge(rows, 2) == ("INSUFFICIENT_EVIDENCE", [])


def test_an_evaluation_on_one_rank_does_not_shift_the_loaders() -> None:
    rows = Rows()
    rows.add("loader", rank=0, loader=0, batches=3)
    for index in range(3):
        rows.add("batch", rank=0, loader=0, index=index, samples=50)
    for rank in range(2):
        loader = 1 - rank
        rows.add("loader", rank=rank, loader=loader, batches=6)
        for index in range(6):
            rows.add("batch", rank=rank, loader=loader, index=index, step=index + 1, samples=8, backwards=index)
        rows.add("batch", rank=rank, loader=loader, index=6, step=6, backwards=6, end="StopIteration")
    assert judge(rows, 2) == ("CLEAR", [])


def test_a_rank_without_rows_is_not_called_clear() -> None:
    assert judge(train([[8] * 10] * 2), 3) == ("INSUFFICIENT_EVIDENCE", [])
    assert judge(train([[8] * 10]), 1) == ("NOT_APPLICABLE", [])


def test_unwrapped_ranks_are_coupled_when_their_weights_agree() -> None:
    rows = train([[8] * 10, [8] * 12])
    for rank in range(2):
        rows.add("tensor", rank=rank, kind="param", sharing="plain", peers="0,1")
        rows.add("param", rank=rank, step=1, stage="end", generation=1, digest=[5 + rank])
    assert judge(rows, 2) == ("INSUFFICIENT_EVIDENCE", [])  # averaged once a round, each rank on data of its own
    rows.connection.execute("UPDATE param SET digest = [5]")
    assert judge(rows, 2)[0] == "INCIDENT"
