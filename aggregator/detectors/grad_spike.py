"""The gradient left the range that it had over the last steps: all of it, or single tensors; for a step, or for good.

Reads     grad (stage local, else reduced), clip, tensor, loss, batch, input, optim, rng
Says      the ranks whose own gradients show it, the tensor that stands out most or none for the whole, the first step,
          how far, whether it came back, whether the loss is ordinary there; a statistical rule, so inferred
Unknown   fewer than 32 comparable watched steps of one cadence, and no clipping call that tells the norm
Blind to  steps between two passes; single tensors of models of which each pass sees a part, and of ranks beyond the
          first 16; tensors that hold less than a 256th of the gradient; what falls
Do        run the step again from the last checkpoint with the samples listed; if it comes again it is the batch, else
          look at the state of the optimizer; clip the norm
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy

from ..comparable import COMPARABLE
from ..departures import BEFORE, FIRST, SKIPPED
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..gradientseries import Event, Series, clip_events, gradient_events
from ..groups import interval, listed, unheard
from ..reductions import CATALOGUE
from ..replay import REPLAY, Item, kit
from ..surroundings import CHANGES, Changed, coincides, raised

CODE = "GRAD_SPIKE"
NEEDS = {"grad": 1, "tensor": 1}
PARAMS: Mapping[str, object] = {
    "most_norms": 2_000_000,  # of single tensors that are judged: about a second; of a larger run the whole alone
    "of_ranks": 16,  # of which single tensors are read: what all ranks show, these do
    "before": 9,  # as departures.LEVEL: steps whose samples are read are those that stand above so many before
    "steps": 16,  # of an attempt whose samples are read, those that stand out most
    "ranks": 8,  # and ranks of each
}
OFTEN = 3  # times that a run does the like: then it is like that
SETTLE = 3  # steps after it that a running run must have
SEEN = 40.0  # a factor that a rule should see; where it would not, it says so
ORDINARY = 1.5  # times its level or less: the loss takes no part
SHOWN = 8

SQL = f"""
WITH {COMPARABLE},
catalogue AS ({CATALOGUE}),
seen AS (
    SELECT g.rank, g.attempt, g.step, g.stage, g.tensors, g.l2, c.family,
           CASE WHEN len(g.nonfinite) = 0 AND (v.step IS NULL OR v.value IS NOT NULL)
                THEN sqrt(list_sum([x * x FOR x IN g.l2 IF x > 0])) END AS norm
    FROM grad g JOIN catalogue c USING (rank, attempt, pid, generation)
    LEFT JOIN value v ON v.rank = g.rank AND v.attempt = g.attempt AND v.step = g.step
    WHERE g.step > 0 AND ((g.stage = 'local' AND g.valid) OR (g.stage = 'reduced' AND list_max(g.l2) >= 0))
    QUALIFY row_number() OVER (PARTITION BY g.rank, g.attempt, g.step, c.family, g.stage, hash(g.tensors)
                               ORDER BY g.micro DESC, g.seq DESC) = 1
),
kind AS (  -- of large models each pass sees other tensors: only passes over the same ones are alike
    SELECT rank, attempt, family, arg_max((stage, mark), (count, stage = 'local')) AS kind
    FROM (SELECT rank, attempt, family, stage, hash(tensors) AS mark, count(*) AS count FROM seen GROUP BY ALL)
    GROUP BY ALL
),
own AS (
    SELECT s.* FROM seen s JOIN kind k USING (rank, attempt, family) WHERE (s.stage, hash(s.tensors)) = k.kind
),
bound AS (SELECT coalesce(max(len(l2)), 0) * count(*) AS norms FROM own),
risen AS (
    SELECT rank, attempt, step, (norm - max(norm) OVER w) / (median(norm) OVER w + 1e-45) AS rise
    FROM own WINDOW w AS (PARTITION BY rank, attempt, family ORDER BY step
                          ROWS BETWEEN $before PRECEDING AND 1 PRECEDING)
    QUALIFY count(norm) OVER w >= $before - 1
),
sought AS (
    SELECT attempt, step, rank FROM (
        SELECT *, max(rise) OVER (PARTITION BY attempt, step) AS top FROM risen WHERE rise > 0)
    QUALIFY dense_rank() OVER (PARTITION BY attempt ORDER BY top DESC, step) <= $steps
        AND row_number() OVER (PARTITION BY attempt, step ORDER BY rise DESC, rank) <= $ranks
),
{REPLAY},
{CHANGES},
named AS (
    SELECT c.family, t.attempt, t.rank, list(t.name ORDER BY t.index) AS names FROM tensor t
    JOIN catalogue c USING (rank, attempt, pid, generation) WHERE t.kind = 'param' GROUP BY ALL
),
clipped AS (
    SELECT attempt, list(step ORDER BY step) AS steps, list(norm ORDER BY step) AS norms FROM (
        SELECT c.attempt, c.step, median(CASE WHEN v.step IS NULL OR v.value IS NOT NULL
                   THEN c.norm / CASE WHEN c.scaled > 0 THEN s.scale ELSE 1 END END) AS norm
        FROM clip c LEFT JOIN value v ON v.rank = c.rank AND v.attempt = c.attempt AND v.step = c.step
        LEFT JOIN (SELECT rank, attempt, step, max(scale) AS scale FROM loss GROUP BY ALL) s
          ON s.rank = c.rank AND s.attempt = c.attempt AND s.step = c.step
        WHERE c.norm_type > 0 AND isfinite(c.norm) AND c.step > 0 GROUP BY ALL) GROUP BY attempt
),
losses AS (
    SELECT attempt, list(step ORDER BY step) AS steps, list(value ORDER BY step) AS "values" FROM (
        SELECT attempt, step, avg(value) AS value FROM value WHERE value IS NOT NULL GROUP BY ALL) GROUP BY attempt
),
lines AS (
    SELECT attempt, family, rank, list(step ORDER BY step) AS steps, list(norm ORDER BY step) AS norms,
           CASE WHEN dense_rank() OVER (PARTITION BY attempt, family ORDER BY rank) <= $of_ranks
                     AND (SELECT norms FROM bound) <= $most_norms
                THEN list(l2 ORDER BY step) END AS l2,
           any_value(tensors) AS tensors, row_number() OVER (PARTITION BY attempt ORDER BY family, rank) = 1 AS first
    FROM own GROUP BY attempt, family, rank
)
SELECT l.attempt, l.family, l.rank, l.steps, l.norms, l.l2, l.tensors, n.names,
       CASE WHEN l.first THEN (SELECT list(item) FROM kit WHERE item.attempt = l.attempt) END AS items,
       c.rates, c.scales, c.passes,
       CASE WHEN l.first THEN p.steps END AS clip_steps, CASE WHEN l.first THEN p.norms END AS clip_norms,
       o.steps AS loss_steps, o."values" AS losses
