"""The loss of a backward is NaN or Inf.

Reads     loss, step, grad, param (whether any update used it), birth, labels
Says      the ranks on which it began, at which step and micro-step, the value, and the operation that gave NaN first;
          whether a batch of that step has no supervised label, of which a mean is NaN
Unknown   no rank recorded a loss
Blind to  losses that never reach backward; overflow that a loss scaler skips while it looks for its scale
Do        look at the operation named: log or division of zero, exp of a large number, half precision; clamp there or
          compute it in float32; if the loss grew for many steps before, it diverged: `tdbg metrics RUN loss`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard

CODE = "NONFINITE_LOSS"
NEEDS = {"loss": 1}
PARAMS: Mapping[str, object] = {
    # torch's GradScaler starts at 2**16 and halves: a healthy model finds its scale within a handful of skips.
    "settling": 10,
}
SHOWN = 8
LEFT_OUT = "; the program left it out of the update"
UNSEEN = "whether it began in a gradient or parameter of step {}, which were not looked at"
SPREAD = ", and on which rank: reduced gradients carry it to all"

# A non-finite loss under a loss scale whose step was skipped (or is not over yet) is forgiven, unless `settling` of
# them follow each other.
SQL = """
WITH flagged AS (
    SELECT l.rank, l.attempt, l.step, l.nonfinite > 0 AS bad, l.first_nonfinite, l.total, l.last, l.backwards,
           l.nonfinite > 0 AND l.scale <> 1 AND coalesce(s.skipped, TRUE) AS skipped
    FROM loss l LEFT JOIN (SELECT rank, attempt, step, bool_or(skipped) AS skipped FROM step GROUP BY ALL) s
      ON s.rank = l.rank AND s.attempt = l.attempt AND s.step = l.step
    WHERE l.attempt IN (SELECT attempt FROM loss WHERE nonfinite > 0)
),
streaks AS (
    SELECT *, row_number() OVER (PARTITION BY rank, attempt ORDER BY step)
            - row_number() OVER (PARTITION BY rank, attempt, skipped ORDER BY step) AS streak
    FROM flagged
),
sized AS (SELECT *, count(*) OVER (PARTITION BY rank, attempt, skipped, streak) AS length FROM streaks),
counted AS (SELECT *, bad AND (NOT skipped OR length >= $settling) AS counts FROM sized),
begun AS (
    SELECT attempt, min(step) FILTER (counts) AS step, count(DISTINCT rank) AS ranks FROM counted GROUP BY attempt
),
used AS (  -- unless an update got finite gradients everywhere and all stayed finite: then the loss was thrown away
    SELECT b.attempt FROM begun b LEFT JOIN grad g ON g.attempt = b.attempt AND g.step = b.step AND g.stage = 'reduced'
    GROUP BY b.attempt, b.ranks HAVING count(DISTINCT g.rank) < b.ranks OR bool_or(len(g.nonfinite) > 0)
    UNION SELECT p.attempt FROM param p JOIN begun b ON b.attempt = p.attempt AND p.step >= b.step
    WHERE len(p.nonfinite) > 0
    UNION SELECT c.attempt FROM counted c JOIN begun b ON b.attempt = c.attempt AND c.step = b.step + 1 WHERE c.bad
), told AS (
SELECT rank, attempt, min(step) FILTER (counts) AS first, max(step) FILTER (counts) AS last,
       count(*) FILTER (counts) AS steps, max(step) FILTER (NOT bad) AS last_finite,
       max(step) FILTER (NOT bad AND step < f) AS last_good,
       arg_min(first_nonfinite, step) FILTER (counts) AS micro, arg_min(backwards, step) FILTER (counts) AS backwards,
       CAST(arg_min(CASE WHEN isfinite(total) THEN last ELSE total END, step) FILTER (counts) AS VARCHAR) AS value,
       attempt IN (SELECT attempt FROM used) AS used,
       (attempt, min(step) FILTER (counts) - 1) IN (SELECT (attempt, step) FROM param WHERE stage = 'end') AS looked,
       (attempt, rank, min(step) FILTER (counts)) IN (
           SELECT (attempt, rank, step) FROM grad WHERE stage = 'local' AND valid
           GROUP BY attempt, rank, step HAVING max(len(nonfinite)) = 0) AS finite
FROM (SELECT *, min(step) FILTER (counts) OVER (PARTITION BY rank, attempt) AS f FROM counted)
GROUP BY rank, attempt HAVING bool_or(counts)
)
SELECT t.*, coalesce(b.op, ''), coalesce(b.shown, ''), coalesce(b.fed_by, ''), coalesce(b.near, ''),
       coalesce(b.reason, ''), coalesce(m.labels, 0), coalesce(m.ignored, 0)
