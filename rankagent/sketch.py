"""Linear sketches of tensors: few numbers that add up over ranks as the tensors themselves do.

Of a tensor's window (see fingerprint) the elements are multiplied by fixed signs and summed, the first and the second
half of the window each for itself. Signs are a hash of the tensor's place in the catalogue and of the position within
the window, so the sketch of a sum is the sum of the sketches, on whichever ranks or shards its parts lie. Products
with signs are exact and sums are made in double precision; what separates the sum of sketches from the sketch of the
sum is the rounding of the reduction itself. As the signs know nothing of these errors e, Hoeffding's inequality holds:
|sum of signed errors| > t * ||e|| has at most the probability 2 exp(-t^2 / 2).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy

from .fingerprint import WINDOW_ELEMENTS, Run

PIECES = 2  # numbers per tensor
_CYCLE = 1 << 16  # signs before they repeat; tensors begin at places of it that lie far apart
_STRIDE = 40_503  # odd, so that all tensors begin elsewhere: shifted signs are as good as new ones

# (place of the tensor in the catalogue, elements of the window before this part of it, elements of the whole window)
Place = tuple[int, int, int]


@functools.lru_cache(maxsize=1)
def _signs() -> Any:
    """The cycle of signs as float32, one window longer: a bit of splitmix64 of the position."""
    x = (numpy.arange(1, _CYCLE + 1, dtype=numpy.uint64)) * numpy.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    bits = ((x >> numpy.uint64(40)) & numpy.uint64(1)).astype(numpy.float32)
    signs = bits * 2 - 1
    return numpy.concatenate([signs, signs[: WINDOW_ELEMENTS + 1]])


@functools.lru_cache(maxsize=8)
def _tile(sizes: tuple[int, ...], places: tuple[Place, ...]) -> tuple[Any, Any, Any]:
    """Signs of parts laid end to end, where each piece begins that is not empty, and its number among all pieces."""
    signs, starts, numbers, at = [], [], [], 0
    for k, (size, (index, before, whole)) in enumerate(zip(sizes, places, strict=True)):
        begin = index * _STRIDE % _CYCLE + before
        signs.append(_signs()[begin : begin + size])
        half = min(max((whole + 1) // 2 - before, 0), size)
        for piece, (first, last) in enumerate(((0, half), (half, size))):
            if last > first:
                starts.append(at + first)
                numbers.append(k * PIECES + piece)
        at += size
    return numpy.concatenate(signs), numpy.asarray(starts), numpy.asarray(numbers)


def sketch_cpu(together: list[Run], places: list[Place], squares: bool) -> tuple[list[float], list[float]]:
    """PIECES numbers for each place, in order, and if asked the L2 norm of each window, from CPU tensors' runs."""
    sketch = numpy.zeros(len(places) * PIECES)
    norms = numpy.zeros(len(places) * PIECES if squares else 0)
    with numpy.errstate(all="ignore"):
        for run in together:
            signs, starts, numbers = _laid_out(run, places)
            values = _values(run.flat)
            sketch[numbers] = numpy.add.reduceat(values * signs, starts, dtype=numpy.float64)
            if squares:
                norms[numbers] = numpy.add.reduceat(numpy.square(values, dtype=numpy.float64), starts)
        whole = numpy.sqrt(norms.reshape(-1, PIECES).sum(1)) if squares else norms
    return sketch.tolist(), whole.tolist()


def _laid_out(run: Run, places: list[Place]) -> tuple[Any, Any, Any]:
    signs, starts, pieces = _tile(run.sizes, tuple(places[i] for i in run.order))
    order = numpy.asarray(run.order)
    return signs, starts, order[pieces // PIECES] * PIECES + pieces % PIECES


def _values(flat: Any) -> Any:
    """A flat CPU tensor as an array of at least single precision: half precision has no fast arithmetic there."""
    flat = flat.detach()
    return (flat.float() if flat.element_size() < 4 else flat).numpy()


class DeviceSketch:
    """`sketch_cpu` on an accelerator: vectors that nothing waits for. Keeps the signs there."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Any, Any]] = {}

    def sketch(self, together: list[Run], places: list[Place], squares: bool, device: Any) -> list[Any]:
        """Vectors on `device`: the sketches and, if asked, the sums of squares of the windows' pieces."""
        import torch

        found = [torch.zeros(len(places) * PIECES, dtype=torch.float64, device=device) for _ in range(1 + squares)]
        for run in together:
            signs, numbers = self._on(run, places)
            values = run.flat.detach().double()
            for vector, addends in zip(found, (values * signs, values * values), strict=False):
                part = torch.zeros_like(vector, device=run.flat.device).index_add_(0, numbers, addends)
                vector += part.to(device, non_blocking=True)
        return found

    def _on(self, run: Run, places: list[Place]) -> tuple[Any, Any]:
        import torch

        key = (run.sizes, tuple(places[i] for i in run.order), tuple(run.order), run.flat.device)
        if key not in self._kept:
            if len(self._kept) >= 8:
                self._kept.clear()
            signs, starts, numbers = _laid_out(run, places)
            counts = numpy.diff(numpy.append(starts, len(signs)))
            repeated = torch.from_numpy(numpy.repeat(numbers, counts))
            device = run.flat.device
            self._kept[key] = (torch.from_numpy(signs.copy()).to(device), repeated.to(device))
        return self._kept[key]

    def clear(self) -> None:
        self._kept.clear()
