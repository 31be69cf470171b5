"""The loss that a trainer logged is not the loss that its training steps returned, or not what was optimised.

Reads     logged, loss, reported
Says      the ranks, the first such log entry, the figure there and what it should have been, which callbacks saw it; a
          multiple by the number of micro-batches or ranks that lies between what was logged and what was optimised; a
          finite figure that stands for losses that were not (a note)
Unknown   no trainer's log was recorded; of the ranks' mean, losses that are not finite and ranks that are missing; in
          Lightning, figures that are no fixed multiple of the loss
Blind to  loops that print; differences below the rounding of half precision or of the figure's own digits
Do        compare what is logged with what backward() is called on: a mean over micro-batches against a sum, a loss of
          one rank against the mean of all, a value multiplied by the number of ranks or the loss scale
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard
from ..multiples import LEAST, RELATIVE, Point, candidates, multiple, over_ranks, told, written

CODE = "LOGGED_LOSS_MISMATCH"
NEEDS = {"step": 1}
PARAMS: Mapping[str, object] = {}
SHOWN = 8

# What Lightning modules log comes with the loss of the backward that follows: times the window it is what the training
# step returned. Of a Trainer's entry the losses of the backwards are known where each of its micro-batches had one.
SQL = """
WITH own AS (
    SELECT rank, attempt, step, max(total) AS total, max(backwards) AS backwards, max(nonfinite) AS nonfinite
    FROM loss GROUP BY ALL
), summed AS (
    SELECT l.rank, l.attempt, l.seq, sum(o.total) AS total, sum(o.backwards) AS backwards, sum(o.nonfinite) AS nonfinite
    FROM logged l JOIN own o ON o.rank = l.rank AND o.attempt = l.attempt AND o.step BETWEEN l.first AND l.step
    GROUP BY ALL
)
SELECT rank, attempt, step, first, global_step, updates, returned, magnitude, entered, stands, history, callbacks,
       micros, CASE WHEN s.backwards = l.micros THEN s.total ELSE 'nan' END, coalesce(s.nonfinite, 0)::BIGINT, ''
FROM logged l LEFT JOIN summed s USING (rank, attempt, seq)
UNION ALL
SELECT rank, attempt, step, step, micro, "window", optimised * "window", abs(optimised * "window"), "value", "value",
       "value", '', 1, optimised, 0, name
FROM reported
ORDER BY attempt, step, rank, global_step
"""


class Row(NamedTuple):
    """One log entry of one rank."""

    rank: int
    attempt: int
    step: int
    first: int
    global_step: int  # Lightning: backwards of this step before this one
    updates: int  # Lightning: what the framework divides by
    returned: float
    magnitude: float
    entered: float
    stands: float
    history: float
    callbacks: str
    micros: int
    optimised: float  # losses of the backwards; NaN unknown
    nonfinite: int  # of them, those that are NaN or Inf
    name: str  # of the metric in Lightning; empty: an entry of a Hugging Face Trainer


class Odd(NamedTuple):
    """A log entry that is not what it should be, and the figure that it should hold."""

    row: Row
    figure: float
    expected: float
    changed: bool  # after the trainer handed it over; else it was handed over so


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """Entries without numbers to compare leave the question open."""
    if not rows:
        yield Abstention("INSUFFICIENT_EVIDENCE", "no trainer's log was recorded")
    for attempt in sorted({r.attempt for r in rows}):
        mine = [r for r in rows if r.attempt == attempt]
        yield from _entries([r for r in mine if not r.name], run)
        for name in sorted({r.name for r in mine} - {""}):
            yield from _metric([r for r in mine if r.name == name], run)
    yield from unheard(run)


def _entries(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """A Hugging Face Trainer's log of one attempt."""
    entries: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for r in rows:
        entries[r.step, r.global_step].append(r)
    odd, good, unknown = [], [], 0
    for (step, _), mine in entries.items():
        mean, scale = _mean(mine, run.world_size)
        unknown += math.isnan(mean)
        found = [o for r in mine if (o := _odd(r, mean, scale)) is not None]
        odd.extend(found)
        if not found and not math.isnan(mean):
            good.append(step)
    if odd:
        yield _finding(odd, good, len(entries))
    hidden = [r for r in rows if r.nonfinite and math.isfinite(r.entered)]
    if hidden:
        yield _hidden(hidden)
    windows = {r.micros / r.updates for r in rows if r.updates > 0}
    points = [Point(r.rank, r.step, 0, r.returned, r.optimised) for r in rows]
    yield from _multiple(points, round(min(windows, default=1)), run, rows[0].attempt if rows else 0, "")
    if unknown:
        yield Abstention("INSUFFICIENT_EVIDENCE", f"of {unknown} log entries the ranks' mean loss is not known")


