"""GRAD_VANISHED: gradients that are all zero, or next to nothing in the first layers; convergence is neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kit.rows import Rows
from tdbg.aggregator.detectors import grad_vanished
from tdbg.aggregator.findings import Finding

NAMES = ("in.weight", "in.bias", "mid.weight", "mid.bias", "out.weight", "out.bias")
Norms = Callable[[int, int], Sequence[float]]  # of rank and step, one per tensor


def _rows(norms: Norms, steps: int = 30, loss: Callable[[int], float] = lambda step: 1.0, valid: bool = True,
          shape: str = "8x8") -> Rows:  # fmt: skip
    rows = Rows()
    for rank in range(2):
        for index, name in enumerate(NAMES):
            rows.add("tensor", rank=rank, generation=1, index=index, kind="param", name=name, model_type="Net",
                     shape=shape if name.endswith("weight") else "8", numel=64, trainable=True,
                     sharing="ddp")  # fmt: skip
        for step in range(1, steps + 1):
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1, watched=True)
            rows.add("loss", rank=rank, step=step, backwards=1, total=loss(step), scale=1.0)
            rows.add("grad", rank=rank, step=step, stage="local", generation=1, l2=list(norms(rank, step)), valid=valid,
                     scale=1.0)  # fmt: skip
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(grad_vanished)
    assert outcomes == {"GRAD_VANISHED": outcome}
    return [f for _, f in found]


def test_all_gradients_zero_from_the_start() -> None:
    (found,) = _found(_rows(lambda rank, step: [0.0] * 6, loss=lambda step: 0.0))
    assert (found.ranks, found.first_step, found.last_good_step, found.severity) == ((0, 1), 1, None, "warning")


def test_one_rank_from_a_step_on() -> None:
    (found,) = _found(_rows(lambda rank, step: [0.0 if rank == 1 and step >= 12 else 1.0] * 6))
    assert (found.ranks, found.first_step, found.last_good_step) == ((1,), 12, 11)


def test_single_batches_without_anything_to_learn_are_clear() -> None:
    assert _found(_rows(lambda rank, step: [0.0 if step % 5 < 3 else 1.0] * 6), "CLEAR") == []


def test_a_loss_that_has_come_down_to_nothing_is_a_note() -> None:
    rows = _rows(lambda rank, step: [0.0 if step > 20 else 1.0] * 6, loss=lambda step: 0.0 if step > 20 else 1.0)
    assert [f.severity for f in _found(rows)] == ["note"]


def test_the_first_layers_get_next_to_nothing() -> None:
    (found,) = _found(_rows(lambda rank, step: [1e-9, 1e-9, 3e-8, 1e-7, 1.0, 1.0]))
    assert (found.subject, found.first_step, found.severity) == ("in.weight", 1, "warning")
    assert "the first 2 weights" in found.summary


def test_one_small_weight_or_small_ones_elsewhere_are_clear() -> None:
    assert _found(_rows(lambda rank, step: [1e-9, 1.0, 1.0, 1.0, 1.0, 1.0]), "CLEAR") == []
    assert _found(_rows(lambda rank, step: [1.0, 1.0, 1e-9, 1.0, 1e-9, 1.0]), "CLEAR") == []


def test_all_gradients_becoming_small_together_is_convergence() -> None:
    assert _found(_rows(lambda rank, step: [10.0**-step] * 6), "CLEAR") == []


def test_small_at_first_and_then_not_is_clear() -> None:
    assert _found(_rows(lambda rank, step: [1e-9 if step < 8 else 0.1] * 4 + [1.0, 1.0]), "CLEAR") == []


def test_gradients_that_were_not_this_ranks_own_are_not_judged() -> None:
    assert _found(_rows(lambda rank, step: [0.0] * 6, valid=False), "INSUFFICIENT_EVIDENCE") == []
