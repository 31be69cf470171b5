"""A batch handed to the model holds NaN or Inf, in its inputs or its labels.

Reads     input, batch, loss
Says      the ranks, the step, where in the batch, and the ids of the samples
Unknown   tensors that were left out for their size
Blind to  inputs made inside the model; without DDP or FSDP those changed after the loader while the loss is finite;
          values that are missing by design are told from faults by the loss they give
Do        look at the samples listed in the data set itself, then at what transform and collate make of them (a
          standard deviation of 0, a missing value read as NaN); refuse such a batch in the loader
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..groups import listed, unheard

CODE = "NONFINITE_INPUT"
NEEDS = {"input": 1}
PARAMS: Mapping[str, object] = {
    # A tensor that held some in most of the earlier batches, with a finite loss, holds them on purpose: a mask of
    # -inf, a missing value that the model fills in.
    "habit": 0.5,
}
SHOWN = 8
SEVERAL = "which of the step's batches it was: several were taken in it"
ROWS_FIT = "whether it is the batch itself, or what a frozen part made of it"

SQL = """
WITH hit AS (
    SELECT i.rank, i.attempt, i.step, i.source, i.path, i.dtype, i.nonfinite, i.positions, i.pid, i.rows,
           CASE WHEN l.nonfinite IS NULL THEN 1 WHEN l.nonfinite > 0 THEN 0 ELSE 2 END AS harm
    FROM input i LEFT JOIN (SELECT rank, attempt, step, max(nonfinite) AS nonfinite FROM loss GROUP BY ALL) l
      ON l.rank = i.rank AND l.attempt = i.attempt AND l.step = i.step
    WHERE i.nonfinite > 0
),
looked AS (
    SELECT rank, attempt, source, step,
           row_number() OVER (PARTITION BY rank, attempt, source ORDER BY step) - 1 AS before
    FROM (SELECT DISTINCT rank, attempt, source, step FROM input
          WHERE attempt IN (SELECT attempt FROM hit))
),
judged AS (
    SELECT h.*, count(*) FILTER (harm = 2) OVER (
               PARTITION BY h.rank, h.attempt, h.source, h.path ORDER BY h.step
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) > $habit * k.before AS habitual
    FROM hit h JOIN looked k USING (rank, attempt, source, step)
),
ranked AS (
    SELECT *, count(*) OVER (PARTITION BY rank, attempt) AS steps, max(step) OVER (PARTITION BY rank, attempt) AS last,
           CASE WHEN habitual THEN 2 ELSE harm END AS grade
    FROM judged
),
first AS (
    SELECT * FROM ranked
    QUALIFY row_number() OVER (PARTITION BY rank, attempt ORDER BY grade, step, source, path) = 1
),
good AS (
    SELECT i.rank, i.attempt, max(i.step) AS step FROM input i JOIN first f USING (rank, attempt)
    WHERE i.step < f.step AND i.nonfinite = 0 GROUP BY i.rank, i.attempt
),
taken AS (
    SELECT b.rank, b.attempt, b.pid, b.step, count(*) AS batches, any_value(b.ids) AS ids
    FROM batch b JOIN first f USING (rank, attempt, pid, step) WHERE b."end" = '' GROUP BY ALL
)
SELECT f.rank, f.attempt, f.grade, f.step, f.source, f.path, f.dtype, f.nonfinite, f.rows, f.steps, f.last,
       coalesce(t.batches, 0) AS batches,
       CASE WHEN t.batches = 1 AND f.source <> 'forward' AND len(t.ids) > 0
            THEN list_filter(list_transform(f.positions, lambda p: t.ids[p + 1]), lambda i: i IS NOT NULL)
            ELSE [] END AS ids,
       g.step AS last_good
FROM first f LEFT JOIN taken t USING (rank, attempt, pid, step) LEFT JOIN good g USING (rank, attempt)
ORDER BY f.attempt, f.grade, f.step, f.rank
"""


class Row(NamedTuple):
    """The most telling batch of one rank: `grade` 0 with a non-finite loss, 1 loss unknown, 2 finite or habitual."""

    rank: int
    attempt: int
    grade: int
    step: int
    source: str
    path: str
    dtype: str
    nonfinite: int
    rows: int
    steps: int
    last: int
    batches: int
    ids: list[int]
    last_good: int | None


SEVERITY: tuple[Severity, ...] = ("critical", "warning", "note")
SAID = ("", "; the loss of that step is not known", "; the loss stayed finite: missing values or masks may be meant")


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per attempt: the ranks of the earliest step among the most harmful."""
    for attempt in sorted({r.attempt for r in rows}):
        mine = [r for r in rows if r.attempt == attempt]
        first = mine[0]
        yield _finding([r for r in mine if (r.grade, r.step) == (first.grade, first.step)], mine)
    yield from unheard(run)


def _finding(hit: Sequence[Row], all_of: Sequence[Row]) -> Finding:
    first = hit[0]
    ranks = tuple(r.rank for r in hit)
    what = {
        "batch": "a batch taken from the loader",
        "graph": "data from outside the graph, a row for each of the batch,",
    }.get(first.source, "a batch handed to the model")
    several = any(r.source != "forward" and r.batches > 1 for r in hit)
    return Finding(
        ranks=ranks,
        first_step=first.step,
        last_good_step=first.last_good,
        last_step=max(r.last for r in all_of),
        attempt=first.attempt,
        severity=SEVERITY[first.grade],
        subject=first.path,
        summary=f"{what} on {listed(ranks)} at step {first.step} holds NaN or Inf "
        f"in {first.path or 'a tensor'} ({first.dtype}){SAID[first.grade]}",
        evidence=tuple(_evidence(hit[:SHOWN])),
        cannot_conclude=((SEVERAL,) if several else ()) + ((ROWS_FIT,) if first.source == "graph" else ()),
        next_check="look at these samples in the data set, and at what the transform and collate functions do to them",
    )


def _evidence(hit: Sequence[Row]) -> Iterator[Evidence]:
    for r in hit:
        rows = f" of a batch of {r.rows}" if r.rows > 0 else ""
        yield Evidence(r.rank, r.step, f"elements of {r.path} that are not finite{rows}", str(r.nonfinite), "0")
        if r.ids:
            yield Evidence(r.rank, r.step, "sample ids", ", ".join(map(str, r.ids[:32])))
        if r.steps > 1:
            yield Evidence(r.rank, r.last, "steps with such a batch", str(r.steps), "0")
