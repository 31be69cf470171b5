"""The loss left the range that it had over the last steps: for a step, or for good.

Reads     loss, batch, input, optim, rng
Says      the ranks (one, if 80 % of the excess is its own), the first step outside, how far, whether it came back, the
          samples of that step, and what changed near it; a statistical rule, so inferred, with its chance
Unknown   fewer than 26 comparable steps in an attempt; losses that vary so much that 40 times as much is nothing new
Blind to  steps of an unusual batch size or number of backwards; a rise within a few times the range of the steps
          before; changes below a twentieth of the first losses
Do        look at the samples listed first; run the step again from the last checkpoint before it; if the same samples
          give the same loss it is the data, else the state (rate, scale, optimizer). `tdbg timeline RUN` shows what
          changed at this step
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from ..comparable import COMPARABLE
from ..departures import BEFORE, FIRST, SKIPPED, Departure, departures, reaches
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..groups import listed, unheard
from ..median import median
from ..replay import REPLAY, Item, kit
from ..surroundings import CHANGES, Changed, coincides, raised
from ..wording import counted

CODE = "LOSS_SPIKE"
NEEDS = {"loss": 1}
PARAMS: Mapping[str, object] = {
    "before": 9,  # as departures.LEVEL: steps whose samples are read are those that stand above so many before
    "steps": 16,  # of an attempt whose samples are read, those that stand out most
    "ranks": 8,  # and ranks of each
}
ALPHA = 0.002  # a fifth of the 1 % that a run's statistical rules share: half for the mean, half for single ranks
LEAST = math.log(1.5)  # a smaller factor is no spike, however quiet the run
SMALL = 0.05  # of the first losses: what is below it counts by difference, not by factor
START = 5  # first losses, which tell the scale
SHARE = 0.8  # of the excess on one rank: it is named alone
SETTLE = 3  # steps after it that a running run must have: what rises may stay, which is another statement
OFTEN = 3  # times that a run does the like: then it is like that, as one with a rare kind of batch
DIVERGED = (
    10.0  # times the largest of the first losses and staying: far worse than untrained, which other data seldom explain
)
SEEN = 40.0  # a factor that a rule should see; where it would not, it says so
SHOWN = 8

SQL = f"""
WITH {COMPARABLE},
own AS (SELECT rank, attempt, step, value / (abs(median(value) OVER (PARTITION BY rank, attempt)) + 1e-30) AS level
        FROM value),
peak AS (SELECT attempt, step, max(level) AS high, avg(level) AS mean FROM own GROUP BY attempt, step),
sought AS (
    SELECT attempt, step, rank FROM (
        SELECT attempt, step FROM (
            SELECT attempt, step, greatest(high / max(high) OVER w, mean / max(mean) OVER w) AS rise FROM peak
            WINDOW w AS (PARTITION BY attempt ORDER BY step ROWS BETWEEN $before PRECEDING AND 1 PRECEDING))
        WHERE rise > 1 QUALIFY row_number() OVER (PARTITION BY attempt ORDER BY rise DESC, step) <= $steps
    ) JOIN own USING (attempt, step)
    QUALIFY row_number() OVER (PARTITION BY attempt, step ORDER BY level DESC, rank) <= $ranks
),
{REPLAY},
{CHANGES}
SELECT v.attempt, v.rank, list(v.step ORDER BY v.step) AS steps, list(v.value ORDER BY v.step) AS "values",
       CASE WHEN v.rank = min(v.rank) OVER (PARTITION BY v.attempt)
            THEN (SELECT list(item) FROM kit WHERE item.attempt = v.attempt) END AS items,
       any_value(c.rates) AS rates, any_value(c.scales) AS scales, any_value(c.passes) AS passes
