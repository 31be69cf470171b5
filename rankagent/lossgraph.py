"""What the last operations of a loss's graph tell: whether it was divided before its backward, which label it ignores.

Only what is certain is said: the mean that a loss function of torch's took, with nothing between it and the backward
but the loss scaler's product, sums and changes of type or shape. Numbers that the graph has saved are left alone: to
read one would unpack it, which under activation checkpointing computes the forward anew.
"""

from __future__ import annotations

from typing import Any

from . import torchprivate

# what changes no value: types, shapes, copies
_AS_IT_IS = {"ToCopyBackward0", "CloneBackward0", "ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0",
             "UnsqueezeBackward0", "AliasBackward0"}  # fmt: skip
_FACTOR = ("MulBackward0", "DivBackward0")
_LOOKED_AT = 16  # operations, breadth first: what divides, weighs or sums up losses
_DEPTH = 8  # operations followed: a loss of more terms is left open


def undivided(root: Any, scaled: bool) -> bool:
    """True only where it is certain. `scaled`: a loss scaler has multiplied it last."""
    node = _bare(getattr(root, "grad_fn", None))
    if scaled and node is not None and node.name() == _FACTOR[0]:
        node = _first(node)
    return _plain(node, _DEPTH)


def ignored_indices(root: Any) -> set[int]:
    """The indices that torch's classification losses near the end of this graph ignore; empty where none is."""
    found, todo, seen = set(), [getattr(root, "grad_fn", None)], 0
    while todo and seen < _LOOKED_AT:
        node = todo.pop(0)
        if node is None:
            continue
        seen += 1
        index = torchprivate.ignores(node)
        if index is not None:
            found.add(index)
        else:
            todo += [part for part, _ in node.next_functions]
    return found


def _plain(node: Any, depth: int) -> bool:
    node = _bare(node)
    if node is None or not depth:
        return False
    name = node.name()
    if name in ("AddBackward0", "SubBackward0"):
        return all(_plain(part, depth - 1) for part, _ in node.next_functions if part is not None)
    if name == "MeanBackward0":
        inner = _bare(_first(node))  # of losses that each were divided?
        return inner is not None and inner.name() not in _FACTOR
    return torchprivate.takes_mean(node)


def _first(node: Any) -> Any:
    return node.next_functions[0][0] if node.next_functions else None


def _bare(node: Any) -> Any:
    """The operation below those that change no value."""
    for _ in range(_DEPTH):
        if node is None or node.name() not in _AS_IT_IS:
            return node
        node = _first(node)
    return node
