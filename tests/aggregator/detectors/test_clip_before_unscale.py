"""CLIP_BEFORE_UNSCALE: a threshold that met gradients still multiplied by the loss scale."""

from __future__ import annotations

from kit.rows import Rows
from tdbg.aggregator.detectors import clip_before_unscale
from tdbg.aggregator.findings import Finding


def _rows(scaled: dict[int, list[int]], scale: float | None = 1024.0, steps: int = 6) -> Rows:
    """Two ranks that clip at every step; `scaled` lists the steps of each at which nothing had been unscaled."""
    rows = Rows()
    for rank in range(2):
        for step in range(1, steps + 1):
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1)
            rows.add("clip", rank=rank, step=step, max_norm=2.0, norm_type=2.0, norm=300.0, calls=1,
                     scaled=int(step in scaled.get(rank, [])))  # fmt: skip
            if scale is not None:
                rows.add("loss", rank=rank, step=step, backwards=1, scale=scale)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(clip_before_unscale)
    assert outcomes == {"CLIP_BEFORE_UNSCALE": outcome}
    return [f for _, f in found]


def test_every_step_of_all_ranks() -> None:
    every = list(range(1, 7))
    (found,) = _found(_rows({0: every, 1: every}))
    assert (found.ranks, found.first_step, found.last_good_step, found.severity) == ((0, 1), 1, None, "warning")
    assert "2 came to 0.00195" in found.summary


def test_from_a_step_on_and_on_one_rank() -> None:
    (found,) = _found(_rows({1: [4, 5, 6]}))
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((1,), 4, 3, 6)


def test_clipping_after_unscaling_is_clear() -> None:
    assert _found(_rows({}), "CLEAR") == []


def test_a_scale_of_one_multiplies_nothing() -> None:
    assert _found(_rows({0: [1, 2], 1: [1, 2]}, scale=1.0), "NOT_APPLICABLE") == []


def test_a_scale_that_was_not_read_counts() -> None:
    assert [f.first_step for f in _found(_rows({0: [2]}, scale=None))] == [2]


def test_without_clipping_it_does_not_apply() -> None:
    rows = Rows().add("step", rank=0, step=1).add("loss", rank=0, step=1, scale=8.0)
    assert _found(rows, "NOT_APPLICABLE") == []
