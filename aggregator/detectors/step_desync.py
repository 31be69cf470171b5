"""Ranks that reduce their gradients together took different numbers of steps, or of backwards per step.

Reads     step, tensor, event, exit, memory, batch
Says      which ranks, by how much, and from which step on; of a job that failed: who left out a batch and was through
          with the data when the others were not
Unknown   steps that were inferred; models that no wrapper couples; a running or killed run's last steps
Blind to  a step more or less that a job's end explains; ranks that Join lets run out of data
Do        every rank must call step() as often: look for a batch that one rank skips, a loop bound by its own data
          length, an early stop decided by a local number
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, split, unheard

CODE = "STEP_DESYNC"
NEEDS = {"step": 1, "tensor": 1}
SHOWN = 8
PARAMS: Mapping[str, object] = {
    "steady": 0.9,  # ranks that fill a budget of tokens vary from step to step; a fault keeps one offset
}
LEAST_STEPS = 3  # fewer could be the start or the tail of an epoch
LEAST_SHARE = 0.5  # an accumulation window cut short at an epoch's end is in the minority
LATE_STEPS = 8  # a fault that sets in late counts from there on, once there were more steps than any epoch's tail has
# Where the numbers vary on every rank: the chance that one of R like ranks has strictly the most (or the fewest) in so
# many steps is binomial with 1 / R. A hundredth of the 1 % that a run's statistical rules share.
ALPHA = 1e-4
LEAST_RATIO = 1.5  # to its peers' middle: the reduction counts ranks alike, so that is how much its samples weigh
# Within one reduction a rank can be at most one finished step ahead of a rank that died in the next one.
STOPPED_SLACK = 2

# Ranks are coupled when one set of peers reduces together (or shards one model). Backwards are compared as offsets
# from the coupled group's first rank, so that a window that varies for all of them alike is no difference.
SQL = """
WITH coupled AS (
    SELECT rank, attempt, hash(arg_max(ranks, len(ranks))) AS team
    FROM (SELECT rank, attempt, CASE WHEN sharing = 'sharded' THEN mesh ELSE peers END AS ranks
          FROM tensor WHERE sharing NOT IN ('plain', 'ignored', 'outside'))
    GROUP BY rank, attempt
),
mine AS (
    SELECT s.rank, s.attempt, c.team, s.step, max(s.backwards) AS backwards, bool_or(s.inferred) AS inferred
    FROM step s JOIN coupled c USING (rank, attempt) WHERE s.step > 0 GROUP BY ALL
),
ends AS (
    SELECT rank, attempt, team, max(step) AS last, bool_or(inferred) AS inferred FROM mine GROUP BY ALL
),
teams AS (SELECT attempt, team, min(last) AS common, min(rank) AS lead FROM ends GROUP BY ALL),
beside AS (
    SELECT m.rank, m.attempt, m.team, m.step, m.backwards, m.backwards - l.backwards AS more
    FROM mine m JOIN teams t ON t.attempt = m.attempt AND t.team = m.team AND m.step <= t.common
    JOIN mine l ON l.rank = t.lead AND l.attempt = m.attempt AND l.step = m.step
),
unequal AS (
    SELECT attempt, team, step FROM beside GROUP BY ALL HAVING min(more) <> max(more)
),
span AS (
    SELECT attempt, team, min(step) AS first, max(step) AS last, count(*) AS steps FROM unequal GROUP BY ALL
),
offset_of AS (
    SELECT b.rank, b.attempt, mode(b.more) AS more, arg_min(b.backwards, b.step) AS backwards,
           max(b.step) - min(b.step) + 1 AS steps, list(b.more) AS all_more
    FROM beside b JOIN span s ON s.attempt = b.attempt AND s.team = b.team AND b.step >= s.first
    GROUP BY b.rank, b.attempt
),
extreme AS (
    SELECT attempt, team, step, max(backwards) AS most, min(backwards) AS fewest,
           count(*) FILTER (backwards = most_of) AS at_most, count(*) FILTER (backwards = fewest_of) AS at_fewest
    FROM (SELECT b.*, max(backwards) OVER w AS most_of, min(backwards) OVER w AS fewest_of
          FROM beside b WINDOW w AS (PARTITION BY attempt, team, step))
    GROUP BY ALL
),
ahead AS (
    SELECT b.rank, b.attempt, sum(b.backwards) AS total, count(*) AS compared,
           count(*) FILTER (b.backwards = x.most AND x.at_most = 1) AS above,
           count(*) FILTER (b.backwards = x.fewest AND x.at_fewest = 1) AS below
    FROM beside b JOIN extreme x USING (attempt, team, step)
    JOIN span s ON s.attempt = b.attempt AND s.team = b.team AND b.step >= s.first
    GROUP BY b.rank, b.attempt
),
died AS (
    SELECT rank, attempt, min(ended_ns) AS ended FROM exit WHERE exit_code <> 0 AND NOT stopped_by_launcher GROUP BY ALL
),
given AS (  -- batches of training: backwards before each, so far
    SELECT b.rank, b.attempt, c.team, b.loader, b.iterator, b.index, min(b.step) AS step, max(b.backwards) AS backwards
    FROM batch b JOIN coupled c USING (rank, attempt) WHERE b."end" = '' AND b.grad_enabled GROUP BY ALL
),
shared AS (  -- those that the whole group was given, beside the rank with most
    SELECT *, max(backwards) OVER w - backwards AS fewer FROM given
    WINDOW w AS (PARTITION BY attempt, team, loader, iterator, index)
    QUALIFY count(*) OVER w = (SELECT count(*) FROM ends e WHERE e.attempt = given.attempt AND e.team = given.team)
),
latest AS (
    SELECT attempt, team, loader, max(iterator) AS iterator FROM shared GROUP BY attempt, team, loader
    QUALIFY row_number() OVER (PARTITION BY attempt, team ORDER BY count(*) DESC, loader) = 1
),
lagging AS (
    SELECT rank, attempt, arg_max(fewer, (shared.iterator, index)) AS fewer, min(step) FILTER (fewer > 0) AS since,
           count(*) AS batches
    FROM shared JOIN latest USING (attempt, team, loader) GROUP BY ALL
),
through AS (
    SELECT DISTINCT b.rank, b.attempt FROM batch b JOIN coupled c USING (rank, attempt)
    JOIN latest l ON l.attempt = b.attempt AND l.team = c.team AND l.loader = b.loader AND l.iterator = b.iterator
    WHERE b."end" <> ''
)
SELECT e.attempt, e.rank, e.team, e.last, t.common, e.inferred,
       e.attempt IN (SELECT attempt FROM event WHERE kind = 'join') AS joined,
       e.attempt IN (SELECT attempt FROM memory WHERE cuda_allocated_bytes >= 0) AS runs_ahead,
       d.rank IS NOT NULL AND d.ended = min(d.ended) OVER (PARTITION BY e.attempt) AS died_first,
       count(d.rank) OVER (PARTITION BY e.attempt) > 0 AS death_seen,
       coalesce(s.steps, 0) AS unequal, s.first, s.last AS last_unequal, coalesce(o.more, 0) AS more,
       coalesce(o.backwards, 0) AS backwards,
       coalesce(len(list_filter(o.all_more, lambda x: x = o.more)) >= $steady * len(o.all_more), TRUE) AS steady,
       coalesce(a.total, 0) AS total, coalesce(a.compared, 0) AS compared, coalesce(a.above, 0) AS above,
       coalesce(a.below, 0) AS below, coalesce(g.fewer, 0) AS fewer, g.since, coalesce(g.batches, 0) AS batches,
       h.rank IS NOT NULL AS through