FROM lines l LEFT JOIN named n USING (attempt, family, rank) LEFT JOIN changes c ON c.attempt = l.attempt
LEFT JOIN clipped p ON p.attempt = l.attempt LEFT JOIN (SELECT * FROM losses) o ON o.attempt = l.attempt AND l.first
ORDER BY l.attempt, l.family, l.rank
"""


class Row(NamedTuple):
    """One rank's gradients of an attempt and tensor catalogue; what belongs to the attempt is on its first row."""

    attempt: int
    family: int
    rank: int
    steps: list[int]
    norms: list[float | None]  # of all tensors; None where the step is not comparable
    l2: list[list[float]] | None  # [step][tensor]; None where there are too many
    tensors: list[int]  # catalogue index of each; empty: all from 0 on
    names: list[str] | None
    items: list[Item] | None
    rates: Changed | None
    scales: Changed | None
    passes: list[int] | None
    clip_steps: list[int] | None
    clip_norms: list[float | None] | None
    loss_steps: list[int] | None
    losses: list[float] | None


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """The first of what departs, and up to two further ones; of a run that has many the first as a note."""
    enough, loud = False, 0.0
    for attempt in sorted({r.attempt for r in rows}):
        mine = [r for r in rows if r.attempt == attempt]
        events: list[Event] = []
        for family in dict.fromkeys(r.family for r in mine):
            series = Series.of([r for r in mine if r.family == family])
            enough = enough or series.judged
            loud = max(loud, series.loudness)
            events += gradient_events(series)
        first = mine[0]
        if first.clip_steps and first.clip_norms:
            enough = enough or len(first.clip_steps) >= SKIPPED + 2 * FIRST + BEFORE
            everyone = tuple(sorted({r.rank for r in mine}))
            events += clip_events(first.clip_steps, first.clip_norms, everyone, events)
        if run.status == "running":
            events = [e for e in events if e.returned or e.after >= SETTLE]
        events.sort(key=lambda e: e.first)
        often = len(events) > OFTEN
        for event in events[:1] if often else events:
            yield _finding(event, mine[0], often or event.alike >= OFTEN - 1, len({r.rank for r in mine}))
    if not enough:
        why = f"no attempt has {SKIPPED + 2 * FIRST + BEFORE} comparable steps with gradients of one cadence"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    elif loud > SEEN:
        why = f"the gradient norm varies so much by itself that {SEEN:.0f} times as much would be nothing new"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    yield from unheard(run)


