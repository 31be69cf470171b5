"""Where two series of numbers that should be equal leave each other, and whether rounding alone can do that.

The part in which both agree is the null model. Sums in another order, as of atomics or an unordered reduction, differ
by about sqrt(N) roundings for N terms; what one step leaves grows from step to step, but never by a jump, since stable
training multiplies a difference by less than 2 in a step. So a difference is a parting when it is larger than rounding
makes one, ten times larger than any before it, and stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

EPSILON = 2.0**-23  # of single precision
LOW_EPSILON = 2.0**-8  # of bfloat16, the coarser of the two half precisions
# A sum of N terms in another order errs by sqrt(N) roundings: less than this for all N below 1 / EPSILON = 8 million.
ROUNDING = math.sqrt(EPSILON)
# After steps that agreed bit for bit, noise would have had to begin just there: then sums of up to 3,000 terms are
# granted, which the difference of one single step may come from.
FIRST_ROUNDING = EPSILON**0.75
AGREED = 10  # steps bit for bit that show a program to be free of noise: with noise in half of the steps, 1 in 1,000
JUMP = 10.0  # more than three steps of growth by 2; where differences grow by themselves, three such steps more
WINDOW = 8  # steps over which that growth is taken
STAYS = 5  # steps, or as many as there are, in whose middle the difference is still that large


@dataclass(frozen=True)
class Parting:
    """The first step at which the series leave each other by a jump, and the size of it in units of the series."""

    step: int
    size: float
    before: float  # largest difference of an earlier step, in the same units


def differences(a: Mapping[int, float], b: Mapping[int, float]) -> dict[int, float]:
    """|a - b| by step where both have a value, in units of the usual size of a; where only one is finite, infinite."""
    steps = sorted(a.keys() & b.keys())
    sizes = [abs(a[s]) for s in steps if math.isfinite(a[s])]
    usual = median(sizes) if sizes else 1.0
    return {s: _apart(a[s], b[s], usual or 1.0) for s in steps}


def _apart(a: float, b: float, usual: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / usual if math.isfinite(a) and math.isfinite(b) else math.inf


def parting(apart: Mapping[int, float], low_precision: bool = False) -> Parting | None:
    """The first jump of `differences` that rounding can't make and that stays; None without one."""
    steps = sorted(apart)
    rounding = max(ROUNDING, LOW_EPSILON) if low_precision else ROUNDING
    largest, agreed = 0.0, 0
    records: list[float] = []  # the largest so far, step by step
    for at, step in enumerate(steps):
        size = apart[step]
        first = LOW_EPSILON if low_precision else FIRST_ROUNDING
        least = first if largest == 0.0 and agreed >= AGREED else rounding
        if (
            size > least
            and size > JUMP * _growth(records) ** 3 * largest
            and _stays(apart, steps[at : at + STAYS], size)
        ):
            return Parting(step, size, largest)
        largest = max(largest, size if math.isfinite(size) else 0.0)
        records.append(largest)
        agreed += size == 0.0
    return None


def _growth(records: Sequence[float]) -> float:
    """By which factor a step the largest difference has grown of late."""
    late = [r for r in records[-WINDOW - 1 :] if r > 0]
    return float((late[-1] / late[0]) ** (1 / (len(late) - 1))) if len(late) > 1 else 1.0


def _stays(apart: Mapping[int, float], steps: Sequence[int], size: float) -> bool:
    return median(min(apart[s], 1e300) for s in steps) >= min(size, 1e300) / JUMP


def within_noise(apart: Mapping[int, float], values: Mapping[int, float], low_precision: bool = False) -> bool:
    """Without a parting: whether the series end no farther apart than rounding, or than they vary from step to step."""
    steps = sorted(apart)
    if not steps:
        return False
    end = median(apart[s] for s in steps[-max(1, len(steps) // 4) :])
    if end <= (LOW_EPSILON if low_precision else ROUNDING):
        return True
    known = [values[s] for s in steps if math.isfinite(values[s])]
    usual = median(abs(v) for v in known) if known else 0.0
    moves = [abs(y - x) for x, y in pairwise(known)]
    return bool(moves and usual) and end <= median(moves) / usual
