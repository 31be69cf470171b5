"""PARAM_NOT_OPTIMIZED: what shows that a parameter is left out, and the parameters that may look like it."""

from __future__ import annotations

from kit.replicas import catalogue
from kit.rows import Rows
from tdbg.aggregator.detectors import param_not_optimized
from tdbg.aggregator.findings import Finding

RANKS, STEPS = 2, 6


def _rows(still: int = 2, loose: int = 2, steps: int = STEPS) -> Rows:
    """Three tensors; `loose` belongs to no optimizer and `still` keeps its bits."""
    rows = catalogue(Rows(), RANKS, "body.weight", "body.bias", "lora.up")
    rows.connection.execute("UPDATE tensor SET optimizer = -1 WHERE index = ?", [loose])
    for rank in range(RANKS):
        for step in range(1, steps + 1):
            digests = [7 if t == still else 100 * step + t for t in range(3)]
            rows.add("param", rank=rank, step=step, stage="end", generation=1, digest=digests)
            rows.add("grad", rank=rank, step=step, stage="local", generation=1, l2=[1.0] * 3, valid=True, scale=1.0)
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(param_not_optimized)
    assert outcomes == {"PARAM_NOT_OPTIMIZED": outcome}
    return [f for _, f in found]


def test_a_parameter_with_gradients_that_no_optimizer_holds_and_nothing_changes() -> None:
    (found,) = _found(_rows())
    assert (found.ranks, found.first_step, found.subject, found.severity) == ((0, 1), 1, "lora.up", "warning")


def test_counts_from_the_first_gradient_on() -> None:
    rows = _rows()
    rows.connection.execute("UPDATE grad SET l2 = [1.0, 1.0, 0.0] WHERE step < 3")
    assert _found(rows)[0].first_step == 3


def test_counts_from_the_catalogue_in_which_it_appears() -> None:
    rows = _rows()
    rows.connection.execute("UPDATE tensor SET step = 3")
    rows.connection.execute("DELETE FROM grad WHERE step <= 3")  # those are of the catalogue before
    assert _found(rows)[0].first_step == 3


def test_a_parameter_that_something_else_changes_is_left_in_peace() -> None:
    assert _found(_rows(still=1), "CLEAR") == []


def test_frozen_ones_and_those_without_a_gradient_are_left_in_peace() -> None:
    frozen = _rows()
    frozen.connection.execute("UPDATE tensor SET trainable = FALSE WHERE index = 2")
    assert _found(frozen, "CLEAR") == []
    for l2 in (0.0, -1.0, -2.0):
        rows = _rows()
        rows.connection.execute("UPDATE grad SET l2 = [1.0, 1.0, ?]", [l2])
        assert _found(rows, "CLEAR") == []


def test_an_optimizer_that_comes_later_clears_it() -> None:
    rows = _rows()
    rows.connection.execute("INSERT INTO tensor SELECT * REPLACE (2 AS generation, 0 AS optimizer) FROM tensor")
    assert _found(rows, "CLEAR") == []


def test_a_model_of_which_nothing_is_held_is_somebody_elses() -> None:
    rows = _rows()
    rows.connection.execute("UPDATE tensor SET model = 1 WHERE index = 2")
    assert _found(rows, "CLEAR") == []
    rows.connection.execute("UPDATE tensor SET optimizer = -1")
    assert _found(rows, "NOT_APPLICABLE") == []


def test_abstains_while_the_others_have_hardly_changed() -> None:
    assert _found(_rows(steps=2), "INSUFFICIENT_EVIDENCE") == []
    warm = _rows()  # a learning rate of zero so far
    warm.connection.execute("UPDATE param SET digest = [5, 6, 7]")
    assert _found(warm, "INSUFFICIENT_EVIDENCE") == []


def test_windows_of_large_models_are_not_compared_with_each_other() -> None:
    rows = _rows(still=9)
    rows.connection.execute("UPDATE tensor SET numel = 3000000")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []  # different windows of different steps say nothing
    for rank in range(RANKS):
        rows.add("param", rank=rank, step=1, stage="start", generation=1, digest=[1, 2, 3])
        rows.add("param", rank=rank, step=STEPS, stage="final", generation=1, digest=[11, 12, 3])
    assert _found(rows)[0].subject == "lora.up"