FROM told t LEFT JOIN (
    SELECT * FROM birth QUALIFY row_number() OVER (PARTITION BY rank, attempt, step ORDER BY seq) = 1
) b ON b.rank = t.rank AND b.attempt = t.attempt AND b.step = t.first
LEFT JOIN (
    SELECT rank, attempt, step, max(elements) AS labels, any_value(ignored) AS ignored FROM labels
    WHERE supervised = 0 AND (  -- of an evaluation in between nothing is said
        step = 1 OR (rank, attempt, pid, loader, iterator) IN (
            SELECT (rank, attempt, pid, loader, iterator) FROM training_pass))
    GROUP BY ALL
) m ON m.rank = t.rank AND m.attempt = t.attempt AND m.step = t.first
ORDER BY t.attempt, t.first, t.rank
"""


class Row(NamedTuple):
    """One rank on which a loss was not finite."""

    rank: int
    attempt: int
    first: int
    last: int
    steps: int
    last_finite: int | None
    last_good: int | None
    micro: int
    backwards: int
    value: str
    used: bool  # an update may have taken it
    looked: bool  # the parameters were looked at after the step before
    finite: bool  # its own gradients of that step were, as those of a constant that is not
    op: str = ""  # of table birth, that of the step's first loss that is not finite
    shown: str = ""
    fed_by: str = ""
    near: str = ""
    reason: str = ""
    masked: int = 0  # labels of a batch of the step of which none is supervised; 0 where there is no such batch
    ignored: int = 0  # what marks them


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per attempt: the ranks of the earliest step."""
    for attempt in sorted({r.attempt for r in rows}):
        mine = [r for r in rows if r.attempt == attempt]
        yield _finding([r for r in mine if r.first == mine[0].first], mine, run.world_size)
    yield from unheard(run)


def _finding(born: Sequence[Row], all_of: Sequence[Row], world_size: int) -> Finding:
    first = born[0]
    ranks = tuple(r.rank for r in born)
    followed = [r for r in all_of if r.first > first.first]
    unseen = UNSEEN.format(first.first - 1) + (SPREAD if 1 < len(ranks) == world_size else "")
    masked = "; a batch of this step has no supervised label" if all(r.masked for r in born) else ""
    after = f"; {listed(r.rank for r in followed)} followed at step {followed[0].first}" if followed else ""
    return Finding(
        ranks=ranks,
        first_step=first.first,
        last_good_step=first.last_good,
        last_step=max(r.last for r in all_of),
        attempt=first.attempt,
        subject="loss",
        severity="critical" if first.used else "warning" if first.finite else "note",
        summary=f"the loss is {first.value} on {listed(ranks)} at step {first.first}{masked}{after}"
        + ("" if first.used else "; gradients and update stayed finite" if first.finite else LEFT_OUT),
        evidence=tuple(e for r in born[:SHOWN] for e in _evidence(r)),
        cannot_conclude=tuple(_open(born, unseen)),
        next_check="look at how labels are made and masked: truncated answers, a mask that is shifted"
        if masked
        else "look at this step's batch on these ranks, and at logarithms, divisions and roots in the loss",
    )


def _evidence(r: Row) -> Iterator[Evidence]:
    yield Evidence(r.rank, r.first, f"loss, micro-step {r.micro + 1} of {r.backwards}", r.value, "a finite number")
    if r.masked:
        value = f"none of {r.masked} (all are {r.ignored}, which is ignored)"
        yield Evidence(r.rank, r.first, "supervised labels in a batch of this step", value, "some")
    beside = f", next to {r.near}" if r.near else ""
    if r.shown == "result":
        yield Evidence(r.rank, r.first, "operation of the forward that gave NaN first", r.op + beside, "finite")
    elif r.shown == "input":
        given = f", given by {r.fed_by}" if r.fed_by else ""
        yield Evidence(r.rank, r.first, "operation of the forward that got NaN first", r.op + beside + given, "finite")
    elif r.shown == "root" and r.fed_by:
        yield Evidence(r.rank, r.first, "nothing that the forward kept holds NaN; it began in or after", r.fed_by)


def _open(born: Sequence[Row], unseen: str) -> Iterator[str]:
    if not born[0].looked and born[0].first > 1:
        yield unseen
    for reason in sorted({r.reason for r in born if r.reason}):
        yield f"in which operation of the forward it was born: {reason}"
