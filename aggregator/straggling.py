"""Which rank is steadily slower than its peers, by its own time. Pure functions of durations; no clock is compared.

Own time is all but waiting for others: in lock step the slow rank is the one that waits least. A step counts as a hit
of a rank when its own time is more than HIT above its peers' median of the same step. A straggler is a rank with a
stretch of steps in which nearly all are hits, far more than a coin would give, whose median excess is material and
beyond the peers' own scatter. Waiting for data, which is bursty (a loader's workers deliver in turns), is judged in
sums over 2, 4 and 8 steps as well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy

WARM_UP: Final = 5  # steps left out: compilation, autotuning, the start of loader workers
LEAST: Final = 20  # blocks: 20 of 20 is the first count with a chance below CHANCE
HIT: Final = math.log(1.05)
SHARE: Final = 0.8  # of the blocks are hits: a rank that takes turns with others at being the slowest has fewer
WHOLE: Final = 0.5  # of what one phase takes longer is there in own time as a whole: else it is only spent elsewhere
LEANS: Final = 0.6  # the same of times that hold waiting for cores, where times without it are as they must be
CHANCE: Final = 1e-6  # of a stretch of hits from a fair coin, and less where many are tried
BUDGET: Final = 0.01 / 4  # of false alarms in a run: the run's 1 %, shared with other rules of its kind
# Typical excess that is worth a word. 10 % more work shows as about 8 to 9.5 % of own time, as what the loop itself
# takes is not in it; beside +5 % as the bar for single steps, this leaves out devices of one kind that differ a little.
MATERIAL: Final = math.log(1.07)
# The excess is also beyond the peers: MADs of their typical places, and of single steps. A median of 20 steps strays by
# 0.4 MAD of a step (standard error), so that 2 are some five of those.
SCATTERS: Final = 6.0
STEP_SCATTERS: Final = 2.0
LEAST_NS: Final = 1e6  # a step: a scheduler's slice; below that the order in which threads wake decides
LASTING: Final = 0.1  # of the steps, unless it goes on at the end: a shorter one costs the run less than 1 %
BLOCKS: Final = (1, 2, 4, 8)
EXACT_RANKS: Final = 32  # up to here a rank is left out of its peers' median; beyond that one of many moves nothing
PAIR_APART: Final = math.log(1.5)

WAITS: Final = frozenset({"communication", "reduce_wait"})
PAUSES: Final = frozenset({"checkpoint", "evaluation"})  # of one rank for all: meant, and a matter of their own


class Op(NamedTuple):
    """One operation of one rank in one step; several of a kind add up. `stage`: only ranks of one stage are peers."""

    rank: int
    stage: int
    step: int
    op: str
    duration: float


@dataclass(frozen=True)
class Peers:
    """Ranks that do the same work, over the steps that all of them have. Times are [rank, step]; NaN: not measured."""

    stage: int
    ranks: tuple[int, ...]
    steps: Any
    own: Mapping[str, Any]  # operation -> time, waits and pauses left out
    cpu_wait: Mapping[str, Any] | None = None  # of it at most so much was waiting for a core; None: unknown


@dataclass(frozen=True)
class Straggler:
    """A stretch of steps in which `ranks` (a pair: both, the slower first) were slower than their peers."""

    ranks: tuple[int, ...]
    first_step: int
    last_step: int
    phase: str
    excess: float  # share of the peers' median own time
    excess_ns: float  # a step
    hits: int
    blocks: int
    size: int  # steps in a block
    chance: float
    bar: float  # what the excess had to exceed, from the peers' scatter
    doubtful: bool  # it may be no more than waiting for a core


def peers(ops: Iterable[Op]) -> list[Peers]:
    """Group rows by stage. Steps that a rank of the stage lacks are left out."""
    sums: dict[int, dict[str, dict[tuple[int, int], float]]] = defaultdict(lambda: defaultdict(dict))
    steps: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rank, stage, step, op, duration in ops:
        steps[stage][rank].add(step)
        if op not in WAITS | PAUSES:
            cell = sums[stage][op]
            cell[rank, step] = cell.get((rank, step), 0.0) + duration
    found = []
    for stage, of in sorted(steps.items()):
        ranks, common = tuple(sorted(of)), sorted(set.intersection(*of.values()))
        own = {op: numpy.array([[cells.get((r, s), 0.0) for s in common] for r in ranks])
               for op, cells in sums[stage].items()}  # fmt: skip
        found.append(Peers(stage, ranks, numpy.array(common), own))
    return found


def stragglers(group: Peers, tests: int = 1) -> list[Straggler]:
    """The ranks of one group that straggle, each with its longest stretch. `tests`: groups judged in this run."""
    if len(group.ranks) < 2 or not group.own:
        return []
    found: dict[int, Straggler] = {}
    for own, spared, steps in _series(group):
        for size in BLOCKS:
            if len(steps) // size >= LEAST:
                for straggler in _judge(group, own, spared, steps, size, tests * len(group.ranks) * len(steps)):
                    known = found.get(straggler.ranks[0])
                    if known is None or (known.doubtful and not straggler.doubtful):
                        found[straggler.ranks[0]] = straggler
    if len(group.ranks) > 2 and 2 * len(found) >= len(group.ranks):
        return []  # half of them against the other half: nobody is apart
    return [found[r] for r in sorted(found)]


def enough(group: Peers) -> bool:
    """Whether a straggler could have been found at all."""
    return len(group.ranks) > 2 and any(len(steps) >= LEAST for *_, steps in _series(group))


Times = dict[str, Any]  # operation -> [rank, step]


def _series(group: Peers) -> Iterator[tuple[Times, Times | None, Any]]:
    """(own times, the same without waiting for a core, steps): all steps, with the usual value where one was not
    measured; and, if there are such, only the steps in which all was measured."""
    keep = numpy.arange(len(group.steps)) >= WARM_UP
    own = {op: x[:, keep] for op, x in group.own.items() if numpy.isfinite(x[:, keep]).all(0).any()}
    steps = group.steps[keep]
    if not own or not len(steps):
        return
    spared = None
    if group.cpu_wait is not None:
        spared = {op: numpy.maximum(x - group.cpu_wait[op][:, keep], 0.0) for op, x in own.items()}
    known = {op: numpy.isfinite(x).all(0) for op, x in own.items()}
    yield _filled(own, known), _filled(spared, known), steps
    whole = numpy.logical_and.reduce(list(known.values()))
    if not whole.all() and whole.any():
        yield _at(own, whole), _at(spared, whole) if spared else None, steps[whole]


def _filled(times: Times | None, known: Times) -> Any:
    return times and {op: numpy.where(known[op], x, numpy.median(x[:, known[op]])) for op, x in times.items()}


def _at(times: Times, where: Any) -> Times:
    return {op: x[:, where] for op, x in times.items()}


def _views(times: Times, size: int) -> Iterator[tuple[str, Any]]:
    """("", own time), then for each operation what own time would be if all the rest took its usual time. In sums over
    several steps only waiting for data: of other work, what comes every few steps is a pause, such as logging."""
    sums = {op: _blocks(x, size) for op, x in times.items()}
    total = sum(sums.values())
    if size == 1:
        yield "", total
    usual = numpy.median(total, 0)
    for op, x in sums.items() if size == 1 else [(op, x) for op, x in sums.items() if op == "data"]:
        yield op, x + numpy.maximum(usual - numpy.median(x, 0), 0.0)


def _judge(group: Peers, own: Times, spared: Times | None, steps: Any, size: int, tests: int) -> Iterator[Straggler]:
    sums = {op: _blocks(x, size) for op, x in own.items()}
    without_waits = dict(_views(spared, size)) if spared else {}
    total = sum(sums.values())
    chance = min(CHANCE, BUDGET / (2 * len(BLOCKS) * (len(own) + 1) * tests))
    for op, times in _views(own, size):
        seen = View(times)
        sure = View(without_waits[op]) if spared else None
        for view in (seen, sure) if sure is not None else (seen,):
            for r, a, b in _stretches(view.away > HIT):
                here = slice(a, b)
                excess_ns = float(numpy.median((times - numpy.median(times, 0))[r, here])) / size
                lasting = b >= times.shape[1] - 1 or b - a >= LASTING * times.shape[1]
                if not lasting or excess_ns < LEAST_NS or view.chance(r, here) > chance or not view.stands(r, here):
                    continue
                if view is sure and not seen.leans(r, here):
                    continue
                if float(numpy.median(total[r, here] - _usual(total, r)[here])) < WHOLE * size * excess_ns:
                    continue
                doubtful = view is seen and sure is not None and not sure.stands(r, here)
                excess = {name: _trimmed(x[r, here] - _usual(x, r)[here]) for name, x in sums.items()}
                skipped = len(steps) - times.shape[1] * size
                yield Straggler(
                    (group.ranks[r], group.ranks[1 - r]) if len(group.ranks) == 2 else (group.ranks[r],),
                    int(steps[skipped + a * size]), int(steps[skipped + b * size - 1]),
                    op or max(excess, key=lambda name: excess[name]),
                    math.expm1(float(numpy.median(seen.away[r, here]))),
                    excess_ns, view.hits(r, here), b - a, size, view.chance(r, here), math.expm1(view.least(r, here)),
                    doubtful,
                )  # fmt: skip


class View:
    """One kind of time [rank, block], and what it says of a rank's stretch of blocks."""

    def __init__(self, times: Any) -> None:
        self.times, self.away = times, _away(times)

    def hits(self, r: int, here: slice) -> int:
        return int((self.away[r, here] > HIT).sum())

    def chance(self, r: int, here: slice) -> float:
        return at_least(self.hits(r, here), here.stop - here.start)

    def least(self, r: int, here: slice) -> float:
        return _least(self.times[:, here], r)

    def stands(self, r: int, here: slice) -> bool:
        away = self.away[r, here]
        return bool((away > HIT).mean() >= SHARE and numpy.median(away) >= self.least(r, here))

    def leans(self, r: int, here: slice) -> bool:
        """What is certain without waiting for cores is to be seen with it as well, if less clearly."""
        away = self.away[r, here]
        return bool((away > HIT).mean() >= LEANS and numpy.median(away) >= MATERIAL)


