"""Streams that every worker reads, told from splits, duplicates in the data, several epochs in one pass."""

import random

from kit.rows import Rows
from tdbg.aggregator.detectors import data_repeated


def run(batches, iterable=True, workers=2, whole=True, passes=1, drawn=False, **loader):
    """Passes of one rank: `batches` lists (worker, contents or ids)."""
    rows = Rows()
    for iterator in range(passes):
        at = {"rank": 0, "pid": 9, "iterator": iterator}
        rows.add("loader", **at, workers=workers, iterable=iterable, dataset_class="Lines", batch_size=4,
                 **({"samples": -1, "sampler_class": "S"} | loader))  # fmt: skip
        for index, (worker, keys) in enumerate(batches):
            what = {"digests": keys} if iterable else {"ids": keys}
            rows.add(
                "batch", **at, step=1 + index, index=index, samples=len(keys), worker=worker, backwards=index, **what
            )
        if whole:
            rows.add(
                "batch", **at, step=1 + len(batches), index=len(batches), backwards=len(batches), end="StopIteration"
            )
        for fetches in (0, 1):
            state = fetches if drawn else 7
            rows.add("stream", **at, worker=0, fetches=fetches, names="torch", digests=[state], origins=[1])
    return rows


def batches(*streams):
    """Batches of 4 from each worker's stream in turn."""
    longest = max(map(len, streams))
    return [(w, s[i : i + 4]) for i in range(0, longest, 4) for w, s in enumerate(streams) if s[i : i + 4]]


def judge(rows, world_size=1):
    outcomes, found = rows.judge(data_repeated, world_size=world_size)
    return outcomes["DATA_REPEATED"], [f for _, f in found]


STREAM = list(range(100, 160))


def test_two_workers_that_read_the_whole_stream():
    for whole in (True, False):
        _, (found,) = judge(run(batches(STREAM, STREAM), whole=whole))
        assert (found.severity, found.evidence_state, found.first_step) == ("warning", "OBSERVED", 2)


def test_the_same_samples_in_another_order():
    other = random.Random(1).sample(STREAM, len(STREAM))
    assert len(judge(run(batches(STREAM, other)))[1]) == 1


def test_a_stream_split_by_worker_is_clear():
    assert judge(run(batches(STREAM[::2], STREAM[1::2]))) == ("CLEAR", [])


def test_two_epochs_in_one_pass_are_no_fault():
    again = random.Random(1).sample(STREAM, len(STREAM))
    assert judge(run(batches(STREAM[::2] * 2, STREAM[1::2] * 2))) == ("CLEAR", [])
    assert judge(run(batches(STREAM[::2] + again[::2], STREAM[1::2] + again[1::2]))) == ("CLEAR", [])


def test_duplicates_in_the_data_are_no_fault():
    half = STREAM[:10] + STREAM[30:]
    assert judge(run(batches(STREAM[:30] + half, STREAM[30:] + STREAM[:10]))) == ("CLEAR", [])
    assert judge(run(batches([5] * 40, [5] * 40))) == ("CLEAR", [])


def test_contents_drawn_anew_each_time_are_unknown():
    split = batches(STREAM[::2], STREAM[1::2])
    assert judge(run(split, drawn=True)) == ("INSUFFICIENT_EVIDENCE", [])
    assert judge(run(split, drawn=True, passes=2)) == ("CLEAR", [])


def ids(order, **more):
    return run([(-1, order[i : i + 4]) for i in range(0, len(order), 4)], iterable=False, workers=0,
               **({"samples": len(order)} | more))  # fmt: skip


def test_ids_that_recur_in_a_declared_epoch_are_a_note():
    _, (found,) = judge(ids([*range(40), *range(40)]))
    assert (found.severity, found.first_step) == ("note", 11)


def test_ids_that_fill_up_or_are_drawn_with_replacement_are_nothing():
    assert judge(ids([*range(40), 0, 1, 2, 3])) == ("CLEAR", [])
    assert judge(ids([*range(40), *range(40)], replacement=True)) == ("CLEAR", [])
    assert judge(ids([*range(40), *range(40)], sampler_class="BalancedSampler")) == ("CLEAR", [])
    assert judge(ids([*range(40), *range(40)], samples=-1)) == ("CLEAR", [])