def _metric(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """What Lightning modules logged under one name, beside what their training steps returned."""
    points = [Point(r.rank, r.step, r.global_step, r.entered, r.returned) for r in rows]
    windows = {r.updates for r in rows}
    name, window = rows[0].name, max(windows) if len(windows) == 1 else 1
    said = list(_multiple(points, window, run, rows[0].attempt, name))
    yield from said
    if not said and multiple(told(points), (1.0,)) is None and multiple(_means(points, run), (1.0,)) is None:
        yield Abstention("INSUFFICIENT_EVIDENCE", f"what was logged as {name} is no fixed multiple of the loss")


def _means(points: Sequence[Point], run: RunFacts) -> list[Point]:
    return told(over_ranks(points, run.world_size))


def _multiple(points: Sequence[Point], window: int, run: RunFacts, attempt: int, name: str) -> Iterator[Finding]:
    """One multiple that all points have, each rank's own or of the ranks' mean; `name`: the metric in Lightning."""
    known = told(points)
    factor = multiple(known, candidates(window, run.world_size))
    if factor is None and name:
        known = _means(points, run)
        factor = multiple(known, candidates(1, run.world_size))
    if factor is None or factor == 1 or len({(p.step, p.nth) for p in known}) < LEAST:
        return
    what, of = (f"what was logged as {name}", "what training_step returned") if name else (
        "what training steps returned for the log", "the losses that the backwards started from")  # fmt: skip
    twice = name and factor == window > 1
    yield Finding(
        ranks=tuple(sorted({p.rank for p in known})),
        first_step=known[0].step,
        last_step=known[-1].step,
        attempt=attempt,
        subject=name or "loss",
        severity="warning" if twice or not name else "note",
        summary=f"{what} is {written(factor)} {of}, at each of {len(known)} entries"
        + (f": it was divided by {window} before the framework divides it by {window}" if twice else ""),
        evidence=tuple(
            Evidence(p.rank, p.step, "logged loss", f"{p.logged:.6g}", f"{p.optimised:.6g}") for p in known[:SHOWN]
        ),
        cannot_conclude=("whether the other size is meant, by a weight of the loss or a sum over ranks",),
        next_check="look at what divides or multiplies the loss between the log and the backward",
    )


def _hidden(rows: Sequence[Row]) -> Finding:
    """The Trainer's filter puts the average of the steps before in the place of a loss that is NaN or Inf."""
    first = rows[0]
    ranks = sorted({r.rank for r in rows})
    return Finding(
        ranks=tuple(ranks),
        first_step=first.first,
        last_step=max(r.step for r in rows),
        attempt=first.attempt,
        subject="loss",
        severity="note",
        summary=f"the log shows a finite loss, {first.entered:.6g}, for steps {first.first} to {first.step}, while "
        f"losses were NaN or Inf on {listed(ranks)}: the figure leaves them out",
        evidence=tuple(
            Evidence(r.rank, r.step, f"losses that are NaN or Inf, of {r.micros} behind the logged {r.entered:.6g}",
                     str(r.nonfinite), "0")
            for r in rows[:SHOWN]
        ),
        next_check="set logging_nan_inf_filter=False to see them in the log",
    )  # fmt: skip


def _mean(mine: Sequence[Row], world_size: int) -> tuple[float, float]:
    """What the trainer's arithmetic gives: the ranks' mean per update, and of absolute values; NaN unknown."""
    first = mine[0]
    whole = len(mine) == world_size == len({r.rank for r in mine})
    alike = len({(r.first, r.updates) for r in mine}) == 1 and first.updates > 0
    if not (whole and alike and all(math.isfinite(r.returned) for r in mine)):
        return math.nan, math.nan
    parts = first.updates * world_size
    return math.fsum(r.returned for r in mine) / parts, math.fsum(r.magnitude for r in mine) / parts


def _odd(row: Row, mean: float, scale: float) -> Odd | None:
    """The first figure of an entry that is off; None where all that are known agree."""
    for figure in (row.stands, row.history):
        if _differ(figure, row.entered, abs(row.entered)):
            return Odd(row, figure, row.entered, True)
    if _differ(row.entered, mean, scale):
        return Odd(row, row.entered, mean, False)
    return None


def _differ(figure: float, expected: float, scale: float) -> bool:
    """Beyond rounding: in half precision, or to as many digits as the figure has."""
    if not (math.isfinite(figure) and math.isfinite(expected)):
        return False
    exponent = Decimal(repr(figure)).normalize().as_tuple().exponent
    unit = 10.0**exponent if isinstance(exponent, int) else 0.0
    return abs(figure - expected) > RELATIVE * max(scale, abs(expected)) + unit


def _finding(odd: Sequence[Odd], good: Sequence[int], entries: int) -> Finding:
    first = odd[0]
    step = first.row.step
    ranks = sorted({o.row.rank for o in odd})
    ratios = [o.figure / o.expected for o in odd if o.expected]
    steady = ratios and max(ratios) - min(ratios) <= 2 * RELATIVE * max(map(abs, ratios))
    size = f"{ratios[0]:.4g} times" if steady else "not"
    how = "was changed after the trainer handed it to its log" if first.changed else "is not the ranks' mean"
    steps = len({o.row.step for o in odd})
    return Finding(
        ranks=tuple(ranks),
        first_step=step,
        last_good_step=max((s for s in good if s < step), default=None),
        last_step=max(o.row.step for o in odd),
        attempt=first.row.attempt,
        subject="loss",
        severity="warning",
        summary=f"the logged loss is {size} what training steps returned on {listed(ranks)} from step {step} on"
        f" ({steps} of {entries} log entries): the figure {how}",
        evidence=tuple(
            Evidence(o.row.rank, o.row.step, "logged loss", f"{o.figure:.6g}", f"{o.expected:.6g}") for o in odd[:SHOWN]
        )
        + ((Evidence(first.row.rank, step, "callbacks", first.row.callbacks),) if first.row.callbacks else ()),
        cannot_conclude=("which of the callbacks changed it",) if first.changed else (),
        next_check="look for what writes to the logs: callbacks with on_log, an override of log or of training_step",
    )
