"""COLLECTIVE_MISMATCH from rows: who issued what at one position, what looks alike and is none, what can't be told."""

from __future__ import annotations

from typing import Any

import pytest

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import collective_mismatch as detector

Call = tuple[str, str]  # what was issued ("op signature"), and where
LOSS, ACCURACY = ("all_reduce float32[1] SUM", "log.py:4 loss"), ("all_reduce float32[1] SUM", "log.py:9 accuracy")
NORM, GATHER = ("all_reduce float32[7] SUM", "norm.py:3 norm"), ("all_gather int64[5] x2", "eval.py:8 gather")
BARRIER = ("barrier", "save.py:20 save")


class Job:
    """Steps of ranks on one group: `step({0: [LOSS], 1: [LOSS]})` adds one step's calls in order."""

    def __init__(self, world: int, **more: Any) -> None:
        self.rows, self.world, self.more, self.steps = Rows(), world, more, 0
        self.at = dict.fromkeys(range(world), 0)
        for rank in range(world):
            self.rows.add("step", rank=rank, step=1)

    def step(self, calls: dict[int, list[Call]], **more: Any) -> Job:
        self.steps += 1
        values = {"group": "0", "ranks": list(range(self.world)), "root": -1, "source": "call"} | self.more | more
        for rank, issued in calls.items():
            for what, site in issued:
                self.at[rank] += 1
                op, _, signature = what.partition(" ")
                self.rows.add("collective", rank=rank, pid=100 + rank, step=self.steps, position=self.at[rank], op=op,
                              signature=signature, site=site, **values)  # fmt: skip
        return self

    def same(self, *calls: Call, steps: int = 5) -> Job:
        for _ in range(steps):
            self.step({rank: list(calls) for rank in range(self.world)})
        return self

    def judge(self, **facts: Any) -> tuple[str, list[Finding]]:
        outcomes, found = self.rows.judge(detector, world_size=self.world, **facts)
        return outcomes["COLLECTIVE_MISMATCH"], [f for _, f in found]

    def only(self, **facts: Any) -> Finding:
        _, (found,) = self.judge(**facts)
        return found


# ---------------------------------------------------------------- found


def test_the_rank_that_issued_another_size_than_the_majority_is_named_with_both_sites() -> None:
    job = Job(3).same(LOSS, GATHER)
    job.step({0: [LOSS, GATHER], 1: [LOSS, ("all_gather int64[4] x2", "eval.py:8 gather")], 2: [LOSS, GATHER]})
    found = job.only()
    assert (found.ranks, found.first_step, found.last_good_step) == ((1,), 6, 5)
    assert (found.severity, found.evidence_state, found.subject) == ("critical", "OBSERVED", "all_gather")
    assert "int64[4] x2 at eval.py:8" in found.summary
    assert "int64[5] x2" in found.evidence[0].expected


def test_two_ranks_are_both_named_and_neither_is_called_wrong() -> None:
    found = Job(2).same(LOSS).step({0: [NORM], 1: [LOSS]}).only()
    assert found.ranks == (0, 1)
    assert found.first_step == 6
    assert any("no majority" in text for text in found.cannot_conclude)
    assert {e.rank for e in found.evidence} == {0, 1}


def test_a_majority_of_those_recorded_is_none_where_silent_ranks_could_outvote_it() -> None:
    job = Job(5).same(LOSS)
    job.step({0: [NORM], 1: [LOSS], 2: [LOSS]})
    assert job.only(missing_ranks=(3, 4)).ranks == (0, 1, 2)


def test_only_the_first_mismatch_of_a_group_is_told() -> None:
    job = Job(3).same(LOSS)
    job.step({0: [LOSS], 1: [NORM], 2: [LOSS]}).step({0: [NORM], 1: [LOSS], 2: [LOSS]})
    assert job.only().ranks == (1,)


def test_different_roots_are_different_collectives() -> None:
    job = Job(3).same(LOSS)
    for rank in range(3):
        job.rows.add("collective", rank=rank, pid=100 + rank, step=6, position=6, op="broadcast", source="call",
                     signature="float32[3]", root=int(rank == 2), group="0", ranks=[0, 1, 2],
                     site="a.py:1 f")  # fmt: skip
    found = job.only()
    assert found.ranks == (2,)
    assert "with root 1" in found.summary


