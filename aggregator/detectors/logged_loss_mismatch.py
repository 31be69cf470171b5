"""The loss that a trainer logged is not the loss that its training steps returned.

Reads     logged
Says      the ranks, the first such log entry, the figure there and what it should have been, which callbacks saw it
Unknown   no trainer's log was recorded; losses that are not finite; of the ranks' mean, ranks that are missing
Blind to  loops that print; differences below the rounding of half precision or of the figure's own digits
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

CODE = "LOGGED_LOSS_MISMATCH"
NEEDS = {"logged": 1}
PARAMS: Mapping[str, object] = {}
# A figure may have passed through bfloat16, which keeps 8 bits: rounding twice is off by at most 2**-8. Sums in
# float32 are far closer.
RELATIVE = 2.0**-8
SHOWN = 8

SQL = """
SELECT rank, attempt, step, first, global_step, updates, returned, magnitude, entered, stands, history, callbacks
FROM logged ORDER BY attempt, step, rank, seq
"""


class Row(NamedTuple):
    """One log entry of one rank."""

    rank: int
    attempt: int
    step: int
    first: int
    global_step: int
    updates: int
    returned: float
    magnitude: float
    entered: float
    stands: float
    history: float
    callbacks: str


class Odd(NamedTuple):
    """A log entry that is not what it should be, and the figure that it should hold."""

    row: Row
    figure: float
    expected: float
    changed: bool  # after the trainer handed it over; else it was handed over so


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per attempt. Entries without numbers to compare leave the question open."""
    unknown = 0
    for attempt in sorted({r.attempt for r in rows}):
        entries: dict[tuple[int, int], list[Row]] = defaultdict(list)
        for r in rows:
            if r.attempt == attempt:
                entries[r.step, r.global_step].append(r)
        odd, good = [], []
        for (step, _), mine in entries.items():
            mean, scale = _mean(mine, run.world_size)
            unknown += math.isnan(mean)
            found = [o for r in mine if (o := _odd(r, mean, scale)) is not None]
            odd.extend(found)
            if not found and not math.isnan(mean):
                good.append(step)
        if odd:
            yield _finding(odd, good, len(entries))
    if unknown:
        yield Abstention("INSUFFICIENT_EVIDENCE", f"of {unknown} log entries the ranks' mean loss is not known")
    yield from unheard(run)


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
