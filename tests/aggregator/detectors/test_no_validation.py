"""NO_VALIDATION: a finished training that nothing was held against."""

from __future__ import annotations

from kit.rows import Rows
from tdbg.aggregator.detectors import no_validation
from tdbg.aggregator.findings import Finding


def _rows(evaluating: tuple[int, ...] = (), ranks: int = 2, loader: bool = True) -> Rows:
    """Training of 8 steps; `evaluating` ranks take a pass over another loader at its end."""
    rows = Rows()
    for rank in range(ranks):
        for step in range(1, 9):
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1)
            if loader:
                rows.add("batch", rank=rank, step=step, index=step - 1, samples=4, backwards=step - 1)
        for index in range(3 if rank in evaluating else 0):
            rows.add("batch", rank=rank, step=9, loader=1, index=index, samples=4, backwards=8, grad_enabled=False)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT", **facts: object) -> list[Finding]:
    outcomes, found = rows.judge(no_validation, **facts)
    assert outcomes == {"NO_VALIDATION": outcome}
    return [f for _, f in found]


def test_no_pass_without_a_backward_is_a_note() -> None:
    (found,) = _found(_rows())
    assert (found.severity, found.first_step, found.last_step) == ("note", None, 8)


def test_an_evaluation_on_one_rank_is_one() -> None:
    assert _found(_rows((0,)), "CLEAR") == []


def test_a_run_that_goes_on_or_failed_may_still_be_evaluated() -> None:
    for status in ("running", "failed", "killed"):
        assert _found(_rows(), "INSUFFICIENT_EVIDENCE", status=status) == []


def test_a_silent_rank_may_have_evaluated() -> None:
    assert _found(_rows(), "INSUFFICIENT_EVIDENCE", world_size=3, missing_ranks=(2,)) == []


def test_loops_without_loaders_are_not_judged() -> None:
    assert _found(_rows(loader=False), "INSUFFICIENT_EVIDENCE") == []


def _told(setting: str, seen: int = 0) -> Rows:
    rows = _rows()
    for rank in range(2):
        rows.add("selection", rank=rank, step=9, seen=seen, setting=setting, metric="eval_loss",
                 schedule="eval every 500 steps")  # fmt: skip
    return rows


def test_settings_that_wait_for_a_metric_are_named() -> None:
    (found,) = _found(_told("load_best_model_at_end"))
    assert found.summary.endswith("; without effect: load_best_model_at_end by eval_loss")
    assert found.evidence[1].value == "none (eval every 500 steps)"


def test_a_metric_that_came_from_elsewhere_took_effect() -> None:
    (found,) = _found(_told("EarlyStopping", seen=1))
    assert ("without effect" in found.summary, len(found.evidence)) == (False, 1)
