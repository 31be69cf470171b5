"""HANG: which collective was not issued by whom, and a rank that runs while the others wait for it."""

from __future__ import annotations

from typing import Any

import pytest

from kit.plants import REDUCING, stalled
from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import hang

RANKS = 4
TORCH = "/v/site-packages/torch"
WRAPPER = f"{TORCH}/distributed/c10d_logger.py:8 wrapper\n{TORCH}/distributed/distributed_c10d.py:9"
BARRIER = f"train.py:17 save\n{WRAPPER} barrier"
ALL_REDUCE = f"train.py:44 main\n{WRAPPER} all_reduce"
FILE = "train.py:60 <module>\ntrain.py:20 wait_for"
TIMEOUT = {"type": "RuntimeError", "message": "[gloo] Timed out waiting 15000ms for recv operation to complete"}


def training(ranks: int = RANKS) -> Rows:
    rows = Rows()
    for rank in range(ranks):
        for step in range(1, 9):
            rows.add("step", rank=rank, step=step, step_ns=10**8)
    return rows


def judge(rows: Rows, status: str = "running", ranks: int = RANKS) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(hang, world_size=ranks, status=status)
    return outcomes["HANG"], [f for _, f in found]


def late(rows: Rows, rank: int, frames: str) -> None:
    rows.add("failure", rank=rank, kind="exception", frames=frames, step=9, **TIMEOUT)
    rows.add("exit", rank=rank, exit_code=1, ended_ns=10**15 + rank, step=8)


# ---------------------------------------------------------------- the order of collectives


def issued(rows: Rows, last: dict[int, int], group: str = "0", source: str = "call", **more: Any) -> None:
    """The last three collectives of each rank of the group up to a position."""
    row = {"ranks": sorted(last), "op": "all_reduce", "signature": "float32[1] SUM", "site": "train.py:44 main"} | more
    for rank, top in last.items():
        for position in range(top - 2, top + 1):
            rows.add("collective", rank=rank, step=9, group=group, source=source, position=position, **row)


def all_in(*stacks: str, told: bool = True, **more: Any) -> Rows:
    rows = training(len(stacks))
    for rank, stack in enumerate(stacks):
        stalled(rows, rank, stack, step=8, told=told, **more)
    return rows


def test_what_the_others_wait_in_and_who_has_not_issued_it_is_said() -> None:
    rows = all_in(ALL_REDUCE, FILE, ALL_REDUCE, ALL_REDUCE)
    issued(rows, {0: 30, 1: 29, 2: 30, 3: 30})
    _, (found,) = judge(rows)
    assert (found.ranks, found.severity, found.evidence_state) == ((1,), "critical", "OBSERVED")
    assert (
        "ranks 0, 2, 3 have issued all_reduce 30 of group 0 (float32[1] SUM, train.py:44 main), rank 1 has not"
        in found.summary
    )
    assert (found.evidence[0].rank, found.evidence[0].metric) == (1, "has not issued")


def test_positions_name_the_rank_where_all_stacks_look_alike() -> None:
    rows = all_in(*[ALL_REDUCE] * 4)
    issued(rows, {0: 30, 1: 30, 2: 29, 3: 30})
    _, (found,) = judge(rows)
    assert (found.ranks, found.severity) == ((2,), "critical")


@pytest.mark.parametrize("told", [True, False])
def test_a_rank_that_is_not_known_to_the_end_is_never_said_to_be_behind(told: bool) -> None:
    rows = all_in(*[ALL_REDUCE] * 4, told=told)
    issued(rows, {0: 30, 1: 30, 2: 29 if not told else 30, 3: 30})
    _, (found,) = judge(rows)
    assert found.ranks == (0, 1, 2, 3)
    assert "not" not in found.summary.replace("no progress", "")


def test_a_rank_whose_probe_failed_on_the_way_is_not_behind() -> None:
    rows = all_in(*[ALL_REDUCE] * 4)
    issued(rows, {0: 30, 1: 30, 2: 12, 3: 30})
    rows.add("probe", rank=2, step=4, name="collectives", state="disabled")
    _, (found,) = judge(rows)
    assert found.ranks == (0, 1, 2, 3)
    assert "issued" not in found.summary


def test_calls_that_were_only_counted_are_positions_too() -> None:
    rows = all_in(*[ALL_REDUCE] * 4)
    issued(rows, dict.fromkeys(range(4), 8))
    for rank in range(4):
        rows.add("collective_step", rank=rank, step=8, group="0", ranks=[0, 1, 2, 3], first=9, count=5 - (rank == 3))
    _, (found,) = judge(rows)
    assert found.ranks == (3,)
    assert "collective 13 of group 0, rank 3 has not" in found.summary


