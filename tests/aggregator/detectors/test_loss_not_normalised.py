"""LOSS_NOT_NORMALISED: only where every look shows undivided losses of several batches of one loader."""

from __future__ import annotations

import pytest

from kit.rows import Rows
from tdbg.aggregator.detectors import loss_not_normalised
from tdbg.aggregator.findings import Finding


def _rows(per_step: int = 4, undivided: bool = True, steps: int = 8, backwards: int | None = None, loaders: int = 1,
          watched: int = 100, batches: bool = True, ranks: int = 2) -> Rows:  # fmt: skip
    """Ranks that make each step of `per_step` batches of each of `loaders`."""
    rows = Rows()
    runs = per_step * loaders if backwards is None else backwards
    for rank in range(ranks):
        for loader in range(loaders):
            rows.add("loader", rank=rank, loader=loader, batches=per_step * steps)
        before = index = 0
        for step in range(1, steps + 1):
            for n in range(per_step if batches else 0):
                for loader in range(loaders):
                    rows.add("batch", rank=rank, step=step, loader=loader, index=index, backwards=before + n)
                index += 1
            before += runs
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=runs, watched=step <= watched)
            rows.add("loss", rank=rank, step=step, backwards=runs, undivided=undivided and step <= watched)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(loss_not_normalised)
    assert outcomes == {"LOSS_NOT_NORMALISED": outcome}
    return [f for _, f in found]


def test_summed_losses_of_several_micro_batches() -> None:
    (found,) = _found(_rows())
    assert (found.ranks, found.first_step, found.last_step, found.severity) == ((0, 1), 1, 8, "note")
    assert "4 micro-batches a step" in found.summary


def test_a_divisor_in_one_step_that_was_looked_at_clears_it() -> None:
    rows = _rows()
    rows.connection.execute("UPDATE loss SET undivided = FALSE WHERE step = 5")
    assert _found(rows, "CLEAR") == []
    assert _found(_rows(undivided=False), "CLEAR") == []


def test_unwatched_steps_say_nothing_either_way() -> None:
    assert [f.last_step for f in _found(_rows(watched=4))] == [4]
    assert _found(_rows(watched=2), "INSUFFICIENT_EVIDENCE") == []


@pytest.mark.parametrize("shape", [{"per_step": 1}, {"per_step": 1, "backwards": 2}, {"per_step": 1, "loaders": 2}])
def test_one_batch_a_step_is_no_accumulation(shape: dict[str, int]) -> None:
    """Also with several losses of one batch, or with a batch from each of two loaders."""
    assert _found(_rows(**shape), "NOT_APPLICABLE") == []


def test_several_batches_in_one_backward_are_no_micro_batches() -> None:
    assert _found(_rows(per_step=2, backwards=1), "INSUFFICIENT_EVIDENCE") == []


def test_without_batches_or_in_an_older_record_nothing_is_said() -> None:
    assert _found(_rows(batches=False), "INSUFFICIENT_EVIDENCE") == []
    rows = _rows()
    rows.connection.execute("UPDATE loss SET undivided = NULL")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []
