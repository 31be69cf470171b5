"""STRAGGLER from rows: who, since when, in which phase; waits, pauses and pairs."""

from __future__ import annotations

from kit.times import timed
from tdbg.aggregator.detectors import straggler


def judged(rows, ranks=4):
    outcomes, found = rows.judge(straggler, world_size=ranks)
    return outcomes["STRAGGLER"], [f for _, f in found]


def test_the_slow_rank_is_named_and_not_those_that_wait_for_it():
    slow = "rank = 2 AND step >= 15"
    rows = timed(4, 60, data_ns=f"CASE WHEN {slow} THEN 4e6 ELSE 1e6 END",
                 reduce_wait_ns="CASE WHEN rank <> 2 AND step >= 15 THEN 3e6 ELSE 0 END",
                 backward_ns="CASE WHEN rank <> 2 AND step >= 15 THEN 8e6 ELSE 5e6 END")  # fmt: skip
    outcome, (found,) = judged(rows)
    assert outcome == "INCIDENT"
    assert (found.ranks, found.first_step, found.last_step, found.subject) == ((2,), 15, 60, "data")
    assert (found.severity, found.evidence_state) == ("warning", "INFERRED")


def test_checkpoints_and_evaluation_and_collectives_of_one_rank_are_none():
    for phase in ("checkpoint_ns", "evaluation_ns", "communication_ns"):
        assert judged(timed(4, 60, **{phase: "CASE WHEN rank = 1 THEN 50e6 ELSE 0 END"})) == ("CLEAR", [])


def test_what_rank_0_does_for_all_is_a_note():
    _, (found,) = judged(timed(4, 60, other_ns="CASE WHEN rank = 0 THEN 5e6 ELSE 1e6 END"))
    assert (found.ranks, found.severity, found.subject) == ((0,), "note", "other")
    _, (found,) = judged(timed(4, 60, other_ns="CASE WHEN rank = 1 THEN 5e6 ELSE 1e6 END"))
    assert (found.ranks, found.severity) == ((1,), "warning")


def test_a_pair_has_no_majority():
    outcome, (found,) = judged(timed(2, 60, forward_ns="CASE WHEN rank = 1 THEN 30e6 ELSE 3e6 END"), 2)
    assert (outcome, found.ranks, found.severity) == ("INCIDENT", (0, 1), "warning")
    assert "which of the two" in found.cannot_conclude[0]
    _, (found,) = judged(timed(2, 60, forward_ns="CASE WHEN rank = 1 THEN 5e6 ELSE 3e6 END"), 2)
    assert found.severity == "note"
    assert judged(timed(2, 60), 2) == ("INSUFFICIENT_EVIDENCE", [])


def test_too_few_steps_are_no_evidence():
    assert judged(timed(4, 20, forward_ns="CASE WHEN rank = 1 THEN 30e6 ELSE 3e6 END")) == ("INSUFFICIENT_EVIDENCE", [])


def test_what_may_be_waiting_for_a_core_is_no_evidence():
    slow = {"forward_ns": "CASE WHEN rank = 1 THEN 9e6 ELSE 3e6 END"}
    assert judged(timed(4, 60, **slow))[0] == "INCIDENT"
    assert judged(timed(4, 60, cpu_wait_ns="CASE WHEN rank = 1 THEN 6e6 ELSE 0 END", **slow)) == (
        "INSUFFICIENT_EVIDENCE", [])  # fmt: skip


def test_where_that_was_measured_it_counts_in_its_own_phase_only():
    rows = timed(4, 60, forward_ns="CASE WHEN rank = 1 THEN 9e6 ELSE 3e6 END",
                 backward_ns="CASE WHEN rank = 1 THEN 11e6 ELSE 5e6 END",
                 reduce_wait_ns="CASE WHEN rank = 1 THEN 6e6 ELSE 0 END",
                 cpu_wait_ns="CASE WHEN rank = 1 THEN 6e6 ELSE 0 END")  # fmt: skip
    assert judged(rows) == ("INSUFFICIENT_EVIDENCE", [])
    rows.connection.execute("""INSERT INTO cpu_wait BY NAME SELECT rank, attempt, step, 0 AS data_ns, 0 AS forward_ns,
        0 AS backward_ns, cpu_wait_ns AS reduce_wait_ns, 0 AS optimizer_ns, 0 AS other_ns FROM phase""")
    assert [(f.ranks, f.subject) for f in judged(rows)[1]] == [((1,), "forward")]


def test_of_a_sharded_model_forward_and_backward_hold_waits_and_say_nothing():
    rows = timed(4, 60, forward_ns="CASE WHEN rank = 1 THEN 30e6 ELSE 3e6 END")
    for rank in range(4):
        rows.add("tensor", rank=rank, kind="param", name="w", shape="4", sharing="sharded")
    assert judged(rows) == ("CLEAR", [])


def test_ranks_that_hold_other_tensors_are_no_peers():
    rows = timed(4, 60, forward_ns="CASE WHEN rank >= 2 THEN 6e6 ELSE 3e6 END")
    for rank in range(4):
        rows.add("tensor", rank=rank, kind="param", name=f"stage{rank // 2}.w", shape="4")
    _, (found,) = judged(rows)
    assert (found.ranks, found.severity, found.subject) == ((2, 3), "note", "stage")


def test_on_a_device_its_own_times_count_and_not_the_hosts():
    rows = timed(
        6, 60, other_ns="CASE WHEN rank = 1 THEN 30e6 ELSE 1e6 END", data_ns="CASE WHEN rank = 2 THEN 9e6 ELSE 0 END"
    )
    assert {f.ranks for f in judged(rows, 6)[1]} == {(1,), (2,)}
    rows.connection.execute("""INSERT INTO phase_device BY NAME SELECT rank, attempt, step, 2000000 AS gap_ns,
        3000000 AS forward_ns, CASE WHEN rank = 3 THEN 12000000 ELSE 15500000 END AS backward_ns,
        CASE WHEN rank = 3 THEN 0 ELSE 10500000 END AS reduce_wait_ns, 1000000 AS optimizer_ns FROM phase""")
    assert [(f.ranks, f.subject) for f in judged(rows, 6)[1]] == [((3,), "backward")]


def test_runs_without_the_newer_columns_are_judged_by_what_they_have():
    rows = timed(4, 60, forward_ns="CASE WHEN rank = 1 THEN 9e6 ELSE 3e6 END")
    rows.connection.execute("""UPDATE phase SET cpu_ns = NULL, cpu_wait_ns = NULL, communication_ns = NULL,
        checkpoint_ns = NULL, evaluation_ns = NULL""")
    assert [f.ranks for f in judged(rows)[1]] == [(1,)]
