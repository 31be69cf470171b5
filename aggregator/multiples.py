"""Whether what was logged is one fixed multiple of what was optimised. Pure functions.

A multiple is told only where it is the number of micro-batches of a step or of ranks, or one part of it, and holds at
every point: what a missing or a second division makes. Any other difference may be meant: part of a loss, a smoothed
figure, another metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# A figure may have passed through bfloat16, which keeps 8 bits: rounding twice is off by at most 2**-8. Sums in
# float32 are far closer. Multiples lie a factor of 2 apart at least.
RELATIVE = 2.0**-8
LEAST = 5  # points: a part of a loss that is about half of it is so by chance within 2**-8 at one, not at five


class Point(NamedTuple):
    """One figure that was logged, and what was optimised."""

    rank: int
    step: int
    nth: int  # of the step
    logged: float
    optimised: float


def candidates(window: int, ranks: int) -> tuple[float, ...]:
    """1, then the multiples that a wrong division gives."""
    return tuple(dict.fromkeys(f for n in (1, window, ranks) for f in (float(n), 1 / n) if n > 0))


def told(points: Iterable[Point]) -> list[Point]:
    """The points that can tell one multiple from another: finite, and not zero."""
    return [p for p in points if math.isfinite(p.logged) and math.isfinite(p.optimised) and (p.logged or p.optimised)]


def multiple(points: Sequence[Point], factors: Sequence[float]) -> float | None:
    """The first of the factors that holds at every point; None without one."""
    return next((f for f in factors if points and all(_is(p, f) for p in points)), None)


def _is(p: Point, factor: float) -> bool:
    return abs(p.logged - factor * p.optimised) <= RELATIVE * abs(factor * p.optimised)


def over_ranks(points: Sequence[Point], ranks: int) -> Iterator[Point]:
    """Each point with the ranks' mean of what was optimised in place of its own; nothing where a rank is missing."""
    together: dict[tuple[int, int], list[Point]] = {}
    for p in points:
        together.setdefault((p.step, p.nth), []).append(p)
    for group in together.values():
        if len({p.rank for p in group}) == len(group) == ranks:
            mean = math.fsum(p.optimised for p in group) / ranks
            yield from (p._replace(optimised=mean) for p in group)


def written(factor: float) -> str:
    """4 times, or 1/4 of."""
    return f"{factor:g} times" if factor >= 1 else f"1/{1 / factor:g} of"
