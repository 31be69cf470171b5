"""Where the parts of sharded tensors lie: what this rank holds, who holds the same, who reduces together.

Read from FSDP's own bookkeeping where it can be (FSDP1, FSDP2, hybrid and replicated forms), from a DTensor's
placements otherwise (tensor parallelism). What is laid out in a way not known here says so: no peers, nothing compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import torchprivate


@dataclass(frozen=True)
class Layout:
    """One sharded tensor as this rank holds it. Ranks are global ones, sorted."""

    shape: tuple[int, ...]  # of the tensor whose gradient is scattered; under tensor parallelism itself a part
    numel: int  # elements held here
    start: int  # first flat element of the whole that is held here; -1 when the part is not one piece of it
    peers: tuple[int, ...]  # ranks that hold the same part, this one included; empty when no other does
    shards: tuple[int, ...]  # ranks over which the gradient is reduced; empty: by none that is known
    mesh: tuple[int, ...]  # ranks that together hold all parts of it

    @property
    def full_numel(self) -> int:
        return math.prod(self.shape)


@dataclass
class Layouts:
    """What a model's modules say. `of` and `gathered` go by the id of a parameter, which `kept` keeps alive."""

    of: dict[int, Layout] = field(default_factory=dict)
    gathered: dict[int, Any] = field(default_factory=dict)  # FSDP2 shows these in place of its shards for a while
    kept: list[Any] = field(default_factory=list)

    def named(self, module: Any) -> Iterator[tuple[str, Any]]:
        """A module's parameters as an optimizer knows them."""
        for name, p in module.named_parameters():
            yield name, self.gathered.get(id(p), p)

    def parameters(self, module: Any) -> Iterator[Any]:
        for _, p in self.named(module):
            yield p


def read(torch: Any, modules: Iterable[Any]) -> tuple[Layouts, bool]:
    """The layouts that FSDP keeps for these modules, and whether all of it could be read."""
    found, whole = Layouts(), True
    for module in modules:
        if type(module).__name__ == "FullyShardedDataParallel":
            try:
                unit = torchprivate.fsdp1_unit(module)
            except (AttributeError, TypeError):
                whole = False
                continue
            if unit is not None:
                _add_fsdp1(torch, unit, found)
        else:
            parts = torchprivate.fsdp2_parts(module)
            whole = whole and parts is not None
            for part in parts or ():
                _add_fsdp2(part, found)
    return found, whole


def _add_fsdp1(torch: Any, unit: torchprivate.Fsdp1Unit, found: Layouts) -> None:
    groups = [_ranks(torch, g) for g in unit.groups]
    every = groups[0] if len(groups) == 1 else _crossed(torch, *groups)
    for part in unit.parts:
        same = () if part.same is None else _ranks(torch, part.same)
        layout = Layout(part.full_shape, part.numel, part.start, same if len(same) > 1 else (), every, every)
        found.of[id(part.shard)] = layout
        found.kept.append(part.shard)


def _ranks(torch: Any, group: Any) -> tuple[int, ...]:
    """A group's global ranks; none for one that has been destroyed while models that used it live on."""
    try:
        return tuple(sorted(torch.distributed.get_process_group_ranks(group)))
    except (KeyError, ValueError, RuntimeError):
        return ()


def _crossed(torch: Any, inner: Sequence[int], across: Sequence[int]) -> tuple[int, ...]:
    """All ranks of a hybrid strategy, whose shard groups and replica groups cross; empty where only some ranks do."""
    world = torch.distributed.get_world_size()
    return tuple(range(world)) if len(inner) * len(across) == world else ()


def _add_fsdp2(part: torchprivate.Fsdp2Part, found: Layouts) -> None:
    numel = torchprivate.local_shard(part.shard).numel()
    layout = Layout(
        part.full_shape, numel, _start(part), same_part(part.shard), tuple(sorted(part.ranks)), _mesh(part.shard)
    )
    found.of[id(part.shard)] = layout
    found.kept.append(part.shard)
    if part.gathered is not None:
        found.gathered[id(part.gathered)] = part.shard
        found.kept.append(part.gathered)


def _start(part: torchprivate.Fsdp2Part) -> int:
    if part.dim is None:
        return 0
    return -1 if part.dim else _chunk_start(part.full_shape, part.index, part.count)


def _chunk_start(shape: Sequence[int], index: int, count: int) -> int:
    """The first flat element of chunk `index`, as torch.chunk along dimension 0 cuts it."""
    rows = -(-shape[0] // count)
    return min(index * rows, shape[0]) * math.prod(shape[1:])


def of_dtensor(tensor: Any) -> Layout:
    """The layout of a DTensor that no FSDP module manages, from its placements alone."""
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, at = tuple(tensor.shape), mesh.get_coordinate()
    numel = torchprivate.local_shard(tensor).numel()
    split = [d for d, p in enumerate(placements) if not p.is_replicate()]
    start = -1
    if not split:
        start = 0
    elif len(split) == 1 and at is not None and type(placements[split[0]]).__name__ == "Shard":
        dim = split[0]
        start = _chunk_start(shape, at[dim], mesh.size(dim)) if placements[dim].dim == 0 else -1
    return Layout(shape, numel, start, same_part(tensor), (), _mesh(tensor))


def same_part(tensor: Any) -> tuple[int, ...]:
    """Ranks that hold the same part of a DTensor as this one: those that differ only along replicated mesh axes.

    Empty when there is no other, and when part of it is an unfinished sum, of which no two ranks need hold the same.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    at = mesh.get_coordinate()
    if at is None or any(p.is_partial() for p in placements):
        return ()
    where = tuple(slice(None) if p.is_replicate() else at[axis] for axis, p in enumerate(placements))
    ranks = mesh.mesh[where].flatten().tolist()
    return tuple(sorted(ranks)) if len(ranks) > 1 else ()


def _mesh(tensor: Any) -> tuple[int, ...]:
    return tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))


def data_parallel(layouts: Iterable[Layout]) -> tuple[int, ...]:
    """The ranks that train one model's sharded tensors on different data: the widest group over which one is reduced.

    Empty when there is none, or when the groups overlap without one that holds all others.
    """
    groups = {layout.shards for layout in layouts if layout.shards}
    widest = max(groups, key=len, default=())
    return widest if all(set(g) <= set(widest) for g in groups) else ()
