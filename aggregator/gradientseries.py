"""Gradient norms of one tensor catalogue over time, of all tensors and of each, and where they depart from their past.

A single tensor is held beside the median of all at the same step: a branch that grows moves the whole but little, and
what moves all alike is the whole's own. Of several ranks the median is taken, so that single ranks don't decide there.
Between two cadences the past ends: over 64 steps a norm wanders farther than from one to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy

from .departures import BEFORE, FIRST, LEVEL, SKIPPED, Departure, departures, reaches
from .median import median

ALPHA = 0.002 / 4  # a fifth of the 1 % of a run's statistical rules: the mean, single ranks, tensors, clipping calls
LEAST = math.log(2.0)  # a smaller factor is no spike, however quiet the run
LEAST_OF_TENSOR = math.log(3.0)  # single tensors wander more: layers learn one after the other
SMALL = 1 / 256  # of the whole gradient: below it a tensor may be rounding noise of bfloat16 (8 bits) all through
FEWEST_TENSORS = 4  # of which a median says what all do
SHARE = 0.8  # of the excess on one rank: it is named alone
SOON = 2  # steps within which what begins in several tensors is one thing
MOST_FINDINGS = 3  # of one catalogue


class Line(Protocol):
    """What is read of one rank."""

    @property
    def rank(self) -> int: ...

    @property
    def steps(self) -> list[int]: ...

    @property
    def norms(self) -> list[float | None]: ...

    @property
    def l2(self) -> list[list[float]] | None: ...

    @property
    def tensors(self) -> list[int]: ...

    @property
    def names(self) -> list[str] | None: ...


@dataclass(frozen=True)
class Event:
    """A departure in steps and ranks. `subject`: the tensor that stands out most, empty for the whole gradient."""

    subject: str
    ranks: tuple[int, ...]
    first: int
    last: int
    peak: int
    before: int | None
    after: int  # steps that the run has after it
    lasting: bool
    returned: bool
    factor: float
    reach: float
    chance: float
    alike: int
    seen: tuple[tuple[int, float, float], ...]  # rank, value at the peak, level before
    alone: bool = False  # most other tensors take no part
    others: tuple[tuple[str, float], ...] = ()  # tensors that depart with it, and by what factor


@dataclass(frozen=True)
class Series:
    """Logarithms of the norms [step, rank], and of single tensors [step, rank, tensor] for some ranks."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    norms: Any
    tensors: Any | None
    names: tuple[str, ...]

    @staticmethod
    def of(lines: Sequence[Line]) -> Series:
        steps = tuple(sorted({s for line in lines for s in line.steps}))
        place = {s: i for i, s in enumerate(steps)}
        norms = numpy.full((len(steps), len(lines)), numpy.nan)
        for column, line in enumerate(lines):
            at = [place[s] for s in line.steps]
            norms[at, column] = [math.nan if v is None else v for v in line.norms]
        read = [line for line in lines if line.l2]
        width = min((len(one) for line in read for one in line.l2 or ()), default=0)
        tensors = numpy.full((len(steps), len(read), width), numpy.nan) if width >= FEWEST_TENSORS else None
        if tensors is not None:
            for column, line in enumerate(read):
                tensors[[place[s] for s in line.steps], column] = [one[:width] for one in line.l2 or ()]
            tensors[~numpy.isfinite(norms[:, [lines.index(line) for line in read]])] = numpy.nan
            tensors = _log(tensors)
        names = lines[0].names or []
        index = lines[0].tensors or range(width)
        known = tuple(names[i] if i < len(names) else f"tensor {i}" for i in index)
        return Series(steps, tuple(line.rank for line in lines), _log(norms), tensors, known)

    @property
    def judged(self) -> bool:
        """Whether some part of it is long enough."""
        least = SKIPPED + 2 * FIRST + BEFORE
        mean = _middle(self.norms)
        return any(int(numpy.isfinite(mean[part]).sum()) >= least for part in paced(self.steps))

    @property
    def loudness(self) -> float:
        """The factor that a single step of the whole norm must have to be told from the range of the steps before."""
        parts = [_middle(self.norms[part])[:, None] for part in paced(self.steps)]
        return max((reaches(p) for p in parts if len(p) >= SKIPPED + 2 * FIRST + BEFORE), default=0.0)


def _log(x: Any) -> Any:
    """Logarithms; none of an exact zero: from no gradient to some is growth without end."""
    with numpy.errstate(all="ignore"):
        return numpy.log(numpy.where((x > 0) & numpy.isfinite(x), x, numpy.nan))


def _middle(x: Any) -> Any:
    """Median over ranks [axis 1] where at least half of them have a value."""
    enough = 2 * numpy.isfinite(x).sum(1) >= x.shape[1]
    return numpy.where(enough, median(x, 1), numpy.nan)


def paced(steps: Sequence[int]) -> Iterator[slice]:
    """Parts of one cadence: a part ends where the next step is more than twice as far as those before."""
    begun, gap = 0, 0
    for at in range(1, len(steps)):
        here = steps[at] - steps[at - 1]
        if gap and here > 2 * gap:
            yield slice(begun, at)
            begun, gap = at, 0
        else:
            gap = max(gap, here)
    yield slice(begun, len(steps))


