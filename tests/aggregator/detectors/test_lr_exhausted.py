"""LR_EXHAUSTED: lr that is gone for good while updates go on, and schedules that end as they should."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from kit.rows import Rows
from tdbg.aggregator.detectors import lr_exhausted
from tdbg.aggregator.findings import Finding

STEPS = 40


def _rows(lr: Callable[[int], float], steps: int = STEPS, optimizers: int = 1, scheduler: str = "",
          position: Callable[[int], int] = lambda s: s - 1, end: int = -1, ranks: int = 2) -> Rows:  # fmt: skip
    """`lr(step)` of optimizer 0; a row only on a change, as the probe writes them."""
    rows = Rows()
    for rank in range(ranks):
        before = None
        for step in range(1, steps + 1):
            rows.add("step", rank=rank, step=step, optimizers=optimizers, backwards=1)
            if lr(step) != before:
                before = lr(step)
                rows.add("optim", rank=rank, step=step, class_name="AdamW", lr=before)
            if scheduler:
                rows.add("schedule", rank=rank, step=step, position=position(step), end=end, class_name=scheduler)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(lr_exhausted)
    assert outcomes == {"LR_EXHAUSTED": outcome}
    return [f for _, f in found]


def test_lr_that_reached_zero_long_before_the_end() -> None:
    (found,) = _found(_rows(lambda s: max(0.0, 0.1 * (1 - (s - 1) / 20))))
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((0, 1), 21, 20, 40)
    assert (found.severity, found.evidence_state) == ("warning", "OBSERVED")
    assert "20 of 40 steps" in found.summary


def test_a_remainder_too_small_to_change_anything_counts_as_none() -> None:
    assert [f.first_step for f in _found(_rows(lambda s: 0.1 if s < 30 else 1e-9))] == [30]
    assert _found(_rows(lambda s: 0.1 if s < 30 else 1e-6), "CLEAR") == []


def test_a_scheduler_that_moves_on_with_every_rank_is_named() -> None:
    (found,) = _found(_rows(lambda s: max(0.0, 1 - 4 * (s - 1) / 40), scheduler="LambdaLR", position=lambda s: 4 * s))
    assert (found.first_step, "moves on by 4 a step" in found.summary) == (11, True)


@pytest.mark.parametrize(
    "lr",
    [
        lambda s: 0.1 * min(s - 1, 10) / 10,  # warm-up from zero
        lambda s: 0.1 * (STEPS - s) / STEPS,  # linear decay whose last step is 0
        lambda s: 0.05 * (1 + math.cos(math.pi * s / STEPS)),
        lambda s: 0.0,  # frozen on purpose from the start
        lambda s: 0.1 * 0.1 ** (s // 10),  # decays by steps, to 1e-5 of the first
        lambda s: 0.0 if 10 <= s < 30 else 0.1,  # rests for a while
        lambda s: 0.0 if s >= 39 else 0.1,
    ],
)
def test_schedules_that_end_with_training_or_start_from_nothing(lr: Callable[[int], float]) -> None:
    assert _found(_rows(lr), "CLEAR") == []


def test_a_short_run_needs_three_steps_and_a_long_one_a_share() -> None:
    assert [f.first_step for f in _found(_rows(lambda s: 0.1 if s < 8 else 0.0, steps=10))] == [8]
    assert _found(_rows(lambda s: 0.1 if s < 197 else 0.0, steps=200), "CLEAR") == []
    assert [f.first_step for f in _found(_rows(lambda s: 0.1 if s < 191 else 0.0, steps=200))] == [191]


def test_a_group_that_is_frozen_on_purpose_neither_hides_nor_makes_one() -> None:
    rows = _rows(lambda s: 0.1 if s < 20 else 0.0)
    for rank in (0, 1):
        rows.add("optim", rank=rank, step=1, group=1, class_name="AdamW", lr=0.0)
    assert [f.first_step for f in _found(rows)] == [20]
    for rank in (0, 1):
        rows.add("optim", rank=rank, step=1, group=2, class_name="AdamW", lr=0.01)
    assert _found(rows, "CLEAR") == []


def test_a_plateau_that_was_lowered_that_far_is_advice() -> None:
    (found,) = _found(_rows(lambda s: 0.1 if s < 20 else 1e-8, scheduler="ReduceLROnPlateau"))
    assert found.severity == "note"


def test_updates_of_other_optimizers_do_not_count() -> None:
    rows = _rows(lambda s: 0.1 if s < 20 else 0.0)
    for rank in (0, 1):
        rows.add("optim", rank=rank, step=1, optimizer=1, class_name="SGD", lr=0.01)
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []
    rows.connection.execute("UPDATE step SET optimizers = 2")
    assert [(f.first_step, f.subject) for f in _found(rows)] == [(20, "lr of AdamW")]


def test_a_cosine_past_its_lowest_point_is_advice() -> None:
    lr = lambda s: 0.05 * (1 + math.cos(math.pi * (s - 1) / 25)) + 0.001  # noqa: E731
    (found,) = _found(_rows(lr, scheduler="CosineAnnealingLR", end=25))
    assert (found.severity, found.first_step, found.ranks) == ("note", 27, (0, 1))
    assert _found(_rows(lr, scheduler="CosineAnnealingLR", end=40), "CLEAR") == []
    assert _found(_rows(lambda s: 0.1, scheduler="LinearLR", end=5), "CLEAR") == []


def test_without_a_number_nothing_is_said() -> None:
    assert _found(_rows(lambda s: math.nan), "INSUFFICIENT_EVIDENCE") == []
    assert _found(_rows(lambda s: 0.1, steps=2), "INSUFFICIENT_EVIDENCE") == []


def test_a_record_that_does_not_hold_where_schedules_end() -> None:
    rows = _rows(lambda s: 0.1, scheduler="CosineAnnealingLR", end=20)
    rows.connection.execute('UPDATE schedule SET "end" = NULL')
    assert _found(rows, "CLEAR") == []
