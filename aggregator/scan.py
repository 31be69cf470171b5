"""Which run of a like-for-like batch is the odd one: `tdbg scan A B C ...`.

Every pair is compared (compare.py). Runs that agree, bit for bit or within rounding, stand together; a run that parts
from all of a majority that agrees is the outlier. Runs that were not started alike (other seeds, models, data) are no
peers: they are left out and said, and a batch that has them is never ALL_ALIKE. Two runs that differ have no majority.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from .compare import Comparison, Unlike
from .wording import counted

Outcome = Literal["OUTLIER", "NO_SINGLE_OUTLIER", "ALL_ALIKE"]
AGREE = ("IDENTICAL", "WITHIN_NOISE")
FEWEST = 3  # with two, none is the odd one


@dataclass(frozen=True)
class Scanned:
    """One run beside its peers: those with which it could be compared to an end."""

    run: str
    peers: int
    divergences: int
    first: Comparison | None  # the earliest at which it leaves one of them
    started_otherwise: tuple[Unlike, ...]  # what it, and no other run, was started with


@dataclass(frozen=True)
class Scan:
    """What is said of the batch."""

    outcome: Outcome
    run: str | None
    why: str
    runs: tuple[Scanned, ...]

    @property
    def scores(self) -> dict[str, int]:
        return {s.run: s.divergences for s in self.runs}


def scan(runs: Sequence[str], pairs: Mapping[tuple[str, str], Comparison]) -> Scan:
    """Judge a batch from the comparison of each of its pairs (keys in the order of `runs`).

    Cost: n(n-1)/2 comparisons, made by the caller; each run is read once.
    """
    scanned = tuple(_scanned(run, runs, pairs) for run in runs)
    outcome, run, why = _judged(runs, pairs, scanned)
    return Scan(outcome, run, why, scanned)


def _judged(runs: Sequence[str], pairs: Mapping[tuple[str, str], Comparison],
            scanned: Sequence[Scanned]) -> tuple[Outcome, str | None, str]:  # fmt: skip
    together = _together(runs, pairs)
    rest = [r for r in runs if r not in together]
    alike = [p for p in pairs.values() if p.outcome in AGREE]
    parted = [p for p in pairs.values() if p.outcome == "DIVERGED"]
    if not alike and not parted:
        return "NO_SINGLE_OUTLIER", None, f"no two of them can be compared: {_first_why(pairs)}"
    if not rest and len(alike) == len(pairs):
        bits = "bit for bit" if all(p.outcome == "IDENTICAL" for p in alike) else "within rounding"
        return "ALL_ALIKE", None, f"all {counted(len(pairs), 'pair')} of {counted(len(runs), 'run')} agree {bits}"
    unlike = [s.run for s in scanned if s.peers == 0]
    left_out = f"; not like for like and left out: {', '.join(unlike)} ({_why_of(unlike[0], pairs)})" if unlike else ""
    comparable = [r for r in runs if r not in unlike]
    if len(comparable) < FEWEST:
        words = f"{' and '.join(comparable)} {'differ' if parted else 'agree'}, and two runs have no majority"
        return "NO_SINGLE_OUTLIER", None, words + left_out
    odd = [r for r in comparable if r not in together]
    if 2 * len(together) <= len(comparable):
        return "NO_SINGLE_OUTLIER", None, f"no majority agrees: {_sides(comparable, pairs)}{left_out}"
    if not odd:
        if parted or unlike:
            words = f"{counted(len(together), 'run')} agree" + (", yet not all of their pairs do" if parted else "")
            return "NO_SINGLE_OUTLIER", None, words + left_out
        return "NO_SINGLE_OUTLIER", None, f"nothing parts them, but not every pair could be judged: {_first_why(pairs)}"
    if len(odd) > 1:
        return "NO_SINGLE_OUTLIER", None, f"{counted(len(together), 'run')} agree, {', '.join(odd)} do not{left_out}"
    run = odd[0]
    against = [_pair(run, other, pairs) for other in together]
    if any(p.outcome != "DIVERGED" for p in against) or any(
        _pair(x, y, pairs).outcome == "DIVERGED" for x, y in combinations(together, 2)
    ):
        return "NO_SINGLE_OUTLIER", None, f"{run} parts from some of the others only, or they part as well{left_out}"
    first = next(s.first for s in scanned if s.run == run)
    assert first is not None
    return "OUTLIER", run, (f"{counted(len(together), 'run')} agree and {run} parts from each of them: "
                            f"{first.why}{left_out}")  # fmt: skip


def _together(runs: Sequence[str], pairs: Mapping[tuple[str, str], Comparison]) -> list[str]:
    """The largest set of runs that pairs which agree hold together; of equal ones the first."""
    sets: list[set[str]] = []
    for run in runs:
        near = [s for s in sets if any(_pair(run, other, pairs).outcome in AGREE for other in s)]
        sets = [s for s in sets if s not in near] + [{run}.union(*near)]
    largest = max(sets, key=lambda s: (len(s), -min(runs.index(r) for r in s)))
    return [r for r in runs if r in largest]


def _sides(runs: Sequence[str], pairs: Mapping[tuple[str, str], Comparison]) -> str:
    left, sides = list(runs), []
    while left:
        side = _together(left, pairs)
        sides.append(" = ".join(side))
        left = [r for r in left if r not in side]
    return " | ".join(sides)


def _scanned(run: str, runs: Sequence[str], pairs: Mapping[tuple[str, str], Comparison]) -> Scanned:
    mine = {other: _pair(run, other, pairs) for other in runs if other != run}
    judged = [p for p in mine.values() if p.outcome in (*AGREE, "DIVERGED")]
    parted = [p for p in judged if p.outcome == "DIVERGED"]
    first = min(parted, key=lambda p: p.first_step or 0, default=None)
    return Scanned(run, len(judged), len(parted), first, _own(run, mine))


def _own(run: str, mine: Mapping[str, Comparison]) -> tuple[Unlike, ...]:
    """Keys in which this run differs from every other, which among themselves are not asked; `a` is this run's."""
    every: dict[str, list[Unlike]] = {}
    for c in mine.values():
        for d in c.identity_differences:
            every.setdefault(d.key, []).append(d if c.a == run else Unlike(d.key, d.b, d.a))
    return tuple(ds[0] for ds in every.values() if len(ds) == len(mine) and len({d.b for d in ds}) == 1)


def _pair(x: str, y: str, pairs: Mapping[tuple[str, str], Comparison]) -> Comparison:
    return pairs[x, y] if (x, y) in pairs else pairs[y, x]


def _why_of(run: str, pairs: Mapping[tuple[str, str], Comparison]) -> str:
    return next(c.why for key, c in pairs.items() if run in key)


def _first_why(pairs: Mapping[tuple[str, str], Comparison]) -> str:
    return next(c.why for c in pairs.values() if c.outcome not in (*AGREE, "DIVERGED"))
