"""HANG: who did not arrive and who waits, from the stacks of a stall or from how the ranks ended."""

from __future__ import annotations

from typing import Any

import pytest

from kit.plants import REDUCING, stalled
from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import hang
from tdbg.aggregator.waits import place_of

RANKS = 4
TORCH = "/v/site-packages/torch"
WRAPPER = f"{TORCH}/distributed/c10d_logger.py:8 wrapper\n{TORCH}/distributed/distributed_c10d.py:9"
BARRIER = f"train.py:17 save\n{WRAPPER} barrier"
ALL_REDUCE = f"train.py:44 main\n{WRAPPER} all_reduce"
FILE = "train.py:60 <module>\ntrain.py:20 wait_for"
LOADER = (
    f"train.py:25 main\n{TORCH}/utils/data/dataloader.py:7 __next__\n{TORCH}/utils/data/dataloader.py:9 _try_get_data\n"
    "/usr/lib/python3.11/multiprocessing/queues.py:113 get\n/usr/lib/python3.11/selectors.py:415 select"
)
TIMEOUT = {"type": "RuntimeError", "message": "[gloo] Timed out waiting 15000ms for recv operation to complete"}
CLOSED = {"type": "RuntimeError", "message": "[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1"}


def training(ranks: int = RANKS, steps: int = 8, attempt: int = 0) -> Rows:
    rows = Rows()
    for rank in range(ranks):
        for step in range(1, steps + 1):
            rows.add("step", rank=rank, step=step, attempt=attempt, step_ns=10**8)
    return rows


def judge(rows: Rows, status: str = "running", ranks: int = RANKS, **facts: Any) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(hang, world_size=ranks, status=status, **facts)
    return outcomes["HANG"], [f for _, f in found]


def test_the_rank_that_did_not_arrive_is_named_with_its_place_while_the_job_hangs() -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, FILE if rank == 1 else REDUCING, step=8)
    _, (found,) = judge(rows)
    assert (found.ranks, found.first_step, found.last_good_step) == ((1,), 9, 8)
    assert (found.severity, found.evidence_state, found.subject) == ("critical", "OBSERVED", "train.py:20 wait_for")
    assert "no progress for 31 s; rank 1 did not arrive: train.py:20 wait_for" in found.summary
    assert "ranks 0, 2, 3 wait in backward" in found.summary


def test_a_hanging_job_that_is_killed_by_hand_still_says_who_did_not_arrive() -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, FILE if rank == 1 else REDUCING, step=8)
        rows.add("exit", rank=rank, exit_code=-15, stopped_by_launcher=True, ended_ns=10**15, step=8)
    _, (found,) = judge(rows, "killed")
    assert (found.ranks, found.severity) == ((1,), "critical")


def test_a_loader_whose_workers_give_nothing_is_said_to_be_waited_for() -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, LOADER if rank == 3 else REDUCING, step=8)
    _, (found,) = judge(rows)
    assert found.ranks == (3,)
    assert "its data loader's workers (train.py:25 main)" in found.summary


@pytest.mark.parametrize("stacks", [(FILE, FILE.replace(":20", ":21"), FILE), (FILE,)])
def test_a_loop_that_polls_is_stuck_whichever_of_its_lines_is_caught(stacks: tuple[str, ...]) -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, *(stacks if rank == 1 else (REDUCING,)), step=8, busy_ns=5 * 10**7)
    _, (found,) = judge(rows)
    assert found.ranks == (1,)


@pytest.mark.parametrize("work", [{"busy_ns": 2 * 10**9}, {"below_ns": 2 * 10**9}, {"io_bytes": 10**9}])
def test_ranks_that_wait_for_one_that_works_are_not_hung(work: dict[str, int]) -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, FILE if rank == 0 else BARRIER, step=8, **(work if rank == 0 else {}))
    outcome, found = judge(rows)
    assert (outcome, found) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_backward_that_computes_is_work_and_one_that_idles_is_a_wait() -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, REDUCING, step=8, busy_ns=4 * 10**9 if rank == 0 else 0)
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_rank_in_a_debugger_keeps_the_others_waiting_on_purpose() -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, f"{FILE}\n/usr/lib/python3.11/pdb.py:5 cmdloop" if rank == 0 else REDUCING, step=8)
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_ranks_that_spin_for_their_device_wait() -> None:
    rows = training()
    for rank in range(RANKS):
        spins = {"device": True, "busy_ns": 4 * 10**9}
        stalled(rows, rank, FILE if rank == 2 else "train.py:33 main", step=8, **(spins if rank != 2 else {}))
    _, (found,) = judge(rows)
    assert (found.ranks, found.severity) == ((2,), "critical")


