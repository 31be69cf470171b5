"""Gradients of the last step were still there when the next backward began, and went into the next update as well.

Reads     leftover
Says      the ranks, the first such step, how many of the looked-at updates it concerns
Unknown   no two updates in a row were looked at
Blind to  what the leftovers probe is blind to
Do        call optimizer.zero_grad() once per update, on the optimizer that holds the tensors named; where the sum is
          meant (accumulation), step once per window
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import interval, listed, unheard

CODE = "GRAD_NOT_ZEROED"
NEEDS = {"leftover": 1}
PARAMS: Mapping[str, object] = {}
SHOWN = 8

SQL = """
WITH begun AS (
    SELECT rank, attempt, optimizer, min(step) AS step FROM leftover WHERE kept GROUP BY ALL
)
SELECT l.rank, l.attempt, l.optimizer, b.step, max(l.step) FILTER (l.kept),
       count(*) FILTER (l.kept), count(*), max(l.step) FILTER (NOT l.kept AND l.step < b.step),
       arg_min(l.parameter, l.step) FILTER (l.kept), count(*) FILTER (l.step >= b.step)
FROM leftover l JOIN begun b USING (rank, attempt, optimizer)
GROUP BY l.rank, l.attempt, l.optimizer, b.step ORDER BY l.attempt, b.step, l.rank, l.optimizer
"""


class Row(NamedTuple):
    """One optimizer of one rank that was stepped on old gradients."""

    rank: int
    attempt: int
    optimizer: int
    first: int
    last: int
    kept: int
    looked: int
    last_good: int | None
    parameter: str
    since: int  # updates looked at from the first on


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per attempt: the ranks on which it began first."""
    for _, members in groupby(rows, key=lambda r: r.attempt):
        several = list(members)
        yield _finding([r for r in several if r.first == several[0].first], several)
    yield from unheard(run)


def _finding(begun: Sequence[Row], all_of: Sequence[Row]) -> Finding:
    first = begun[0]
    ranks = tuple(sorted({r.rank for r in begun}))
    always = all(2 * r.kept > r.since and r.kept > 1 for r in begun)
    return Finding(
        ranks=ranks,
        first_step=first.first,
        last_good_step=first.last_good,
        last_step=max(r.last for r in all_of),
        attempt=first.attempt,
        # once may be a step that training goes on from on purpose; again and again every update repeats the last ones
        severity="critical" if always else "warning",
        subject=first.parameter,
        summary=f"{listed(ranks)}: the gradient of step {first.first - 1} was still there when the backward of step "
        f"{first.first} began, and was used again; so at {first.kept} of {first.since} updates looked at from then on",
        evidence=tuple(
            Evidence(r.rank, r.first, f"gradient of {r.parameter} when the backward began", "the bits that the update "
                     "before had used", "zero or none")
            for r in begun[:SHOWN]
        ),
        cannot_conclude=interval(first.last_good, first.first),
        next_check="call zero_grad() once between an update and the next backward",
    )  # fmt: skip
