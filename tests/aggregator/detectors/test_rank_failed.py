"""RANK_FAILED from rows of exits and exceptions."""

from __future__ import annotations

from typing import Any

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import rank_failed

SECOND = 10**9


def ended(rows: Rows, rank: int, code: int, at: float, step: int = 10, stopped: bool = False, **more: Any) -> None:
    """A rank that completed `step` steps and whose process the launcher saw end at this second."""
    rows.add("step", rank=rank, step=step)
    rows.add(
        "exit", rank=rank, exit_code=code, ended_ns=int(at * SECOND), step=step, stopped_by_launcher=stopped, **more
    )


def raised(rows: Rows, rank: int, kind: str, message: str, at: float, step: int = 11, **more: Any) -> None:
    rows.add("failure", rank=rank, kind=more.pop("how", "exception"), type=kind, message=message, step=step,
             time_ns=int(at * SECOND), frames="train.py:30 main", during="forward", **more)  # fmt: skip


def judge(rows: Rows, world_size: int = 3, status: str = "failed", **facts: Any) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(rank_failed, world_size=world_size, status=status, **facts)
    return outcomes["RANK_FAILED"], [f for _, f in found]


def test_all_ranks_ending_with_0_is_clear() -> None:
    rows = Rows()
    for rank in range(3):
        ended(rows, rank, 0, 5)
    assert judge(rows, status="finished") == ("CLEAR", [])


def test_a_run_that_goes_on_is_not_called_clear() -> None:
    rows = Rows().add("step", rank=0, step=4)
    assert judge(rows, 1, "running") == ("INSUFFICIENT_EVIDENCE", [])


def test_names_the_rank_that_raised_and_not_those_whose_connection_it_closed() -> None:
    rows = Rows()
    raised(rows, 1, "IndexError", "index out of range in self", 5.0)
    ended(rows, 1, 1, 5.9)
    for rank in (0, 2):  # seen to end before the culprit
        raised(rows, rank, "RuntimeError", "[tcp/pair.cc:1] Connection closed by peer [10.0.0.1]:7", 5.1)
        ended(rows, rank, 1, 5.5)
    _, (f,) = judge(rows)
    assert (f.ranks, f.first_step, f.subject, f.severity) == ((1,), 11, "IndexError", "critical")
    assert f.last_good_step == 10
    assert "ranks 0, 2 fell afterwards" in f.summary
    assert any(e.metric == "innermost frames" and "train.py:30" in e.value for e in f.evidence)


def test_a_signal_is_the_root_even_when_the_victims_exits_were_seen_earlier() -> None:
    rows = Rows()
    for rank in (0, 1):
        raised(rows, rank, "DistBackendError", "NCCL error: remote process exited or there was a network error", 4.9)
        ended(rows, rank, 1, 4.9, step=29)
    ended(rows, 2, -9, 5.0, step=29)
    _, (f,) = judge(rows)
    assert (f.ranks, f.first_step, f.subject) == ((2,), 30, "SIGKILL")
    assert "who sent SIGKILL" in f.cannot_conclude


def test_a_kernel_oom_kill_is_named_as_evidence() -> None:
    rows = Rows()
    ended(rows, 0, -9, 5.0, oom_kills=1)
    ended(rows, 1, -15, 5.3, stopped=True)
    _, (f,) = judge(rows, 2)
    assert any("OOM kills" in e.metric and e.value == "1" for e in f.evidence)
    assert [c for c in f.cannot_conclude if "OOM kill" in c]
    assert not [c for c in f.cannot_conclude if "who sent" in c]


def test_the_ranks_that_torchrun_stopped_are_no_roots() -> None:
    rows = Rows()
    raised(rows, 0, "SystemExit", "", 5.2, how="exit")  # its handler of SIGTERM calls sys.exit
    ended(rows, 0, 1, 5.2, stopped=True)
    raised(rows, 1, "3", "", 5.0, how="exit")
    ended(rows, 1, 3, 5.0)
    _, (f,) = judge(rows, 2)
    assert (f.ranks, f.subject) == ((1,), "exit code 3")


def test_the_same_exception_in_the_same_step_on_all_ranks_names_all() -> None:
    rows = Rows()
    for rank in range(3):
        raised(rows, rank, "ValueError", "bad option", 5 + rank / 10, step=1)
        ended(rows, rank, 1, 6, step=0, stopped=rank > 0)
    _, (f,) = judge(rows)
    assert (f.ranks, f.first_step, f.last_good_step) == ((0, 1, 2), 1, None)