def _stretches(hit: Any) -> Iterator[tuple[int, int, int]]:
    """(rank, from, to) of each rank's stretch of blocks with the most hits, of which at least SHARE are."""
    sums = numpy.concatenate([numpy.zeros((len(hit), 1)), numpy.cumsum(numpy.where(hit, 1 - SHARE, -SHARE), 1)], 1)
    gain = sums - numpy.minimum.accumulate(sums, 1)
    ends = gain.argmax(1)
    for r, b in enumerate(ends.tolist()):
        if gain[r, b] >= (1 - SHARE) * SHARE * LEAST / 2:  # far fewer hits than could ever do
            a = int(sums[r, : b + 1].argmin())
            if b - a >= LEAST:
                yield r, a, b


def _blocks(x: Any, size: int) -> Any:
    """Sums over `size` steps; what fills no block at the start is left out."""
    usable = x.shape[1] // size * size
    return x[:, x.shape[1] - usable :].reshape(len(x), -1, size).sum(2)


def _usual(x: Any, r: int) -> Any:
    """The peers' median of each block."""
    return numpy.median(numpy.delete(x, r, 0), 0) if len(x) <= EXACT_RANKS else numpy.median(x, 0)


def _away(total: Any) -> Any:
    """Logarithm of each rank's time over its peers' median."""
    floored = numpy.maximum(total, 1e-9)
    return numpy.log(floored) - numpy.log(
        numpy.array([_usual(floored, r) for r in range(len(floored))])
        if len(floored) <= EXACT_RANKS
        else numpy.median(floored, 0)
    )


