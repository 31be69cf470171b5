"""RESTARTED from rows of attempts."""

from __future__ import annotations

from kit.rows import Rows
from tdbg.aggregator.detectors import restarted


def attempts(*steps: int, ranks: int = 2) -> Rows:
    rows = Rows()
    for attempt, last in enumerate(steps):
        for rank in range(ranks):
            for step in range(1, last + 1):
                rows.add("step", rank=rank, attempt=attempt, step=step)
    return rows


def test_one_attempt_is_clear_and_without_its_ranks_it_is_not() -> None:
    assert attempts(4).judge(restarted)[0] == {"RESTARTED": "CLEAR"}
    assert attempts(4).judge(restarted, missing_ranks=(1,))[0] == {"RESTARTED": "INSUFFICIENT_EVIDENCE"}


def test_names_the_attempt_and_how_the_one_before_ended() -> None:
    rows = attempts(6, 3)
    rows.add("exit", rank=1, exit_code=1, ended_ns=5, step=6)
    rows.add("exit", rank=0, exit_code=-15, ended_ns=6, step=6, stopped_by_launcher=True)
    rows.add("checkpoint", rank=0, attempt=1, event="load", path="/a/s.pt")
    outcomes, ((_, f),) = rows.judge(restarted)
    assert outcomes == {"RESTARTED": "INCIDENT"}
    assert (f.ranks, f.attempt, f.first_step, f.severity) == ((0, 1), 1, 1, "note")
    assert (
        "came to step 6; rank 1 had failed in it with exit code 1, rank 0 fell afterwards; it loaded a checkpoint"
        in f.summary
    )
    assert [(e.rank, e.value) for e in f.evidence] == [
        (1, "exit code 1"), (0, "SIGTERM, stopped by the launcher"), (0, "/a/s.pt")]  # fmt: skip


def test_each_further_attempt_is_a_note_even_when_it_never_took_a_step() -> None:
    rows = attempts(6, 3).add("exit", rank=0, attempt=2, exit_code=1, ended_ns=9)
    found = [f for _, f in rows.judge(restarted)[1]]
    assert [(f.attempt, f.ranks) for f in found] == [(1, (0, 1)), (2, (0,))]
    assert "no checkpoint was seen to be loaded" in found[0].summary


def test_who_failed_first_is_told_apart_from_those_that_lost_their_peer() -> None:
    rows = attempts(6, 3, ranks=3)
    rows.add("failure", rank=0, kind="exception", type="RuntimeError", message="Connection closed by peer", time_ns=5)
    rows.add("failure", rank=1, kind="exception", type="ValueError", message="no", time_ns=9)
    for rank in (0, 1):
        rows.add("exit", rank=rank, exit_code=1, ended_ns=20 + rank, step=6)
    ((_, f),) = rows.judge(restarted)[1]
    assert "rank 1 had failed in it with ValueError, rank 0 fell afterwards" in f.summary
    assert [(e.rank, e.value) for e in f.evidence] == [(1, "ValueError"), (0, "RuntimeError")]


def test_communication_errors_alone_do_not_say_who_was_first() -> None:
    rows = attempts(6, 3)
    for rank in (0, 1):
        rows.add("failure", rank=rank, kind="exception", type="RuntimeError", message="Connection reset by peer")
    ((_, f),) = rows.judge(restarted)[1]
    assert "ranks 0, 1 had ended in it, and which of them first is not known" in f.summary


def test_an_attempt_that_was_stopped_from_outside_has_nobody_who_failed() -> None:
    rows = attempts(6, 3)
    for rank in (0, 1):
        rows.add("exit", rank=rank, exit_code=-15, ended_ns=5, step=6, stopped_by_launcher=True)
    ((_, f),) = rows.judge(restarted)[1]
    assert "fail" not in f.summary.replace("no checkpoint", "")
