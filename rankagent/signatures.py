"""What ranks must agree on when they issue a collective together: its name, the reduction, types and sizes, the root.

Only what every backend needs to be equal goes in, so that what may differ never looks like a fault: the number of
elements and not the shape; of an all-gather or reduce-scatter over lists the list that all ranks share (NCCL takes
parts of unequal size there), and on the host a rank's own part too; of an all-to-all no size; of gather and scatter
sizes on the host only (NCCL sends parts of any size). `reduce`'s output, the lists of a root and the payload of a
peer are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from zlib import crc32

SHOWN = 8  # kinds of tensors in a row that a signature spells out; more are counted and digested


@dataclass(frozen=True)
class Shape:
    """How to read one method of ProcessGroup: the name people know it by, which argument all ranks share, its sizes."""

    op: str
    argument: int = 0
    sizes: str = "all"  # all, host (only of tensors on the host), none
    rooted: bool = False
    own: int = -1  # argument that holds this rank's part, whose size counts on the host, where gloo wants them equal


# torch 2.4 to 2.14; a method that a version lacks is left out. send and recv pair two ranks and move no group's order.
METHODS: Mapping[str, Shape] = {
    "allreduce": Shape("all_reduce"),
    "allreduce_coalesced": Shape("all_reduce_coalesced"),
    "broadcast": Shape("broadcast", rooted=True),
    "reduce": Shape("reduce", rooted=True),
    "allgather": Shape("all_gather", own=1),
    "allgather_coalesced": Shape("all_gather_coalesced"),
    "_allgather_base": Shape("all_gather_into_tensor", own=1),
    "all_gather_single": Shape("all_gather_into_tensor", own=1),
    "allgather_into_tensor_coalesced": Shape("all_gather_into_tensor_coalesced"),
    "all_gather_single_coalesced": Shape("all_gather_into_tensor_coalesced"),
    "gather": Shape("gather", 1, "host", rooted=True),
    "scatter": Shape("scatter", 0, "host", rooted=True),
    "reduce_scatter": Shape("reduce_scatter", 1, own=0),
    "_reduce_scatter_base": Shape("reduce_scatter_tensor", 1, own=0),
    "reduce_scatter_single": Shape("reduce_scatter_tensor", 1, own=0),
    "reduce_scatter_tensor_coalesced": Shape("reduce_scatter_tensor_coalesced", 1),
    "reduce_scatter_single_coalesced": Shape("reduce_scatter_tensor_coalesced", 1),
    "alltoall": Shape("all_to_all", 0, "none"),
    "alltoall_base": Shape("all_to_all_single", 0, "none"),
    "all_to_all_single": Shape("all_to_all_single", 0, "none"),
    "barrier": Shape("barrier", -1),
    "monitored_barrier": Shape("monitored_barrier", -1),
}


def read(
    shape: Shape, args: Sequence[Any], kwargs: Mapping[str, Any], reduction: Callable[[Any], str]
) -> tuple[str, int]:
    """(signature, root's rank in its group or -1) of a call of this method. `reduction` names a reduce operation."""
    if shape.argument < 0:
        return "", -1
    given = [*args, *kwargs.values()] if kwargs else args
    shared = given[shape.argument] if len(given) > shape.argument else ()
    if isinstance(shared, list) and len(shared) == 1 and not isinstance(shared[0], (list, tuple)):
        text = _one(shared[0], shape.sizes)  # the usual call: one tensor
    else:
        text = sizes(list(_flat(shared)), shape.sizes)
    if shape.own >= 0 and len(given) > shape.own:
        part = list(_flat(given[shape.own]))
        if part and part[0].device.type == "cpu":
            text = f"{text} own {sizes(part, 'all')}"
    root = -1
    for value in given[1:]:
        op = getattr(value, "reduceOp", None)
        if op is not None:
            text = f"{text} {reduction(op)}"
        if shape.rooted:
            at = getattr(value, "rootRank", value)
            root = at if isinstance(at, int) else root
    if "op" in kwargs:
        text = f"{text} {reduction(kwargs['op'])}"
    return text, root


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from _flat(v)
    elif hasattr(value, "numel"):
        yield value


def sizes(tensors: Sequence[Any], which: str) -> str:
    """Types and numbers of elements, e.g. "float32[64] x2 int64[1]"."""
    if len(tensors) == 1:
        return _one(tensors[0], which)
    return listed([_one(t, which) for t in tensors])


def listed(parts: Sequence[str]) -> str:
    """The parts in order, runs of equal ones counted, a long list cut and digested."""
    runs = [(part, len(list(same))) for part, same in groupby(parts)]
    text = " ".join(part if n == 1 else f"{part} x{n}" for part, n in runs[:SHOWN])
    return text if len(runs) <= SHOWN else f"{text} and more, #{crc32(repr(runs).encode()):08x}"


_names: dict[Any, str] = {}  # of the few types there are


def _one(tensor: Any, which: str) -> str:
    dtype = _names.get(tensor.dtype)
    if dtype is None:
        dtype = _names[tensor.dtype] = str(tensor.dtype)[6:]  # without "torch."
    if which == "none" or (which == "host" and tensor.device.type != "cpu"):
        return dtype
    return f"{dtype}[{tensor.numel()}]"