def gradient_events(series: Series) -> list[Event]:
    """Departures of the whole and of single tensors, those of one beginning folded into one."""
    found: list[Event] = []
    for part in paced(series.steps):
        steps = series.steps[part]
        if len(steps) < SKIPPED + 2 * FIRST + BEFORE:
            continue
        norms = series.norms[part]
        events = [_whole(d, norms, steps, series.ranks) for d in departures(_middle(norms)[:, None], ALPHA, LEAST)]
        if len(series.ranks) > 1:
            events += [
                e for e in (_whole(d, norms, steps, series.ranks) for d in departures(norms, ALPHA, LEAST))
                if not _beside(e, events)
            ]  # fmt: skip
        if series.tensors is not None:
            own = _folded(_of_tensors(series, part))
            alone = [e for e in own if e.alone or not _beside(e, events)]  # the whole says what all tensors do
            events = [e for e in events if not _beside(e, alone)] + alone
        found += sorted(events, key=lambda e: e.first)[: MOST_FINDINGS + 1]
    return found


def clip_events(steps: Sequence[int], norms: Sequence[float | None], ranks: tuple[int, ...],
                known: Sequence[Event]) -> list[Event]:  # fmt: skip
    """Departures of the norm that clipping calls returned, at every step, of which `known` says nothing."""
    y = _log(numpy.array([[math.nan if v is None else v] for v in norms], dtype=float))
    found = []
    for d in departures(y, ALPHA, LEAST):
        now, level = math.exp(y[d.peak, 0]), math.exp(y[d.peak, 0] - d.off)
        event = _event("", d, steps, ranks, ((ranks[0], now, level),))
        if not any((e.before or 0) - SOON <= event.first <= e.last + SOON for e in known):
            found.append(event)
    return found


def _event(subject: str, d: Departure, steps: Sequence[int], ranks: tuple[int, ...],
           seen: tuple[tuple[int, float, float], ...]) -> Event:  # fmt: skip
    return Event(
        subject, ranks, steps[d.first], steps[d.last], steps[d.peak], steps[d.before] if d.before >= 0 else None,
        len(steps) - 1 - d.first, d.lasting, d.returned, math.exp(d.off), d.reach, d.chance, d.alike, seen,
    )  # fmt: skip


def _whole(d: Departure, norms: Any, steps: Sequence[int], everyone: Sequence[int]) -> Event:
    level = median(norms[max(0, d.first - LEVEL) : d.first], 0)
    with numpy.errstate(all="ignore"):
        now, usual = numpy.exp(norms[d.peak]), numpy.exp(level)
    excess = numpy.where(numpy.isfinite(now - usual) & (now > usual), now - usual, 0.0)
    named = numpy.nonzero(norms[d.peak] - level > max(d.reach, d.off / 2))[0].tolist()
    if excess.sum() > 0 and excess.max() >= SHARE * excess.sum():
        named = [int(excess.argmax())]
    if not named or len(named) >= SHARE * len(everyone):
        named = list(range(len(everyone)))
    order = sorted((c for c in named if math.isfinite(now[c])), key=lambda c: -float(excess[c]))
    seen = tuple((everyone[c], float(now[c]), float(usual[c])) for c in order)
    return _event("", d, steps, tuple(sorted(everyone[c] for c in named)), seen)


def _of_tensors(series: Series, part: slice) -> Iterator[Event]:
    """Departures of single tensors from their place beside the median of all."""
    own, steps = series.tensors[part], series.steps[part]  # type: ignore[index]
    middle = _middle(own)
    common = median(middle, 1)
    beside = middle - common[:, None]
    whole = _middle(series.norms[part])
    with numpy.errstate(all="ignore"):
        small = middle < whole[:, None] + math.log(SMALL)
    width = beside.shape[1]
    for k in range(width):
        for d in departures(beside[:, k : k + 1], ALPHA / width, LEAST_OF_TENSOR):
            before = slice(max(0, d.first - LEVEL), d.first)
            if small[d.peak, k] or middle[d.peak, k] - median(middle[before, k], 0) < d.off / 2:
                continue  # it is the others that fell
            level = median(own[before, :, k], 0)
            out = numpy.nonzero(own[d.peak, :, k] - level > d.off / 2)[0].tolist()
            everyone = series.ranks[: own.shape[1]]
            all_of = len(out) >= SHARE * len(everyone)
            named = series.ranks if all_of else tuple(everyone[c] for c in out)
            seen = tuple((everyone[c], math.exp(own[d.peak, c, k]), math.exp(level[c])) for c in out)
            if named:
                all_rise = common[d.peak] - median(common[before], 0)
                alone = all_rise < (whole[d.peak] - median(whole[before], 0)) / 2
                yield replace(_event(series.names[k], d, steps, named, seen), alone=bool(alone))


def _beside(event: Event, others: Sequence[Event]) -> bool:
    """Whether one of the others begins with it."""
    return any(abs(event.first - other.first) <= SOON for other in others)


def _folded(events: Iterator[Event]) -> list[Event]:
    """What begins in several tensors at once is one event, named by the one that stands out most."""
    left = sorted(events, key=lambda e: e.first)
    found = []
    while left:
        together = [e for e in left if e.first <= left[0].first + SOON]
        left = [e for e in left if e.first > left[0].first + SOON]
        most = max(together, key=lambda e: e.factor)
        rest = sorted((e for e in together if e is not most), key=lambda e: -e.factor)
        others = tuple((e.subject, e.factor) for e in rest)
        found.append(replace(most, first=min(e.first for e in together), others=others))
    return found