def test_a_rank_that_issues_what_comes_next_seems_to_have_left_one_out() -> None:
    job = Job(3).same(LOSS, NORM)
    found = job.step({0: [LOSS], 1: [NORM], 2: [LOSS]}).only()
    assert found.ranks == (1,)
    assert "rank 1 seems to have left out" in found.summary


def test_the_recorder_of_torch_shows_a_barrier_against_a_gradient_all_reduce() -> None:
    job = Job(3).same(LOSS)
    bucket = ("all_reduce float[20]", "")
    job.at = dict.fromkeys(range(3), 40)
    job.step({0: [BARRIER], 1: [bucket], 2: [bucket]}, source="recorder")
    found = job.only()
    assert (found.ranks, found.first_step, found.severity) == ((0,), 6, "critical")
    assert "save.py:20" in found.summary
    assert "torch's own" in found.summary


def test_calls_and_recorder_that_show_one_mismatch_are_one_finding() -> None:
    job = Job(2).same(LOSS)
    job.step({0: [NORM], 1: [LOSS]})
    job.steps -= 1
    job.step({0: [NORM], 1: [LOSS]}, source="recorder")
    assert "SUM" in job.only().summary


def test_a_rank_behind_by_a_call_that_looks_like_its_neighbours() -> None:
    job = Job(3).same(LOSS, ACCURACY)
    job.step({0: [LOSS, ACCURACY], 1: [ACCURACY], 2: [LOSS, ACCURACY]}).same(LOSS, ACCURACY, steps=4)
    found = job.only()
    assert (found.ranks, found.first_step, found.severity) == ((1,), 6, "warning")
    assert "left out all_reduce float32[1] SUM at log.py:4" in found.summary


def test_crossed_call_sites_against_a_majority() -> None:
    job = Job(3).same(LOSS, ACCURACY)
    job.step({0: [LOSS, ACCURACY], 1: [ACCURACY, LOSS], 2: [LOSS, ACCURACY]})
    found = job.only()
    assert (found.ranks, found.first_step) == ((1,), 6)
    assert (found.severity, found.evidence_state) == ("warning", "INFERRED")
    assert "log.py:4 loss and log.py:9 accuracy" in found.summary.replace(
        "log.py:9 accuracy and log.py:4 loss", "log.py:4 loss and log.py:9 accuracy"
    )


def test_two_ranks_that_cross_after_they_went_in_one_order() -> None:
    job = Job(2).same(LOSS, ACCURACY).step({0: [LOSS, ACCURACY], 1: [ACCURACY, LOSS]})
    found = job.only()
    assert (found.ranks, found.first_step) == ((0, 1), 6)


def test_crossing_after_a_long_time_of_lines_of_their_own() -> None:
    own = ("all_reduce float32[1] SUM", "main.py:5 main")
    job = Job(3)
    for _ in range(60):
        job.step({0: [own, LOSS, ACCURACY], 1: [LOSS, LOSS, ACCURACY], 2: [LOSS, LOSS, ACCURACY]})
    job.step({0: [own, LOSS, ACCURACY], 1: [LOSS, LOSS, ACCURACY], 2: [LOSS, ACCURACY, LOSS]})
    assert [(f.ranks, f.first_step) for f in job.judge()[1]] == [((2,), 61)]


def test_digests_of_a_step_without_rows() -> None:
    job = Job(3).same(LOSS)
    for rank in range(3):
        for step in (8, 9):
            job.rows.add("collective_step", rank=rank, step=step, group="0", ranks=[0, 1, 2], first=90, count=30,
                         digest=5 + (rank == 1 and step == 9), site_digest=3, site_sum=3)  # fmt: skip
    found = job.only()
    assert (found.ranks, found.first_step, found.severity) == ((1,), 9, "critical")


# ---------------------------------------------------------------- healthy


def two_branches(job: Job) -> None:
    here, there = ("broadcast float32[4]", "a.py:3 f"), ("broadcast float32[4]", "a.py:5 f")
    for _ in range(9):
        job.step({rank: [there if rank else here, LOSS] for rank in range(job.world)})


def emulated_broadcasts(job: Job) -> None:
    """Each rank in turn contributes its values and the others zeros, from two lines."""
    mine, zeros = ("all_reduce float32[4] SUM", "a.py:3 f"), ("all_reduce float32[4] SUM", "a.py:5 f")
    for _ in range(9):
        job.step({r: [mine if turn == r else zeros for turn in range(job.world)] for r in range(job.world)})


