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


def backwards(rows: Rows, times: float = 1.0, nonfinite: int = 0) -> Rows:
    """The losses of the backwards behind the log entries of `logs`: what was returned, or a multiple of it."""
    for rank in (0, 1):
        for step in range(1, 41):
            odd = nonfinite and step == 9
            rows.add("loss", rank=rank, step=step, backwards=1, nonfinite=int(bool(odd)), scale=1.0,
                     total=math.nan if odd else times * (1.2345678 / step + 0.1 * rank))  # fmt: skip
    return rows


def test_steps_that_return_what_they_optimise_are_clear() -> None:
    assert found(backwards(logs()), "CLEAR") == []


def test_a_multiple_between_the_log_and_the_backwards_is_found() -> None:
    (finding,) = found(backwards(logs(), 0.5))
    assert (finding.ranks, finding.first_step, finding.severity) == ((0, 1), 2, "warning")
    assert "is 2 times the losses that the backwards started from, at each of 40 entries" in finding.summary


def test_any_other_multiple_may_be_a_scale_of_an_engine_and_is_left_alone() -> None:
    assert found(backwards(logs(), 65536.0), "CLEAR") == []
    unknown = backwards(logs(), 0.5)
    unknown.connection.execute("UPDATE loss SET backwards = 2")  # further losses: which were logged is not known
    assert found(unknown, "CLEAR") == []


def test_a_finite_figure_that_stands_for_losses_that_are_not_is_a_note() -> None:
    rows = backwards(logs(), nonfinite=1)
    rows.connection.execute("UPDATE logged SET returned = 'nan' WHERE first = 9")
    (finding,) = found(rows)
    assert (finding.severity, finding.ranks, finding.first_step, finding.last_step) == ("note", (0, 1), 9, 10)
    assert "the figure leaves them out" in finding.summary


def lightning(value: Callable[[float, float], float], window: int = 2, steps: int = 6) -> Rows:
    """What two ranks log under one name: `value` of a rank's own loss and of both ranks' mean."""
    rows = Rows()
    for step in range(1, steps + 1):
        for micro in range(window):
            own = [2.3456789 / (step + micro) + 0.3 * rank for rank in (0, 1)]
            for rank in (0, 1):
                rows.add("step", rank=rank, step=step)
                rows.add("reported", rank=rank, step=step, micro=micro, window=window, name="train_loss",
                         value=value(own[rank], sum(own) / 2), optimised=own[rank] / window)  # fmt: skip
    return rows


def test_lightning_that_logs_what_it_returns_or_the_ranks_mean_is_clear() -> None:
    assert found(lightning(lambda own, mean: own), "CLEAR") == []
    assert found(lightning(lambda own, mean: mean), "CLEAR") == []
    assert found(lightning(lambda own, mean: own * (1 + 2.0**-9)), "CLEAR") == []


def test_a_loss_divided_twice_is_a_warning() -> None:
    (finding,) = found(lightning(lambda own, mean: 4 * own, window=4))
    assert (finding.severity, finding.subject, finding.ranks) == ("warning", "train_loss", (0, 1))
    assert "4 times what training_step returned" in finding.summary
    assert "divided by 4 before the framework divides it by 4" in finding.summary


def test_other_exact_multiples_are_notes() -> None:
    for value in (lambda own, mean: own / 4, lambda own, mean: 2 * mean, lambda own, mean: own / 2):
        (finding,) = found(lightning(value, window=4))
        assert finding.severity == "note"


def test_what_is_no_fixed_multiple_or_seen_too_seldom_is_left_open() -> None:
    for value in (lambda own, mean: own - 0.1, lambda own, mean: 3 * own, lambda own, mean: math.nan):
        assert found(lightning(value), "INSUFFICIENT_EVIDENCE") == []
    assert found(lightning(lambda own, mean: 2 * own, steps=2), "INSUFFICIENT_EVIDENCE") == []
