"""From which step on a run is slower than it was, and which ranks and phase it comes from. Pure functions of arrays.

The first steps after the warm-up say what is usual. The stretch that rises furthest above it, step by step, is found
exactly (largest sum of what lies above half the smallest change worth a word, each step limited so that no single
pause counts much); it is a slowdown when nearly all steps in it are slow and nearly none before it are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy

WARM_UP: Final = 5
USUAL: Final = 20  # steps that say what is usual
LEAST: Final = 20  # slow steps
# Step times of one program on one machine drift by some 10 to 20 % with clocks, caches and page faults.
MATERIAL: Final = math.log(1.3)
SCATTERS: Final = 6.0  # times the scatter (MAD) before it
CLEAN: Final = 0.9  # of the slow steps lie above the middle
RARE: Final = 0.2  # of the steps before do, at most: a busy neighbour, a pause that nobody saw
CHANCE: Final = 1e-6  # that as many slow steps would come to lie in the stretch if their order meant nothing
LEAST_NS: Final = 2e6  # a step: some slices of a scheduler
LASTING: Final = 0.1  # of the steps, where it ends before the run does
RISEN: Final = 0.5  # of the job's rise: a rank whose own time rose so much has part in it
CLEAR_SHARE: Final = 0.6  # of the rise lies in one phase, else it is "mixed"


@dataclass(frozen=True)
class Change:
    """Positions `at` to `until` (exclusive) are slow; medians in ns."""

    at: int
    until: int
    before: float
    after: float
    scatter: float  # MAD of the logarithms before
    scatter_ns: float  # MAD before


def change(x: Any) -> Change | None:
    """The stretch of steps that is lastingly slower than the steps before it; None without one. `x` in ns, in order."""
    if len(x) < USUAL + LEAST:
        return None
    logs = numpy.log(numpy.maximum(x, 1.0))
    half = MATERIAL / 2
    above = numpy.clip(logs - (numpy.median(logs[:USUAL]) + half), -half, half)
    sums = numpy.concatenate([[0.0], numpy.cumsum(above)])
    gain = sums - numpy.minimum.accumulate(sums)
    until = int(gain.argmax())
    at = int(sums[: until + 1].argmin())
    if at < USUAL or until - at < LEAST:
        return None
    at = _border(logs, at, until)
    if at < USUAL or until - at < LEAST:
        return None
    found = measured(x, at, until)
    if not _clear(logs, found) or (until < len(x) and until - at < LASTING * len(x)):
        return None
    return found


def _border(logs: Any, at: int, until: int) -> int:
    """Where the stretch begins, seen from the middle between what is usual before it and in it: steps that scatter
    much had lain above the smallest change worth a word before."""
    middle = (numpy.median(logs[:at]) + numpy.median(logs[at:until])) / 2
    sums = numpy.cumsum(numpy.where(logs[:until] > middle, 1, -1))
    return int(numpy.concatenate([[0], sums]).argmin())


def measured(x: Any, at: int, until: int) -> Change:
    """The medians of a series before and in a stretch."""
    before, after = x[:at], x[at:until]
    usual = float(numpy.median(before))
    logs = numpy.log(numpy.maximum(before, 1.0))
    scatter = float(numpy.median(numpy.abs(logs - numpy.median(logs))))
    scatter_ns = float(numpy.median(numpy.abs(before - usual)))
    return Change(at, until, usual, float(numpy.median(after)), scatter, scatter_ns)


def _clear(logs: Any, found: Change) -> bool:
    rise = math.log(max(found.after, 1.0) / max(found.before, 1.0))
    longer = found.after - found.before
    # short steps scatter by a large factor and yet by little time
    beyond = rise >= SCATTERS * found.scatter or longer >= SCATTERS * found.scatter_ns
    if rise < MATERIAL or longer < LEAST_NS or not beyond:
        return False
    middle = math.log(max(found.before, 1.0)) + rise / 2
    slow = logs > middle
    late, early = slow[found.at : found.until], slow[: found.at]
    return bool(late.mean() >= CLEAN and early.mean() <= RARE and by_chance(early, late) <= CHANCE)


def by_chance(early: Any, late: Any) -> float:
    """Fisher's exact test, one-sided: chance that `late` holds so many of all the slow steps or more."""
    n, m, hits = len(early), len(late), int(early.sum() + late.sum())
    if n + m > 2000:  # far beyond any doubt where the shares are as far apart as they must be here
        return 0.0
    total = math.comb(n + m, hits)
    most = min(m, hits)
    return sum(math.comb(m, k) * math.comb(n, hits - k) for k in range(int(late.sum()), most + 1)) / total


def fastest(times: Any) -> Any:
    """Step times [step] of the job: of the rank that waited least, for others or for cores."""
    return numpy.maximum(times, 0.0).min(0)


@dataclass(frozen=True)
class Share:
    """Where a rise comes from: positions of ranks (all when nobody's own time rose), phase and its part of the rise."""

    ranks: tuple[int, ...]
    phase: str
    part: float
    rises: Mapping[str, float]


def share(phases: Mapping[str, Any], waits: Mapping[str, Any], at: int, until: int, rise: float) -> Share:
    """Ranks and phase of a rise of `rise` ns. Times are [rank, step]; NaN: not measured."""
    own = {name: _rise(x, at, until) for name, x in phases.items()}
    total = numpy.sum(list(own.values()), 0)
    ranks = numpy.flatnonzero(total >= RISEN * rise)
    if not len(ranks):  # nobody's own: what all wait in
        own = {"communication": numpy.sum([_rise(x, at, until) for x in waits.values()], 0)}
        ranks = numpy.arange(len(total))
    rises = {name: float(numpy.mean(r[ranks])) for name, r in own.items()}
    phase = max(rises, key=lambda name: rises[name])
    part = min(rises[phase] / rise, 1.0)  # phases may hold waiting for cores, which the rise does not
    return Share(tuple(ranks.tolist()), phase if part >= CLEAR_SHARE else "mixed", part, rises)


def _rise(x: Any, at: int, until: int) -> Any:
    """Of each rank: median in the stretch less median before it; 0 where either has too few measured steps."""
    found = numpy.zeros(len(x))
    for r, series in enumerate(x):
        before, after = series[:at], series[at:until]
        before, after = before[numpy.isfinite(before)], after[numpy.isfinite(after)]
        if len(before) >= FEWEST and len(after) >= FEWEST:
            found[r] = numpy.median(after) - numpy.median(before)
    return found


FEWEST: Final = 3  # measured steps on either side: fewer have no median to speak of
