"""SHARD_MISSING from the ids of whole passes and the chain of data sets below each loader."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import shard_missing

N = 100


def levels(*chain: tuple[str, int, str]) -> str:
    return json.dumps([list(level) for level in chain])


def read(rows: Rows, rank: int, ids: Iterable[int], chain: str, loader: int = 0, trains: bool = True,
         whole: bool = True, batch: int = 5, **more: Any) -> Rows:  # fmt: skip
    """One pass of a rank over a loader, whose batches feed training or not."""
    ids = list(ids)
    about = {"batch_size": batch, "sampler_class": "RandomSampler", "sampler": -1, "samples": len(ids), "levels": chain}
    key = {"rank": rank, "loader": loader}
    rows.add("loader", **key, **(about | more))
    count = -(-len(ids) // batch)
    for index in range(count):
        some = ids[index * batch : (index + 1) * batch]
        fed = index if trains else 0
        rows.add("batch", **key, index=index, step=index + 1, ids=some, samples=len(some), backwards=fed)
    if whole:
        rows.add("batch", **key, index=count, step=count, backwards=count if trains else 0, end="StopIteration")
    return rows


def by_hand(*shards: Sequence[int], n: int = N, **more: Any) -> Rows:
    """Ranks that each took their own indices of one data set of `n` samples."""
    rows = Rows()
    for rank, ids in enumerate(shards):
        read(rows, rank, ids, levels(("Rows", n, ""), ("Subset", len(ids), f"indices {rank}")), **more)
    return rows


def dealt(*shards: Sequence[int], n: int = N, drop_last: bool = False, **more: Any) -> Rows:
    """Ranks with a DistributedSampler over one data set of `n` samples."""
    rows = Rows()
    for rank, ids in enumerate(shards):
        rows.add("sampler", rank=rank, event="init", class_name="DistributedSampler", num_replicas=len(shards),
                 drop_last=drop_last, dataset_length=n)  # fmt: skip
        read(rows, rank, ids, levels(("Rows", n, "")), sampler=0, sampler_class="DistributedSampler", **more)
    return rows


def judge(rows: Rows, world_size: int = 2) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(shard_missing, world_size=world_size)
    return outcomes["SHARD_MISSING"], [f for _, f in found]


def test_a_pass_over_all_samples_is_clear() -> None:
    assert judge(by_hand(range(50), range(50, 100))) == ("CLEAR", [])
    assert judge(dealt(range(0, 100, 2), range(1, 100, 2))) == ("CLEAR", [])


def test_a_part_that_no_rank_took_is_counted_and_listed() -> None:
    _, (f,) = judge(by_hand(range(40), range(40, 80)))
    assert (f.ranks, f.first_step, f.severity, f.evidence_state) == ((0, 1), 8, "warning", "OBSERVED")
    assert "20 of 100 samples of Rows" in f.summary
    assert "80, 81, 82" in f.summary
    assert f.cannot_conclude == ("whether they were held out on purpose",)


def test_what_a_split_into_equal_parts_leaves_over_is_no_loss() -> None:
    assert judge(by_hand(range(33), range(33, 66), range(66, 99)), 3) == ("CLEAR", [])


def test_the_tail_that_a_distributed_sampler_drops_is_no_loss() -> None:
    shards = [range(r, 96, 8) for r in range(8)]
    assert judge(dealt(*shards, n=103, drop_last=True), 8) == ("CLEAR", [])
    assert judge(dealt(*shards, n=103), 8)[0] == "INCIDENT"  # without drop_last it would have padded


def test_the_last_batch_that_loaders_drop_is_no_loss() -> None:
    shards = [list(range(r, 100, 2))[:48] for r in range(2)]
    rows = dealt(*shards, batch=16)
    assert judge(rows)[0] == "INCIDENT"
    rows.connection.execute("UPDATE loader SET drop_last = TRUE, samples = 50")
    assert judge(rows) == ("CLEAR", [])


def test_a_split_that_all_ranks_made_alike_is_the_data_set() -> None:
    rows = Rows()
    train = range(80)
    for rank in range(2):
        chain = levels(("Rows", N, ""), ("Subset", 80, "alike"), ("Subset", 40, f"part {rank}"))
        read(rows, rank, train[rank::2], chain)
    assert judge(rows) == ("CLEAR", [])


def test_samples_that_are_evaluated_are_not_missing() -> None:
    rows = by_hand(range(40), range(40, 80))
    read(rows, 0, range(80, 100), levels(("Rows", N, ""), ("Subset", 20, "held out")), loader=1, trains=False)
    assert judge(rows) == ("CLEAR", [])


def test_evaluation_of_another_data_set_does_not_hide_the_loss() -> None:
    rows = by_hand(range(40), range(40, 80))
    read(rows, 0, range(100), levels(("Other", N, "")), loader=1, trains=False)
    assert judge(rows)[0] == "INCIDENT"


def test_two_training_loaders_may_share_out_the_data_between_them() -> None:
    rows = Rows()
    for rank in range(2):
        for loader, part in enumerate((range(50), range(50, 100))):
            chain = levels(("Rows", N, ""), ("Subset", 25, f"loader {loader} part {rank}"))
            read(rows, rank, part[rank::2], chain, loader=loader)
    assert judge(rows) == ("CLEAR", [])


def test_a_pass_that_has_not_ended_is_no_evidence() -> None:
    assert judge(by_hand(range(40), range(40, 80), whole=False)) == ("INSUFFICIENT_EVIDENCE", [])


def test_all_planned_batches_consumed_end_a_pass_too() -> None:
    assert judge(by_hand(range(40), range(40, 80), whole=False, batches=8))[0] == "INCIDENT"


def test_a_wrapper_whose_indices_are_unknown_is_no_evidence() -> None:
    rows = Rows()
    for rank in range(2):
        read(rows, rank, range(40 * rank, 40 * rank + 40), levels(("Rows", N, ""), ("Filtered", 40, "")))
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_samplers_that_draw_a_set_number_or_with_replacement_are_not_judged() -> None:
    assert judge(by_hand(range(40), range(40, 80), replacement=True)) == ("NOT_APPLICABLE", [])
    rows = Rows()
    for rank in range(2):
        read(rows, rank, range(30), levels(("Rows", N, "")))
    assert judge(rows) == ("NOT_APPLICABLE", [])


def test_a_rank_without_the_pass_may_have_consumed_them() -> None:
    assert judge(by_hand(range(40), range(40, 80)), 3) == ("INSUFFICIENT_EVIDENCE", [])
    assert judge(by_hand(range(40)), 1) == ("NOT_APPLICABLE", [])


def test_iterable_data_and_unreadable_levels_are_no_evidence() -> None:
    assert judge(by_hand(range(40), range(40, 80), iterable=True)) == ("INSUFFICIENT_EVIDENCE", [])
    rows = by_hand(range(40), range(40, 80))
    rows.connection.execute("UPDATE loader SET levels = '[[\"Rows\", 10'")
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_batches_that_do_not_fill_a_round_are_left_over_by_a_batch_sampler_of_the_users() -> None:
    rows = by_hand(range(46), range(46, 92), batch=8)
    rows.connection.execute("UPDATE loader SET batch_size = -1")
    assert judge(rows) == ("CLEAR", [])
    assert judge(by_hand(range(46), range(46, 92), batch=8))[0] == "INCIDENT"
    more = by_hand(range(44), range(44, 88), batch=8)
    more.connection.execute("UPDATE loader SET batch_size = -1")
    assert judge(more)[0] == "INCIDENT"


def test_a_resumed_pass_is_not_missing_what_was_consumed_before() -> None:
    assert judge(by_hand(range(40, 70), range(70, 100), skipped=8)) == ("INSUFFICIENT_EVIDENCE", [])


def test_one_sampler_dealt_to_all_ranks_leaves_out_what_fills_no_round() -> None:
    def shards(count: int) -> Rows:
        about = {"batch": 8, "drop_last": True, "sharers": 2, "samples": 110, "n": 110}
        return by_hand(range(count), range(count, 2 * count), **about)

    assert judge(shards(48)) == ("CLEAR", [])  # 96 of 110: six rounds of 16
    assert judge(shards(40))[0] == "INCIDENT"


def test_rank_0_that_reads_for_all_knows_the_ids_of_all() -> None:
    rows = Rows()
    for rank, ids in enumerate((range(N), ())):
        read(rows, rank, ids, levels(("Rows", N, "")), sampler_class="SequentialSampler", dispatched=2, samples=N)
    for index in range(10):
        rows.add("batch", rank=1, index=index, step=index + 1, samples=5, backwards=index)
    rows.add("batch", rank=1, index=10, step=10, backwards=10, end="StopIteration")
    assert judge(rows) == ("CLEAR", [])


def test_a_choice_that_holds_both_the_split_and_the_share_is_no_evidence() -> None:
    rows = Rows()
    for rank in range(2):
        chain = json.dumps([["Rows", N, ""], ["Rows", 40, f"share {rank}", "composed"]])
        read(rows, rank, range(40 * rank, 40 * rank + 40), chain)
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])
    alike = Rows()
    for rank in range(2):
        chain = json.dumps([["Rows", N, ""], ["Rows", 80, "train", "composed"]])
        read(alike, rank, range(30 * rank, 30 * rank + 30), chain)
    assert judge(alike)[0] == "NOT_APPLICABLE"  # the samplers draw a set number
