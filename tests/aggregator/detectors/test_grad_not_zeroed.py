"""GRAD_NOT_ZEROED: the ranks and the first step whose update used an old gradient again."""

from __future__ import annotations

from kit.rows import Rows
from tdbg.aggregator.detectors import grad_not_zeroed
from tdbg.aggregator.findings import Finding


def _rows(kept: dict[int, list[int]], looked: range = range(2, 10), optimizer: int = 0) -> Rows:
    rows = Rows()
    for rank in range(2):
        for step in looked:
            rows.add("leftover", rank=rank, step=step, optimizer=optimizer, kept=step in kept.get(rank, []),
                     parameter="head.bias")  # fmt: skip
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(grad_not_zeroed)
    assert outcomes == {"GRAD_NOT_ZEROED": outcome}
    return [f for _, f in found]


def test_from_the_first_chance_on_it_is_critical() -> None:
    every = list(range(2, 10))
    (found,) = _found(_rows({0: every, 1: every}))
    assert (found.ranks, found.first_step, found.last_good_step, found.subject) == ((0, 1), 2, None, "head.bias")
    assert found.severity == "critical"


def test_a_rank_that_begins_later_with_a_single_step() -> None:
    (found,) = _found(_rows({1: [6]}))
    assert (found.ranks, found.first_step, found.last_good_step, found.severity) == ((1,), 6, 5, "warning")


def test_a_cadence_leaves_an_interval() -> None:
    (found,) = _found(_rows({0: [10, 18], 1: [10, 18]}, looked=range(2, 20, 8)))
    assert (found.first_step, found.last_good_step) == (10, 2)
    assert "between 3 and 10" in found.cannot_conclude[0]


def test_gradients_that_are_zeroed_are_clear() -> None:
    assert _found(_rows({}), "CLEAR") == []


def test_nothing_looked_at_is_not_enough() -> None:
    assert _found(Rows().add("step", rank=0, step=1), "INSUFFICIENT_EVIDENCE") == []
