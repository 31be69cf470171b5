"""Streams that two workers share and draw from, told from those they leave alone or seed anew."""

from kit.rows import Rows
from tdbg.aggregator.detectors import worker_seed_duplicated

DRAWN = (10, 11, 12)


def run(*workers, origins=None, iterable=False, passes=1, backwards=1):
    """Passes in which worker i's stream stood at `workers[i]` before its first batches and after 1 and 2 of them."""
    rows = Rows()
    for iterator in range(passes):
        at = {"rank": 0, "iterator": iterator, "pid": 9}
        rows.add("loader", **at, workers=len(workers), dataset_class="Noisy", iterable=iterable)
        for index in range(4):
            rows.add("batch", **at, step=index, index=index, samples=4, backwards=index * backwards)
        for worker, states in enumerate(workers):
            for fetches, state in enumerate(states):
                origin = origins[worker][fetches] if origins else -1
                rows.add("stream", **at, worker=worker, fetches=fetches, names="dataset.rng", digests=[state],
                         origins=[origin])  # fmt: skip
    return rows


def judge(rows):
    outcomes, found = rows.judge(worker_seed_duplicated)
    return outcomes["WORKER_SEED_DUPLICATED"], [f for _, f in found]


def test_two_workers_that_stand_at_the_same_places_drew_the_same_numbers():
    _, (found,) = judge(run(DRAWN, DRAWN))
    assert (found.severity, found.evidence_state, found.subject) == ("warning", "OBSERVED", "dataset.rng")
    assert found.evidence[0].value == "0, 1"


def test_two_of_three_workers():
    _, (found,) = judge(run(DRAWN, (20, 21, 22), DRAWN))
    assert found.evidence[0].value == "0, 2"


def test_one_sequence_drawn_from_at_different_pace_is_proof_when_nobody_seeded():
    pace = (DRAWN, (10, 13, 14))
    assert judge(run(*pace))[0] == "INSUFFICIENT_EVIDENCE"
    assert judge(run(*pace, origins=[(1, 1, 1), (1, 2, 3)]))[0] == "INSUFFICIENT_EVIDENCE"
    assert len(judge(run(*pace, origins=[(1, 1, 1), (1, 1, 1)]))[1]) == 1


def test_streams_that_are_left_alone_or_set_anew_for_each_sample_are_no_fault():
    assert judge(run((10, 10, 10), (10, 10, 10))) == ("CLEAR", [])
    assert judge(run((10, 11, 11), (10, 11, 11))) == ("CLEAR", [])
    assert judge(run((10, 11, 12), (20, 21, 22))) == ("CLEAR", [])


def test_one_batch_per_worker_is_too_little():
    assert judge(run((10, 11), (10, 11))) == ("INSUFFICIENT_EVIDENCE", [])


def test_an_iterable_data_set_may_share_on_purpose():
    assert judge(run(DRAWN, DRAWN, iterable=True)) == ("INSUFFICIENT_EVIDENCE", [])


def test_loaders_that_do_not_feed_training_are_left_alone():
    assert judge(run(DRAWN, DRAWN, backwards=0)) == ("CLEAR", [])


def test_the_same_numbers_in_every_pass_are_a_note():
    _, (found,) = judge(run(DRAWN, (20, 21, 22), passes=2))
    assert found.severity == "note"
