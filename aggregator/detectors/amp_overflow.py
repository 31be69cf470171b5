"""The loss scaler keeps skipping steps: the scale does not settle, or no scale helps.

Reads     step, loss
Says      the ranks, from which step on, how many updates were lost, the scale of each
Unknown   no loss scaler was in use; fewer steps than it takes to settle
Blind to  fused optimizers on an accelerator, where whether a step was skipped stays on the device
Do        `tdbg timeline RUN` shows the scale by step. Skips that never end: a scaler made anew in the loop, or state
          that was not restored with scaler.load_state_dict. Skips at any scale: the gradients are NaN without a scale
          too; run one step in float32. Overflow now and then is how a scaler works
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..groups import listed, split, unheard

CODE = "AMP_OVERFLOW"
NEEDS = {"step": 1, "loss": 1}
PARAMS: dict[str, object] = {
    # After an overflow GradScaler.update() multiplies the scale by its backoff factor, below 1 always. A step skipped
    # at a scale that is not smaller than the one skipped before it means that no update took place in between, or that
    # the scaler is another one. Two may come of a loop that updates every second step; three in a row do not.
    "stuck": 3,
}
SHOWN = 8
# A scale that has settled grows twofold after `growth_interval` good steps, so at most one step in interval + 1 is
# lost: one in 2,001 by default, one in eleven where it is set to 10. One in four is far beyond any of them.
LOST_SHARE = 0.25
LEAST_STEPS = 40  # after the first good one; ten losses, so that the bound is not crossed by two or three
LOW = 3  # skips at a scale below 1: the gradients themselves hold NaN or Inf, or would need none

SQL = """
WITH taken AS (
    SELECT s.rank, s.attempt, s.step, bool_or(s.skipped) AS skipped, max(l.scale) AS scale
    FROM step s LEFT JOIN (SELECT rank, attempt, step, max(scale) AS scale FROM loss GROUP BY ALL) l
      USING (rank, attempt, step)
    WHERE s.attempt IN (SELECT attempt FROM loss WHERE scale <> 1 UNION SELECT attempt FROM step WHERE skipped)
    GROUP BY ALL
), apart AS (
    SELECT attempt, step, count(*) FILTER (skipped) AS skipping, count(*) AS ranks
    FROM taken GROUP BY attempt, step
), marked AS (
    SELECT t.*, skipped AND lag(skipped) OVER w AND scale >= lag(scale) OVER w AS same,
           min(step) FILTER (NOT skipped) OVER (PARTITION BY t.rank, t.attempt) AS good,
           a.skipping > 0 AND a.skipping < a.ranks AS parted
    FROM taken t JOIN apart a USING (attempt, step) WINDOW w AS (PARTITION BY rank, attempt ORDER BY step)
), island AS (  -- a skip whose scale has fallen begins a new row
    SELECT *, count(*) FILTER (NOT coalesce(same, FALSE)) OVER (PARTITION BY rank, attempt ORDER BY step) AS streak
    FROM marked
), sized AS (SELECT *, count(*) FILTER (skipped) OVER (PARTITION BY rank, attempt, streak) AS length FROM island)
SELECT rank, attempt, count(*), count(*) FILTER (skipped), min(step) FILTER (skipped), max(step) FILTER (skipped),
       min(step) FILTER (skipped AND length >= $stuck), coalesce(max(length), 0),
       min(step) FILTER (skipped AND scale < 1), count(*) FILTER (skipped AND scale < 1),
       count(*) FILTER (step > good), count(*) FILTER (step > good AND skipped),
       min(step) FILTER (step > good AND skipped), min(step) FILTER (parted), count(*) FILTER (parted),
       coalesce(bool_or(skipped) FILTER (parted AND step = f), FALSE), arg_min(scale, step) FILTER (skipped),
       arg_max(scale, step) FILTER (skipped)