def _finding(event: Event, row: Row, often: bool, ranks: int) -> Finding:
    what = f"gradient of {event.subject}" if event.subject else "gradient norm"
    who = listed(event.ranks) if len(event.ranks) < ranks else "all ranks"
    ordinary = _ordinary(row, event)
    up = raised(row.rates, event.first)
    # of a whole gradient that stays larger where the loss does too, other data or another phase is as likely
    meant = event.lasting and not event.subject and not up and not ordinary
    severity: Severity = "note" if often or meant else "warning"
    stays = f"; it stays so to step {event.last}" if event.lasting and not event.returned else ""
    stays = f"; it stays so for steps {event.first} to {event.last}" if event.lasting and event.returned else stays
    loss = {True: "; the loss is ordinary there", False: "; the loss is larger there too", None: ""}[ordinary]
    near = tuple(coincides((row.rates, row.scales, row.passes), row.attempt, event.first))
    others = f" and of {len(event.others)} more tensors" if event.others else ""
    beside = ", beside the other tensors" if event.subject else ""
    return Finding(
        ranks=event.ranks,
        first_step=event.first,
        last_good_step=event.before,
        last_step=event.last,
        attempt=row.attempt,
        subject=event.subject,
        severity=severity,
        evidence_state="INFERRED",
        summary=f"the {what}{others} on {who} leaves its range at step {event.first}: {event.factor:.3g} times its "
        f"level before{beside}{stays}{loss}{'; it comes again and again' if often else ''}; chance of this in a "
        f"healthy run at most {max(event.chance, 1e-9):.1g}",
        evidence=(
            *(Evidence(r, event.peak, what, f"{now:.4g}", f"about {level:.4g}, its level before")
              for r, now, level in event.seen[:SHOWN]),
            Evidence(None, event.first, f"range of the {what} before", f"times {math.exp(event.reach):.4g}"),
            *(Evidence(None, event.first, f"gradient of {name}", f"times {factor:.3g} of its level")
              for name, factor in event.others[:SHOWN]),
            *near,
            *kit(row.items or (), row.attempt, event.first, event.ranks),
        ),
        cannot_conclude=(
            "whether it is meant: other weights of the loss, data or phase do the same",
            *interval(event.before, event.first),
        ),
        next_check="look at what weighs the loss or this part of the model from this step on"
        if event.lasting
        else "look at this step's batch and loss weights; run it again from the last checkpoint before it",
    )  # fmt: skip


def _ordinary(row: Row, event: Event) -> bool | None:
    """Whether the mean loss at the peak is near its level of the steps before; None where it is not known."""
    values = dict(zip(row.loss_steps or (), row.losses or (), strict=True))
    before = [v for s, v in values.items() if event.first - 9 <= s < event.first]
    here = [v for s, v in values.items() if event.first <= s <= min(event.last, event.first + 4)]
    if len(before) < FIRST or not here:
        return None
    level = float(numpy.median(before))
    return None if level <= 0 else max(here) <= ORDINARY * level
