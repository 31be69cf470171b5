"""GRAD_VANISHED: exact zeros, first layers that get nothing, a norm that collapses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kit.replicas import catalogue
from kit.rows import Rows
from tdbg.aggregator.detectors import grad_vanished
from tdbg.aggregator.findings import Finding

STEPS, WORLD, DEEP = 40, 2, 8
Norms = Callable[[int, int], Sequence[float]]  # of rank and step


def _run(norms: Norms, loss: Callable[[int], float] = lambda step: 1.0, layers: int = DEEP, **tensor: object) -> Rows:
    rows = catalogue(Rows(), WORLD, *(f"layers.{i}.weight" for i in range(layers)), **{"shape": "2x2"} | tensor)
    for rank in range(WORLD):
        for step in range(1, STEPS + 1):
            me = {"rank": rank, "step": step}
            rows.add("loss", **me, backwards=1, total=loss(step), scale=1.0)
            rows.add("step", **me, optimizers=1, backwards=1)
            rows.add("grad", **me, stage="local", generation=1, l2=list(norms(rank, step)), valid=True, scale=1.0)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT", **facts: object) -> list[Finding]:
    outcomes, found = rows.judge(grad_vanished, world_size=WORLD, **facts)
    assert outcomes == {"GRAD_VANISHED": outcome}
    return [f for _, f in found]


def _alike(rank: int, step: int) -> list[float]:
    return [1.0] * DEEP


def test_ordinary_gradients_are_clear() -> None:
    assert _found(_run(_alike), "CLEAR") == []


def test_exact_zeros_from_the_start_are_observed() -> None:
    (found,) = _found(_run(lambda rank, step: [0.0] * DEEP, lambda step: 0.0))
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((0, 1), 1, None, STEPS)
    assert (found.severity, found.evidence_state) == ("warning", "OBSERVED")


def _with_labels(supervised: Callable[[int, int], int]) -> Rows:
    """Zero gradients on rank 1 from step 12 on, and a training pass whose batches have so many supervised labels."""
    rows = _run(lambda rank, step: [float(rank == 0 or step < 12)] * DEEP)
    for rank in range(WORLD):
        for step in range(1, STEPS + 1):
            at = {"rank": rank, "step": step, "index": step - 1}
            rows.add("batch", **at, samples=4, backwards=step - 1)
            rows.add("labels", **at, elements=32, supervised=supervised(rank, step), rows=4, ignored=-100)
    return rows


def test_labels_that_are_all_masked_at_these_very_steps_are_said() -> None:
    (found,) = _found(_with_labels(lambda rank, step: 0 if rank == 1 and step >= 12 else 20))
    assert (found.ranks, found.first_step) == ((1,), 12)
    assert found.summary.endswith("; no label of these steps' batches is supervised")
    assert ("supervised labels", "none (all are -100, which is ignored)") in [
        (e.metric, e.value) for e in found.evidence
    ]


def test_one_step_with_supervised_labels_leaves_the_masks_out_of_it() -> None:
    (found,) = _found(_with_labels(lambda rank, step: 0 if rank == 1 and step != 20 else 20))
    assert (found.first_step, "supervised" in found.summary) == (12, False)


def test_an_evaluation_with_labels_between_the_steps_changes_nothing() -> None:
    rows = _with_labels(lambda rank, step: 0 if rank == 1 and step >= 12 else 20)
    for index in range(4):
        at = {"rank": 1, "step": 20, "loader": 1, "index": index}
        rows.add("batch", **at, backwards=19, grad_enabled=False)
        rows.add("labels", **at, elements=32, supervised=32)
    assert "no label of these steps' batches is supervised" in _found(rows)[0].summary


def test_exact_zeros_from_some_step_on_name_it() -> None:
    (found,) = _found(_run(lambda rank, step: [0.0 if step >= 12 else 1.0] * DEEP))
    assert (found.first_step, found.last_good_step) == (12, 11)


def test_a_rank_alone_is_named_and_one_that_ran_out_of_data_is_a_note() -> None:
    (found,) = _found(_run(lambda rank, step: [float(rank != 1)] * DEEP))
    assert (found.ranks, found.severity) == ((1,), "warning")
    (found,) = _found(_run(lambda rank, step: [float(rank != 1 or step < 34)] * DEEP))
    assert (found.ranks, found.severity) == ((1,), "note")


def test_a_few_batches_without_gradient_and_a_learnt_margin_are_clear() -> None:
    assert _found(_run(lambda rank, step: [float(step % 5 > 0)] * DEEP), "CLEAR") == []
    learnt = _run(lambda rank, step: [1.0 if step < 20 else 0.0] * DEEP, lambda step: max(0.0, 1 - step / 15))
    assert _found(learnt, "CLEAR") == []


def test_first_layers_that_get_next_to_nothing_are_named() -> None:
    (found,) = _found(_run(lambda rank, step: [10.0 ** (2 * k - 14) for k in range(DEEP)]))
    assert (found.ranks, found.first_step, found.subject) == ((0, 1), 1, "layers.0.weight")
    assert (found.severity, found.evidence_state) == ("warning", "INFERRED")
    assert "first 3 layers (layers.0.weight to layers.2.weight)" in found.summary


def test_healthy_depth_biases_and_adapters_are_clear() -> None:
    assert _found(_run(lambda rank, step: [1e-4, 1e-3, 1e-2, 0.1, 1, 1, 1, 1]), "CLEAR") == []
    one = _run(lambda rank, step: [1e-9, 1, 1, 1, 1, 1, 1, 1])  # of one alone the cause may lie in itself
    assert _found(one, "CLEAR") == []
    adapters = _run(lambda rank, step: [0.0 if step == 1 and k % 2 == 0 else 1.0 for k in range(DEEP)])
    assert _found(adapters, "CLEAR") == []
    biases = _run(lambda rank, step: [1e-9] * 4 + [1.0] * 4, shape="4")
    assert _found(biases, "CLEAR") == []
    frozen = _run(lambda rank, step: [1e-9] * 4 + [1.0] * 4)
    frozen.connection.execute("UPDATE tensor SET trainable = FALSE WHERE index < 4")
    assert _found(frozen, "CLEAR") == []
    unused = _run(lambda rank, step: [0.0] * 3 + [1.0] * 5)
    assert _found(unused, "CLEAR") == []


def test_depth_that_is_overcome_is_clear() -> None:
    rows = _run(lambda rank, step: [1e-9 if k < 3 and step < 8 else 1.0 for k in range(DEEP)])
    assert _found(rows, "CLEAR") == []


def test_a_collapse_at_once_while_the_loss_stays_is_found() -> None:
    (found,) = _found(_run(lambda rank, step: [1.0 if step < 20 else 1e-5] * DEEP))
    assert (found.ranks, found.first_step, found.last_good_step) == ((0, 1), 20, 19)
    assert (found.severity, found.evidence_state, found.subject) == ("warning", "INFERRED", "gradient norm")


def test_convergence_is_clear() -> None:
    slow = _run(lambda rank, step: [math.exp(-step)] * DEEP)  # to a floor of noise: the loss stays
    assert _found(slow, "CLEAR") == []
    at_once = _run(lambda rank, step: [1.0 if step < 20 else 1e-5] * DEEP, lambda step: 1.0 if step < 20 else 1e-6)
    assert _found(at_once, "CLEAR") == []
    comes_back = _run(lambda rank, step: [1e-5 if 20 <= step < 24 else 1.0] * DEEP)
    assert _found(comes_back, "CLEAR") == []


def test_too_little_is_said() -> None:
    rows = _run(_alike)
    rows.connection.execute("DELETE FROM grad WHERE step > 3")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []
    assert _found(_run(_alike), "INSUFFICIENT_EVIDENCE", missing_ranks=(1,)) == []
