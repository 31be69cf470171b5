"""SAMPLER_SEED_MISMATCH from the rows of samplers, and of loaders where it matters which of them feed training."""

from __future__ import annotations

from typing import Any

from kit.rows import Rows
from tdbg.aggregator.detectors import sampler_seed_mismatch

PASS_STEPS = 5


def passes(
    rows: Rows, rank: int, seed: int, epochs: list[int], sampler: int = 0, trains: bool = True, **more: Any
) -> None:
    """One sampler of one rank, iterated once for each epoch, by a loader whose batches feed training or don't."""
    about = {"rank": rank, "sampler": sampler, "seed": seed, "num_replicas": 3, "dataset_length": 300, "shuffle": True}
    about |= {"class_name": "DistributedSampler"} | more
    rows.add("sampler", event="init", **about)
    for k, epoch in enumerate(epochs):
        step = 1 + k * PASS_STEPS
        rows.add("loader", rank=rank, loader=sampler, iterator=k, sampler=sampler)
        rows.add("sampler", event="iter", epoch=epoch, step=step, **about)
        for index in range(PASS_STEPS):
            fed = k * PASS_STEPS + index if trains else 0
            rows.add("batch", rank=rank, loader=sampler, iterator=k, index=index, step=step + index, backwards=fed)
        rows.add("batch", rank=rank, loader=sampler, iterator=k, index=PASS_STEPS, step=step + PASS_STEPS,
                 backwards=(k + 1) * PASS_STEPS if trains else 0, end="StopIteration")  # fmt: skip


def judge(rows: Rows, world_size: int = 3) -> tuple[str, list[tuple[object, ...]]]:
    outcomes, found = rows.judge(sampler_seed_mismatch, world_size=world_size)
    return outcomes["SAMPLER_SEED_MISMATCH"], [(f.ranks, f.first_step, f.subject, f.severity) for _, f in found]


def test_equal_seeds_and_epochs_are_clear() -> None:
    rows = Rows()
    for rank in range(3):
        passes(rows, rank, 7, [0, 1, 2])
    assert judge(rows) == ("CLEAR", [])


def test_an_epoch_set_on_one_rank_only_is_found_where_the_passes_part() -> None:
    rows = Rows()
    for rank in range(3):
        passes(rows, rank, 7, [0, 1, 2] if rank == 0 else [0, 0, 0])
    assert judge(rows)[1] == [((0,), 1 + PASS_STEPS, "sampler.epoch", "critical")]


def test_two_ranks_with_different_seeds_are_both_named() -> None:
    rows = Rows()
    for rank in range(2):
        passes(rows, rank, 100 + rank, [0])
    assert judge(rows, 2)[1] == [((0, 1), 1, "sampler.seed", "critical")]


def test_without_shuffling_the_seed_does_not_matter() -> None:
    rows = Rows()
    for rank in range(3):
        passes(rows, rank, rank, [0], shuffle=False)
    assert judge(rows) == ("NOT_APPLICABLE", [])


def test_a_shuffled_evaluation_sampler_gives_a_warning() -> None:
    rows = Rows()
    for rank in range(3):
        passes(rows, rank, 7, [0])
        passes(rows, rank, 7 + (rank == 1), [0], sampler=1, trains=False, dataset_length=60)
    assert judge(rows)[1] == [((1,), 1, "sampler.seed", "warning")]


def test_a_glance_at_the_first_batch_on_one_rank_shifts_nothing() -> None:
    rows = Rows()
    rows.add("loader", rank=0, loader=9, iterator=0, sampler=0)
    rows.add("sampler", rank=0, event="iter", seed=7, num_replicas=3, dataset_length=300, shuffle=True)
    rows.add("batch", rank=0, loader=9, iterator=0, index=0)
    for rank in range(3):
        passes(rows, rank, 7, [0, 1, 2])
    assert judge(rows) == ("CLEAR", [])


def test_an_extra_sampler_over_other_data_on_one_rank_shifts_nothing() -> None:
    rows = Rows()
    passes(rows, 0, 99, [0], sampler=0, trains=False, dataset_length=40)
    for rank in range(3):
        passes(rows, rank, 7, [0, 1], sampler=1 if rank == 0 else 0)
    assert judge(rows)[1] == []


def test_groups_of_replicas_may_shuffle_differently() -> None:
    rows = Rows()
    for rank in range(4):
        rows.add("tensor", rank=rank, kind="param", sharing="ddp", peers="0,1" if rank < 2 else "2,3")
        passes(rows, rank, 7 + rank // 2, [0, 1], num_replicas=2)
    assert judge(rows, 4) == ("CLEAR", [])


def test_a_sampler_that_is_never_iterated_is_no_evidence() -> None:
    rows = Rows()
    for rank in range(3):
        passes(rows, rank, rank, [])
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_single_process_has_nobody_to_agree_with() -> None:
    rows = Rows()
    passes(rows, 0, 7, [0])
    assert judge(rows, 1) == ("NOT_APPLICABLE", [])
