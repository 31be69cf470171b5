"""What changed at or just before a step: learning rate, loss scale, the pass over the data, the attempt.

Said beside a departure as what coincides with it, never as its cause. One change decides how grave a lasting one is: a
learning rate above all that the run had before. A warm restart of a schedule goes back to what the run knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from .findings import Evidence

NEAR = 3  # steps: an update at a new rate shows itself in the loss of the next step, momentum carries it on
RAISED = 1.5  # times all before: a warm-up that is still going on raises it by less in a step

# One row per attempt: learning rates from the step on that they hold for, loss scales likewise, first steps of passes
# (of the first rank: all begin theirs together).
CHANGES: Final = """
rates AS (
    SELECT attempt, list({'step': step, 'value': lr} ORDER BY step) AS rates FROM (
        SELECT attempt, greatest(step, 1) AS step, max(lr) AS lr FROM optim GROUP BY ALL) GROUP BY attempt
),
scales AS (
    SELECT attempt, list({'step': step, 'value': scale} ORDER BY step) AS scales FROM (
        SELECT attempt, step, scale, lag(scale) OVER (PARTITION BY attempt ORDER BY step) AS before FROM (
            SELECT attempt, step, max(scale) AS scale FROM loss GROUP BY ALL)) WHERE before <> scale GROUP BY attempt
),
passes AS (
    SELECT attempt, list(DISTINCT step ORDER BY step) AS passes FROM (
        SELECT attempt, min(step) AS step FROM training_batch
        WHERE rank = (SELECT min(rank) FROM loader) GROUP BY attempt, pid, loader, iterator)
    GROUP BY attempt
),
changes AS (
    SELECT attempt, r.rates, s.scales, p.passes FROM rates r FULL JOIN scales s USING (attempt)
    FULL JOIN passes p USING (attempt)
)
"""

Changed = Sequence[Mapping[str, Any]]


def raised(rates: Changed | None, step: int) -> Evidence | None:
    """The learning rate rose near this step beyond all that the attempt had before."""
    most = 0.0
    for change in rates or ():
        value = change["value"]
        if value is None or change["step"] > step:
            break
        if most > 0 and value > RAISED * most and change["step"] >= step - NEAR:
            return Evidence(None, change["step"], "learning rate", f"{value:.4g}, {value / most:.3g} times the highest "
                            "before", f"{most:.4g}")  # fmt: skip
        most = max(most, value)
    return None


def coincides(changes: tuple[Changed | None, Changed | None, Sequence[int] | None], attempt: int, step: int,
              ) -> Iterator[Evidence]:  # fmt: skip
    """Evidence of what else changed near this step."""
    rates, scales, passes = changes
    up = raised(rates, step)
    if up is not None:
        yield up
    else:
        near = [(a, b) for a, b in zip(rates or (), (rates or ())[1:], strict=False) if _near(b["step"], step)]
        jumps = [(a, b) for a, b in near if a["value"] and b["value"] and not 0.5 < b["value"] / a["value"] < RAISED]
        for a, b in jumps[-1:]:
            yield Evidence(None, b["step"], "learning rate", f"{b['value']:.4g}", f"{a['value']:.4g} before")
    for change in [c for c in scales or () if _near(c["step"], step)][-1:]:
        yield Evidence(None, change["step"], "loss scale changed to", f"{change['value']:.6g}")
    for begun in [p for p in passes or () if p > 1 and step - 1 <= p <= step]:
        yield Evidence(None, begun, "a new pass over the data began", f"at step {begun}")
    if attempt > 0:
        yield Evidence(None, None, "the run had been restarted", f"attempt {attempt}")


def _near(changed: int, step: int) -> bool:
    return step - NEAR <= changed <= step
