"""GRAD_SPIKE: gradient norms beside their own past, whole and per tensor."""

from __future__ import annotations

import random

import pytest

from kit.replicas import catalogue
from kit.rows import Rows
from tdbg.aggregator.detectors import grad_spike
from tdbg.aggregator.findings import Finding

STEPS, WORLD = 70, 3
NAMES = ("a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias")


def _run(ranks: int = WORLD, steps: int = STEPS, spread: float = 0.05, every: int = 1) -> Rows:
    rows = catalogue(Rows(), ranks, *NAMES)
    for rank in range(ranks):
        drawn = random.Random(rank)
        for step in range(1, steps + 1):
            me = {"rank": rank, "step": step}
            rows.add("loss", **me, backwards=1, total=1 + drawn.gauss(0, spread), scale=1.0)
            rows.add("step", **me, optimizers=1, backwards=1)
            common = drawn.gauss(1, spread)
            if step % every == 0:
                norms = [common * drawn.gauss(1, spread) * (1 + k) for k in range(len(NAMES))]
                rows.add("grad", **me, stage="local", generation=1, l2=norms, valid=True, scale=1.0, synced=1)
    return rows


def _times(rows: Rows, factor: float, where: str, tensors: str = "TRUE") -> Rows:
    rows.connection.execute(f"UPDATE grad SET l2 = [CASE WHEN {tensors} THEN x * {factor} ELSE x END "
                            f"FOR x, k IN l2] WHERE {where}")  # fmt: skip
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT", world_size: int = WORLD, **facts: object) -> list[Finding]:
    outcomes, found = rows.judge(grad_spike, world_size=world_size, **facts)
    assert outcomes == {"GRAD_SPIKE": outcome}
    return [f for _, f in found]


def test_ordinary_gradients_are_clear() -> None:
    assert _found(_run(), "CLEAR") == []


def test_a_single_step_of_all_ranks_is_found() -> None:
    (found,) = _found(_times(_run(), 40, "step = 50"))
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((0, 1, 2), 50, 49, 50)
    assert (found.subject, found.severity, found.evidence_state) == ("", "warning", "INFERRED")
    assert "the loss is ordinary there" in found.summary


def test_a_branch_that_stays_larger_is_named_by_its_tensors() -> None:
    (found,) = _found(_times(_run(), 6, "step >= 40", "k IN (3, 4)"))
    assert (found.ranks, found.first_step, found.severity) == ((0, 1, 2), 40, "warning")
    assert found.subject in ("b.weight", "b.bias")
    assert "1 more tensor" in found.summary
    assert "stays so" in found.summary


def test_one_rank_that_has_nearly_all_of_it_is_named_alone() -> None:
    (found,) = _found(_times(_run(), 40, "step = 50 AND rank = 1"))
    assert (found.ranks, found.first_step) == ((1,), 50)


def test_a_whole_gradient_that_stays_larger_with_the_loss_is_a_note() -> None:
    rows = _times(_run(), 6, "step >= 40")
    assert [f.severity for f in _found(rows)] == ["warning"]
    rows.connection.execute("UPDATE loss SET total = total * 4 WHERE step >= 40")
    assert [f.severity for f in _found(rows)] == ["note"]


def test_what_comes_again_and_again_is_a_note() -> None:
    assert [f.severity for f in _found(_times(_run(), 20, "step IN (40, 50, 60)"))][:1] == ["note"]


def test_a_short_window_and_overflow_are_not_compared() -> None:
    rows = _times(_run(), 20, "step = 50")
    rows.connection.execute("UPDATE loss SET backwards = 2 WHERE step = 50")
    assert _found(rows, "CLEAR") == []
    rows = _times(_run(), 20, "step = 50")
    rows.connection.execute("UPDATE grad SET nonfinite = [1] WHERE step = 50")
    assert _found(rows, "CLEAR") == []


def test_what_falls_or_begins_is_no_spike() -> None:
    # from then on a rise by as much would be nothing new
    assert _found(_times(_run(), 0.02, "step >= 40"), "INSUFFICIENT_EVIDENCE") == []
    assert _found(_times(_run(), 0.02, "step >= 40", "k < 5"), "CLEAR") == []  # the rest's share grows
    assert _found(_times(_run(), 0.0, "step < 40", "k = 1"), "CLEAR") == []
    rows = _run()
    rows.connection.execute("UPDATE grad SET l2 = list_concat([-1.0], l2[2:]) WHERE step < 40")  # thawed later
    assert _found(rows, "CLEAR") == []


def test_a_tensor_of_rounding_noise_is_not_judged() -> None:
    rows = _times(_run(), 1e-8, "TRUE", "k = 2")
    assert _found(_times(rows, 50, "step = 50", "k = 2"), "CLEAR") == []


def test_between_two_cadences_the_past_ends() -> None:
    rows = _run(steps=60)
    for rank in range(WORLD):
        for step in (124, 188, 252):
            rows.add("grad", rank=rank, step=step, stage="local", generation=1, l2=[9.0 * k for k in range(1, 7)],
                     valid=True, scale=1.0)  # fmt: skip
    assert _found(rows, "CLEAR") == []


def test_the_norm_that_clipping_returns_is_a_series_of_its_own() -> None:
    rows = _run(every=8)
    for rank in range(WORLD):
        for step in range(1, STEPS + 1):
            norm = 40.0 if step == 51 else 1 + step % 7 / 50
            rows.add("clip", rank=rank, step=step, max_norm=1.0, norm_type=2.0, norm=norm, calls=1)
    (found,) = _found(rows)
    assert (found.ranks, found.first_step, found.last_good_step, found.subject) == ((0, 1, 2), 51, 50, "")


@pytest.mark.parametrize(("scale", "norm"), [(256.0, 256.0), (256.0, 256.0 * 40), (None, 256.0)])
def test_clipping_of_scaled_gradients_is_read_by_their_own_norm(scale: float | None, norm: float) -> None:
    rows = _run(every=8)
    for rank in range(WORLD):
        for step in range(1, STEPS + 1):
            late = step >= 51
            rows.add("clip", rank=rank, step=step, max_norm=1.0, norm_type=2.0, calls=1, scaled=int(late),
                     norm=(norm if late else 1.0) * (1 + step % 7 / 50))  # fmt: skip
    rows.connection.execute("UPDATE loss SET scale = ?", [scale])
    assert [f.first_step for f in _found(rows, "INCIDENT" if norm > 256 else "CLEAR")] == ([51] if norm > 256 else [])


def test_reduced_norms_serve_where_no_local_ones_are() -> None:
    rows = _times(_run(), 40, "step = 50")
    rows.connection.execute("UPDATE grad SET stage = 'reduced'")
    assert [f.first_step for f in _found(rows)] == [50]


@pytest.mark.parametrize("steps", [10, 25])
def test_too_little_is_said(steps: int) -> None:
    assert _found(_run(steps=steps), "INSUFFICIENT_EVIDENCE") == []
    assert _found(_run(), "INSUFFICIENT_EVIDENCE", missing_ranks=(2,)) == []


def test_norms_that_leap_by_themselves_are_never_clear() -> None:
    loud = _run(spread=2.0)
    assert _found(loud, "INSUFFICIENT_EVIDENCE") == []
    assert _found(_times(loud, 30, "step = 50"), "INSUFFICIENT_EVIDENCE") == []
