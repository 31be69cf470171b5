"""Whether a series of block minima rises, how steadily, how fast: Mann-Kendall, Theil-Sen, and what a leak looks like.

Minima over blocks of steps, not single samples: memory of one step hangs together with that of the step before, and on
healthy series of that kind (AR 0.8) Mann-Kendall raises 15 % false alarms at a nominal 0.1 % over samples, 0.4 % over
minima of ten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

TREND_Z = 3.09  # one-sided p of 0.001
LOWER_Z = 1.645  # the slope's 95 % lower bound: what is projected should rather be late than early
FEWEST_BLOCKS = 8  # with 7 no trend at all reaches z > 3.09; 8 do when each lies above the one before (p = 1 / 8!)
# What is kept at each step makes nearly every block rise by about the same. Allocators' arenas and caches take their
# memory in few large pieces: between those most blocks stay where they were.
STEADY_SHARE = 0.9  # of the blocks rise by
STEADY_PART = 0.25  # of the mean rise, at least
# With 12 blocks a random walk without drift, the hardest series that is no leak, looks like one in 0.5 % of cases
STEADY_BLOCKS = 12


@dataclass(frozen=True)
class Trend:
    """A rising series: `slope` in bytes a step, the cautious one that is projected."""

    z: float
    slope: float
    growth: int


@dataclass(frozen=True)
class Rise:
    """The last part of a series, in which it rises block after block: from `first` on, by `growth` bytes."""

    z: float
    slope: float  # bytes a step, the median
    first: int  # step
    begin: int  # usage at that step
    growth: int
    blocks: int


def trend(values: Sequence[int], steps: Sequence[int]) -> Trend | None:
    """The trend of block minima, None unless it is certain, steady and still going on in the last third."""
    z = mann_kendall_z(values)
    if z <= TREND_Z:
        return None
    middle, lower = theil_sen(values, steps)
    third = max(3, len(values) // 3)
    late, _ = theil_sen(values[-third:], steps[-third:])
    # a cache that fills rises ever more slowly: below half the whole window's pace it is levelling off
    if lower <= 0 or late < middle / 2:
        return None
    return Trend(z, min(lower, late), values[-1] - values[0])


def steady_rise(values: Sequence[int], steps: Sequence[int]) -> Rise | None:
    """The longest last part that rises as what is kept from step to step does; None without one.

    The whole series, its last half and its last 12 blocks are tried, so that growth which began late is seen as well,
    in blocks as they are and in larger ones: what is kept at every tenth step only rises in blocks of ten.
    """
    for size in (1, 2, 4):
        lows, at = _larger(values, size), list(steps[::size])[: len(values) // size]
        for count in (len(lows), len(lows) // 2, STEADY_BLOCKS):
            if STEADY_BLOCKS <= count <= len(lows) and (found := _rise(lows, at, len(lows) - count)) is not None:
                return found
    return None


def _larger(values: Sequence[int], size: int) -> list[int]:
    """Minima over blocks of so many blocks."""
    return [min(values[i : i + size]) for i in range(0, len(values) - size + 1, size)]


def _rise(values: Sequence[int], steps: Sequence[int], begin: int) -> Rise | None:
    found = trend(values[begin:], steps[begin:])
    if found is None or not _steady(values[begin:]):
        return None
    while begin and _goes_on(values, begin):
        begin -= 1
    middle, _ = theil_sen(values[begin:], steps[begin:])
    return Rise(found.z, middle, steps[begin], values[begin], values[-1] - values[begin], len(values) - begin)


def _steady(values: Sequence[int]) -> bool:
    rises = [b - a for a, b in pairwise(values)]
    mean = (values[-1] - values[0]) / len(rises)
    return sum(r >= STEADY_PART * mean for r in rises) >= STEADY_SHARE * len(rises)


def _goes_on(values: Sequence[int], begin: int) -> bool:
    """Whether the block before `begin` belongs to the same rise."""
    mean = (values[-1] - values[begin]) / (len(values) - 1 - begin)
    return STEADY_PART * mean <= values[begin] - values[begin - 1] <= mean / STEADY_PART


def mann_kendall_z(values: Sequence[int]) -> float:
    """Mann-Kendall statistic with continuity correction and ties; above 0 for a rise, 0 for fewer than 3 values."""
    n = len(values)
    if n < 3:
        return 0.0
    score = sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])
    ties = sum(t * (t - 1) * (2 * t + 5) for t in (list(values).count(v) for v in set(values)))
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if variance <= 0 or score == 0:
        return 0.0
    return (score - math.copysign(1, score)) / math.sqrt(variance)


def theil_sen(values: Sequence[int], steps: Sequence[int]) -> tuple[float, float]:
    """Median of the slopes of all pairs, and its lower bound (Sen 1968) at LOWER_Z; (0, 0) when no step passed."""
    slopes = sorted(
        (b - a) / (steps[j] - steps[i])
        for i, a in enumerate(values)
        for j, b in enumerate(values[i + 1 :], i + 1)
        if steps[j] > steps[i]
    )
    if not slopes:
        return 0.0, 0.0
    n = len(values)
    width = LOWER_Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return median(slopes), slopes[max(0, min(len(slopes) - 1, int((len(slopes) - width) / 2)))]