def _least(times: Any, r: int) -> float:
    """The excess that a rank must typically have to be apart from these peers; of a pair, from how the two scatter."""
    logs = numpy.log(numpy.maximum(times, 1e-9))
    if len(logs) == 2:
        away = logs[r] - logs[1 - r]
        return float(max(MATERIAL, STEP_SCATTERS * numpy.median(numpy.abs(away - numpy.median(away)))))
    others = numpy.delete(logs, r, 0)
    others = others - numpy.median(others, 0)
    places = numpy.median(others, 1, keepdims=True)
    steps = numpy.median(numpy.abs(others - places))
    return float(max(MATERIAL, SCATTERS * numpy.median(numpy.abs(places)), STEP_SCATTERS * steps))


def _trimmed(x: Any) -> float:
    """Mean without the tenth at either end: one long pause must not name the phase."""
    cut = len(x) // 10
    return float(numpy.sort(x)[cut : len(x) - cut].mean())


def at_least(hits: int, n: int) -> float:
    """Chance of so many heads or more in `n` throws of a fair coin."""
    if n > 1000:  # normal tail with continuity correction: exact sums of large numbers take long and tell no more
        return math.erfc((hits - 0.5 - n / 2) / math.sqrt(n / 2)) / 2
    return sum(math.comb(n, k) for k in range(hits, n + 1)) / (1 << n)


@dataclass(frozen=True)
class Heavy:
    """A stage whose ranks all take longer than the other stages'."""

    stage: int
    ranks: tuple[int, ...]
    ratio: float


def heavy_stages(groups: list[Peers]) -> list[Heavy]:
    """Stages that are steadily heavier than the median of the others: how the model was cut, no fault of a rank."""
    whole = [g for g in groups if len(g.ranks) > 1 and len(g.steps) >= WARM_UP + LEAST and g.own]
    if len(whole) < 2:
        return []
    found = []
    medians = {g.stage: float(numpy.median(numpy.median(sum(g.own.values())[:, WARM_UP:], 0))) for g in whole}
    for g in whole:
        others = float(numpy.median([m for s, m in medians.items() if s != g.stage]))
        if others > 0 and math.log(medians[g.stage] / others) >= STAGE_APART:
            found.append(Heavy(g.stage, g.ranks, medians[g.stage] / others))
    return found


STAGE_APART: Final = math.log(1.25)  # layers are whole: with few of them per stage cuts differ by a fifth anyway
