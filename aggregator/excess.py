"""Which rank's values lie grossly beyond everything seen so far: few events are enough where they are that far off.

The order of exchangeable values alone needs many events. How far a new record lies beyond the old one says more, if
something is assumed of the tail; here, that deviations of the *logarithms* have at worst a tail with exponent 1.5,
which is an infinite variance, and far heavier than any power law of the norms themselves (which is exponential in
logarithms). Then, with n exchangeable steps before, a step's largest deviation lies beyond c times the largest before
with probability c^-1.5 / (n + 1) at most, falls on a given one of R ranks with 1 / R, and with j such events set aside
j + 1 times as often: a birth process, whose count is geometric and whose excesses log(c) are exponential. The chance of
an event sum that large is then a sum of gamma tails. What counts as excess is the smaller of two: over the rank's own
usual place beside its peers, and over the largest value of any rank up to and in this step. So neither a value that
comes back, nor a peer that has next to none, nor a growth of all ranks makes an event. Neighbouring steps are one
event.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy

EXPONENT = 1.5  # of the tail of logarithms, at worst: between one without a mean (1) and one with a variance (2)
FAR = 4.0  # times the range of logarithms up to now: twice what FURTHER asks of events that are merely counted
RANGE = math.log(1.5)  # a run may vary so much yet that has not so far
LEAST_FACTOR = math.log(4.0)
LEAST = 15  # steps before
SMALL = math.log(
    256
)  # a tensor this far below the whole gradient may be rounding noise of bfloat16 (8 bits) all through
MOST_EVENTS = 60  # the geometric sum is cut there


@dataclass(frozen=True)
class Gross:
    """Events of one rank in one series, at the positions `steps`, far beyond all other values."""

    rank: int
    series: int
    steps: tuple[int, ...]
    chance: float


def gross(x: Any, off: Any, nothing: float, alpha: float) -> Iterator[Gross]:
    """The series of each rank that lies grossly beyond all others, or the whole, with at most `alpha` of a false one.

    `x[rank, step, series]` are logarithms, `off` their deviations from the rank's own usual place beside its peers;
    series 0 is the whole, to which half of `alpha` belongs. `nothing` is the logarithm that stands for zero.
    """
    ranks, _, series = x.shape
    x = numpy.where(x > nothing + 1, x, numpy.nan)  # what has no value grows without end when it gets one
    off = numpy.where(numpy.isfinite(x) & (numpy.isfinite(x).sum(0) >= 3), off, numpy.nan)
    with numpy.errstate(all="ignore"):
        reach = _before(largest(numpy.abs(off), 0.0), RANGE)
        excess = numpy.minimum(off, x - _before(largest(x, -math.inf), -math.inf))
        possible = (excess > numpy.maximum(FAR * reach, LEAST_FACTOR)).any(1)
    found: dict[int, list[Gross]] = {}
    whole = x[:, :, 0][numpy.isfinite(x[:, :, 0])]
    floor = float(numpy.median(whole)) - SMALL if len(whole) else -math.inf
    for r, k in zip(*(i.tolist() for i in numpy.nonzero(possible)), strict=True):
        events, rate = _events(x[:, :, k], off[:, :, k], r, floor)
        tests = 2 * ranks * (1 if k == 0 else series - 1)
        chance = tests * chance_of(rows_of(events), rate / ranks) if events else 1.0
        if chance <= alpha:
            found.setdefault(r, []).append(Gross(r, k, tuple(events), chance))
    for several in found.values():  # ordered by series: a single one says more than the whole, of many the whole does
        yield several[-1 if len(several) <= 2 else 0]


def largest(x: Any, otherwise: float) -> Any:
    """Largest value of any rank that has one."""
    return numpy.max(numpy.where(numpy.isfinite(x), x, otherwise), axis=0)


def _before(x: Any, first: float) -> Any:
    """The largest of all steps before, for each step."""
    return numpy.maximum.accumulate(numpy.concatenate([numpy.full_like(x[:1], first), x[:-1]]), axis=0)


def _events(x: Any, off: Any, rank: int, floor: float) -> tuple[dict[int, float], float]:
    """Steps at which the rank lies beyond all others and how often the range, and the records to expect."""
    others = numpy.arange(len(x)) != rank
    peers, peaks = largest(numpy.abs(off[others]), 0.0).tolist(), largest(x[others], -math.inf).tolist()
    own, mine = off[rank].tolist(), x[rank].tolist()
    events: dict[int, float] = {}
    reach, peak, seen, rate = RANGE, -math.inf, 0, 0.0
    for at, deviation in enumerate(own):
        reach, peak = max(reach, peers[at]), max(peak, peaks[at])
        if math.isnan(deviation):
            continue
        if seen >= LEAST:
            rate += 1 / (seen + 1)
        excess = min(deviation, mine[at] - peak)
        if seen >= LEAST and excess > max(FAR * reach, LEAST_FACTOR) and mine[at] > floor:
            events[at] = excess / reach
        else:
            reach, peak = max(reach, abs(deviation)), max(peak, mine[at])
        seen += 1
    return events, rate


def rows_of(events: dict[int, float]) -> list[float]:
    """The farthest of each row of neighbouring steps: neighbours in time may be alike."""
    rows: list[float] = []
    last = -2
    for at, times in events.items():
        if at == last + 1:
            rows[-1] = max(rows[-1], times)
        else:
            rows.append(times)
        last = at
    return rows


def chance_of(times: list[float], records: float) -> float:
    """Probability that one rank's events lie together as far out as these."""
    total = EXPONENT * sum(math.log(c) for c in times)
    least = EXPONENT * math.log(FAR)
    more = 1 - math.exp(-records * math.exp(-least))  # probability of one event more
    return sum((1 - more) * more**j * _gamma_beyond(j, total - j * least) for j in range(1, MOST_EVENTS))


def _gamma_beyond(count: int, x: float) -> float:
    """Probability that a sum of `count` unit exponentials is larger than x."""
    return 1.0 if x <= 0 else math.exp(-x) * sum(x**i / math.factorial(i) for i in range(count))
