"""When a value leaves its own past: over time, of one series or of like ranks together. No Gaussian, no fixed noise.

Values are on a logarithmic scale, `y[step, series]`, NaN where there is none. A deviation is taken from where the
few values before lead to expect it, so trends, decays and slow wandering are followed; the range is the farthest that
any lay above it in up to 100 steps before, or half as far below. What departs lies beyond c times that range, at one
step, or with the least of STAYS steps in a row; that least one's own range is taken as half of it where it is smaller.

Chance: of deviations that are exchangeable and have at worst exponential tails on the logarithmic scale (any power law
of the values themselves), the next lies beyond c times the farthest of n with probability n! G(1 + c) / G(n + 1 + c),
G the gamma function. `c` is taken so that the tests of all steps together stay below `alpha`, half of it for either
kind: about 4 after 50 steps, whatever the noise. That neighbouring steps are alike, and the STAYS in a row nearly one
value, is not in the formula: `scripts/power` shows the rates for such noise too. What no past can tell from a fault is
a rare kind of batch that comes for the first time; so departures carry how often the run does the like elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
from numpy.lib.stride_tricks import sliding_window_view

from .median import median

LEVEL = 9  # values before, of which the median is the level: follows a decay, and four odd ones in a row don't move it
FIRST = 5  # of them at least
LAST = 3  # values before, between which the level lies: it follows at once where a decay ends
SKIPPED = 2  # first steps that are no measure: everything changes most there
BEFORE = 20  # deviations before that one is held against, at least
WINDOW = 100  # and at most: training changes
STAYS = 5  # steps in a row from which on a departure lasts
RANGE = math.log(1.1)  # a run may vary so much yet that has not so far
MARGIN = 1.5  # times the range, the least that counts: a mere record comes once in as many steps as there were
MOST = 20  # departures of one group that are told apart; of a run with more they are no event
DOWN = 0.5  # what falls, as at the beginning of training, widens the range by so much of its size
PART = 0.5  # of the range of single steps at least is that of STAYS in a row: their least value is seldom far out
HALF = 0.5  # of its largest deviation: below it a departure is over


@dataclass(frozen=True)
class Departure:
    """Positions `first` to `last` lie beyond the range; `series` the one that lies farthest out."""

    series: int
    first: int
    last: int
    peak: int  # position that lies farthest out
    lasting: bool  # STAYS steps or more, not only a peak and what falls off behind it
    returned: bool  # it came back within the range
    off: float  # deviation of the peak from the level before
    reach: float  # the range until then
    chance: float
    before: int  # last position before that had a value
    alike: int  # other positions of the run, in no way near, that lie half as far out or farther


@dataclass(frozen=True)
class Deviations:
    """What one group of series needs, computed once: by how much each value departs, and the range it spans."""

    y: Any
    level: Any  # where each value is expected
    once: Any  # y - level
    stays: Any  # the least of STAYS values from here on, from the level here
    once_far: Any  # [step] the farthest of the group
    stays_far: Any


def deviations(y: Any) -> Deviations:
    """Of `y[step, series]`."""
    level = _before(y)
    level = level + _before(y - level)  # in a steady decay all lie below the level by as much
    level = _within_the_last(y, level)  # and where it ends, no longer
    once = y - level
    ahead = numpy.concatenate([y, numpy.full((STAYS - 1, y.shape[1]), numpy.nan)])
    beyond = sliding_window_view(ahead, STAYS, axis=0) - level[:, :, None]
    known = numpy.isfinite(beyond).all(2)
    stays = numpy.where(known, beyond.min(2), numpy.nan)
    stays_far = numpy.where(known, numpy.maximum(beyond.min(2), -DOWN * beyond.max(2)), -math.inf)
    once_far = _farthest(numpy.maximum(once, -DOWN * once))
    return Deviations(y, level, once, stays, once_far, numpy.maximum(stays_far.max(1), PART * once_far))


def departures(y: Any, alpha: float, least: float) -> Iterator[Departure]:
    """Upward departures by `least` or more of series that share one range, in order, with chance `alpha` of any."""
    steps, series = y.shape
    if steps <= SKIPPED + BEFORE or not series:
        return
    d = deviations(y)
    held = numpy.arange(steps) >= SKIPPED + 2 * FIRST  # positions whose deviations make the range
    start = 0
    for _ in range(MOST):
        found = _first(d, held, start, alpha / 2, least)
        if found is None:
            return
        yield found
        # what departed is no part of the range; what lasts begins a new past
        held[max(0, found.first - STAYS + 1) : found.last + LEVEL] = False
        start = found.last + 1
        if found.lasting and not found.returned:
            return


def _first(d: Deviations, held: Any, start: int, alpha: float, least: float) -> Departure | None:
    """The first departure of either kind from position `start` on."""
    steps = len(d.y)
    best: tuple[int, Any, float] | None = None  # position, range at each, chance
    for k, off, far in ((1, d.once, d.once_far), (STAYS, d.stays, d.stays_far)):
        reach, count = _range(numpy.where(held, far, -math.inf), k)
        factor = _factors(count, steps, alpha)
        bound = numpy.maximum(factor * reach, least)
        top = _farthest(off)
        top[:start] = -math.inf
        at = numpy.nonzero(top > bound)[0]
        if len(at) and (best is None or at[0] < best[0]):
            n, c = int(count[at[0]]), float(top[at[0]] / reach[at[0]])
            best = int(at[0]), reach, min(1.0, 2 * steps * _chance(n, c))
    return None if best is None else _departure(d, *best)


def _departure(d: Deviations, at: int, ranges: Any, chance: float) -> Departure:
    """What belongs to a departure that was noticed at `at`: it may have begun before, and lasts until it returns."""
    column = int(numpy.nanargmax(numpy.where(numpy.isfinite(d.once[at]), d.once[at], -math.inf)))
    y, first = d.y[:, column], at
    while first > SKIPPED + BEFORE and d.once[first - 1, column] > MARGIN * ranges[first - 1]:
        first -= 1
    reach = float(ranges[first])
    off = y - d.level[first, column]
    back = numpy.nonzero(off[at:] <= reach)[0]
    end = at + int(back[0]) if len(back) else len(y)
    known = numpy.nonzero(numpy.isfinite(off[first:end]))[0] + first
    others = _farthest(d.once) > HALF * (d.once[at, column])
    others[: SKIPPED + 2 * FIRST] = others[first - 1 : end + LEVEL] = False
    peak = int(known[numpy.argmax(off[known])])
    last = int(known[-1])
    high = known[off[known] > HALF * off[peak]]
    earlier = numpy.nonzero(numpy.isfinite(y[:first]))[0]
    return Departure(
        series=column, first=first, last=last, peak=peak, lasting=len(high) >= STAYS, returned=bool(len(back)),
        off=float(off[peak]), reach=reach, chance=chance, before=int(earlier[-1]) if len(earlier) else -1,
        alike=int(others.sum()),
    )  # fmt: skip


def reaches(y: Any) -> float:
    """The factor that a single step must have at the end of `y` to be told from the range: what a look can see."""
    d = deviations(y)
    held = numpy.arange(len(y)) >= SKIPPED + 2 * FIRST
    reach, count = _range(numpy.where(held, d.once_far, -math.inf), 1)
    factor = _factors(count, len(y), 1e-3)
    seen = (factor * reach)[count >= BEFORE]
    return math.exp(min(float(numpy.median(seen)), 700.0)) if len(seen) else math.inf


def _before(y: Any) -> Any:
    """Median of the LEVEL values before each step; NaN with fewer than FIRST of them."""
    padded = numpy.concatenate([numpy.full((LEVEL, y.shape[1]), numpy.nan), y[:-1]])
    before = sliding_window_view(padded, LEVEL, axis=0)
    return numpy.where(numpy.isfinite(before).sum(2) >= FIRST, median(before, 2), numpy.nan)


def _within_the_last(y: Any, level: Any) -> Any:
    """The level, but not beyond what the LAST values before each step were."""
    padded = numpy.concatenate([numpy.full((LAST, y.shape[1]), numpy.nan), y[:-1]])
    last = sliding_window_view(padded, LAST, axis=0)
    low = numpy.where(numpy.isfinite(last), last, math.inf).min(2)
    high = numpy.where(numpy.isfinite(last), last, -math.inf).max(2)
    return numpy.where(low <= high, numpy.clip(level, low, high), level)


def _farthest(x: Any) -> Any:
    """The largest over the series, -inf where none has a value."""
    return numpy.max(numpy.where(numpy.isfinite(x), x, -math.inf), axis=1)


def _range(far: Any, k: int) -> tuple[Any, Any]:
    """For each step the largest of `far` in the WINDOW before, and how many there are; the last k - 1 reach into it."""
    steps = len(far)
    padded = numpy.concatenate([numpy.full(WINDOW + k - 1, -math.inf), far[: max(0, steps - k)]])
    windows = sliding_window_view(padded, WINDOW)[:steps]
    reach, count = windows.max(1), numpy.isfinite(windows).sum(1)
    return numpy.maximum(numpy.where(count > 0, reach, 0.0), RANGE), count


def _chance(n: float, c: float) -> float:
    """Probability that a value lies beyond c times the farthest of the n before them."""
    return math.exp(math.lgamma(n + 1) + math.lgamma(c + 1) - math.lgamma(n + c + 1))


@lru_cache(maxsize=4096)
def _factor(n: int, tests: int, alpha: float) -> float:
    """The least c whose chance in all tests is at most alpha, at least MARGIN."""
    if n < BEFORE:
        return math.inf
    low, high = MARGIN, 200.0
    if tests * _chance(n, low) <= alpha:
        return low
    if tests * _chance(n, high) > alpha:
        return math.inf
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if tests * _chance(n, middle) <= alpha else (middle, high)
    return high


def _factors(count: Any, tests: int, alpha: float) -> Any:
    by_count = {n: _factor(n, tests, alpha) for n in set(count.tolist())}
    return numpy.array([by_count[n] for n in count.tolist()])
