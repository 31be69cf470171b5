"""LOGGED_LOSS_MISMATCH: a figure changed on its way into the log, and the rounding and windows that are no fault."""

from __future__ import annotations

import math
from collections.abc import Callable

from kit.rows import Rows
from tdbg.aggregator.detectors import logged_loss_mismatch
from tdbg.aggregator.findings import Finding

Change = Callable[[int, float], float]


def same(step: int, value: float) -> float:
    return value


def logs(stands: Change = same, entered: Change = same, window: int = 2, ranks: int = 2, lost: int = 0) -> Rows:
    """Log entries about windows of steps: the loss falls and differs between ranks."""
    rows = Rows()
    for step in range(window, 20 * window + 1, window):
        own = [sum(1.2345678 / s + 0.1 * rank for s in range(step - window + 1, step + 1)) for rank in range(ranks)]
        mean = entered(step, sum(own) / window / ranks)
        for rank in range(ranks):
            rows.add("step", rank=rank, step=step)
            if rank >= ranks - lost:
                continue
            figure = stands(step, mean)
            rows.add("logged", rank=rank, step=step, first=step - window + 1, global_step=step, updates=window,
                     micros=window, returned=own[rank], magnitude=own[rank], entered=mean, stands=figure,
                     history=figure, callbacks="Pretty")  # fmt: skip
    return rows


def found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, said = rows.judge(logged_loss_mismatch)
    assert outcomes == {"LOGGED_LOSS_MISMATCH": outcome}
    return [f for _, f in said]


def test_a_figure_that_a_callback_changes_is_found_with_its_factor() -> None:
    (finding,) = found(logs(stands=lambda s, v: v / 4 if s >= 10 else v))
    assert (finding.ranks, finding.first_step, finding.last_good_step) == ((0, 1), 10, 8)
    assert (finding.severity, finding.evidence_state) == ("warning", "OBSERVED")
    assert "0.25 times" in finding.summary
    assert finding.evidence[-1].value == "Pretty"


def test_a_smoothed_figure_is_found() -> None:
    (finding,) = found(logs(stands=lambda s, v: 0.5 * v + 0.5))
    assert "not what" in finding.summary


def test_a_figure_that_is_not_the_mean_of_what_was_returned_is_found() -> None:
    (finding,) = found(logs(entered=lambda s, v: v * 2))
    assert (finding.ranks, finding.first_step, finding.last_good_step) == ((0, 1), 2, None)
    assert finding.cannot_conclude == ()


def test_rounding_is_no_mismatch() -> None:
    assert found(logs(), "CLEAR") == []
    for digits in (0, 1, 2, 4):
        assert found(logs(stands=lambda s, v, d=digits: round(v, d)), "CLEAR") == []  # type: ignore[misc]
        assert found(logs(entered=lambda s, v, d=digits: round(v, d)), "CLEAR") == []  # type: ignore[misc]
    assert found(logs(stands=lambda s, v: float(f"{v:.3g}")), "CLEAR") == []
    assert found(logs(stands=lambda s, v: v * (1 + 2.0**-9)), "CLEAR") == []


def test_figures_that_are_no_numbers_are_no_mismatch() -> None:
    assert found(logs(stands=lambda s, v: math.nan), "CLEAR") == []


def test_a_missing_rank_leaves_the_mean_open_but_not_a_changed_figure() -> None:
    assert found(logs(lost=1), "INSUFFICIENT_EVIDENCE") == []
    assert found(logs(lost=1, entered=lambda s, v: v * 2), "INSUFFICIENT_EVIDENCE") == []
    assert [f.ranks for f in found(logs(lost=1, stands=lambda s, v: v / 4))] == [(0,)]


def test_losses_that_are_not_finite_are_left_to_other_rules() -> None:
    rows = logs(entered=lambda s, v: 0.0)
    rows.connection.execute("UPDATE logged SET returned = 'nan'")
    assert found(rows, "INSUFFICIENT_EVIDENCE") == []


def test_without_a_log_nothing_is_said() -> None:
    assert found(Rows(), "INSUFFICIENT_EVIDENCE") == []
