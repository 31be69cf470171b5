"""CHECKPOINT_STALL from rows: saves and evaluations that take much of the time, and those that are usual."""

from __future__ import annotations

from kit.times import timed
from tdbg.aggregator.detectors import checkpoint_stall


def judged(rows, ranks=2):
    outcomes, found = rows.judge(checkpoint_stall, world_size=ranks)
    return outcomes["CHECKPOINT_STALL"], [f for _, f in found]


def every(n, ns, also="TRUE"):
    return f"CASE WHEN step % {n} = 0 AND {also} THEN {ns} ELSE 0 END"


def test_a_save_after_every_step_is_found_on_the_rank_that_saves():
    rows = timed(2, 60, checkpoint_ns=every(1, "60e6", "rank = 0"), step_ns="70e6")
    outcome, (found,) = judged(rows)
    assert (outcome, found.ranks, found.first_step, found.subject) == ("INCIDENT", (0,), 3, "checkpoint")
    assert (found.severity, found.evidence_state) == ("warning", "OBSERVED")
    assert "every 1 steps" in found.summary


def test_saves_now_and_then_and_a_last_one_are_usual():
    assert judged(timed(2, 200, checkpoint_ns=every(50, "100e6"))) == ("CLEAR", [])
    assert judged(timed(2, 60, checkpoint_ns="CASE WHEN step = 60 THEN 9e9 ELSE 0 END")) == ("CLEAR", [])


def test_the_small_saves_of_a_small_program_are_usual():
    assert judged(timed(2, 60, checkpoint_ns=every(2, "20e6"))) == ("CLEAR", [])


def test_evaluation_as_long_as_training_is_a_note_and_mostly_evaluation_a_warning():
    assert judged(timed(2, 100, evaluation_ns=every(20, "150e6"))) == ("CLEAR", [])
    _, (found,) = judged(timed(2, 100, evaluation_ns=every(20, "250e6")))
    assert (found.severity, found.subject) == ("note", "evaluation")
    _, (found,) = judged(timed(2, 100, evaluation_ns=every(4, "150e6")))
    assert (found.severity, found.subject) == ("warning", "evaluation")


def test_too_few_steps_are_no_evidence():
    assert judged(timed(2, 15, checkpoint_ns="900e6")) == ("INSUFFICIENT_EVIDENCE", [])
