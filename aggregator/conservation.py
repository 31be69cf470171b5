"""What a reduced gradient is made of, told from sketches: whose parts are in it, and how each counts.

Sketches are linear: of a reduction that adds up the ranks' gradients and multiplies by a factor, every number x is that
factor times the sum of the ranks' numbers, up to the rounding errors `error` (in units of the sum). Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy

CANDIDATES = 256  # factors tried when looking for the one that most numbers share: one per number, at most these
NOTHING = 0.05  # a part that counts less than this beside the largest is tried as missing; the test itself is exact
MORE = 3  # numbers beyond the unknowns that a solution must fit as well


@dataclass(frozen=True)
class Cells:
    """Numbers of one reduction: `x[m]` reduced, `parts[r, m]` of each rank, `error[m]`, the tensor each is of."""

    x: Any
    parts: Any
    error: Any
    tensors: Sequence[str]
    ranks: Sequence[int]

    def only(self, chosen: Any) -> Cells:
        names = tuple(t for t, c in zip(self.tensors, chosen, strict=True) if c)
        return Cells(self.x[chosen], self.parts[:, chosen], self.error[chosen], names, self.ranks)


@dataclass(frozen=True)
class Cause:
    """What accounts for the numbers of `tensors`, which are off.

    `missing`: the parts of `ranks` are not in it; `scaled`: the part of one rank counts `weight` times; `factor`: all
    parts count alike, by another factor than declared; `none`: no such account fits.
    """

    kind: Literal["missing", "scaled", "factor", "none"]
    tensors: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    factor: float = 0.0
    weight: float = 1.0


def factors(x: Any, total: Any, error: Any) -> tuple[float, float]:
    """The range of factors that explains every number: empty (low > high) when no common one does."""
    low, high = _ranges(x, total, error)
    return (float(low.max()), float(high.min())) if len(low) else (0.0, float("inf"))


def _ranges(x: Any, total: Any, error: Any) -> tuple[Any, Any]:
    with numpy.errstate(all="ignore"):
        one, other = x / (total - error), x / (total + error)
        weak = numpy.abs(total) <= error  # its sign is not known: only that the factor is large enough
        low = numpy.where(weak, numpy.abs(x) / (numpy.abs(total) + error), numpy.minimum(one, other))
        high = numpy.where(weak, numpy.inf, numpy.maximum(one, other))
    keep = error > 0
    slack = 2.0**-23  # x itself is stored in single precision
    return low[keep] * (1 - slack), high[keep] * (1 + slack)


def explain(cells: Cells, factor: float | None) -> Cause:
    """Account for numbers that do not fit: `factor` is the one declared, None when only a common one is asked for."""
    total = cells.parts.sum(0)
    whole = _common(cells.x, total, cells.error) if factor is None else factor
    off = numpy.abs(cells.x - whole * total) > abs(whole) * cells.error + 2.0**-23 * numpy.abs(cells.x)
    names = tuple(dict.fromkeys(t for t, o in zip(cells.tensors, off, strict=True) if o))
    # both numbers of a tensor belong to it, whether or not chance made one of them fit
    here = cells.only(numpy.array([t in names for t in cells.tensors], dtype=bool))
    if not names:
        return Cause("none", names)
    low, high = factors(here.x, here.parts.sum(0), here.error)
    if low <= high and high > 0 and (factor is not None and len(here.x) >= MORE):
        return Cause("factor", names, factor=_middle(low, high))
    return _missing(here, names) or _weighed(here, names) or Cause("none", names)


def _common(x: Any, total: Any, error: Any) -> float:
    """The factor that most numbers share."""
    low, high = _ranges(x, total, error)
    sure = numpy.isfinite(high)
    if not sure.any():
        return 0.0
    low, high = low[sure], high[sure]
    tried = ((low + high) / 2)[:: max(1, len(low) // CANDIDATES)]
    fits = ((low[None, :] <= tried[:, None]) & (tried[:, None] <= high[None, :])).sum(1)
    return float(tried[int(fits.argmax())])


def _missing(cells: Cells, names: tuple[str, ...]) -> Cause | None:
    """The one rank without whose part a common factor fits; None when there is none or more than one."""
    if len(cells.x) < MORE:
        return None
    total = cells.parts.sum(0)
    fitting = []
    for r, rank in enumerate(cells.ranks):
        low, high = factors(cells.x, total - cells.parts[r], cells.error)
        if low <= high and low > 0 and numpy.isfinite(high):
            fitting.append((rank, _middle(low, high)))
    if len(fitting) != 1:
        return None
    return Cause("missing", names, (fitting[0][0],), fitting[0][1])


def _weighed(cells: Cells, names: tuple[str, ...]) -> Cause | None:
    """Solve for each rank's weight where numbers outnumber ranks: several missing, or one counted otherwise."""
    count = len(cells.ranks)
    if len(cells.x) < count + MORE:
        return None
    scale = 1 / numpy.where(cells.error > 0, cells.error, numpy.inf)
    weights, _, rank, _ = numpy.linalg.lstsq((cells.parts * scale).T, cells.x * scale, rcond=None)
    most = float(numpy.abs(weights).max())
    if rank < count or not most > 0:
        return None
    inside = weights > NOTHING * most
    low, high = factors(cells.x, cells.parts[inside].sum(0), cells.error)
    if not inside.all() and low <= high and low > 0:
        gone = tuple(r for r, i in zip(cells.ranks, inside, strict=True) if not i)
        return Cause("missing", names, gone, _middle(low, high))
    usual = float(numpy.median(weights))
    odd = int(numpy.abs(weights - usual).argmax())
    others = numpy.delete(weights, odd)
    alike = float(others.max() - others.min()) <= 1e-2 * abs(usual) if count > 2 and usual > 0 else False
    fits = (numpy.abs(cells.x - weights @ cells.parts) <= 2 * most * cells.error).all()
    if not (alike and fits):
        return None
    weight = float(weights[odd]) / usual
    return Cause("scaled", names, (cells.ranks[odd],), usual, weight)


def _middle(low: float, high: float) -> float:
    return low if not numpy.isfinite(high) else (low + high) / 2
