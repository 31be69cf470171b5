"""Streams that ranks share: nothing by themselves, a note where they are drawn from, a warning where data is."""

import pytest

from kit.healthy import healthy
from kit.plants import sql
from tdbg.aggregator.detectors import rng_duplicated

SAME_STREAM = "UPDATE rng SET torch_digest = step"
SAME_WORK = ("UPDATE grad SET l2 = [5, 6, 7, 8] WHERE stage = 'local'", "UPDATE loss SET total = 1 / step")


def judge(*statements, ranks=3):
    rows = healthy(ranks)
    sql(*statements)(rows)
    outcomes, found = rows.judge(rng_duplicated)
    return outcomes["RNG_DUPLICATED"], [f for _, f in found]


def test_data_drawn_from_one_stream_gives_one_gradient():
    _, (found,) = judge(SAME_STREAM, *SAME_WORK)
    assert (found.severity, found.evidence_state, found.ranks, found.first_step) == (
        "warning",
        "OBSERVED",
        (0, 1, 2),
        1,
    )


def test_two_of_four_ranks_are_enough():
    of = " WHERE rank IN (1, 3)"
    _, (found,) = judge(SAME_STREAM + of, SAME_WORK[0] + " AND rank IN (1, 3)", SAME_WORK[1] + of, ranks=4)
    assert found.ranks == (1, 3)


def test_streams_that_nobody_draws_from_are_nothing():
    assert judge(SAME_STREAM, "UPDATE rng SET moved = ''", *SAME_WORK) == ("CLEAR", [])
    assert judge(SAME_STREAM, "UPDATE rng SET moved = 'torch:optimizer'") == ("CLEAR", [])


@pytest.mark.parametrize(
    "look_alike",
    [
        (),  # each rank has its own samples
        ("UPDATE rng SET moved = 'torch:forward'", *SAME_WORK),  # one batch for all, and dropout
        (*SAME_WORK, "UPDATE batch SET ids = [index]"),  # the samples are shared: SHARD_OVERLAP says so
    ],
)
def test_a_shared_stream_without_data_from_it_is_a_note(look_alike):
    _, (found,) = judge(SAME_STREAM, *look_alike)
    assert found.severity == "note"


def test_workers_that_augment_alike_on_all_ranks_are_a_note():
    _, (found,) = judge("UPDATE stream SET digests = [worker * 100 + fetches, 5]")
    assert (found.severity, found.subject) == ("note", "torch in workers")


def test_unwrapped_ranks_and_short_runs_are_unknown():
    assert (
        judge(SAME_STREAM, *SAME_WORK, "UPDATE tensor SET peers = '', sharing = 'plain'")[0] == "INSUFFICIENT_EVIDENCE"
    )
    assert judge("DELETE FROM rng WHERE step > 1")[0] == "INSUFFICIENT_EVIDENCE"


def test_a_rank_alone_has_nobody_to_share_with():
    assert judge(ranks=1) == ("NOT_APPLICABLE", [])