def test_the_odd_one_of_a_majority_is_named_where_all_wait() -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, BARRIER if rank == 0 else REDUCING, step=8)
    _, (found,) = judge(rows)
    assert (found.ranks, found.severity) == ((0,), "critical")
    assert "barrier (train.py:17 save)" in found.summary


def test_two_ranks_that_wait_in_different_calls_are_both_named() -> None:
    rows = training(2)
    stalled(rows, 0, BARRIER, step=8)
    stalled(rows, 1, ALL_REDUCE, step=8)
    _, (found,) = judge(rows, ranks=2)
    assert found.ranks == (0, 1)
    assert any("majority" in c for c in found.cannot_conclude)


def test_the_rank_that_is_a_step_behind_is_named_where_all_wait_in_one_line() -> None:
    rows = training()
    rows.connection.execute("DELETE FROM step WHERE rank = 1 AND step = 8")
    for rank in range(RANKS):
        stalled(rows, rank, REDUCING, step=7 if rank == 1 else 8)
    _, (found,) = judge(rows)
    assert found.ranks == (1,)


def test_all_in_one_place_are_all_named_and_the_transport_is_not_blamed_outright() -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, ALL_REDUCE, step=8)
    _, (found,) = judge(rows)
    assert (found.ranks, found.first_step) == ((0, 1, 2, 3), 9)
    assert any("transport" in c for c in found.cannot_conclude)


def test_a_rank_that_left_in_order_is_named_while_the_others_wait_for_it() -> None:
    rows = training()
    for rank in (0, 1, 2):
        stalled(rows, rank, REDUCING, step=8)
    rows.add("exit", rank=3, exit_code=0, ended_ns=5, step=8).add("event", rank=3, kind="end")
    _, (found,) = judge(rows)
    assert found.ranks == (3,)
    assert "its program had ended in order" in found.summary


def test_without_a_stack_it_is_inferred_at_most() -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, *(() if rank == 2 else (REDUCING,)), step=8)
    _, (found,) = judge(rows)
    assert (found.ranks, found.severity, found.evidence_state) == ((2,), "warning", "INFERRED")


def test_a_rank_that_is_stopped_by_a_signal_gives_no_stack_and_is_known_all_the_same() -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, *(() if rank == 2 else (REDUCING,)), step=8, state="T" if rank == 2 else "S")
    _, (found,) = judge(rows)
    assert (found.ranks, found.severity) == ((2,), "critical")


def test_ranks_of_a_node_that_saw_no_stall_may_be_the_ones_at_fault() -> None:
    rows = training(8)
    for rank in range(RANKS):
        stalled(rows, rank, REDUCING, step=8)
    _, (found,) = judge(rows, ranks=8)
    assert (found.severity, found.evidence_state) == ("warning", "INFERRED")


def test_nodes_are_judged_together() -> None:
    rows = training(8)
    for rank in range(8):
        stalled(rows, rank, FILE if rank == 6 else REDUCING, step=8, node=rank // 4)
    _, (found,) = judge(rows, ranks=8)
    assert found.ranks == (6,)


def test_a_single_process_that_stands_still_is_named() -> None:
    rows = training(1)
    stalled(rows, 0, FILE, step=8)
    _, (found,) = judge(rows, ranks=1)
    assert (found.ranks, found.severity) == ((0,), "critical")


# ---------------------------------------------------------------- what is none


def test_a_stall_that_training_got_over_is_no_hang() -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, FILE if rank == 0 else BARRIER, step=8)
    rows.add("step", rank=2, step=9)
    assert judge(rows) == ("CLEAR", [])


def test_a_stall_that_ended_without_a_step_is_no_hang() -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, FILE, step=8)
    rows.add("stall", rank=0, stall=1, look=1, event="resumed")
    assert judge(rows) == ("CLEAR", [])


def test_a_long_wait_at_the_end_of_a_program_that_ends_well_is_no_hang() -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, FILE if rank == 0 else BARRIER, step=8)
        rows.add("exit", rank=rank, exit_code=0, ended_ns=10**15, step=8)
    assert judge(rows, "finished") == ("CLEAR", [])