FROM (SELECT *, min(step) FILTER (parted) OVER (PARTITION BY attempt) AS f FROM sized)
GROUP BY rank, attempt ORDER BY attempt, rank
"""


class Row(NamedTuple):
    """One rank's steps under a loss scaler in one attempt."""

    rank: int
    attempt: int
    steps: int
    skips: int
    first: int | None  # of the skipped ones
    last: int | None
    stuck: int | None  # first step of a row of skips in which the scale did not fall
    longest: int  # of such rows
    low: int | None  # first step skipped at a scale below 1
    lows: int
    after: int  # steps after the first that was not skipped
    lost: int  # of them, skipped
    first_lost: int | None
    parted: int | None  # first step that some ranks skipped and others did not
    partings: int
    skipped_then: bool  # whether this rank skipped the first of those
    scale: float | None  # of the first skip
    last_scale: float | None


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """At most one finding per attempt about scales, and one about ranks that did not skip together."""
    if not rows:
        yield Abstention("NOT_APPLICABLE", "no loss scaler was in use")
        return
    for _, members in groupby(rows, key=lambda r: r.attempt):
        several = list(members)
        if any(r.parted is not None for r in several):
            yield _parted(several)
        for kind in (_stuck, _useless, _often):
            found = kind(several)
            if found is not None:
                yield found
                break
    yield from unheard(run)


def _stuck(rows: Sequence[Row]) -> Finding | None:
    hit = [r for r in rows if r.stuck is not None]
    if not hit:
        return None
    first = min(r.stuck or 0 for r in hit)
    r = hit[0]
    return _finding(hit, first, f"the loss scale stays at {r.scale:g} while step after step is skipped, {r.skips} of "
                    f"{r.steps} steps in all: the scaler is not updated, or is made anew")  # fmt: skip


def _useless(rows: Sequence[Row]) -> Finding | None:
    hit = [r for r in rows if r.lows >= LOW]
    if not hit:
        return None
    r = hit[0]
    return _finding(hit, min(r.low or 0 for r in hit), f"{r.lows} steps were skipped at a loss scale below 1 (down to "
                    f"{r.last_scale:g}): the gradients are not finite at any scale")  # fmt: skip


def _often(rows: Sequence[Row]) -> Finding | None:
    hit = [r for r in rows if r.after >= LEAST_STEPS and r.lost > LOST_SHARE * r.after]
    if not hit:
        return None
    r = hit[0]
    return _finding(hit, min(r.first_lost or 0 for r in hit), f"{r.lost} of {r.after} steps were skipped after the "
                    "loss scale had been found")  # fmt: skip


def _finding(hit: Sequence[Row], first: int, what: str) -> Finding:
    ranks = tuple(r.rank for r in hit)
    severity: Severity = "critical" if all(r.skips == r.steps for r in hit) else "warning"
    return Finding(
        ranks=ranks,
        first_step=first,
        last_good_step=first - 1 if first > 1 else None,
        last_step=max(r.last or 0 for r in hit),
        attempt=hit[0].attempt,
        severity=severity,
        subject="loss scale",
        summary=f"{listed(ranks)}: {what}",
        evidence=tuple(
            Evidence(r.rank, r.last, "steps skipped; loss scale at the first and the last of them",
                     f"{r.skips} of {r.steps}; {r.scale:g}, {r.last_scale:g}", "a scale that falls until it fits")
            for r in hit[:SHOWN]
        ),
        next_check="keep one scaler for the whole run and call its update() once after each step",
    )  # fmt: skip


def _parted(rows: Sequence[Row]) -> Finding:
    first = min(r.parted for r in rows if r.parted is not None)
    there = {r.rank: r.skipped_then for r in rows}
    odd = split(there)
    skipping = [r for r, skipped in there.items() if skipped]
    return Finding(
        ranks=odd.odd,
        first_step=first,
        last_good_step=first - 1 if first > 1 else None,
        last_step=max(r.last or 0 for r in rows),
        attempt=rows[0].attempt,
        severity="critical",
        subject="skipped steps",
        summary=f"{listed(skipping)} skipped step {first}, the other ranks took it; so at {rows[0].partings} steps",
        evidence=tuple(
            Evidence(rank, first, "the loss scaler", "skipped" if there[rank] else "stepped", "the same on all ranks")
            for rank in odd.odd[:SHOWN]
        ),
        cannot_conclude=() if odd.decided else ("which ranks are right: no majority of them agrees",),
        next_check="under sharding use ShardedGradScaler, which lets the ranks agree; else see why gradients differ",
    )
