"""SHARD_OVERLAP from the ids and content digests of training batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import shard_overlap

N = 96
Passes = Sequence[Sequence[int]]


def train(ranks: Sequence[Passes], batch: int = 4, split: int = 0, whole: bool = True, contents: Any = None,
          n: int = N, **loader: Any) -> Rows:  # fmt: skip
    """Ranks that consume these ids, pass after pass. `split`: parts of their DistributedSampler; 0 without one.

    `contents(rank, pass, id)` gives a sample's digest; the same for the same id where it is None.
    """
    rows = Rows()
    for rank, passes in enumerate(ranks):
        step = 0
        for k, ids in enumerate(passes):
            about = {"sampler_class": "RandomSampler", "sampler": 0 if split else -1, "dataset_class": "Rows",
                     "dataset_length": n, "dataset_digest": "d", "batch_size": batch,
                     "levels": f'[["Rows", {n}, ""]]'}  # fmt: skip
            rows.add("loader", rank=rank, iterator=k, **(about | loader))
            for at in range(0, len(ids), batch):
                step += 1
                some = list(ids[at : at + batch])
                digests = [contents(rank, k, i) if contents else 31 * i for i in some]
                rows.add("batch", rank=rank, iterator=k, index=at // batch, step=step, samples=len(some),
                         digests=digests, ids=[] if loader.get("iterable") else some, backwards=step - 1)  # fmt: skip
            if whole:
                rows.add("batch", rank=rank, iterator=k, index=10**6, step=step, backwards=step, end="StopIteration")
        if split:
            rows.add("sampler", rank=rank, event="init", class_name="DistributedSampler", num_replicas=split,
                     shuffle=True, dataset_length=n)  # fmt: skip
    return rows


def shuffled(seed: int, n: int = N) -> list[int]:
    ids = list(range(n))
    random.Random(seed).shuffle(ids)
    return ids


def distributed(rank: int, parts: int, seed: int = 0, n: int = N) -> list[int]:
    """What a DistributedSampler deals to a rank: every parts-th of a shuffle, padded from its beginning."""
    ids = shuffled(seed, n)
    ids += ids[: -n % parts]
    return ids[rank::parts]


def relate(rows: Rows, peers: Sequence[str], sharing: str = "ddp", model: str = "Net") -> Rows:
    for rank, text in enumerate(peers):
        rows.add("tensor", rank=rank, kind="param", name="w", sharing=sharing, peers=text, model_type=model)
    return rows


def judge(rows: Rows, world_size: int, **facts: Any) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(shard_overlap, world_size=world_size, **facts)
    return outcomes["SHARD_OVERLAP"], [f for _, f in found]


def test_shards_without_a_common_sample_are_clear() -> None:
    assert judge(train([[distributed(r, 3, e) for e in (0, 1)] for r in range(3)], split=3), 3) == ("CLEAR", [])


def test_the_samplers_own_padding_is_no_overlap() -> None:
    assert judge(train([[distributed(r, 4, n=97)] for r in range(4)], split=4, n=97), 4) == ("CLEAR", [])
    subset = train([[distributed(r, 4, n=41)] for r in range(4)], split=4, n=41, dataset_length=60)
    assert judge(subset, 4) == ("CLEAR", [])  # the sampler deals a subset of the root data set


def test_batches_that_wrap_around_to_fill_the_last_round_are_no_overlap() -> None:
    n, batch, ranks = 90, 8, 2  # 12 batches, the last of which is filled up from the beginning
    ids = shuffled(3, n) + shuffled(3, n)[:6]
    dealt = [[i for b in range(r, 12, ranks) for i in ids[b * batch : b * batch + batch]] for r in range(ranks)]
    assert judge(train([[d] for d in dealt], batch=batch, n=n), 2) == ("CLEAR", [])


def test_the_same_batches_on_both_ranks_are_data_that_was_not_sharded() -> None:
    _, (f,) = judge(train([[shuffled(0)], [shuffled(0)]]), 2)
    assert (f.ranks, f.first_step, f.severity, f.evidence_state) == ((0, 1), 1, "critical", "OBSERVED")
    assert "not sharded" in f.summary


def test_each_rank_shuffling_all_of_the_data_for_itself_is_not_sharded_either() -> None:
    _, (f,) = judge(train([[shuffled(r)] for r in range(3)]), 3)
    assert (f.ranks, f.severity) == ((0, 1, 2), "critical")
    assert "not sharded" in f.summary


def test_two_pairs_that_read_the_same_shard_are_all_named() -> None:
    _, (f,) = judge(train([[distributed(r % 2, 2)] for r in range(4)], split=2), 4)
    assert (f.ranks, f.first_step, f.severity) == ((0, 1, 2, 3), 1, "critical")


def test_only_the_ranks_that_share_are_named() -> None:
    _, (f,) = judge(train([[distributed(0, 3)], [distributed(1, 3)], [distributed(1, 3)]], split=3), 3)
    assert f.ranks == (1, 2)


def test_shuffles_with_different_seeds_overlap_in_part() -> None:
    _, (f,) = judge(train([[distributed(r, 2, seed=r)] for r in range(2)], split=2), 2)
    assert (f.ranks, f.severity) in [((0, 1), "critical"), ((0, 1), "warning")]
    assert (f.first_step or 0) > 1


def test_overlap_that_begins_in_the_second_pass_starts_there() -> None:
    _, (f,) = judge(train([[distributed(r, 2), distributed(r, 2, seed=r + 5)] for r in range(2)], split=2), 2)
    assert (f.first_step or 0) > N // 2 // 4


def test_one_shared_sample_in_the_middle_is_found() -> None:
    mine, other = list(range(48)), list(range(48, 96))
    other[20] = 7
    _, (f,) = judge(train([[mine], [other]]), 2)
    assert (f.ranks, f.first_step, f.severity) == ((0, 1), 6, "warning")


def test_local_files_numbered_from_0_are_not_the_same_data() -> None:
    own = train([[shuffled(0), shuffled(1)]] * 2, contents=lambda rank, k, i: 1000 * rank + i, dataset_digest="")
    assert judge(own, 2) == ("INSUFFICIENT_EVIDENCE", [])


def test_equal_contents_prove_one_data_set_without_a_digest_of_it() -> None:
    assert judge(train([[shuffled(0)]] * 2, dataset_digest=""), 2)[0] == "INCIDENT"


def test_nothing_that_identifies_the_data_set_is_no_proof() -> None:
    rows = train([[shuffled(0)]] * 2, dataset_digest="")
    rows.connection.execute("UPDATE batch SET digests = []")
    assert judge(rows, 2) == ("INSUFFICIENT_EVIDENCE", [])


def test_random_augmentation_does_not_hide_the_overlap_of_ids() -> None:
    rows = train([[shuffled(0), shuffled(1)]] * 2, contents=lambda rank, k, i: hash((rank, k, i)) % 2**32)
    assert judge(rows, 2)[0] == "INCIDENT"


def test_data_sets_of_other_length_are_not_the_same_data() -> None:
    rows = train([[shuffled(0)]] * 2)
    rows.connection.execute("UPDATE loader SET dataset_length = 95 WHERE rank = 1")
    assert judge(rows, 2) == ("INSUFFICIENT_EVIDENCE", [])


def test_tensor_parallel_ranks_may_read_the_same() -> None:
    pairs = [[distributed(r // 2, 2)] for r in range(4)]
    assert judge(relate(train(pairs, split=2), ["0,2", "1,3", "0,2", "1,3"]), 4) == ("CLEAR", [])
    assert judge(relate(train(pairs, split=2), [""] * 4, "sharded", "Net"), 4) == ("INSUFFICIENT_EVIDENCE", [])
    assert judge(relate(train(pairs, split=2), [""] * 4, "sharded", "FSDPNet"), 4) == ("INSUFFICIENT_EVIDENCE", [])


def test_fully_sharded_ranks_that_all_read_the_same_did_not_shard_the_data() -> None:
    rows = relate(train([[shuffled(0)]] * 4), [""] * 4, "sharded", "FSDPNet")
    assert judge(rows, 4)[0] == "INCIDENT"


def test_ranks_without_a_known_process_group_may_train_on_their_own() -> None:
    rows = relate(train([[shuffled(0)]] * 2), ["", ""], "plain")
    assert judge(rows, 2) == ("INSUFFICIENT_EVIDENCE", [])


def test_unwrapped_ranks_must_show_that_they_are_replicas() -> None:
    rows = relate(train([[shuffled(0)]] * 2), ["0,1", "0,1"], "plain")
    for rank in range(2):
        rows.add("param", rank=rank, step=1, stage="start", generation=1, digest=[7])
        rows.add("param", rank=rank, step=1, stage="end", generation=1, digest=[8 + rank])
    assert judge(rows, 2) == ("INSUFFICIENT_EVIDENCE", [])  # stages of a pipeline, parts of a layer, a search
    for rank in range(2):
        rows.add("param", rank=rank, step=2, stage="end", generation=1, digest=[9])
    assert [f.ranks for f in judge(rows, 2)[1]] == [(0, 1)]


def test_a_model_that_gets_a_slice_of_each_batch_abstains() -> None:
    rows = train([[shuffled(0)]] * 2)
    for rank in range(2):
        for step in range(1, N // 4 + 1):
            rows.add("input", rank=rank, step=step, source="forward", rows=2)
    assert judge(rows, 2) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_model_that_gets_a_slice_along_another_dimension_abstains() -> None:
    rows = train([[shuffled(0)]] * 2)
    for rank in range(2):
        for step in range(1, N // 4 + 1):
            rows.add("input", rank=rank, step=step, source="batch", rows=4, elements=64)
            rows.add("input", rank=rank, step=step, source="forward", rows=4, elements=32)
    assert judge(rows, 2) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_model_that_gets_all_but_the_last_token_is_judged() -> None:
    rows = train([[shuffled(0)]] * 2)
    for rank in range(2):
        for step in range(1, N // 4 + 1):
            rows.add("input", rank=rank, step=step, source="batch", rows=4, elements=64)
            rows.add("input", rank=rank, step=step, source="forward", rows=4, elements=60)
    assert [f.ranks for f in judge(rows, 2)[1]] == [(0, 1)]


def test_draws_with_replacement_may_meet() -> None:
    assert judge(train([[shuffled(0)]] * 2, replacement=True), 2) == ("NOT_APPLICABLE", [])
    assert judge(train([[shuffled(0)]] * 2, sampler_class="RASampler"), 2) == ("NOT_APPLICABLE", [])
    drawn = [random.Random(r).choices(range(N), k=48) for r in range(2)]
    assert judge(train([[d] for d in drawn], sampler_class="Mine"), 2) == ("INSUFFICIENT_EVIDENCE", [])


def test_an_endless_sampler_that_goes_round_the_data_is_clear() -> None:
    stream = shuffled(0) + shuffled(1) + shuffled(2)
    assert judge(train([[stream[r::2]] for r in range(2)], whole=False, sampler_class="Endless"), 2) == ("CLEAR", [])


def test_evaluation_of_the_same_data_on_all_ranks_is_not_looked_at() -> None:
    rows = train([[distributed(r, 2)] for r in range(2)], split=2)
    for rank in range(2):
        rows.add("loader", rank=rank, loader=1, dataset_class="Rows", dataset_length=N, dataset_digest="d")
        for index in range(5):
            rows.add("batch", rank=rank, loader=1, index=index, ids=list(range(4 * index, 4 * index + 4)), backwards=12)
    assert judge(rows, 2) == ("CLEAR", [])


def stream(ranks: Sequence[Passes], contents: Any = None) -> Rows:
    return train(ranks, batch=8, contents=contents, iterable=True, n=-1, levels="")


def test_iterable_data_that_all_ranks_read_alike_is_observed() -> None:
    _, (f,) = judge(stream([[range(64)], [range(64)]]), 2)
    assert (f.ranks, f.first_step, f.severity, f.evidence_state) == ((0, 1), 1, "critical", "OBSERVED")


def test_iterable_data_that_recurs_and_is_split_is_clear() -> None:
    assert judge(stream([[range(r, 128, 2)] * 2 for r in range(2)]), 2) == ("CLEAR", [])


def test_iterable_data_that_overlaps_in_part_is_inferred() -> None:
    _, (f,) = judge(stream([[range(100)], [range(50, 150)]]), 2)
    assert (f.severity, f.evidence_state) == ("warning", "INFERRED")


@pytest.mark.parametrize("k", [1, 2])
def test_iterable_data_whose_contents_never_recur_is_no_evidence(k: int) -> None:
    rows = stream([[range(64)] * k for _ in range(2)], contents=lambda rank, k, i: hash((rank, k, i)) % 2**32)
    assert judge(rows, 2) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_rank_without_rows_is_not_called_clear() -> None:
    assert judge(train([[distributed(r, 3)] for r in range(2)], split=3), 3) == ("INSUFFICIENT_EVIDENCE", [])
    assert judge(train([[shuffled(0)]]), 1) == ("NOT_APPLICABLE", [])


def test_of_a_large_run_a_share_of_the_ids_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shard_overlap.PARAMS, "compared", 400)
    n = 4000
    split = train([[distributed(r, 2, n=n)] for r in range(2)], batch=50, n=n, split=2)
    assert judge(split, 2) == ("CLEAR", [])
    _, (f,) = judge(train([[shuffled(0, n)]] * 2, batch=50, n=n), 2)
    assert (f.ranks, f.severity) == ((0, 1), "critical")


def test_rank_0_that_reads_for_all_shares_nothing() -> None:
    rows = relate(train([[shuffled(1)], [shuffled(1)]], dispatched=2), ["0,1", "0,1"])
    assert judge(rows, 2) == ("NOT_APPLICABLE", [])