def test_a_skipped_collective_names_the_rank_and_both_groups() -> None:
    rows = all_in(ALL_REDUCE, REDUCING, ALL_REDUCE, ALL_REDUCE)
    issued(rows, {0: 30, 1: 29, 2: 30, 3: 30}, group="1")
    issued(rows, {0: 90, 1: 91, 2: 90, 3: 90}, source="recorder", site="", signature="")
    _, (found,) = judge(rows)
    assert (found.ranks, found.severity) == ((1,), "critical")
    assert "rank 1 has not; rank 1 has issued all_reduce 91 of group 0, ranks 0, 2, 3 have not" in found.summary


def test_stacks_and_positions_that_contradict_each_other_accuse_nobody_outright() -> None:
    rows = all_in(FILE, ALL_REDUCE, ALL_REDUCE, ALL_REDUCE)
    issued(rows, {0: 30, 1: 30, 2: 30, 3: 29})
    _, (found,) = judge(rows)
    assert (found.severity, found.evidence_state) == ("warning", "INFERRED")
    assert any("the order of collectives rank 3" in c for c in found.cannot_conclude)


def test_of_two_ranks_the_position_is_said_and_no_majority_made_of_it() -> None:
    rows = all_in(ALL_REDUCE, BARRIER)
    issued(rows, {0: 30, 1: 29})
    _, (found,) = judge(rows, ranks=2)
    assert found.ranks == (0, 1)
    assert "rank 0 has issued all_reduce 30 of group 0" in found.summary
    assert any("majority" in c for c in found.cannot_conclude)


def test_a_group_of_other_ranks_and_one_of_a_full_step_say_nothing() -> None:
    rows = all_in(*[ALL_REDUCE] * 4)
    issued(rows, {0: 3, 1: 3}, group="2")
    for position in range(1, 200):
        rows.add("collective", rank=3, step=9, group="3", ranks=[2, 3], position=position, op="barrier", source="call")
    rows.add("collective", rank=2, step=9, group="3", ranks=[2, 3], position=1, op="barrier", source="call")
    _, (found,) = judge(rows)
    assert found.ranks == (0, 1, 2, 3)
    assert "issued" not in found.summary


# ---------------------------------------------------------------- a rank that runs

SPIN = "train.py:60 <module>\ntrain.py:21 prepare"
BUSY = {"busy_ns": 4 * 10**9, "state": "R"}


def spinning(*stacks: str, look: int = 2, others: str = REDUCING, **more: Any) -> Rows:
    rows = training()
    for rank in range(RANKS):
        mine = stacks if rank == 1 else (others,)
        stalled(rows, rank, *mine, step=8, look=look, **((BUSY | more) if rank == 1 else {}))
    return rows


@pytest.mark.parametrize("stacks", [(SPIN,), (SPIN, SPIN.replace(":21", ":22"), SPIN)])
def test_a_rank_that_runs_on_the_spot_for_twice_the_limit_is_named_as_running(stacks: tuple[str, ...]) -> None:
    _, (found,) = judge(spinning(*stacks))
    assert (found.ranks, found.first_step, found.severity, found.evidence_state) == ((1,), 9, "warning", "OBSERVED")
    assert "rank 1 is running, not blocked, and did not arrive: train.py:2" in found.summary
    assert "ranks 0, 2, 3 wait in backward" in found.summary
    assert any("work that takes so long" in c for c in found.cannot_conclude)


def test_at_the_limit_long_work_is_given_time() -> None:
    assert judge(spinning(SPIN, look=1)) == ("INSUFFICIENT_EVIDENCE", [])


@pytest.mark.parametrize(
    "stacks",
    [
        (SPIN, SPIN.replace("prepare", "score"), SPIN),
        (SPIN, SPIN.replace(":60", ":61"), SPIN),
        (SPIN, SPIN.partition("\n")[0], SPIN),
    ],
)
def test_work_that_moves_on_between_looks_is_no_hang(stacks: tuple[str, ...]) -> None:
    assert judge(spinning(*stacks)) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_rank_that_runs_while_nobody_waits_for_it_is_no_hang() -> None:
    assert judge(spinning(SPIN, others=FILE)) == ("INSUFFICIENT_EVIDENCE", [])
    rows = training(1)
    stalled(rows, 0, SPIN, step=8, look=3, **BUSY)
    assert judge(rows, ranks=1) == ("INSUFFICIENT_EVIDENCE", [])


def test_long_work_that_ended_well_is_no_hang() -> None:
    rows = spinning(SPIN)
    rows.add("step", rank=0, step=9)
    assert judge(rows) == ("CLEAR", [])


def test_a_rank_that_ran_until_torchs_timeout_ended_the_job_is_named() -> None:
    rows = spinning(SPIN, look=1)
    for rank in (0, 2, 3):
        late(rows, rank, REDUCING)
    rows.add("exit", rank=1, exit_code=-15, stopped_by_launcher=True, ended_ns=2 * 10**15, step=8)
    _, (found,) = judge(rows, "failed")
    assert (found.ranks, found.severity) == ((1,), "critical")
