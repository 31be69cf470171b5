"""SAMPLES_DROPPED from the sizes of training passes and the ids in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import samples_dropped

Passes = Sequence[Sequence[int]]


def train(ranks: Sequence[Passes], batch: int = 8, n: int = 0, split: int = 0, whole: bool = True, trains: bool = True,
          ids: bool = True, **loader: Any) -> Rows:  # fmt: skip
    """Ranks that consume these samples, pass after pass. `split`: a DistributedSampler shares out a data set of `n`."""
    rows = Rows()
    for rank, passes in enumerate(ranks):
        step = 0
        if split:
            rows.add("sampler", rank=rank, event="init", class_name="DistributedSampler", num_replicas=split,
                     dataset_length=n)  # fmt: skip
        for k, taken in enumerate(passes):
            about = {"sampler_class": "DistributedSampler" if split else "RandomSampler", "sampler": 0 if split else -1,
                     "batch_size": batch, "samples": n // max(1, split), "drop_last": True, "batches": 99,
                     "levels": f'[["Rows", {n}, ""]]'}  # fmt: skip
            rows.add("loader", rank=rank, iterator=k, **(about | loader))
            for at in range(0, len(taken), batch):
                step += 1
                some = list(taken[at : at + batch])
                rows.add("batch", rank=rank, iterator=k, index=at // batch, step=step, samples=len(some),
                         ids=some if ids else [], backwards=step - 1 if trains else 0)  # fmt: skip
            if whole:
                rows.add("batch", rank=rank, iterator=k, index=-(-len(taken) // batch), step=step,
                         backwards=step if trains else 0, end="StopIteration")  # fmt: skip
    return rows


def dealt(n: int, ranks: int, batch: int, passes: int = 3, reshuffled: bool = True) -> list[list[list[int]]]:
    """What DistributedSampler and drop_last give each rank."""
    shards: list[list[list[int]]] = [[] for _ in range(ranks)]
    for k in range(passes):
        order = list(range(n))
        random.Random(k if reshuffled else 0).shuffle(order)
        for rank in range(ranks):
            mine = order[rank::ranks]
            shards[rank].append(mine[: len(mine) // batch * batch])
    return shards


def judge(rows: Rows, world_size: int = 2, **facts: Any) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(samples_dropped, world_size=world_size, **facts)
    return outcomes["SAMPLES_DROPPED"], [f for _, f in found]


def test_a_third_of_each_pass_is_told_even_when_it_is_another_third_each_time() -> None:
    outcome, (found,) = judge(train(dealt(96, 2, 32), batch=32, n=96, split=2))
    assert outcome == "INCIDENT"
    assert (found.ranks, found.severity, found.evidence_state, found.first_step) == ((0, 1), "warning", "OBSERVED", 1)
    assert "32 of 96 samples" in found.summary
    assert "other ones" in found.summary


def test_the_same_samples_dropped_in_each_pass_are_lost_for_good() -> None:
    _, (found,) = judge(train(dealt(112, 2, 16, reshuffled=False), batch=16, n=112, split=2))
    assert found.severity == "warning"
    assert "16 of 112" in found.summary
    assert "no pass gives them" in found.summary
    assert judge(train(dealt(112, 2, 16), batch=16, n=112, split=2)) == ("CLEAR", [])  # a seventh, other ones each time


@pytest.mark.parametrize(("n", "batch"), [(1000, 8), (1003, 16), (170, 8), (64, 32)])
def test_a_remainder_is_no_finding(n: int, batch: int) -> None:
    assert judge(train(dealt(n, 2, batch), batch=batch, n=n, split=2)) == ("CLEAR", [])


def test_a_pass_that_training_left_early_does_not_turn_a_remainder_into_a_loss() -> None:
    shards = [[whole, cut[:16]] for whole, cut in dealt(245, 2, 8, passes=2)]
    rows = train(shards, n=245, split=2)
    rows.connection.execute("""DELETE FROM batch WHERE iterator = 1 AND "end" = 'StopIteration'""")
    assert judge(rows) == ("CLEAR", [])


def test_a_small_part_lost_for_good_is_a_note() -> None:
    _, (found,) = judge(train(dealt(86, 2, 8, reshuffled=False), n=86, split=2))
    assert found.severity == "note"


def test_one_sampler_whose_batches_are_dealt_to_all_ranks_is_counted_once() -> None:
    shards = [[list(range(32))], [list(range(32, 64))]]
    _, (found,) = judge(train(shards, batch=32, n=110, sharers=2, samples=110))
    assert (found.severity, found.ranks) == ("warning", (0, 1))
    assert "46 of 110" in found.summary


def test_one_process_is_judged_too() -> None:
    assert judge(train([[list(range(32))] * 2], batch=32, n=60), 1)[0] == "INCIDENT"
    assert judge(train([[list(range(60))] * 2], batch=32, n=60, drop_last=False), 1) == ("CLEAR", [])


def test_without_ids_the_sizes_decide() -> None:
    assert judge(train([[list(range(32))] * 2], batch=32, n=60, ids=False), 1)[0] == "INCIDENT"


def test_a_loader_that_gives_no_batch_at_all() -> None:
    _, (found,) = judge(train([[[], []], [[], []]], batch=64, n=40, samples=20), 2)
    assert (found.severity, found.ranks) == ("warning", (0, 1))
    assert "40 of 40" in found.summary


def test_a_shortage_that_drop_last_does_not_explain_is_another_rules() -> None:
    assert judge(train([[list(range(30))], [list(range(50, 80))]], n=100, split=2)) == ("CLEAR", [])


def test_a_pass_that_did_not_end_is_no_evidence() -> None:
    shards = dealt(960, 2, 32, passes=1)
    assert (
        judge(train([[p[:64] for p in s] for s in shards], n=960, split=2, whole=False))[0] == "INSUFFICIENT_EVIDENCE"
    )


def test_a_loop_that_leaves_every_pass_early_without_reshuffling_gets_a_note() -> None:
    same = [[list(range(rank, 200, 2))[:48]] * 3 for rank in range(2)]
    _, (found,) = judge(train(same, n=200, split=2, whole=False, batches=12))
    assert found.severity == "note"
    assert "104 of 200" in found.summary


def test_short_passes_over_reshuffled_data_reach_all_of_it() -> None:
    shards = [[p[:48] for p in s] for s in dealt(200, 2, 8, passes=8)]
    assert judge(train(shards, n=200, split=2, whole=False, batches=12)) == ("CLEAR", [])


@pytest.mark.parametrize("about", [{"replacement": True}, {"iterable": True}, {"skipped": 3}])
def test_data_whose_length_means_nothing_is_not_judged(about: dict[str, Any]) -> None:
    rows = train(dealt(96, 2, 32), batch=32, n=96, split=2, **about)
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_batch_sampler_of_the_users_may_have_its_own_rule() -> None:
    _, (found,) = judge(_bucketed(), 1)
    assert found.severity == "note"
    assert found.cannot_conclude


def _bucketed() -> Rows:
    rows = train([[list(range(40))] * 2], n=60, samples=-1)
    rows.connection.execute("UPDATE loader SET batch_size = -1, sampler_class = 'Buckets'")
    return rows


def test_evaluation_may_drop_what_it_likes() -> None:
    assert judge(train(dealt(96, 2, 32), batch=32, n=96, split=2, trains=False))[0] == "INSUFFICIENT_EVIDENCE"


def test_a_rank_that_was_not_recorded_leaves_the_share_unknown() -> None:
    assert judge(train(dealt(96, 3, 8)[:2], n=96, split=3), 3)[0] == "INSUFFICIENT_EVIDENCE"