def roles_by_turns(job: Job) -> None:
    """Rank 0 leads in even steps, rank 1 in odd ones."""
    lead, follow = ("all_reduce float32[4] SUM", "a.py:3 lead"), ("all_reduce float32[4] SUM", "a.py:9 follow")
    for turn in range(9):
        orders = [[lead, follow], [follow, lead]]
        job.step({rank: orders[(rank + turn) % 2] if rank < 2 else [follow, follow] for rank in range(job.world)})


def joined_early(job: Job) -> None:
    """A rank out of data shadows the others' collectives from another line, its step frozen."""
    shadow = ("all_reduce float32[1] SUM", "a.py:40 main")
    job.same(LOSS, ACCURACY)
    for _ in range(6):
        job.step({rank: [shadow, shadow] if rank == 1 else [LOSS, ACCURACY] for rank in range(job.world)})
    job.rows.connection.execute("UPDATE collective SET step = 6 WHERE rank = 1 AND step > 6")


def one_rank_further(job: Job) -> None:
    job.same(LOSS, ACCURACY).step({0: [LOSS, ACCURACY]} | {rank: [LOSS] for rank in range(1, job.world)})


def one_line_for_all(job: Job) -> None:
    """Reductions of one size from one line: nothing tells them apart, whatever was left out."""
    job.same(LOSS, steps=6).step({rank: [LOSS] * (1 + (rank == 0)) for rank in range(job.world)})


def groups_of_their_own(job: Job) -> None:
    """Two groups of one name on different ranks (split), each with its own calls."""
    job.same(LOSS)
    for rank in range(job.world):
        mine = [r for r in range(job.world) if r % 2 == rank % 2]
        for position in range(1, 9):
            job.rows.add("collective", rank=rank, pid=100 + rank, step=position, position=position, group="7", root=-1,
                         ranks=mine, op="all_reduce", signature=f"float32[{1 + rank % 2}]", site="a.py:1 f",
                         source="call")  # fmt: skip


def attempts(job: Job) -> None:
    """A restart begins with other calls."""
    job.same(LOSS)
    for rank in range(job.world):
        job.rows.add("collective", rank=rank, attempt=1, pid=200 + rank, step=1, position=1, group="0", root=-1,
                     ranks=list(range(job.world)), op="barrier", site="load.py:1 load", source="call")  # fmt: skip


HEALTHY = (two_branches, emulated_broadcasts, roles_by_turns, joined_early, one_rank_further, one_line_for_all,
           groups_of_their_own, attempts)  # fmt: skip


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("pattern", HEALTHY, ids=lambda f: f.__name__)
def test_is_silent_on(pattern: Any, world: int) -> None:
    job = Job(world)
    pattern(job)
    outcome, found = job.judge()
    assert found == []
    turns = world == 2 and pattern in (emulated_broadcasts, roles_by_turns)  # or they cross: two ranks can't tell
    assert outcome == ("INSUFFICIENT_EVIDENCE" if turns else "CLEAR")


def test_large_groups_list_their_ranks_once() -> None:
    job = Job(3).same(LOSS).step({0: [LOSS], 1: [NORM], 2: [LOSS]})
    job.rows.connection.execute("UPDATE collective SET ranks = [] WHERE position > 1")
    assert job.only().ranks == (1,)


def test_two_ranks_that_cross_from_the_first_step_on_may_take_turns() -> None:
    job = Job(2)
    for _ in range(9):
        job.step({0: [LOSS, ACCURACY], 1: [ACCURACY, LOSS]})
    assert job.judge() == ("INSUFFICIENT_EVIDENCE", [])


def test_one_recorded_rank_is_not_enough() -> None:
    job = Job(2)
    job.step({0: [LOSS]})
    assert job.judge()[0] == "INSUFFICIENT_EVIDENCE"


def test_a_rank_that_aborted_leaves_what_torch_issued_unknown() -> None:
    job = Job(3).same(LOSS)
    assert job.judge()[0] == "CLEAR"
    job.step({0: [NORM], 2: [NORM]}, source="recorder")
    assert job.judge() == ("INSUFFICIENT_EVIDENCE", [])
