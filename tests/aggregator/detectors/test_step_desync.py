"""STEP_DESYNC: numbers of steps and of backwards, and the differences that a job's end or its design explains."""

from __future__ import annotations

import pytest

from kit.replicas import catalogue
from kit.rows import Rows
from tdbg.aggregator.detectors import step_desync
from tdbg.aggregator.findings import Finding


def _rows(*last: int, sharing: str = "ddp", backwards: int = 1) -> Rows:
    rows = catalogue(Rows(), len(last), "a", sharing=sharing)
    for rank, steps in enumerate(last):
        for step in range(1, steps + 1):
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=backwards)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT", **facts: object) -> list[Finding]:
    outcomes, found = rows.judge(step_desync, **facts)
    assert outcomes == {"STEP_DESYNC": outcome}
    return [f for _, f in found]


def _more(rows: Rows, rank: int, count: int, steps: str) -> Rows:
    rows.connection.execute(f"UPDATE step SET backwards = {count} WHERE rank = {rank} AND step {steps}")
    return rows


def test_a_rank_with_another_number_of_backwards_on_most_steps_is_named() -> None:
    (found,) = _found(_more(_rows(10, 10, 10), 1, 2, ">= 3"))
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((1,), 3, 2, 10)
    assert (found.severity, found.evidence[0].value, found.evidence[0].expected) == ("warning", "2", "1")


def test_the_reference_rank_itself_can_be_the_odd_one() -> None:
    assert [f.ranks for f in _found(_more(_rows(10, 10, 10), 0, 2, ">= 3"))] == [(0,)]


@pytest.mark.parametrize("steps", ["> 5", "IN (3, 9)"])
def test_a_difference_on_few_steps_is_no_finding(steps: str) -> None:
    assert _found(_more(_rows(10, 10, 10), 1, 2, steps), "CLEAR") == []


def test_a_difference_that_sets_in_late_and_stays_is_a_finding() -> None:
    assert [(f.ranks, f.first_step) for f in _found(_more(_rows(40, 40, 40), 1, 2, ">= 29"))] == [((1,), 29)]
    assert _found(_more(_rows(40, 40, 40), 1, 2, ">= 35"), "CLEAR") == []


def test_an_update_that_one_rank_left_out_is_found_where_its_backwards_ran_on() -> None:
    (found,) = _found(_more(_rows(10, 10, 9), 2, 2, "= 4"))
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((2,), 4, 3, 10)


def test_windows_that_vary_with_each_ranks_data_are_no_finding() -> None:
    rows = _rows(12, 12, 12)
    rows.connection.execute("UPDATE step SET backwards = 1 + (step * (rank + 1)) % 3")
    assert _found(rows, "CLEAR") == []


def _vary(rows: Rows, number: str) -> Rows:
    rows.connection.execute(f"UPDATE step SET backwards = {number}")
    return rows


def test_where_all_vary_a_rank_that_nearly_always_has_the_most_by_far_is_named() -> None:
    (found,) = _found(_vary(_rows(20, 20, 20), "(2 + (step * (rank + 2)) % 3) * (CASE rank WHEN 1 THEN 3 ELSE 1 END)"))
    assert (found.ranks, found.first_step, found.evidence_state) == ((1,), 1, "INFERRED")
    assert "more backwards than on any other rank" in found.summary
    (fewest,) = _found(_vary(_rows(20, 20, 20), "CASE rank WHEN 0 THEN 1 + step % 2 ELSE 4 + step * rank % 3 END"))
    assert fewest.ranks == (0,)
    assert "fewer backwards" in fewest.summary
    two = _vary(_rows(20, 20), "(2 + (step * (rank + 2)) % 3) * (1 + 2 * rank)")
    assert [f.ranks for f in _found(two)] == [(0, 1)]


@pytest.mark.parametrize(("steps", "factor"), [(4, "3"), (20, "1.3"), (20, "CASE step % 4 WHEN 0 THEN 0.2 ELSE 3 END")])
def test_few_steps_a_small_excess_or_one_that_comes_and_goes_proves_nothing(steps: int, factor: str) -> None:
    rows = _rows(steps, steps, steps)
    _vary(rows, f"((20 + (step * (rank + 2)) % 3) * (CASE rank WHEN 1 THEN {factor} ELSE 1 END))::INT")
    assert _found(rows, "CLEAR") == []


def test_a_window_that_varies_alike_on_all_ranks_is_clear() -> None:
    rows = _rows(10, 10)
    rows.connection.execute("UPDATE step SET backwards = 1 + step % 3")
    assert _found(rows, "CLEAR") == []


def test_a_finished_run_whose_ranks_took_different_numbers_of_steps() -> None:
    (found,) = _found(_rows(10, 10, 9))
    assert (found.ranks, found.first_step, found.last_good_step, found.subject) == ((2,), 10, 9, "steps")


