"""Where in the forward a value that is not finite was born, read from the graph that backward is about to use.

Operations save tensors for their backward. Below the first of them whose saved values hold NaN, everything that was
saved is finite, so there it was born, or in an operation between. Read only where nothing is changed by it: saved
tensors behind hooks (activation checkpointing, offloading) would be computed again, so such a step is left alone.
Of values that were computed Inf is not looked for: masks and logarithms of probabilities hold it by design.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import torchprivate

MOST_NODES = 20_000  # a large language model has some thousands
MOST_NS = 500_000_000  # what one step that is lost anyway may cost
NEAREST = 3  # parameters that are named
PARAMETER = "a parameter"
CONSTANT = "a tensor without gradient, as an input or a constant"
# Operations by which a batch enters a model, with the names of that argument; an Inf in it makes NaN.
DATA = {"addmm": "mat1", "mm": "self", "bmm": "self", "baddbmm": "batch1", "convolution": "input", "linear": "input"}
RESULTS = ("result", "out", "logsumexp", "log_sumexp")  # how saved results begin, statistics beside them included


@dataclass(frozen=True)
class Birth:
    """The operation nearest to the inputs that shows NaN.

    `shown` is result (it made it), input (`fed_by` gave it) or root (no saved value shows it: it was born after
    `fed_by`, the operations nearest to the loss of which values are known). `near`: parameters nearest below.
    """

    op: str
    shown: str
    fed_by: tuple[str, ...]
    near: tuple[Any, ...]
    nodes: int
    whole: bool  # all of the graph was looked at
    given: Any = None  # what such an operation got from outside the graph as its data, and is not finite


def find(root: Any, now_ns: Callable[[], int] = time.perf_counter_ns) -> Birth | None:
    """Where the NaN or Inf of this scalar loss was born; None when it has no graph."""
    top = getattr(root, "grad_fn", None)
    if top is None:
        return None
    until = now_ns() + MOST_NS
    done: set[Any] = set()
    known: set[Any] = set()  # operations of which a saved tensor was looked at
    stack: list[tuple[Any, bool]] = [(top, False)]
    while stack:
        if len(done) >= MOST_NODES or now_ns() > until:
            return Birth(op(top), "root", (), (), len(done), False)
        node, ready = stack.pop()
        if ready:
            shown, giver, given = _shown(node, known)
            if shown:
                return Birth(op(node), shown, (giver,) if giver else (), _near(node), len(done), True, given)
            continue
        if node in done:
            continue
        done.add(node)
        stack.append((node, True))
        stack += [(child, False) for child in _below(node) if child not in done]
    return Birth(op(top), "root", _nearest_known(top, known), _near(top), len(done), True)


def _shown(node: Any, known: set[Any]) -> tuple[str, str, Any]:
    """Whether a saved tensor of this operation holds NaN: on which side of it, what gave it, the data if nothing did.

    Data from outside the graph must not hold Inf either."""
    found: tuple[str, str, Any] = ("", "", None)
    data = DATA.get(op(node))
    for name, tensor in torchprivate.saved_for_backward(node):
        values = torchprivate.held_here(tensor)
        if values is None:
            continue
        known.add(node)
        if not values.is_floating_point() or not values.numel():
            continue
        result = name.startswith(RESULTS)
        outside = not result and tensor.grad_fn is None and not tensor.requires_grad
        bad = ~values.isfinite() if outside and name == data else values != values
        if not bool(bad.any()):
            continue
        if result:
            found = ("result", "", None)
        elif outside:
            return "input", CONSTANT, values if name == data else None
        else:
            return "input", op(tensor.grad_fn) if tensor.grad_fn is not None else PARAMETER, None
    return found


def op(node: Any) -> str:
    """The operation's name as people know it: LogBackward0 is log."""
    name: str = node.name().rpartition("::")[2]
    return name.partition("Backward")[0].lower() or name


def _below(node: Any) -> list[Any]:
    return [c for c, _ in node.next_functions if c is not None]


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _breadth_first(top: Any) -> Iterator[Any]:
    seen, level = {top}, [top]
    while level:
        yield from level
        below = dict.fromkeys(c for n in level for c in _below(n) if c not in seen)
        seen.update(below)
        level = list(below)


def _near(node: Any) -> tuple[Any, ...]:
    """The leaves nearest below."""
    found: list[Any] = []
    for below in _breadth_first(node):
        if _is_leaf(below):
            found.append(below.variable)
            if len(found) == NEAREST:
                break
    return tuple(found)


def _nearest_known(top: Any, known: set[Any]) -> tuple[str, ...]:
    """The operations nearest to the loss whose saved values are finite, of each branch the first."""
    found, seen, level = dict[str, None](), {top}, [top]
    while level:
        below = []
        for node in level:
            if node in known:
                found[op(node)] = None
                continue
            for child in _below(node):
                if child not in seen:
                    seen.add(child)
                    below.append(child)
        level = below
    return tuple(found)[:NEAREST]