def test_stopping_the_launcher_is_no_failure_of_a_rank() -> None:
    rows = Rows()
    for rank in range(3):
        ended(rows, rank, -15, 5, stopped=True)
    assert judge(rows, status="killed") == ("NOT_APPLICABLE", [])


def test_ctrl_c_reaches_all_ranks_and_is_no_failure_of_one() -> None:
    rows = Rows()
    for rank in range(3):
        raised(rows, rank, "KeyboardInterrupt", "", 5)
        ended(rows, rank, 1, 5.1, stopped=rank == 2)
    assert judge(rows, status="killed") == ("NOT_APPLICABLE", [])


def test_a_single_rank_that_gets_sigterm_is_a_failure() -> None:
    rows = Rows()
    ended(rows, 1, -15, 5.0)
    for rank in (0, 2):
        ended(rows, rank, -15, 5.2, stopped=True)
    _, (f,) = judge(rows)
    assert (f.ranks, f.subject) == ((1,), "SIGTERM")


def test_an_exception_before_the_job_is_stopped_is_still_named() -> None:
    rows = Rows()
    raised(rows, 1, "ValueError", "no such file", 5.0)
    for rank in range(3):
        ended(rows, rank, 1 if rank == 1 else -15, 6, stopped=True)
    assert [f.ranks for f in judge(rows, status="killed")[1]] == [(1,)]


def test_communication_errors_alone_blame_nobody_for_sure() -> None:
    rows = Rows()
    for rank, at in ((0, 5.0), (1, 5.4)):
        raised(rows, rank, "RuntimeError", "Timed out waiting 15000ms for recv operation to complete", at)
        ended(rows, rank, 1, at)
    _, (f,) = judge(rows)
    assert (f.ranks, f.severity) == ((0, 1), "warning")
    assert any("which rank is to blame" in c for c in f.cannot_conclude)
    assert any("1 rank(s) whose end was not seen" in c for c in f.cannot_conclude)


def test_an_abort_comes_before_the_errors_of_those_that_it_left_alone_whatever_the_clocks_say() -> None:
    rows = Rows()
    for rank, at in ((0, 5.0), (2, 5.1)):
        raised(rows, rank, "RuntimeError", "gloo/transport/tcp/pair.cc: Connection closed by peer [127.0.0.1]:4", at)
        ended(rows, rank, 1, at + 1)
    ended(rows, 1, -6, 5.2)
    (f,) = judge(rows)[1]
    assert (f.ranks, f.severity, f.subject) == ((1,), "warning", "SIGABRT")
    assert "ranks 0, 2 fell afterwards" in f.summary


def test_peers_that_lose_their_connection_while_the_job_is_stopped_are_no_failures() -> None:
    rows = Rows()
    raised(rows, 0, "RuntimeError", "Connection reset by peer", 5.0)
    ended(rows, 0, 1, 5.0)
    ended(rows, 1, -15, 5.1, stopped=True)
    assert judge(rows, 2, "killed") == ("NOT_APPLICABLE", [])


def test_an_abort_after_an_orderly_end_is_a_warning() -> None:
    rows = Rows()
    for rank in range(2):
        rows.add("event", rank=rank, step=10, kind="end")
        ended(rows, rank, -6 if rank else 0, 5)
    _, (f,) = judge(rows, 2)
    assert (f.ranks, f.severity, f.subject) == ((1,), "warning", "SIGABRT")
    assert any("whether anything is wrong" in c for c in f.cannot_conclude)


def test_a_failed_attempt_that_was_restarted_is_reported_for_its_attempt() -> None:
    rows = Rows()
    raised(rows, 1, "IndexError", "x", 5.0)
    ended(rows, 1, 1, 5.0)
    ended(rows, 0, -15, 5.2, stopped=True)
    for rank in range(2):
        ended(rows, rank, 0, 9, step=20, attempt=1)
        rows.add("step", rank=rank, step=20, attempt=1)
    outcome, (f,) = judge(rows, 2, "finished")
    assert (outcome, f.ranks, f.attempt, f.severity) == ("INCIDENT", (1,), 0, "warning")


def test_an_exception_in_a_side_thread_did_not_end_the_rank() -> None:
    rows = Rows()
    raised(rows, 0, "OSError", "x", 3, how="thread_exception")
    ended(rows, 0, 0, 5)
    assert judge(rows, 1, "finished") == ("CLEAR", [])


def test_without_the_launchers_exit_rows_the_exception_suffices() -> None:
    rows = Rows().add("step", rank=0, step=10)
    raised(rows, 0, "KeyError", "'x'", 5)
    _, (f,) = judge(rows, 2)
    assert (f.ranks, f.first_step, f.subject) == ((0,), 11, "KeyError")
