"""SLOWDOWN from rows: which step, phase and ranks; what makes steps longer by right."""

from __future__ import annotations

import pytest

from kit.times import timed
from tdbg.aggregator.detectors import slowdown

LATE = "step >= 50"
SLOW = {"other_ns": f"CASE WHEN {LATE} THEN 21e6 ELSE 1e6 END"}


def judged(rows, ranks=4):
    outcomes, found = rows.judge(slowdown, world_size=ranks)
    return outcomes["SLOWDOWN"], [f for _, f in found]


def test_the_first_slow_step_the_phase_and_all_ranks():
    outcome, (found,) = judged(timed(4, 100, **SLOW))
    assert (outcome, found.ranks, found.first_step, found.last_good_step) == ("INCIDENT", (0, 1, 2, 3), 50, 49)
    assert (found.subject, found.severity, found.evidence_state) == ("other", "warning", "INFERRED")


def test_one_rank_that_all_wait_for_is_named_alone():
    rows = timed(4, 100, data_ns=f"CASE WHEN {LATE} AND rank = 3 THEN 20e6 ELSE 0 END",
                 backward_ns=f"CASE WHEN {LATE} AND rank <> 3 THEN 25e6 ELSE 5e6 END",
                 reduce_wait_ns=f"CASE WHEN {LATE} AND rank <> 3 THEN 20e6 ELSE 0 END")  # fmt: skip
    _, (found,) = judged(rows)
    assert (found.ranks, found.subject, found.first_step) == ((3,), "data", 50)


def test_when_only_waiting_rose_it_is_communication():
    rows = timed(4, 100, backward_ns=f"CASE WHEN {LATE} THEN 25e6 ELSE 5e6 END",
                 reduce_wait_ns=f"CASE WHEN {LATE} THEN 20e6 ELSE 0 END")  # fmt: skip
    _, (found,) = judged(rows)
    assert (found.ranks, found.subject) == ((0, 1, 2, 3), "communication")


@pytest.mark.parametrize("phase", ["checkpoint_ns", "evaluation_ns"])
def test_pauses_are_no_slowdown(phase):
    assert judged(timed(4, 100, **{phase: f"CASE WHEN {LATE} THEN 50e6 ELSE 0 END"})) == ("CLEAR", [])


@pytest.mark.parametrize(
    "work",
    [
        f"UPDATE batch SET samples = 16 WHERE {LATE}",
        f"UPDATE batch SET loader = 1 WHERE {LATE}",
        f"UPDATE step SET backwards = 2 WHERE {LATE}",
        f"UPDATE step SET optimizers = 2 WHERE {LATE}",
        f"""INSERT INTO labels BY NAME SELECT rank, attempt, step, CASE WHEN {LATE} THEN 512 ELSE 256 END AS elements
        FROM step""",
        f"""INSERT INTO grad BY NAME SELECT rank, attempt, step, 'local' AS stage,
        CASE WHEN {LATE} THEN [1.0, 1.0, 1.0] ELSE [-1.0, 1.0, 1.0] END AS l2 FROM step""",
        "INSERT INTO tensor BY NAME SELECT rank, attempt, step, 2 AS generation FROM step WHERE step = 49",
    ],
    ids=["larger batches", "another loader", "accumulation", "an optimizer more", "longer texts", "layers unfrozen",
         "a model built anew"],
)  # fmt: skip
def test_steps_that_do_more_are_no_slowdown(work):
    rows = timed(4, 100, **SLOW)
    rows.connection.execute(work)
    assert judged(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_machine_that_got_busier_is_no_evidence():
    rows = timed(4, 100, other_ns=f"CASE WHEN {LATE} THEN 11e6 ELSE 1e6 END",
                 cpu_wait_ns=f"CASE WHEN {LATE} THEN 10e6 ELSE 0 END")  # fmt: skip
    assert judged(rows) == ("CLEAR", [])
    rows = timed(4, 100, other_ns=f"CASE WHEN {LATE} THEN 11e6 ELSE 1e6 END",
                 cpu_wait_ns=f"CASE WHEN {LATE} THEN 5e6 ELSE 0 END")  # fmt: skip
    assert judged(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_it_is_seen_through_the_noise_of_a_busy_machine():
    noise = "hash(step * 7 + rank) % 40 * 1e6"
    rows = timed(4, 100, other_ns=f"{noise} + CASE WHEN {LATE} THEN 31e6 ELSE 1e6 END", cpu_wait_ns=noise)
    _, (found,) = judged(rows)
    assert (found.first_step, found.subject, found.ranks) == (50, "other", (0, 1, 2, 3))


def test_the_agents_own_time_is_no_slowdown():
    rows = timed(4, 100, step_ns=f"10e6 + CASE WHEN {LATE} THEN 20e6 ELSE 0 END")
    rows.connection.execute(f"UPDATE step SET agent_ns = 20000000 WHERE {LATE}")
    assert judged(rows) == ("CLEAR", [])


def test_a_few_slow_steps_and_short_runs_say_nothing():
    assert judged(timed(4, 100, other_ns="CASE WHEN step BETWEEN 50 AND 60 THEN 41e6 ELSE 1e6 END")) == ("CLEAR", [])
    assert judged(timed(4, 30, **SLOW)) == ("INSUFFICIENT_EVIDENCE", [])
