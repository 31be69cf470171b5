"""Which of several like ranks stands apart from the others, by its own past: rank statistics and margins, no Gaussian.

Values are logarithms, `x[rank, step, series]`, NaN where a rank has none. What all ranks share (training itself) is
taken off as the median over ranks, what is a rank's own (its share of the data) as its median over the steps before.
What stands out lies farther off than any rank's did in the window before it, twice as far in the middle or where it is
a single step, and by a least factor. How often chance does that is not taken from a distribution, but from the order of
exchangeable values: k steps in a row beyond all of the n before them have probability 1 / C(n + k, k), and of single
ones the share that falls on one of R ranks is binomial with 1 / R.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy

BEFORE = 20  # steps before that a value is held against, at least; LEAST of them with a value
LEAST = 15
WINDOW = 100  # and at most: training changes
FURTHER = 2.0  # times the largest deviation of the window, in logarithms: 1.5 x seen, 2.25 x wanted
LASTING = math.log(1.5)  # smallest factor of a difference that lasts
ONCE = math.log(4.0)  # smallest factor of one that comes and goes: a single batch may be odd by itself
SOON = 5  # steps within which what begins in several tensors is one thing: all together speak first
FEWEST = 3  # events of one rank, at least


@dataclass(frozen=True)
class Apart:
    """A rank that stands apart in one series at the positions `steps`, `factors` times its usual value."""

    kind: Literal["lasting", "repeated"]
    rank: int
    series: int
    first: int
    last: int
    steps: tuple[int, ...]
    factors: tuple[float, ...]
    chance: float


def apart(x: Any, alpha: float) -> Iterator[Apart]:
    """Ranks that stand apart, with the chance of a false one at most `alpha` for each of the two kinds."""
    ranks, steps, series = x.shape
    if ranks < 3 or steps <= BEFORE:
        return
    x = numpy.where(numpy.isfinite(x).sum(0) >= 3, x, numpy.nan)  # two that differ have no majority
    tests = float(ranks * steps * series)
    held = x.copy()  # without what was found to be odd
    lasting: dict[int, list[Apart]] = {}
    events: list[tuple[int, int, int, float]] = []  # position, rank, series, deviation
    for at in range(BEFORE, steps):
        past = held[:, max(0, at - WINDOW) : at]
        seen = numpy.isfinite(past).sum(1)
        level = median(_beside(past), 1)  # of each rank beside the others
        with numpy.errstate(all="ignore"):
            reach = numpy.nanmax(numpy.abs(_beside(past - level[:, None])), axis=(0, 1), initial=0.0)
            off = _beside(x[:, at] - level)
            beyond = (numpy.abs(off) > numpy.maximum(FURTHER * reach, LASTING)) & (seen >= LEAST)
        beyond &= numpy.isfinite(held[:, at])
        for r, k in zip(*(i.tolist() for i in numpy.nonzero(beyond)), strict=True):
            sign, before, least = float(numpy.sign(off[r, k])), int(seen[r, k]), float(reach[k])
            ahead = sign * _beside(x[:, at:, k] - level[:, None, k])[r]
            run = _run(ahead, least)
            known = numpy.nonzero(numpy.isfinite(ahead[:run]))[0]
            needed = _needed(before, tests, alpha)
            # its beginning decides: a slow drift leaves every window behind in the end
            jump = float(numpy.median(ahead[known[:needed]]))
            if len(known) >= needed and jump > max(FURTHER * least, LASTING):
                factors = tuple(numpy.exp(sign * ahead[known]).tolist())
                places = tuple((at + known).tolist())
                chance = tests / math.comb(before + len(known), before)
                lasting.setdefault(r, []).append(Apart("lasting", r, k, at, places[-1], places, factors, chance))
                held[r, at : at + run, k] = numpy.nan
            elif abs(off[r, k]) > max(FURTHER * least, ONCE):
                events.append((at, r, k, float(off[r, k])))
                held[r, at, k] = numpy.nan
    for several in lasting.values():
        soon = min(a.first for a in several) + SOON
        yield min((a for a in several if a.first <= soon), key=lambda a: a.series)
    yield from _repeated([e for e in events if e[1] not in lasting], ranks, alpha)


def _beside(x: Any) -> Any:
    """Values beside the median over ranks."""
    return x - median(x, 0)


def _run(ahead: Any, least: float) -> int:
    """How many steps from the first on lie beyond; those without a value neither end nor lengthen a run."""
    within = numpy.nonzero(ahead <= least)[0]
    return int(within[0]) if len(within) else len(ahead)


def _needed(before: int, tests: float, alpha: float) -> int:
    """Steps in a row that chance makes with at most `alpha` in all tests."""
    k = FEWEST
    while tests / math.comb(before + k, k) > alpha:
        k += 1
    return k


def _repeated(events: list[tuple[int, int, int, float]], ranks: int, alpha: float) -> Iterator[Apart]:
    """A rank on which more of the single events fall than chance spreads there."""
    at_rank: dict[int, dict[int, tuple[int, float]]] = {}
    for at, rank, k, off in events:
        here = at_rank.setdefault(rank, {})
        if at not in here or abs(off) > abs(here[at][1]):
            here[at] = (k, off)
    total = sum(len(here) for here in at_rank.values())
    for rank, here in at_rank.items():
        count = len(here)
        chance = ranks * sum(math.comb(total, m) * (1 / ranks) ** m * (1 - 1 / ranks) ** (total - m)
                             for m in range(count, total + 1))  # fmt: skip
        if count >= FEWEST and chance <= alpha:
            positions = sorted(here)
            series = [here[at][0] for at in positions]
            k = max(set(series), key=series.count)
            factors = tuple(math.exp(here[at][1]) for at in positions)
            yield Apart("repeated", rank, k, positions[0], positions[-1], tuple(positions), factors, chance)


def median(x: Any, axis: int) -> Any:
    """Median without NaN; NaN where there is nothing else. Sorts, as nanmedian warns of empty slices."""
    ordered = numpy.sort(x, axis=axis)  # NaN last
    count = numpy.isfinite(x).sum(axis)
    low = numpy.maximum(count - 1, 0) // 2
    high = count // 2
    at = [numpy.expand_dims(numpy.minimum(i, x.shape[axis] - 1), axis) for i in (low, high)]
    a, b = (numpy.take_along_axis(ordered, i, axis).squeeze(axis) for i in at)
    return numpy.where(count > 0, (a + b) / 2, numpy.nan)
