"""Which of several like ranks stands apart from the others, by its own past: rank statistics and margins, no Gaussian.

Values are logarithms, `x[rank, step, series]`, NaN where a rank has none. What all ranks share (training itself) is
taken off as the median over ranks, what is a rank's own (its share of the data) as its median over the steps before.
What stands out lies farther off than any rank's did in the window before it, twice as far in the middle or where it is
a single step, and by a least factor. How often chance does that is not taken from a distribution, but from the order of
exchangeable values: k steps in a row beyond all of the n before them have probability 1 / C(n + k, k), where of steps
that resemble their neighbours only a share counts, and of single ones the share that falls on one of R ranks is
binomial with 1 / R. Few single ones are enough where they are gross (see excess), and beside the rank's other tensors
smaller ones are seen (see shares).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy

from .excess import gross
from .median import median
from .shares import shares

NOTHING = 1e-45  # the smallest number of single precision stands for none in a logarithm
FIRST = 5  # steps from which a rank's usual place is taken, at least
BEFORE = 20  # steps before that a value is held against, at least; LEAST of them with a value
LEAST = 15
WINDOW = 100  # and at most: training changes
FURTHER = 2.0  # times the largest deviation of the window, in logarithms: 1.5 x seen, 2.25 x wanted
LASTING = math.log(1.5)  # smallest factor of a difference that lasts
ONCE = math.log(4.0)  # smallest factor of one that comes and goes: a single batch may be odd by itself
MOST_NEEDED = 1000  # steps in a row: more are not waited for
SOON = 5  # steps within which what begins in several tensors is one thing: all together speak first
FEWEST = 3  # events of one rank, at least


@dataclass(frozen=True)
class Apart:
    """A rank that stands apart in one series at the positions `steps`, `factors` times its usual value."""

    kind: Literal["lasting", "repeated", "gross", "share"]
    rank: int
    series: int
    first: int
    last: int
    steps: tuple[int, ...]
    factors: tuple[float, ...]
    chance: float


def apart(x: Any, alpha: float) -> Iterator[Apart]:
    """Ranks that stand apart, each once, with the chance of a false one at most `alpha` for each of the four kinds."""
    ranks, steps, series = x.shape
    if ranks < 3 or steps <= BEFORE:
        return
    x = numpy.where(numpy.isfinite(x).sum(0) >= 3, x, numpy.nan)  # two that differ have no majority
    tests = float(ranks * steps * series)
    held = x.copy()  # without what was found to be odd
    places = numpy.ascontiguousarray(_beside(held).transpose(0, 2, 1))  # the same beside the peers; steps last to sort
    off = numpy.full((steps, ranks, series), numpy.nan)  # from each rank's usual place, as far as known by then
    plain = numpy.zeros((steps, ranks, series), bool)  # with a deviation, none found to be odd
    farthest = numpy.zeros((steps, series))  # plain deviation of any rank
    steepest = numpy.zeros((steps, series))  # and change since the step before
    until = numpy.zeros((ranks, series), int)  # where a lasting difference ends
    lasting: dict[int, list[Apart]] = {}
    events: list[tuple[int, int, int, float]] = []  # position, rank, series, deviation
    for at in range(FIRST, steps):
        window = slice(max(0, at - WINDOW), at)
        level = median(places[:, :, window], 2)
        off[at] = _beside(x[:, at] - level)
        plain[at] = numpy.isfinite(off[at]) & (until <= at)
        if at >= BEFORE:
            seen, reach = plain[window].sum(0), farthest[window].max(0)
            with numpy.errstate(all="ignore"):
                beyond = numpy.abs(off[at]) > numpy.maximum(FURTHER * reach, LASTING)
            for r, k in zip(*(i.tolist() for i in numpy.nonzero(beyond & plain[at] & (seen >= LEAST))), strict=True):
                sign, before, least = float(numpy.sign(off[at, r, k])), int(seen[r, k]), float(reach[k])
                ahead = sign * _beside(x[:, at:, k] - level[:, None, k])[r]
                run = _run(ahead, least)
                known = numpy.nonzero(numpy.isfinite(ahead[:run]))[0]
                share = _independent(off[window, :, k], plain[window, :, k])
                needed = _needed(before, tests, alpha, share)
                # its beginning decides: a slow drift leaves every window behind in the end
                enough = len(known) >= needed
                if enough and float(numpy.median(ahead[known[: int(needed)]])) > max(FURTHER * least, LASTING):
                    factors = tuple(numpy.exp(sign * ahead[known]).tolist())
                    where = tuple((at + known).tolist())
                    chance = tests * _in_a_row(before * share, len(known) * share)
                    lasting.setdefault(r, []).append(Apart("lasting", r, k, at, where[-1], where, factors, chance))
                    until[r, k] = at + run
                elif abs(off[at, r, k]) > max(FURTHER * least, ONCE) and abs(off[at, r, k] - off[at - 1, r, k]) > float(
                    steepest[window, k].max()
                ):
                    # what wanders off is alike for many steps and no event at each of them: an event is a jump
                    events.append((at, r, k, float(off[at, r, k])))
                    run = 1
                else:
                    continue
                plain[at, r, k] = False
                held[r, at : at + run, k] = numpy.nan
                places[:, k, at : at + run] = _beside(held[:, at : at + run, k])
        farthest[at] = numpy.max(numpy.abs(off[at]), axis=0, where=plain[at], initial=0.0)
        both = plain[at] & plain[at - 1]
        steepest[at] = numpy.max(numpy.abs(off[at] - off[at - 1]), axis=0, where=both, initial=0.0)
    found: dict[int, Apart] = {}
    for several in lasting.values():
        soon = min(a.first for a in several) + SOON
        one = min((a for a in several if a.first <= soon), key=lambda a: a.series)
        found[one.rank] = one
    alike = {k: 1 / _independent(off[:, :, k], plain[:, :, k]) for k in {e[2] for e in events}}
    off = off.transpose(1, 0, 2)
    for far in gross(x, off, math.log(NOTHING), alpha):
        r, k, first = far.rank, far.series, far.steps[0]
        if r not in found or first < found[r].first:
            factors = tuple(numpy.exp(off[r, list(far.steps), k]).tolist())
            found[r] = Apart("gross", r, k, first, far.steps[-1], far.steps, factors, far.chance)
    for again in _repeated(_separate([e for e in events if e[1] not in found], alike), ranks, alpha):
        found[again.rank] = again
    for one_of in shares(x, math.log(NOTHING), alpha):
        if one_of.rank not in found:
            found[one_of.rank] = Apart(
                "share", one_of.rank, one_of.series, one_of.steps[0], one_of.steps[-1], one_of.steps, one_of.factors,
                one_of.chance,
            )  # fmt: skip
    yield from found.values()


def _beside(x: Any) -> Any:
    """Values beside the median over ranks."""
    return x - median(x, 0)


def _independent(off: Any, plain: Any) -> float:
    """Share of the steps that count as independent: neighbours in time may be alike, as AR(1) noise of one correlation.

    Taken from deviations [step, rank] of all ranks.
    """
    off = numpy.where(plain, off, numpy.nan)
    both = off[1:] * off[:-1]
    kept = numpy.isfinite(both)
    alike = both[kept].sum() / max((off[1:][kept] ** 2).sum(), (off[:-1][kept] ** 2).sum(), 1e-300)
    return float((1 - alike) / (1 + alike)) if alike > 0 else 1.0


def _run(ahead: Any, least: float) -> int:
    """How many steps from the first on lie beyond; those without a value neither end nor lengthen a run."""
    within = numpy.nonzero(ahead <= least)[0]
    return int(within[0]) if len(within) else len(ahead)


def _needed(before: float, tests: float, alpha: float, share: float) -> float:
    """Steps in a row that chance makes with at most `alpha` in all tests, where a share of the steps is independent."""
    k = FEWEST
    while _in_a_row(before * share, k * share) * tests > alpha:
        k += 1
        if k > MOST_NEEDED:
            return math.inf
    return k


def _in_a_row(before: float, after: float) -> float:
    """1 / C(before + after, after), between whole numbers too."""
    return math.exp(math.lgamma(before + 1) + math.lgamma(after + 1) - math.lgamma(before + after + 1))


def _separate(events: list[tuple[int, int, int, float]], alike: dict[int, float]) -> list[tuple[int, int, int, float]]:
    """One event for each time that a rank leaves its range: within `alike` steps of a series neighbours are one."""
    kept, before = [], dict[int, int]()
    for event in sorted(events):
        at, rank, k, _ = event
        if at == before.get(rank, at) or at - before[rank] > alike[k]:
            kept.append(event)
        before[rank] = at
    return kept


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
