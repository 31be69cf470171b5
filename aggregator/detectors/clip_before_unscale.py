"""Gradients were clipped while they were still multiplied by the loss scale: the threshold meant another size.

Reads     clip, loss, step
Says      the ranks, the first such step, the threshold and what it came to after unscaling
Unknown   no gradient was clipped while a loss scaler was in use
Blind to  norms clipped by hand; several optimizers of which only some were unscaled in a step
Do        call scaler.unscale_(optimizer) between backward() and clip_grad_norm_; a trainer's own clipping option does
          so by itself
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard

CODE = "CLIP_BEFORE_UNSCALE"
NEEDS = {"step": 1}
PARAMS: Mapping[str, object] = {}
SHOWN = 8

# A scale of 1 multiplies nothing. Where the scale is not known (an accelerator, an unwatched step) it counts as one.
SQL = """
WITH each AS (
    SELECT c.rank, c.attempt, c.step, c.max_norm, c.norm_type, c.norm, c.calls, coalesce(l.scale, 2) AS scale,
           c.scaled > 0 AND coalesce(l.scale, 2) <> 1 AS bad, l.scale IS NOT NULL AND l.scale <> 1 AS used
    FROM clip c LEFT JOIN (SELECT rank, attempt, step, max(scale) AS scale FROM loss GROUP BY ALL) l
      USING (rank, attempt, step)
)
SELECT rank, attempt, min(step) FILTER (bad), max(step) FILTER (bad), count(*) FILTER (bad), count(*),
       arg_min(max_norm, step) FILTER (bad), arg_min(scale, step) FILTER (bad), arg_min(norm, step) FILTER (bad),
       bool_or(used), arg_min(norm_type, step) FILTER (bad)
FROM each GROUP BY rank, attempt ORDER BY attempt, rank
"""


class Row(NamedTuple):
    """One rank's clipping in one attempt; what concerns scaled gradients is None where there were none."""

    rank: int
    attempt: int
    first: int | None
    last: int | None
    bad: int
    steps: int
    threshold: float | None
    scale: float | None
    norm: float | None
    used: bool  # a loss scale was in force in some step with a clipping
    norm_type: float | None


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per attempt."""
    if not any(r.used or r.bad for r in rows):
        yield Abstention("NOT_APPLICABLE", "no gradient was clipped under a loss scale")
        return
    for attempt in sorted({r.attempt for r in rows}):
        hit = [r for r in rows if r.attempt == attempt and r.bad]
        if hit:
            yield _finding(hit)
    yield from unheard(run)


def _finding(hit: Sequence[Row]) -> Finding:
    first = min(hit, key=lambda r: (r.first or 0, r.rank))
    ranks = tuple(r.rank for r in hit)
    threshold, scale = first.threshold or 0.0, first.scale or 1.0
    what = "norm" if first.norm_type else "value"
    return Finding(
        ranks=ranks,
        first_step=first.first,
        last_good_step=None if first.bad == first.steps or not first.first or first.first == 1 else first.first - 1,
        last_step=max(r.last or 0 for r in hit),
        attempt=first.attempt,
        severity="warning",
        subject="gradient clipping",
        summary=f"{listed(ranks)}: gradients were clipped while multiplied by the loss scale, in {first.bad} of "
        f"{first.steps} steps with clipping: the threshold {threshold:g} came to {threshold / scale:.3g} of the "
        f"gradients' own {what} at step {first.first}",
        evidence=tuple(
            Evidence(
                r.rank, r.first, "threshold, loss scale", f"{r.threshold:g}, {r.scale:g}", "clipping after unscale_"
            )
            for r in hit[:SHOWN]
        ),
        cannot_conclude=("whether the threshold was chosen for scaled gradients on purpose",),
        next_check="call scaler.unscale_(optimizer) before clipping",
    )
