"""Optimizer state that replicas must share: who stands apart, since when, and which differences are by design."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kit.replicas import catalogue, losses
from kit.rows import Finding, Rows, bits
from tdbg.aggregator.detectors import optim_state_desync

STEPS = 6
KEYS = '{"exp_avg": "digest", "step": "number"}'


def _rows(ranks: int = 3, steps: int = STEPS, **more: Any) -> Rows:
    """Two tensors under one optimizer; all ranks agree."""
    rows = catalogue(Rows(), ranks, "w", "b", **more)
    for step in range(1, steps + 1):
        for rank in range(ranks):
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1)
        _params(rows, step, {rank: [10 * step, 10 * step + 1] for rank in range(ranks)})
        state(rows, step, "start", dict.fromkeys(range(ranks), _moments(step - 1)))
        state(rows, step, "end", dict.fromkeys(range(ranks), _moments(step)))
    return rows


def _moments(moment: int) -> list[int]:
    return [70 * moment, 70 * moment + 1, bits(moment), bits(moment)] if moment else []


def _params(rows: Rows, step: int, digests: Mapping[int, Sequence[int]]) -> None:
    for rank, digest in digests.items():
        rows.add("param", rank=rank, step=step, stage="end", generation=1, digest=list(digest))


def state(rows: Rows, step: int, stage: str, digests: Mapping[int, Sequence[int]], **more: Any) -> None:
    """One sweep of every rank; no digests: no state yet."""
    for rank, digest in digests.items():
        row = {"generation": 1, "tensors": [0, 1], "keys": KEYS if digest else "", "digest": list(digest)}
        rows.add("optim_state", **(row | {"rank": rank, "step": step, "stage": stage} | more))


def _change(rows: Rows, rank: int, first: int, *, stages: str = "'start', 'end'", moved: bool = True) -> None:
    """The first tensor's moment differs on one rank from a step on, and its parameters with it."""
    rows.connection.execute(
        f"UPDATE optim_state SET digest = list_concat([digest[1] + 5], digest[2:]) "
        f"WHERE rank = {rank} AND step >= {first} AND keys <> '' AND (stage IN ({stages}) OR step > {first})"
    )
    if moved:
        rows.connection.execute(f"UPDATE param SET digest = [digest[1] + 5, 0] WHERE rank = {rank} AND step >= {first}")


def _judge(rows: Rows, **facts: Any) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(optim_state_desync, **facts)
    return outcomes["OPTIM_STATE_DESYNC"], [f for _, f in found]


def test_equal_state_is_clear() -> None:
    assert _judge(_rows()) == ("CLEAR", [])


def test_names_the_rank_the_state_and_the_step() -> None:
    rows = _rows()
    _change(rows, 1, 4, stages="'end'")
    outcome, (found,) = _judge(rows)
    assert outcome == "INCIDENT"
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((1,), 4, 3, 6)
    assert (found.subject, found.severity) == ("exp_avg of w", "critical")


def test_state_changed_between_two_updates_is_seen_before_the_next_one() -> None:
    rows = _rows()
    _change(rows, 1, 4)
    (found,) = _judge(rows)[1]
    assert (found.first_step, found.last_good_step) == (4, 3)
    assert "before the update" in found.summary


def test_a_counter_is_shown_as_a_number() -> None:
    rows = _rows()
    rows.connection.execute(
        f"UPDATE optim_state SET digest = list_concat(digest[:2], [{bits(1)}, {bits(1)}]) WHERE rank = 2 AND step >= 3"
    )
    rows.connection.execute("UPDATE param SET digest = [5, 5] WHERE rank = 2 AND step >= 3")
    (found,) = _judge(rows)[1]
    assert (found.subject, found.ranks) == ("step of w", (2,))
    assert [(e.value, e.expected) for e in found.evidence] == [("1", "2")] * 2


def test_state_that_only_one_rank_loaded_differs_before_its_first_update() -> None:
    rows = catalogue(Rows(), 4, "w", "b")
    state(rows, 1, "start", {0: _moments(20)} | {key: [] for key in (1, 2, 3)})
    rows.add("optim_loaded", rank=0, step=1, entries=2)
    for step in (1, 2):
        for rank in range(4):
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1)
        state(rows, step, "end", {0: _moments(20 + step)} | dict.fromkeys((1, 2, 3), _moments(step)))
        _params(rows, step, {0: [1, 2]} | {key: [step + 7, step + 9] for key in (1, 2, 3)})
    (found,) = _judge(rows)[1]
    assert (found.ranks, found.first_step) == ((0,), 1)
    assert "ranks 1, 2, 3 have none" in found.summary
    assert "load_state_dict had been called on rank 0 only" in found.summary
    assert "wrong" not in found.summary
    assert found.evidence[0].metric == "optimizer.load_state_dict"