FROM value v LEFT JOIN changes c USING (attempt) GROUP BY v.attempt, v.rank ORDER BY v.attempt, v.rank
"""


class Row(NamedTuple):
    """One rank's losses of an attempt: the mean over the step's backwards, None where it is not comparable."""

    attempt: int
    rank: int
    steps: list[int]
    values: list[float | None]
    items: list[Item] | None  # for replaying, on the first row of an attempt
    rates: Changed | None
    scales: Changed | None
    passes: list[int] | None


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """Departures of each attempt; those of a run that has many are one note."""
    enough, loud = False, 0.0
    for attempt in sorted({r.attempt for r in rows}):
        mine = [r for r in rows if r.attempt == attempt]
        steps = sorted({s for r in mine for s in r.steps})
        x = _matrix(mine, steps)
        mean = numpy.where(2 * numpy.isfinite(x).sum(1) >= len(mine), _mean(x), numpy.nan)
        judged = numpy.isfinite(mean)
        if int(judged.sum()) < SKIPPED + 2 * FIRST + BEFORE:
            continue
        enough = True
        x, mean, at = x[judged], mean[judged], [s for s, k in zip(steps, judged, strict=True) if k]
        loud = max(loud, reaches(scaled(mean[:, None])))
        yield from _of_attempt(x, mean, at, mine, run)
    if not enough:
        least = SKIPPED + 2 * FIRST + BEFORE
        yield Abstention("INSUFFICIENT_EVIDENCE", f"no attempt has {least} steps of comparable losses")
    elif loud > SEEN:
        why = f"the loss varies so much by itself that {SEEN:.0f} times as much would be nothing new"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    yield from unheard(run)


def scaled(x: Any) -> Any:
    """Logarithms of losses, but linear where they are small beside the first ones; where some are negative, all are."""
    scale = SMALL * float(numpy.nanmedian(numpy.abs(x[:START])))
    if numpy.min(x, where=numpy.isfinite(x), initial=0.0) < -scale:  # no zero that a factor could refer to
        scale = float(numpy.nanmedian(numpy.abs(x[: SKIPPED + 2 * FIRST + BEFORE])))
    return numpy.arcsinh(x / max(scale, 1e-300))


def _mean(x: Any) -> Any:
    count = numpy.isfinite(x).sum(1)
    return numpy.where(count > 0, numpy.nansum(x, 1) / numpy.maximum(count, 1), numpy.nan)


def _matrix(rows: Sequence[Row], steps: Sequence[int]) -> Any:
    x = numpy.full((len(steps), len(rows)), numpy.nan)
    place = {s: i for i, s in enumerate(steps)}
    for column, r in enumerate(rows):
        x[[place[s] for s in r.steps], column] = [math.nan if v is None else v for v in r.values]
    return x


def _of_attempt(x: Any, mean: Any, steps: Sequence[int], rows: Sequence[Row], run: RunFacts) -> Iterator[Finding]:
    found = list(departures(scaled(mean[:, None]), ALPHA / 2, LEAST))
    if len(rows) > 1:
        begun = [range(d.first - 1, d.last + 2) for d in found]
        of_ranks = departures(scaled(x), ALPHA / 2, LEAST)
        found += [d for d in of_ranks if not any(d.first in one for one in begun)]
    if run.status == "running":
        found = [d for d in found if d.returned or d.first + SETTLE < len(steps)]
    found.sort(key=lambda d: d.first)
    if found:
        often = len(found) >= OFTEN
        yield from (
            _finding(d, x, mean, steps, rows, often or d.alike >= OFTEN - 1) for d in (found[:1] if often else found)
        )


def _finding(d: Departure, x: Any, mean: Any, steps: Sequence[int], rows: Sequence[Row], often: bool) -> Finding:
    attempt, everyone = rows[0].attempt, [r.rank for r in rows]
    level = median(x[max(0, d.first - 9) : d.first], 0)
    excess = x[d.peak] - level
    named = _concerned(excess, everyone)
    first, peak = steps[d.first], steps[d.peak]
    changes = (rows[0].rates, rows[0].scales, rows[0].passes)
    up = raised(rows[0].rates, first)
    beyond = float(numpy.nanmax(mean[d.first : d.last + 1])) > DIVERGED * float(numpy.nanmax(mean[:START])) > 0
    stays = d.lasting and not (up or beyond)
    severity: Severity = "note" if stays or often else "warning"
    near = tuple(coincides(changes, attempt, first))
    replay = tuple(kit(rows[0].items or (), attempt, first, named))
    usual, there = float(numpy.nanmean(level)), float(mean[d.peak])
    who = f"the loss of {listed(named)}" if len(named) < len(everyone) else "the loss of all ranks"
    factor = f"{there / usual:.3g} times" if usual > 0 else f"{there:.4g} after"
    return Finding(
        ranks=named,
        first_step=first,
        last_good_step=steps[d.before] if d.before >= 0 else None,
        last_step=steps[d.last],
        attempt=attempt,
        subject="loss",
        severity=severity,
        evidence_state="INFERRED",
        summary=f"{who} leaves its range at step {first}{_how(d, steps)}: the mean over ranks is {factor} the level of "
        f"{usual:.4g} before at step {peak}{_also(near, often)}; chance of this in a healthy run at most "
        f"{max(d.chance, 1e-9):.1g}",
        evidence=(
            *(
                Evidence(everyone[r], peak, "loss", f"{x[d.peak, r]:.6g}", f"about {level[r]:.6g}, its level before")
                for r in _order(excess, everyone, named)[:SHOWN]
            ),
            Evidence(
                None, first, "range of the loss before", f"times {math.exp(d.reach):.4g} of its level, either way"
            ),
            *near,
            *replay,
        ),
        cannot_conclude=(
            "that its samples are bad: the same ones may be harmless to other weights",
            *(("whether the data or the task changed on purpose: the loss rises and stays",) if stays else ()),
            *(
                ("the samples of that step: none were recorded",)
                if not any("sample" in e.metric for e in replay)
                else ()
            ),
        ),
        next_check="run this step again with these samples from the last checkpoint before it"
        if not (up or d.lasting)
        else "look at what the program changes at this step: learning rate, data, weights of the loss",
    )


def _concerned(excess: Any, everyone: Sequence[int]) -> tuple[int, ...]:
    """The rank that has nearly all of the excess; else those with at least half of a fair part of it."""
    over = numpy.where(numpy.isfinite(excess) & (excess > 0), excess, 0.0)
    total = float(over.sum())
    if total <= 0:
        return tuple(everyone)
    if float(over.max()) >= SHARE * total:
        return (everyone[int(over.argmax())],)
    named = tuple(r for r, o in zip(everyone, over, strict=True) if o >= 0.5 * total / len(everyone))
    return tuple(everyone) if len(named) >= SHARE * len(everyone) else named


def _order(excess: Any, everyone: Sequence[int], named: Sequence[int]) -> list[int]:
    """Columns of the ranks that are named, those with most excess first."""
    columns = [c for c, r in enumerate(everyone) if r in set(named) and math.isfinite(excess[c])]
    return sorted(columns, key=lambda c: -float(excess[c]))


def _how(d: Departure, steps: Sequence[int]) -> str:
    if not d.lasting:
        return " and returns" if d.returned else ""
    return f" for {counted(d.last - d.first + 1, 'step')}" if d.returned else f" and stays to step {steps[d.last]}"


def _also(near: Sequence[Evidence], often: bool) -> str:
    said = "; it comes again and again" if often else ""
    if near:
        said += f"; coincides with: {near[0].metric} {near[0].value}"
    return said