FROM ends e JOIN teams t USING (attempt, team)
LEFT JOIN span s USING (attempt, team)
LEFT JOIN offset_of o ON o.rank = e.rank AND o.attempt = e.attempt
LEFT JOIN ahead a ON a.rank = e.rank AND a.attempt = e.attempt
LEFT JOIN lagging g ON g.rank = e.rank AND g.attempt = e.attempt
LEFT JOIN through h ON h.rank = e.rank AND h.attempt = e.attempt
LEFT JOIN died d ON d.rank = e.rank AND d.attempt = e.attempt
ORDER BY e.attempt, e.team, e.rank
"""


class Row(NamedTuple):
    """How far one rank came in one attempt, and how its backwards stand to those of its group."""

    attempt: int
    rank: int
    team: int  # ranks with the same number reduce together
    last: int
    common: int  # the last step that the whole group took
    inferred: bool
    joined: bool
    runs_ahead: bool  # the host does not wait for an accelerator: last steps may lie apart
    died_first: bool
    death_seen: bool
    unequal: int  # common steps at which the group's backwards differ
    first: int | None
    last_unequal: int | None
    more: int  # this rank's usual offset from the first rank of the group, from `first` on
    backwards: int
    steady: bool  # it keeps that offset
    total: int  # backwards from `first` on
    compared: int  # common steps from `first` on
    above: int  # of them, those in which it has more backwards than any other rank of the group
    below: int  # and fewer
    fewer: int  # backwards at the last batch that all were given, than the rank with most
    since: int | None  # step in which that began
    batches: int  # that all were given
    through: bool  # its latest pass over the data that all have begun has come to its end


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """Judge each coupled group of each attempt for itself."""
    if run.world_size < 2:
        yield Abstention("NOT_APPLICABLE", "a single rank has nobody to differ from")
        return
    teams: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in rows:
        teams[row.attempt, row.team].append(row)
    judged = {key: team for key, team in teams.items() if len(team) > 1}
    if not judged:
        yield Abstention("INSUFFICIENT_EVIDENCE", "no two ranks whose steps a wrapper couples were recorded")
        return
    last_attempt = max(attempt for attempt, _ in judged)
    for (attempt, _), team in judged.items():
        if any(r.inferred for r in team):
            why = "step boundaries were inferred on some rank: nothing counts its steps exactly"
            yield Abstention("INSUFFICIENT_EVIDENCE", why)
            continue
        yield from _backwards(team) if all(r.steady for r in team) else _varying(team)
        # An attempt that another one followed was stopped, whatever the run's end.
        status = run.status if attempt == last_attempt else "failed"
        counted = list(_counts(team, status))
        yield from counted or _skipped(team, status)
    yield from unheard(run)


def _counts(team: Sequence[Row], status: str) -> Iterator[Finding]:
    first = team[0]
    if first.joined or len({r.last for r in team}) == 1 or status == "running":
        return
    stopped = status != "finished"
    if stopped and (first.runs_ahead or not first.death_seen):
        return  # the last steps of a stopped job may lie apart, and nobody knows who stopped first
    far, near = max(r.last for r in team), min(r.last for r in team)
    if stopped and (far - near < STOPPED_SLACK or any(r.died_first for r in team if r.last == near)):
        return
    odd = split({r.rank: r.last for r in team})
    expected = str(odd.shared) if odd.decided else "the same on all ranks"
    # A rank that left out an update ran the backwards of two steps in one: there the numbers went apart.
    begin = first.first if first.first is not None and first.unequal <= far - near else near + 1
    yield Finding(
        ranks=odd.odd,
        first_step=begin,
        last_good_step=begin - 1 or None,
        last_step=far,
        attempt=first.attempt,
        subject="steps",
        severity="warning",
        summary=f"{listed(odd.odd)}: numbers of steps differ, from {near} to {far}",
        evidence=tuple(
            Evidence(r.rank, r.last, "steps taken", str(r.last), expected) for r in team if r.rank in odd.odd
        )[:SHOWN],
        cannot_conclude=() if odd.decided else ("which number was meant: no majority of the ranks agrees",),
        next_check="compare the number of batches on each rank, and branches that leave out a step",
    )


def _skipped(team: Sequence[Row], status: str) -> Iterator[Finding]:
    """A job that failed while some were through with the data after fewer backwards for the same batches.

    Each of their backwards was paired with the others' one before, so their steps are as many until the end comes.
    """
    behind = [r for r in team if r.fewer > 0 and r.through]
    first = next((r for r in behind if r.since is not None), None)
    if status in ("running", "finished") or team[0].joined or first is None or first.since is None:
        return
    if any(r.through != (r in behind) or (r.fewer > 0) != r.through for r in team):
        return  # others are through as well, or are behind and not through: who waits for whom is not told by this
    since = min(r.since for r in behind if r.since is not None)
    odd = split({r.rank: r.fewer for r in team})
    left = ", ".join(str(n) for n in sorted({r.fewer for r in behind}))
    yield Finding(
        ranks=odd.odd,
        first_step=since,
        last_good_step=since - 1 or None,
        last_step=max(r.last for r in team),
        attempt=team[0].attempt,
        subject="batches",
        severity="warning",
        summary=f"{listed(r.rank for r in behind)}: no backward for {left} of the {first.batches} batches that every "
        f"rank was given, first in step {since}, and through with the data when the others were not: from that step on "
        "backwards of different batches were reduced together",
        evidence=tuple(
            Evidence(r.rank, r.since, "backwards fewer than others for the same batches", str(r.fewer), "0")
            for r in behind
        )[:SHOWN],
        cannot_conclude=() if odd.decided else ("which number was meant: no majority of the ranks agrees",),
        next_check="look for a branch that leaves out a batch on one rank: all ranks must leave it out, or none",
    )


def _backwards(team: Sequence[Row]) -> Iterator[Finding]:
    first = team[0]
    if first.first is None or first.unequal < LEAST_STEPS:
        return
    late = first.unequal >= LATE_STEPS and first.unequal > LEAST_SHARE * (first.common - first.first + 1)
    if not late and first.unequal <= LEAST_SHARE * first.common:
        return
    odd = split({r.rank: r.more for r in team})
    usual = [r.backwards for r in team if r.rank not in odd.odd]
    expected = str(usual[0]) if usual else "the same on all ranks"
    counts = ", ".join(str(n) for n in sorted({r.backwards for r in team if r.rank in odd.odd}))
    yield Finding(
        ranks=odd.odd,
        first_step=first.first,
        last_good_step=first.first - 1 if first.first > 1 else None,
        last_step=first.last_unequal,
        attempt=first.attempt,
        subject="backwards",
        severity="warning",
        summary=f"{listed(odd.odd)}: {counts} backwards in step {first.first}, {expected} elsewhere; "
        f"so at {first.unequal} of {first.common} steps",
        evidence=tuple(
            Evidence(r.rank, first.first, "backwards in the step", str(r.backwards), expected)
            for r in team
            if r.rank in odd.odd
        )[:SHOWN],
        cannot_conclude=() if odd.decided else ("which number was meant: no majority of the ranks agrees",),
        next_check="compare the accumulation setting of the ranks",
    )


def _varying(team: Sequence[Row]) -> Iterator[Finding]:
    """A rank whose number is beyond all others' nearly always, where no rank keeps one."""
    steady = PARAMS["steady"]
    assert isinstance(steady, float)
    for r in team:
        peers = median(o.total for o in team if o is not r)
        times = max(r.above, r.below)
        chance = 2 * len(team) * _at_least(times, r.compared, 1 / len(team))
        ratio = max(r.total, peers) / max(min(r.total, peers), 1)
        if chance > ALPHA or times < steady * r.compared or ratio < LEAST_RATIO or r.first is None:
            continue
        which = "more" if r.above > r.below else "fewer"
        hit = tuple(sorted(o.rank for o in team)) if len(team) == 2 else (r.rank,)
        yield Finding(
            ranks=hit,
            first_step=r.first,
            last_good_step=r.first - 1 if r.first > 1 else None,
            last_step=r.last_unequal,
            attempt=r.attempt,
            subject="backwards",
            severity="warning",
            evidence_state="INFERRED",
            summary=f"{listed((r.rank,))}: {which} backwards than on any other rank in {times} of {r.compared} steps, "
            f"{r.total} in all where {peers:g} are the others' middle; the numbers vary on every rank; chance of this "
            f"at most {max(chance, 1e-9):.1g} where ranks are alike and steps independent",
            evidence=tuple(
                Evidence(o.rank, r.first, f"backwards from step {r.first} to {r.common}", str(o.total), "alike")
                for o in team
            )[:SHOWN],
            cannot_conclude=("whether the program weighs each rank's gradient by its number of samples",),
            next_check="compare the rule by which each rank cuts its batches, and divide by what all ranks took",
        )
        return


def _at_least(times: int, of: int, chance: float) -> float:
    """Chernoff's bound of the binomial upper tail: never below it, and without overflow at any length."""
    share = times / of if of else 0.0
    if share <= chance:
        return 1.0
    rest = (1 - share) * math.log((1 - share) / (1 - chance)) if share < 1 else 0.0
    return math.exp(-of * (share * math.log(share / chance) + rest))
