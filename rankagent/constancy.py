"""Whether a tensor says the same of every sample, and what stands below it in the graph of a forward.

Comparisons are exact and stay on the tensor's device: flags are 0-d tensors that nothing waits for. Nothing here keeps
a tensor, saves anything for a backward or draws a random number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .birth import op

# 0.1 ms on one core; of a larger output every n-th sample and element: a constant one is constant there too
ROOM = 1 << 17
FEWEST_SAMPLES = 8  # that are kept where samples are left out
MOST_NODES = 2_000  # a block of a large model has some hundreds
# Operations that hand values on: what gave a tensor its values stands below them.
VIEWS = frozenset((
    "alias", "asstrided", "clone", "expand", "nativedropout", "permute", "reshapealias", "select", "slice", "squeeze",
    "t", "tocopy", "transpose", "unsafeview", "unsqueeze", "view",
))  # fmt: skip


def first_tensor(value: Any, torch: Any) -> Any:
    """The tensor that a module returns or gets, or the first of several; None without one that can be looked at.

    Floating point, of at least two elements per sample: a loss, a score or a weight over a single choice may be
    constant by nature. Part of a graph, since what no parameter went into is no result of training."""
    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    elif isinstance(value, dict):
        value = next(iter(value.values()), None)
    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    if type(value) is not torch.Tensor or not value.is_floating_point() or not value.requires_grad:
        return None
    if value.layout != torch.strided or value.dim() < 2 or value.numel() < 2 * max(value.shape[0], 1):
        return None
    return value


def ends_alike(x: Any) -> Any:
    """Whether the first and the last sample are equal, or all elements of a single one; most outputs end here."""
    if x.shape[0] == 1:
        return _equal(thinned(x))
    return (thinned(x[0], ROOM // 2) == thinned(x[-1], ROOM // 2)).all()


def flags(x: Any) -> list[Any]:
    """All samples equal; all elements equal; all zero; all one. Four 0-d bools."""
    x = thinned(x)
    equal = _equal(x)
    same = equal if x.shape[0] == 1 else (x == x[:1]).all()
    return [same, equal, (x == 0).all(), (x == 1).all()]


def same(x: Any) -> Any:
    """The first of `flags` alone."""
    x = thinned(x)
    return _equal(x) if x.shape[0] == 1 else (x == x[:1]).all()


def _equal(x: Any) -> Any:
    return (x == x[(0,) * x.dim()]).all()


def thinned(x: Any, room: int = ROOM) -> Any:
    """A view of about `room` elements spread over the whole of x: fewer samples first, then every n-th of each dim."""
    over = -(-x.numel() // room)
    if over > 1 and x.dim():
        stride = min(over, max(x.shape[0] // FEWEST_SAMPLES, 1))
        x = x[::stride]
        for dim in range(x.dim() - 1, 0, -1):
            over = -(-x.numel() // room)
            if over <= 1:
                break
            x = x[(slice(None),) * dim + (slice(None, None, min(over, x.shape[dim])),)]
    return x


# -------------------------------------------------------- the graph below


def giver(node: Any) -> str:
    """The operation that gave a tensor its values, behind views and copies; empty for none."""
    for _ in range(len(VIEWS)):
        if node is None or op(node) not in VIEWS:
            break
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return op(node) if node is not None else ""


def reaches(node: Any, target: Any) -> bool:
    """Whether a gradient that enters at `node` comes past `target`."""
    return target is not None and any(n is target for level in _levels(node) for n in level)


def nearest_weights(node: Any) -> list[Any]:
    """The weights next below: leaves of two dimensions and more at the first distance at which there are any."""
    for level in _levels(node):
        found = [v for n in level if (v := getattr(n, "variable", None)) is not None and v.dim() > 1]
        if found:
            return found
    return []


def _levels(node: Any) -> Iterator[list[Any]]:
    """Operations by their distance from `node`."""
    level = [node] if node is not None else []
    seen = set(level)
    while level and len(seen) < MOST_NODES:
        yield level
        below = dict.fromkeys(n for at in level for n, _ in at.next_functions if n is not None and n not in seen)
        seen.update(below)
        level = list(below)