def test_a_running_job_may_be_in_the_middle_of_a_step() -> None:
    assert _found(_rows(10, 10, 8), "CLEAR", status="running") == []


def _dead(rows: Rows, rank: int) -> Rows:
    return rows.add("exit", rank=rank, exit_code=1, ended_ns=5)


def test_a_failed_run_blames_nobody_for_the_steps_after_the_first_death() -> None:
    assert _found(_dead(_rows(10, 10, 8), 2), "CLEAR", status="failed") == []
    assert _found(_dead(_rows(10, 10, 9), 0), "CLEAR", status="failed") == []
    assert _found(_rows(10, 10, 8), "CLEAR", status="failed") == []


def test_a_failed_run_whose_living_rank_was_steps_behind_is_a_finding() -> None:
    assert [f.ranks for f in _found(_dead(_rows(10, 10, 7), 0), status="failed")] == [(2,)]


def test_on_an_accelerator_the_last_steps_of_a_failed_run_prove_nothing() -> None:
    rows = _dead(_rows(10, 10, 7), 0).add("memory", rank=0, step=1, cuda_allocated_bytes=5)
    assert _found(rows, "CLEAR", status="failed") == []


def test_ranks_that_join_lets_run_out_of_data_are_no_finding() -> None:
    assert _found(_rows(10, 8).add("event", rank=1, kind="join"), "CLEAR") == []


def test_inferred_steps_and_unwrapped_models_are_not_judged() -> None:
    rows = _rows(10, 9)
    rows.connection.execute("UPDATE step SET inferred = TRUE WHERE rank = 0")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []
    assert _found(_rows(10, 5, sharing="plain"), "INSUFFICIENT_EVIDENCE") == []
    assert _found(_rows(10), "NOT_APPLICABLE") == []


def test_groups_that_reduce_apart_may_take_different_numbers_of_steps() -> None:
    rows = _rows(10, 10, 6, 6)
    rows.connection.execute("UPDATE tensor SET peers = CASE WHEN rank < 2 THEN '0,1' ELSE '2,3' END")
    assert _found(rows, "CLEAR") == []


def test_an_attempt_that_was_restarted_is_judged_as_a_stopped_one() -> None:
    rows = _rows(10, 9)
    rows.connection.execute("INSERT INTO step BY NAME SELECT * REPLACE (1 AS attempt) FROM step WHERE step < 5")
    rows.connection.execute("INSERT INTO tensor BY NAME SELECT * REPLACE (1 AS attempt) FROM tensor")
    assert _found(rows, "CLEAR") == []


def _read(rows: Rows, given: int, skips: dict[int, tuple[int, ...]], through: tuple[int, ...] = (1,)) -> Rows:
    """Three ranks read `given` batches each and make no backward for those that `skips` has."""
    for rank in range(3):
        backwards = 0
        for index in range(given):
            rows.add("batch", rank=rank, step=backwards + 1, index=index, backwards=backwards)
            backwards += index not in skips.get(rank, ())
        if rank in through:
            rows.add("batch", rank=rank, step=backwards + 1, index=given, backwards=backwards, samples=-1, end="Stop")
    return rows


def test_a_batch_that_one_rank_left_out_is_told_when_the_job_fails_at_the_end_of_its_data() -> None:
    (found,) = _found(_read(_rows(9, 9, 9), 10, {1: (4,)}), status="failed")
    assert (found.ranks, found.first_step, found.last_good_step, found.subject) == ((1,), 5, 4, "batches")
    assert "no backward for 1 of the 10 batches" in found.summary


@pytest.mark.parametrize(
    ("skips", "through", "status"),
    [({1: (4,)}, (1,), "running"), ({1: (4,)}, (), "failed"), ({1: (4,)}, (0, 1, 2), "failed"),
     ({0: (4,), 1: (4,), 2: (4,)}, (1,), "failed"), ({}, (1,), "failed"), ({0: (2,), 1: (4,)}, (1,), "failed"),
     ({0: (2,), 1: (4,), 2: (6,)}, (1,), "failed")],
)  # fmt: skip
def test_batches_that_all_leave_out_or_ranks_that_are_through_together_are_no_finding(
    skips: dict[int, tuple[int, ...]], through: tuple[int, ...], status: str
) -> None:
    assert _found(_read(_rows(9, 9, 9), 10, skips, through), "CLEAR", status=status) == []


def test_with_join_a_rank_may_be_through_earlier() -> None:
    rows = _read(_rows(9, 9, 9), 10, {1: (4,)}).add("event", rank=0, kind="join")
    assert _found(rows, "CLEAR", status="failed") == []
