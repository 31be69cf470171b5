"""A parameter became NaN or Inf.

Reads     param, tensor
Says      the ranks, the step, the first such tensor of the catalogue and how many there are
Unknown   no sweep over the parameters was recorded
Blind to  steps between two sweeps; frozen parameters (a mask of -inf may be kept as one)
Do        find the update that did it: settings and state of the optimizer at this step (eps=0, a huge rate), the
          gradient before it; go back to the checkpoint before the step
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import interval, listed, unheard

CODE = "NONFINITE_PARAM"
NEEDS = {"param": 1, "tensor": 1}
PARAMS: Mapping[str, object] = {}
SHOWN = 8

SQL = """
WITH bad AS (
    SELECT p.rank, p.attempt, p.pid, p.generation, greatest(p.step, 1) AS step, p.stage,
           unnest(p.nonfinite) AS index
    FROM param p WHERE len(p.nonfinite) > 0
),
trained AS (
    SELECT b.*, t.name, b.step * 4 + CASE b.stage WHEN 'start' THEN 0 WHEN 'end' THEN 1 ELSE 2 END AS place
    FROM bad b JOIN tensor t USING (rank, attempt, pid, generation, index)
    WHERE t.trainable OR t.optimizer >= 0
),
born AS (SELECT rank, attempt, min(place) AS place, max(step) AS last FROM trained GROUP BY ALL),
earliest AS (SELECT attempt, min(place) AS place, max(last) AS last FROM born GROUP BY ALL),
good AS (
    SELECT p.attempt, max(greatest(p.step, 1)) AS step FROM param p JOIN earliest e ON e.attempt = p.attempt
    WHERE p.stage = 'end' AND greatest(p.step, 1) < e.place // 4 GROUP BY p.attempt
)
SELECT t.rank, t.attempt, t.step, t.stage, g.step AS last_good, any_value(e.last) AS last,
       list(t.name ORDER BY t.index) AS names
FROM trained t JOIN earliest e ON e.attempt = t.attempt AND e.place = t.place
LEFT JOIN good g ON g.attempt = t.attempt
GROUP BY t.rank, t.attempt, t.step, t.stage, g.step ORDER BY t.attempt, t.rank
"""

WHEN = {"start": ", before the first update", "end": "", "final": ", when the process ended"}


class Row(NamedTuple):
    """One rank at the earliest sweep at which some trained parameter was not finite."""

    rank: int
    attempt: int
    step: int
    stage: str
    last_good: int | None
    last: int
    names: list[str]


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per attempt."""
    for attempt in sorted({r.attempt for r in rows}):
        yield _finding([r for r in rows if r.attempt == attempt])
    yield from unheard(run)


def _finding(hit: Sequence[Row]) -> Finding:
    first = hit[0]
    ranks = tuple(r.rank for r in hit)
    more = f" and {len(first.names) - 1} more" if len(first.names) > 1 else ""
    return Finding(
        ranks=ranks,
        first_step=first.step,
        last_good_step=first.last_good,
        last_step=first.last,
        attempt=first.attempt,
        subject=first.names[0],
        summary=f"{first.names[0]}{more} became NaN or Inf on {listed(ranks)} at step {first.step}"
        f"{WHEN.get(first.stage, '')}",
        evidence=tuple(
            Evidence(r.rank, r.step, "parameters that are not finite", _names(r.names), "none") for r in hit[:SHOWN]
        ),
        cannot_conclude=interval(first.last_good, first.step),
        next_check="look at this step's gradient, loss scale and learning rate, and at the optimizer's eps",
    )


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