def test_a_job_killed_in_mid_training_has_stacks_and_no_hang() -> None:
    rows = training()
    for rank in range(RANKS):
        stalled(rows, rank, FILE if rank == 2 else REDUCING, step=8, event="stopping", samples=1)
        rows.add("exit", rank=rank, exit_code=-15, stopped_by_launcher=True, ended_ns=10**15, step=8)
    outcome, found = judge(rows, "killed")
    assert (outcome, found) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_rank_that_failed_of_itself_is_another_matter() -> None:
    rows = training()
    rows.add("failure", rank=1, kind="exception", type="ValueError", message="bad timeout value", step=9)
    for rank in (0, 2, 3):
        stalled(rows, rank, REDUCING, step=8, event="stopping")
        rows.add("failure", rank=rank, kind="exception", frames=REDUCING, step=9, **TIMEOUT)
    assert judge(rows, "failed")[1] == []


def test_a_crash_before_the_stall_was_noticed_is_another_matter() -> None:
    rows = training()
    rows.add("exit", rank=1, exit_code=-11, ended_ns=1, step=8)
    for rank in (0, 2, 3):
        stalled(rows, rank, REDUCING, step=8)
    assert judge(rows)[1] == []


# ---------------------------------------------------------------- ended by torch's own timeout


def late(rows: Rows, rank: int, frames: str, step: int = 9, **failure: str) -> None:
    rows.add("failure", rank=rank, kind="exception", frames=frames, step=step, **(failure or TIMEOUT))
    rows.add("exit", rank=rank, exit_code=1, ended_ns=10**15 + rank, step=step - 1)


def test_a_timeout_names_the_rank_whose_last_stack_was_elsewhere() -> None:
    rows = training()
    late(rows, 0, REDUCING)
    late(rows, 3, REDUCING, **CLOSED)
    late(rows, 2, REDUCING)
    stalled(rows, 1, FILE, step=8, event="stopping", stall=0, look=0, samples=1)
    rows.add("exit", rank=1, exit_code=-15, stopped_by_launcher=True, ended_ns=2 * 10**15, step=8)
    _, (found,) = judge(rows, "failed")
    assert (found.ranks, found.first_step, found.severity) == ((1,), 9, "critical")
    assert "torch's own timeout ended the wait; rank 1 did not arrive: train.py:20 wait_for" in found.summary


def test_a_timeout_in_different_calls_names_the_odd_one() -> None:
    rows = training()
    late(rows, 0, BARRIER)
    for rank in (1, 2, 3):
        late(rows, rank, REDUCING, **(CLOSED if rank > 1 else {}))
    _, (found,) = judge(rows, "failed")
    assert found.ranks == (0,)


def test_a_peer_that_is_gone_is_no_timeout() -> None:
    rows = training()
    for rank in range(RANKS):
        late(rows, rank, REDUCING, **CLOSED)
    assert judge(rows, "failed")[1] == []


def test_a_rank_without_a_last_stack_is_named_with_reserve() -> None:
    rows = training()
    for rank in (0, 1, 2):
        late(rows, rank, REDUCING)
    rows.add("exit", rank=3, exit_code=-15, stopped_by_launcher=True, ended_ns=2 * 10**15, step=8)
    _, (found,) = judge(rows, "failed")
    assert (found.ranks, found.severity, found.evidence_state) == ((3,), "warning", "INFERRED")


# ---------------------------------------------------------------- stacks


@pytest.mark.parametrize(
    ("frames", "kind", "where", "what"),
    [
        (REDUCING, "backward", "train.py:30 main", "backward"),
        (BARRIER, "communication", "train.py:17 save", "barrier"),
        (LOADER, "data", "train.py:25 main", "its data loader's workers"),
        (FILE, "own", "train.py:20 wait_for", ""),
        (f"a.py:1 f\n{TORCH}/nn/parallel/distributed.py:5 forward\n{TORCH}/nn/modules/module.py:3 _call_impl\n"
         f"{TORCH}/nn/modules/linear.py:9 forward", "own", "a.py:1 f", "forward"),
        (f"a.py:1 f\n{TORCH}/nn/modules/module.py:3 _call_impl\n{TORCH}/nn/parallel/distributed.py:5 _sync_buffers",
         "communication", "a.py:1 f", "_sync_buffers"),
        (f"a.py:1 f\n{TORCH}/cuda/__init__.py:5 synchronize", "device", "a.py:1 f", "synchronize"),
        (f"a.py:1 f\n{TORCH}/serialization.py:5 save", "own", "a.py:1 f", "save"),
    ],
)  # fmt: skip
def test_what_a_stack_says(frames: str, kind: str, where: str, what: str) -> None:
    place = place_of(frames)
    assert place is not None
    assert (place.kind, place.where, place.what) == (kind, where, what)


def test_no_frames_say_nothing() -> None:
    assert place_of("") is None
    assert place_of("garbage") is None
