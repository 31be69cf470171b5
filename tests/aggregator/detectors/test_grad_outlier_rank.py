"""GRAD_OUTLIER_RANK: one rank's own gradients beside its peers'."""

from __future__ import annotations

import random

import pytest

from kit.replicas import catalogue
from kit.rows import Rows
from tdbg.aggregator.detectors import grad_outlier_rank
from tdbg.aggregator.findings import Finding

STEPS = 60


def _run(ranks: int = 4, steps: int = STEPS, sharing: str = "ddp", names: str = "ab") -> Rows:
    """Own gradients and losses that vary by some tenths; every rank has a level of its own."""
    rows = catalogue(Rows(), ranks, *names, sharing=sharing)
    for rank in range(ranks):
        drawn = random.Random(rank)
        for step in range(1, steps + 1):
            norms = [(1 + rank) * drawn.uniform(0.9, 1.1) * (1 + 1 / step) for _ in range(2)]
            me = {"rank": rank, "step": step}
            rows.add("grad", **me, stage="local", generation=1, l2=norms, valid=True, scale=1.0, synced=1)
            rows.add("loss", **me, backwards=1, total=drawn.uniform(0.8, 1.2), scale=1.0)
            rows.add("input", **me, source="forward", rows=8)
            rows.add("step", **me, optimizers=1, backwards=1)
    return rows


def _times(rows: Rows, factor: float, where: str) -> Rows:
    rows.connection.execute(f"UPDATE grad SET l2 = list_transform(l2, lambda x: x * {factor}) WHERE {where}")
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT", world_size: int = 4) -> list[Finding]:
    outcomes, found = rows.judge(grad_outlier_rank, world_size=world_size)
    assert outcomes == {"GRAD_OUTLIER_RANK": outcome}
    return [f for _, f in found]


def test_levels_of_their_own_are_clear() -> None:
    assert _found(_run(), "CLEAR") == []


@pytest.mark.parametrize("factor", [16.0, 0.1])
def test_names_the_rank_that_stands_apart_for_good(factor: float) -> None:
    (found,) = _found(_times(_run(), factor, "rank = 2 AND step >= 30"))
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((2,), 30, 29, STEPS)
    assert (found.evidence_state, found.severity, found.subject) == ("INFERRED", "warning", "")
    assert "its loss is ordinary" in found.summary


def test_says_when_the_loss_is_odd_too() -> None:
    rows = _times(_run(), 16.0, "rank = 2 AND step >= 30")
    rows.connection.execute("UPDATE loss SET total = total * 16 WHERE rank = 2 AND step >= 30")
    (found,) = _found(rows)
    assert "its loss is odd there too" in found.summary


def test_names_the_tensor_that_is_odd_again_and_again() -> None:
    rows = _run()
    rows.connection.execute("UPDATE grad SET l2 = [l2[1], l2[2] * 200] WHERE rank = 1 AND step >= 30 AND step % 3 = 0")
    (found,) = _found(rows)
    assert (found.ranks, found.first_step) == ((1,), 30)


def test_names_the_tensor_whose_share_is_odd_behind_batches_that_move_all() -> None:
    rows = _run(names="abcde")
    rows.connection.execute("UPDATE grad SET l2 = [l2[1], l2[2], l2[1] * 1.1, l2[2] * 0.9, l2[1] * 2]")
    rows.connection.execute("UPDATE grad SET l2 = list_transform(l2, lambda x: x * exp(hash(rank * 1000 + step) % 3))")
    assert _found(rows, "CLEAR") == []
    rows.connection.execute("UPDATE grad SET l2 = list_concat(l2[:4], [l2[5] * 6]) "
                            "WHERE rank = 1 AND step >= 24 AND step % 4 = 0")  # fmt: skip
    (found,) = _found(rows)
    assert (found.ranks, found.first_step, found.subject, found.severity) == ((1,), 24, "e", "warning")
    assert "its usual share beside the rank's other tensors" in found.summary


GROSS = "rank = 1 AND step IN (26, 33, 40)"


def _gross(rows: Rows, norm: str) -> Rows:
    rows.connection.execute(f"UPDATE grad SET l2 = [l2[1], {norm}], nonfinite = [] WHERE {GROSS}")
    return rows


@pytest.mark.parametrize("norm", ["1e17", "'inf'::DOUBLE"])  # squares of finite elements overflow
def test_few_gross_steps_of_one_tensor_are_enough(norm: str) -> None:
    (found,) = _found(_gross(_run(ranks=3, steps=45), norm), world_size=3)
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((1,), 26, 25, 40)
    assert (found.severity, found.evidence_state) == ("warning", "INFERRED")
    assert found.subject == "b"
    assert "far beyond all" in found.summary
    assert "its loss is ordinary" in found.summary


def test_gross_gradients_of_gross_losses_are_a_note() -> None:
    rows = _gross(_run(ranks=3, steps=45), "1e17")
    rows.connection.execute(f"UPDATE loss SET total = total * 1e6 WHERE {GROSS}")
    (found,) = _found(rows, world_size=3)
    assert found.severity == "note"


def test_overflow_of_half_precision_and_non_finite_elements_are_not_gross() -> None:
    rows = _gross(_run(ranks=3, steps=45), "'inf'::DOUBLE")
    rows.connection.execute("UPDATE tensor SET dtype = 'float16'")
    assert _found(rows, "CLEAR", 3) == []
    rows = _gross(_run(ranks=3, steps=45), "'inf'::DOUBLE")
    rows.connection.execute(f"UPDATE grad SET nonfinite = [1] WHERE {GROSS}")
    assert _found(rows, "CLEAR", 3) == []


def test_the_last_small_batch_of_one_rank_is_not_odd() -> None:
    rows = _times(_run(), 30.0, "rank = 3 AND step % 5 = 0")
    rows.connection.execute("UPDATE input SET rows = 1 WHERE rank = 3 AND step % 5 = 0")
    assert _found(rows, "CLEAR") == []


def test_a_change_of_all_ranks_names_nobody() -> None:
    assert _found(_times(_run(), 16.0, "step >= 30"), "CLEAR") == []


def test_of_the_micro_steps_the_last_counts() -> None:
    rows = _run()
    rows.connection.execute("INSERT INTO grad SELECT * REPLACE (list_transform(l2, lambda x: x * 50 * step) AS l2, "
                            "-1 AS micro) FROM grad")  # fmt: skip
    assert _found(rows, "CLEAR") == []


def test_too_little_is_said() -> None:
    assert _found(_run(ranks=2), "NOT_APPLICABLE", 2) == []
    assert _found(_run(steps=12), "INSUFFICIENT_EVIDENCE") == []
    rows = _run()
    rows.connection.execute("UPDATE grad SET valid = FALSE")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []


def test_models_of_their_own_are_not_compared() -> None:
    rows = _times(_run(sharing="plain"), 16.0, "rank = 2 AND step >= 30")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []
