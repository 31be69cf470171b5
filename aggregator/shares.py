"""On which rank single tensors keep leaving their share of the gradient: what whole batches do is taken off first.

A hard batch makes all gradients of its rank larger, each tensor's by a slope of its own. So a tensor's deviation is
taken beside the median of the same rank's other tensors at the same step, times the slope that tensor has on all ranks.
An event lies beyond 1.5 times what any rank's did in the window before it, while no other tensor of the rank left its
range: experts that are chosen, or layers that a rare sample reaches, move several. Events are set aside on every rank
alike, and judged in two ways, each with half of the allowed chance. First by which rank each falls on: given how many a
tensor has, the share of one of R ranks is binomial with 1 / R, whatever tails, jumps and levels the shares have, as
long as the ranks' data are alike. Then by how far they lie out, as in `excess`: of three ranks eight events are needed
where only their number counts, three or four where each is many times the range of all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy

from .excess import FAR, chance_of, largest, rows_of
from .median import median

WINDOW = 100  # steps before that a value is held against, at most: training changes
BEFORE = 20  # and at least; LEAST of them with a value
LEAST = 15
AGAIN = 10  # steps after which the usual place is taken anew: sorting for every step would cost seconds
OTHERS = 3  # tensors beside the one that is judged: the median of fewer follows each of them
FURTHER = 1.5  # times the largest deviation of the window: of 200 normal tensors the farthest stays below 1.4
LEAST_FACTOR = math.log(2.0)
# Of a share that hardly varied so far, at least: it may yet. So wide that four doublings on one of three ranks within
# 70 steps are not enough (chance 0.002) and five are (0.0002).
RANGE = math.log(1.1)
FEWEST = 3  # events of one tensor, at least


@dataclass(frozen=True)
class Share:
    """Events of one rank in one series, at the positions `steps`, `factors` times the usual share."""

    rank: int
    series: int
    steps: tuple[int, ...]
    factors: tuple[float, ...]
    chance: float


def shares(x: Any, nothing: float, alpha: float) -> Iterator[Share]:
    """Ranks with a tensor that leaves its share too often, each once, with chance at most `alpha` of any false one.

    `x[rank, step, series]` are logarithms, series 0 the whole. `nothing` is the logarithm that stands for zero.
    """
    ranks, steps, series = x.shape
    if ranks < 3 or steps <= BEFORE or series <= 1 + OTHERS:
        return
    own = numpy.where(x[:, :, 1:] > nothing + 1, x[:, :, 1:], numpy.nan)
    # beside the peers and the whole run's usual place: an error of the place is then the same at all steps
    off = own - median(own - median(own, 0), 1)[:, None]
    off -= median(off, 0)
    others = _others(off)
    # before it is held beside its peers: among batches that differ much, one odd value moves the median of few ranks
    own = _off(own - _slopes(off, others) * others)
    found: dict[int, Share] = {}
    for r, k, positions, chance in (*_counted(own, events := _events(own)), *_far(own, events)):
        if 2 * chance <= alpha and (r not in found or 2 * chance < found[r].chance):
            factors = tuple(numpy.exp(own[r, positions, k]).tolist())
            found[r] = Share(r, 1 + k, tuple(positions), factors, 2 * chance)
    yield from found.values()


def _counted(own: Any, events: Any) -> Iterator[tuple[int, int, list[int], float]]:
    """Rank, series and positions of events, with the chance that so many of the series fall on one rank."""
    ranks = len(own)
    several = numpy.nonzero(events.sum((0, 1)) >= FEWEST)[0].tolist()
    counted = [(k, _separate(events[:, :, k], own[:, :, k])) for k in several]
    counted = [(k, rows) for k, rows in counted if sum(map(len, rows)) >= FEWEST]
    for k, rows in counted:
        total = sum(map(len, rows))
        for r, positions in enumerate(rows):
            if len(positions) >= FEWEST:
                yield r, k, positions, len(counted) * ranks * _binomial(total, len(positions), 1 / ranks)


def _far(own: Any, events: Any) -> Iterator[tuple[int, int, list[int], float]]:
    """The same for events above the usual share, with the chance that they lie so far out."""
    ranks, _, series = own.shape
    for r, k in zip(*(i.tolist() for i in numpy.nonzero(events.sum(1) >= FEWEST)), strict=True):
        reach, seen, records, far = RANGE, 0, 0.0, dict[int, float]()
        peers = largest(numpy.abs(own[numpy.arange(ranks) != r, :, k]), 0.0).tolist()
        for at, deviation in enumerate(own[r, :, k].tolist()):
            reach = max(reach, peers[at])
            if math.isnan(deviation):
                continue
            records += 1 / (seen + 1) if seen >= LEAST else 0.0
            if seen < LEAST or deviation <= max(FAR * reach, LEAST_FACTOR):
                reach = max(reach, abs(deviation))
            elif events[r, at, k]:
                far[at] = deviation / reach
            seen += 1
        if len(far) >= FEWEST:
            yield r, k, list(far), ranks * series * chance_of(rows_of(far), records / ranks)


def _off(x: Any) -> Any:
    """Deviations beside the median over ranks from what they usually are on the same rank."""
    x = numpy.where(numpy.isfinite(x).sum(0) >= 3, x, numpy.nan)  # two that differ have no majority
    places = x - median(x, 0)
    off = x.copy()
    off[:, :BEFORE] -= median(places[:, :BEFORE], 1)[:, None]
    for at in range(BEFORE, x.shape[1], AGAIN):
        off[:, at : at + AGAIN] -= median(places[:, max(0, at - WINDOW) : at], 1)[:, None]
    # once more: among ranks of unlike places it depends on the place how far one that moves leaves the median
    return off - median(off, 0)


def _others(x: Any) -> Any:
    """Median over the other series at the same place; NaN where there are too few."""
    ordered = numpy.sort(x, axis=2)  # NaN last
    count = numpy.isfinite(x).sum(2, keepdims=True)
    half = count // 2
    low, mid, high = (numpy.take_along_axis(ordered, numpy.clip(half + d, 0, x.shape[2] - 1), 2) for d in (-1, 0, 1))
    odd = numpy.where(x < mid, mid + high, numpy.where(x > mid, low + mid, low + high)) / 2
    even = numpy.where(x <= low, mid, low)
    return numpy.where(count > OTHERS, numpy.where(count % 2 == 1, odd, even), numpy.nan)


def _slopes(x: Any, others: Any) -> Any:
    """How each series follows the others: least absolute deviations over all ranks and steps, so ranks stay alike."""
    slopes = numpy.zeros(x.shape[2])
    for k in range(x.shape[2]):
        a, b = others[:, :, k].ravel(), x[:, :, k].ravel()
        kept = numpy.isfinite(a) & numpy.isfinite(b) & (a != 0)
        if kept.any():
            weight, ratio = numpy.abs(a[kept]), b[kept] / a[kept]
            order = numpy.argsort(ratio)
            total = numpy.cumsum(weight[order])
            slopes[k] = ratio[order][numpy.searchsorted(total, total[-1] / 2)]
    return slopes


def _events(x: Any) -> Any:
    """Where a single tensor of a rank lies beyond what any rank's did before."""
    ranks, steps, series = x.shape
    size = numpy.abs(x)
    plain = numpy.isfinite(x)
    farthest = numpy.zeros((steps, series))  # plain deviation of any rank
    events = numpy.zeros(x.shape, bool)
    seen = numpy.zeros((ranks, series), int)
    for at in range(steps):
        if at >= BEFORE:
            reach = farthest[max(0, at - WINDOW) : at].max(0)
            here = numpy.where(plain[:, at] & (reach > 0), size[:, at], 0.0)
            ranges = here / numpy.where(reach > 0, reach, 1.0)
            beyond = (here > numpy.maximum(FURTHER * reach, LEAST_FACTOR)) & (seen >= LEAST)
            events[:, at] = beyond & ((ranges > FURTHER).sum(1, keepdims=True) == 1)
            plain[:, at] &= ~beyond
        farthest[at] = numpy.max(size[:, at], axis=0, where=plain[:, at], initial=0.0)
        seen += plain[:, at]
        if at >= WINDOW:
            seen -= plain[:, at - WINDOW]
    return events


def _separate(events: Any, x: Any) -> list[list[int]]:
    """Positions of each rank's events, one for each time that it leaves its range: neighbours in time may be alike."""
    gap = _alike(numpy.where(events, numpy.nan, x))
    rows: list[list[int]] = []
    for r in range(len(events)):
        kept: list[int] = []
        before = -math.inf
        for at in numpy.nonzero(events[r])[0].tolist():
            if at - before > gap:
                kept.append(at)
            before = at
        rows.append(kept)
    return rows


def _alike(x: Any) -> float:
    """Steps that count as one, as in AR(1) noise with the correlation of neighbours in x[rank, step]."""
    both = x[:, 1:] * x[:, :-1]
    kept = numpy.isfinite(both)
    squares = (x[:, 1:][kept] ** 2).sum(), (x[:, :-1][kept] ** 2).sum()
    alike = min(max(float(both[kept].sum() / max(*squares, 1e-300)), 0.0), 0.999)
    return (1 + alike) / (1 - alike)


def _binomial(total: int, count: int, share: float) -> float:
    """Probability of `count` or more of `total`."""
    return sum(math.comb(total, m) * share**m * (1 - share) ** (total - m) for m in range(count, total + 1))
