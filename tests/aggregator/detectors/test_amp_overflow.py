"""AMP_OVERFLOW: a scale that settles is healthy; one that never falls, never helps or keeps losing steps is not."""

from __future__ import annotations

from collections.abc import Sequence

from kit.rows import Rows
from tdbg.aggregator.detectors import amp_overflow
from tdbg.aggregator.findings import Finding


def _rows(*ranks: Sequence[tuple[bool, float]]) -> Rows:
    """(skipped, loss scale) of each step, by rank."""
    rows = Rows()
    for rank, steps in enumerate(ranks):
        for step, (skipped, scale) in enumerate(steps, 1):
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1, skipped=skipped)
            rows.add("loss", rank=rank, step=step, backwards=1, scale=scale)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(amp_overflow)
    assert outcomes == {"AMP_OVERFLOW": outcome}
    return [f for _, f in found]


def _settling(skips: int, good: int, start: float = 65536.0) -> list[tuple[bool, float]]:
    return [(True, start / 2**k) for k in range(skips)] + [(False, start / 2**skips)] * good


def test_a_scale_that_settles_and_is_tried_again_now_and_then_is_clear() -> None:
    steps = _settling(9, 30) + [(True, 256.0)] + [(False, 128.0)] * 30
    assert _found(_rows(steps, steps), "CLEAR") == []


def test_a_scale_that_does_not_fall_while_steps_are_skipped_is_critical_when_no_step_is_taken() -> None:
    (found,) = _found(_rows([(True, 65536.0)] * 5, [(True, 65536.0)] * 5))
    assert (found.ranks, found.first_step, found.severity) == ((0, 1), 1, "critical")
    assert "stays at 65536" in found.summary


def test_the_first_step_of_the_row_is_named() -> None:
    steps = [(False, 1024.0)] * 6 + [(True, 1024.0)] * 3 + [(False, 512.0)] * 6
    (found,) = _found(_rows(steps, steps))
    assert (found.first_step, found.last_good_step, found.severity) == (7, 6, "warning")


def test_two_skips_at_one_scale_may_come_of_a_loop_that_updates_every_other_step() -> None:
    steps = [(True, 65536.0)] * 2 + [(True, 32768.0)] * 2 + [(False, 16384.0)] * 9
    assert _found(_rows(steps, steps), "CLEAR") == []


def test_no_scale_helps() -> None:
    (found,) = _found(_rows(_settling(21, 0), _settling(21, 0)))
    assert (found.first_step, found.severity) == (18, "critical")
    assert "below 1" in found.summary


def test_steps_that_keep_being_lost_after_the_scale_was_found() -> None:
    steps = [(False, 512.0)] + [(True, 512.0), (False, 256.0)] * 25
    (found,) = _found(_rows(steps, steps))
    assert (found.first_step, found.severity) == (2, "warning")
    assert "25 of 50" in found.summary
    rarely = [(False, 512.0)] + ([(True, 512.0)] + [(False, 256.0)] * 10) * 6
    assert _found(_rows(rarely, rarely), "CLEAR") == []


def test_ranks_that_do_not_skip_together() -> None:
    good = [(False, 1024.0)] * 8
    odd = [*good[:4], (True, 1024.0), *good[5:]]
    (found,) = _found(_rows(good, odd, good))
    assert (found.ranks, found.first_step, found.severity) == ((1,), 5, "critical")
    (found,) = _found(_rows(good, odd))
    assert found.ranks == (0, 1)
    assert "no majority" in found.cannot_conclude[0]


def test_without_a_scaler_it_does_not_apply() -> None:
    assert _found(_rows([(False, 1.0)] * 5), "NOT_APPLICABLE") == []
