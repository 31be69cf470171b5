"""The median of what is there, over one axis."""

from __future__ import annotations

from typing import Any

import numpy


def median(x: Any, axis: int) -> Any:
    """Median without NaN; NaN where there is nothing else. Sorts, as nanmedian warns of empty slices."""
    ordered = numpy.sort(x, axis=axis)  # NaN last
    count = numpy.isfinite(x).sum(axis)
    if (count == x.shape[axis]).all():  # nothing to be left out
        low, high = ((x.shape[axis] - 1) // 2, x.shape[axis] // 2)
        return (ordered.take(low, axis) + ordered.take(high, axis)) / 2
    low = numpy.maximum(count - 1, 0) // 2
    high = count // 2
    at = [numpy.expand_dims(numpy.minimum(i, x.shape[axis] - 1), axis) for i in (low, high)]
    a, b = (numpy.take_along_axis(ordered, i, axis).squeeze(axis) for i in at)
    return numpy.where(count > 0, (a + b) / 2, numpy.nan)
