"""DATA_STARVED from rows: which ranks wait for data most of the time, and which waits are none of that."""

from __future__ import annotations

from kit.times import timed
from tdbg.aggregator.detectors import data_starved


def judged(rows, ranks=2):
    outcomes, found = rows.judge(data_starved, world_size=ranks)
    return outcomes["DATA_STARVED"], [f for _, f in found]


def test_waiting_for_data_most_of_the_time_is_found_with_the_workers():
    outcome, (found,) = judged(timed(2, 60, data_ns="30e6"))
    assert (outcome, found.ranks, found.severity, found.evidence_state) == ("INCIDENT", (0, 1), "warning", "OBSERVED")
    assert "75% of the time" in found.summary
    assert "2 loader workers" in found.summary


def test_workers_that_deliver_in_turns_are_judged_by_sums():
    assert judged(timed(2, 60, data_ns="CASE WHEN step % 4 = 0 THEN 90e6 ELSE 0 END"))[0] == "INCIDENT"


def test_one_rank_alone_is_named():
    rows = timed(4, 60, data_ns="CASE WHEN rank = 1 THEN 30e6 ELSE 0 END", step_ns="40e6")
    assert [f.ranks for f in judged(rows, 4)[1]] == [(1,)]


def test_small_loaders_and_short_waits_are_none():
    assert judged(timed(2, 60, data_ns="8e6", forward_ns="1e6", backward_ns="1e6")) == ("CLEAR", [])
    assert judged(timed(2, 60, data_ns="12e6", forward_ns="20e6")) == ("CLEAR", [])


def test_the_start_of_workers_and_single_slow_files_are_none():
    rows = timed(2, 60, data_ns="CASE WHEN step % 10 = 1 THEN 2000e6 ELSE 1e6 END")
    rows.connection.execute("UPDATE batch SET iterator = (step - 1) // 10, index = (step - 1) % 10")
    rows.connection.execute("INSERT INTO loader SELECT loader.* REPLACE (i AS iterator) FROM loader, range(1, 6) r(i)")
    assert judged(rows) == ("CLEAR", [])
    assert judged(timed(2, 60, data_ns="CASE WHEN step = 30 THEN 9000e6 ELSE 1e6 END")) == ("CLEAR", [])


def test_a_busy_machine_is_no_evidence():
    assert judged(timed(2, 60, data_ns="30e6", cpu_wait_ns="24e6")) == ("INSUFFICIENT_EVIDENCE", [])


def test_what_rank_0_reads_for_all_is_not_the_others_wait():
    rows = timed(2, 60, data_ns="30e6")
    rows.connection.execute("UPDATE loader SET dispatched = 2")
    assert [f.ranks for f in judged(rows)[1]] == [(0,)]


def test_a_wait_that_a_device_works_through_is_none():
    rows = timed(2, 60, data_ns="30e6")
    rows.connection.execute("""INSERT INTO phase_device BY NAME SELECT rank, attempt, step, 1000000 AS gap_ns, 30000000
        AS forward_ns, 9000000 AS backward_ns, 0 AS reduce_wait_ns, 0 AS optimizer_ns FROM phase""")
    assert judged(rows) == ("CLEAR", [])


def test_too_few_steps_are_no_evidence():
    assert judged(timed(2, 20, data_ns="30e6")) == ("INSUFFICIENT_EVIDENCE", [])
