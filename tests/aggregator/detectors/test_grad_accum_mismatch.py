"""GRAD_ACCUM_MISMATCH: leftovers that leak, odd windows, a declared number, gradients that no update used."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kit.rows import Rows
from tdbg.aggregator.detectors import grad_accum_mismatch
from tdbg.aggregator.findings import Finding

Window = Sequence[int]  # the pass of each micro-batch


def _rows(windows: Sequence[Window], per_batch: int = 1, ranks: int = 2, discarded: dict[int, int] | None = None,
          declared: float | None = None, batches: bool = True) -> Rows:  # fmt: skip
    """Steps of both ranks, each a list of the passes that its micro-batches came from."""
    rows = Rows()
    for rank in range(ranks):
        index: dict[int, int] = {}
        backwards = 0
        for step, window in enumerate(windows, 1):
            for iterator in window if batches else ():
                at = index[iterator] = index.get(iterator, -1) + 1
                rows.add("batch", rank=rank, step=step, iterator=iterator, index=at, samples=4, backwards=backwards)
                backwards += per_batch
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=per_batch * len(window),
                     discarded=(discarded or {}).get(step, 0))  # fmt: skip
        for iterator in index if batches else ():
            rows.add("batch", rank=rank, step=len(windows), iterator=iterator, index=index[iterator] + 1, samples=0,
                     end="StopIteration", backwards=backwards)  # fmt: skip
        if declared is not None:
            rows.add("declared", rank=rank, step=1, value=declared, source="Accelerator",
                     key="gradient_accumulation_steps")  # fmt: skip
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(grad_accum_mismatch)
    assert outcomes == {"GRAD_ACCUM_MISMATCH": outcome}
    return [f for _, f in found]


def _passes(passes: int, windows: int, size: int = 4, last: int = 0) -> list[Window]:
    """Windows that end with their pass, the last one short where `last` says so."""
    return [w for p in range(passes) for w in [[p] * size] * windows + ([[p] * last] if last else [])]


def test_micro_batches_left_over_that_go_into_the_next_passs_first_step() -> None:
    windows = [[0] * 4] * 5 + [[0, 0, 1, 1, 1, 1]] + [[1] * 4] * 5 + [[1, 1, 2, 2, 2, 2]] + [[2] * 4] * 5
    (found,) = _found(_rows(windows))
    assert (found.ranks, found.first_step, found.last_good_step, found.severity) == ((0, 1), 6, 5, "warning")
    assert "6 micro-batches, 4 are usual" in found.summary


@pytest.mark.parametrize("last", [0, 1, 3])
def test_a_short_last_window_is_clear(last: int) -> None:
    assert _found(_rows(_passes(3, 5, last=last)), "CLEAR") == []


def test_a_first_window_that_is_stepped_on_too_early() -> None:
    (found,) = _found(_rows([[0], *_passes(1, 6)]))
    assert (found.first_step, found.severity) == (1, "warning")
    assert "middle of a pass" in found.summary


def test_a_number_that_changes_with_the_pass_is_a_schedule() -> None:
    assert _found(_rows([*[[0] * 4] * 6, *[[1] * 2] * 12]), "CLEAR") == []


def test_a_number_that_varies_all_the_time_is_a_note() -> None:
    (found,) = _found(_rows([[0] * n for n in (4, 4, 3, 4, 5, 4, 4, 3, 4, 4, 5, 3, 4, 2)]))
    assert found.severity == "note"


def test_windows_that_count_on_over_the_end_of_a_pass_are_clear() -> None:
    windows = [[0] * 4] * 4 + [[0, 0, 1, 1]] + [[1] * 4] * 4
    assert _found(_rows(windows), "CLEAR") == []


def test_several_losses_for_each_batch_are_no_windows() -> None:
    assert _found(_rows(_passes(3, 6, size=1), per_batch=2), "CLEAR") == []


def test_a_declared_number_that_no_step_keeps_to() -> None:
    (found,) = _found(_rows(_passes(1, 12, size=1), declared=4.0))
    assert (found.first_step, found.severity) == (1, "warning")
    assert "accumulate 4 backwards a step, and steps are taken after 1" in found.summary
    (found,) = _found(_rows(_passes(1, 12, size=1), declared=4.0, batches=False))
    assert found.first_step == 1


def test_a_declared_number_that_is_kept_is_clear_also_where_passes_are_shorter() -> None:
    assert _found(_rows(_passes(3, 5, last=2), declared=4.0), "CLEAR") == []
    assert _found(_rows(_passes(6, 0, last=3), declared=4.0), "CLEAR") == []


def test_what_one_training_was_told_is_not_held_against_the_next_one_in_the_process() -> None:
    rows = _rows(_passes(1, 12, size=1), declared=4.0)
    rows.add("declared", rank=0, step=3, value=1.0, source="Other", key="gradient_accumulation_steps")
    rows.add("declared", rank=1, step=3, value=1.0, source="Other", key="gradient_accumulation_steps")
    assert _found(rows, "CLEAR") == []


def test_a_source_that_told_several_numbers_says_that_there_were_several_trainings() -> None:
    rows = _rows([*_passes(1, 4), *_passes(1, 12, size=1)], declared=4.0)
    for rank in range(2):
        for step, value in ((1, 1.0), (5, 3.0), (9, 1.0)):
            rows.add("declared", rank=rank, step=step, value=value, source="Other", key="gradient_accumulation_steps")
    assert _found(rows, "CLEAR") == []


def test_a_loop_of_its_own_after_a_training_that_kept_to_its_number() -> None:
    windows = [*_passes(1, 4), *[[1 + n] for n in range(12)]]
    assert _found(_rows(windows, declared=4.0, batches=False), "CLEAR") == []


def test_leftovers_that_are_thrown_away() -> None:
    windows = [[0] * 4] * 5 + [[0, 0, 1, 1, 1, 1]] + [[1] * 4] * 5
    (found,) = _found(_rows(windows, discarded={6: 2}))
    assert (found.first_step, found.severity) == (6, "warning")
    assert "2 backward(s) at the end of a pass were thrown away" in found.summary


def test_a_batch_that_is_left_out_is_a_note_and_a_method_that_always_does_is_nothing() -> None:
    windows = [*_passes(1, 5, size=1), [0, 0], *_passes(1, 5, size=1)]
    assert [f.severity for f in _found(_rows(windows, discarded={6: 1}))] == ["note"]
    twice = _rows(_passes(1, 12, size=1), per_batch=2, discarded=dict.fromkeys(range(1, 13), 1))
    assert _found(twice, "CLEAR") == []


def test_too_little_is_known() -> None:
    assert _found(_rows(_passes(1, 12), batches=False), "INSUFFICIENT_EVIDENCE") == []