def test_two_ranks_are_both_named_and_no_side_is_called_right() -> None:
    rows = _rows(ranks=2)
    _change(rows, 1, 4)
    (found,) = _judge(rows)[1]
    assert found.ranks == (0, 1)
    assert any("no majority" in c for c in found.cannot_conclude)


def test_what_never_reaches_the_parameters_is_a_note() -> None:
    rows = _rows()
    _change(rows, 1, 2, moved=False)
    (found,) = _judge(rows)[1]
    assert found.severity == "note"
    assert "the parameters agree all the same" in found.summary


def test_a_difference_at_the_last_step_may_still_reach_the_parameters() -> None:
    rows = _rows()
    _change(rows, 1, STEPS, stages="'end'", moved=False)
    assert [f.severity for f in _judge(rows)[1]] == ["critical"]


def test_parameters_that_come_together_again_and_again_are_averaged_by_design() -> None:
    rows = _rows(steps=9)
    _change(rows, 1, 2, moved=False)
    rows.connection.execute("UPDATE param SET digest = [rank, 0] WHERE step % 3 <> 0")
    assert [f.severity for f in _judge(rows)[1]] == ["note"]


def test_an_average_after_every_update_is_seen_before_the_next_one() -> None:
    rows = _rows()
    _change(rows, 1, 1, moved=False)
    rows.connection.execute("UPDATE param SET digest = [rank, rank]")
    assert [f.severity for f in _judge(rows)[1]] == ["critical"]
    for step in range(2, STEPS + 1):
        for rank in range(3):
            rows.add("param", rank=rank, step=step, stage="start", generation=1, tensors=[1], digest=[step])
    assert [f.severity for f in _judge(rows)[1]] == ["note"]


def test_state_of_a_parameter_that_has_none_anywhere_is_not_missing() -> None:
    rows = _rows()
    for table in ("tensors", "digest"):
        rows.connection.execute(f"UPDATE optim_state SET {table} = {table}[:1]")
    rows.connection.execute("""UPDATE optim_state SET keys = '{"exp_avg": "digest"}' WHERE keys <> ''""")
    assert _judge(rows) == ("CLEAR", [])


def test_ranks_that_look_at_different_parameters_are_compared_where_both_looked() -> None:
    rows = _rows()
    rows.connection.execute("""UPDATE optim_state SET tensors = [1], digest = [digest[2], digest[4]]
                               WHERE rank = 1 AND stage = 'start' AND keys <> ''""")
    assert _judge(rows) == ("CLEAR", [])


def test_each_window_of_a_large_tensor_is_compared_for_itself() -> None:
    rows = _rows(numel=50_000, shape="50000")
    _change(rows, 1, 4)
    (found,) = _judge(rows)[1]
    assert (found.ranks, found.first_step) == ((1,), 4)


@pytest.mark.parametrize("sharing", ["sharded", "ignored", "hook"])
def test_what_is_no_replica_is_not_compared(sharing: str) -> None:
    rows = _rows(sharing=sharing, peers="" if sharing != "hook" else None)
    _change(rows, 1, 2)
    assert _judge(rows) == ("NOT_APPLICABLE", [])


def test_an_optimizer_without_state_is_not_judged() -> None:
    rows = _rows()
    rows.connection.execute("UPDATE optim_state SET keys = '', digest = []")
    assert _judge(rows) == ("NOT_APPLICABLE", [])


def test_a_single_rank_is_not_judged() -> None:
    assert _judge(_rows(ranks=1)) == ("NOT_APPLICABLE", [])


def test_a_silent_rank_is_named() -> None:
    assert _judge(_rows(), missing_ranks=(3,))[0] == "INSUFFICIENT_EVIDENCE"


def test_unwrapped_models_are_judged_only_when_they_are_shown_to_be_replicas() -> None:
    alone = _rows(sharing="plain")
    _change(alone, 1, 4)
    assert _judge(alone) == ("INSUFFICIENT_EVIDENCE", [])
    tied = losses(_rows(sharing="plain"), 3, STEPS)
    _change(tied, 1, 4)
    assert [(f.ranks, f.severity) for f in _judge(tied)[1]] == [((1,), "warning")]


def test_a_sweep_when_the_process_ended_is_a_note() -> None:
    rows = _rows()
    state(rows, STEPS, "final", {r: _moments(9 if r == 0 else 6) for r in range(3)})
    assert [(f.ranks, f.severity) for f in _judge(rows)[1]] == [((0,), "note")]
    assert _judge(rows, status="killed")[1] == []
