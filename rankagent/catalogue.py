"""Which tensors this rank trains: names, shapes, and who else must hold the same values.

Built from the optimizers that exist and the modules that hold their parameters, again whenever these change. Holds
weak references only, so that a model that training has let go is freed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from . import layout, torchprivate
from .layout import Layout, Layouts

ELEMENTS_PER_PASS = 32_000_000  # about 10 ms on one core; a larger model is covered in turns
SMALL_ELEMENTS = 16_384  # 64 KiB of fp32: norms and biases, looked at in every pass
REPLICATED = ("ddp", "late", "ignored", "hook")  # sharing of tensors in a DDP module: their memory is always there
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
# By-design not an average over all replicas at each step (torch.distributed.algorithms.ddp_comm_hooks)
_PARTIAL_HOOKS = ("localSGD", "noop_hook")


@dataclass(frozen=True)
class Entry:
    """One tensor of the catalogue; `ref` gives it back while it lives."""

    index: int
    kind: str
    name: str
    model: int
    model_type: str
    ref: weakref.ReferenceType[Any]
    numel: int
    optimizer: int
    sharing: str
    peers: str
    broadcast: int
    ddp: int
    shape: str
    full_numel: int  # of the whole tensor, whose gradient is scattered; `numel` elements of it are held here
    shard_start: int  # first flat element of the whole that is held here, -1 when the part is not one piece of it
    shards: str  # ranks over which a sharded tensor's gradient is reduced; empty for any other tensor
    mesh: str  # ranks that together hold all parts of a sharded tensor; empty for any other
    aliases: str = ""  # other names of the same tensor in its model, comma separated

    @property
    def tensor(self) -> Any:
        return self.ref()


class Catalogue:
    """`refresh()` brings it up to date and says whether it changed; `params`, `buffers` list its entries."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._optimizers: list[weakref.ReferenceType[Any]] = []
        self._ddps: list[tuple[weakref.ReferenceType[Any], frozenset[str]]] = []
        self._signature: Any = None
        self._by_id: dict[int, Entry] = {}
        self._tops: list[weakref.ReferenceType[Any]] = []
        self._built: list[tuple[str, int]] = []  # what `_structure` gave when it was built
        self._doubtful = False  # a parameter was registered somewhere since then
        self.generation = 0
        self.params: list[Entry] = []
        self.buffers: list[Entry] = []

    # -------------------------------------------------------- what exists

    def add_optimizer(self, optimizer: Any) -> int:
        """Note an optimizer; its number in this process."""
        for i, ref in enumerate(self._optimizers):
            if ref() is optimizer:
                return i
        self._optimizers.append(weakref.ref(optimizer))
        return len(self._optimizers) - 1

    def optimizers(self) -> dict[int, Any]:
        """The optimizers that exist, by number."""
        return {
            i: o for i, ref in enumerate(self._optimizers) if (o := ref()) is not None and hasattr(o, "param_groups")
        }

    def add_ddp(self, ddp: Any) -> None:
        """Note a DDP module and the names of the tensors that it knew when it was built."""
        module = ddp.module
        known = {n for n, _ in module.named_parameters()} | {n for n, _ in module.named_buffers()}
        self._ddps.append((weakref.ref(ddp), frozenset(known)))

    def ddps(self) -> list[tuple[int, Any, frozenset[str]]]:
        """The DDP modules that exist: number, module, names known at wrapping."""
        return [(i, d, names) for i, (ref, names) in enumerate(self._ddps) if (d := ref()) is not None]

    # -------------------------------------------------------- building

    def refresh(self, in_backward: bool = False) -> bool:
        """Rebuild when optimizers, their parameters or wrapped models have changed. 3 us when nothing has.

        During backward FSDP2 shows gathered parameters in place of its shards: a catalogue of those would be wrong.
        """
        optimizers = self.optimizers()
        signature = (
            tuple(
                (i, len(o.param_groups), sum(len(g["params"]) for g in o.param_groups)) for i, o in optimizers.items()
            ),
            tuple(i for i, _, _ in self.ddps()),
        )
        if signature == self._signature:
            if not self._doubtful or in_backward:
                return False
            self._doubtful = False
            # FSDP shows gathered parameters for a while: only what is there in the same form can be compared
            if any(e.sharing == "sharded" for e in self.params) or self._structure() == self._built:
                return False
            self._signature = None
        if in_backward and not torchprivate.knows_gathered():
            params = (p for o in optimizers.values() for g in o.param_groups for p in g["params"])
            if any(torchprivate.is_shard(p) for p in params):
                return False
        self._signature = signature
        self._build(optimizers)
        self.generation += 1
        return True

    def entry(self, tensor: Any) -> Entry | None:
        """The entry of a parameter."""
        found = self._by_id.get(id(tensor))
        return found if found is not None and found.ref() is tensor else None

    def is_top(self, module: Any) -> bool:
        """Whether this module is a whole model that an optimizer trains, not a part of one."""
        return any(ref() is module for ref in self._tops)

    def tops(self) -> list[Any]:
        """The whole models that optimizers train, by their number in `Entry.model`; None for one that is gone."""
        return [ref() for ref in self._tops]

    def _build(self, optimizers: dict[int, Any]) -> None:
        held: dict[int, tuple[int, str]] = {}
        keep = []  # the ids stay valid while these live
        for number, optimizer in optimizers.items():
            for g, group in enumerate(optimizer.param_groups):
                for k, p in enumerate(group["params"]):
                    held.setdefault(id(p), (number, f"optimizer{number}.group{g}.{k}"))
                    keep.append(p)
        params: list[Entry] = []
        buffers: list[Entry] = []
        seen: set[int] = set()
        roots = self._roots(held)
        self._tops = [weakref.ref(root.module) for root in roots]
        for number, root in enumerate(roots):
            also = _aliases(root.module)
            for name, p in root.layouts.named(root.module):
                if id(p) not in seen:
                    seen.add(id(p))
                    entry = self._entry(len(params), "param", name, number, root, p, held)
                    params.append(replace(entry, aliases=",".join(a for a in also.get(id(p), ()) if a != entry.name)))
            buffers += [self._entry(0, "buffer", n, number, root, b, held) for n, b in root.module.named_buffers()]
        nowhere = Root(None, None, Layouts(), True)
        for p in keep:
            if id(p) not in seen:
                seen.add(id(p))
                name, number = held[id(p)][1], 1 + max((e.model for e in params), default=-1)
                params.append(self._entry(len(params), "param", name, number, nowhere, p, held))
        self.params = params
        self.buffers = [replace(b, index=len(params) + i) for i, b in enumerate(buffers)]
        self._by_id = {id(t): e for e in params if (t := e.ref()) is not None}
        self._built = self._structure()

    def changed(self) -> None:
        """Some module got a parameter or a part: at the next refresh look whether it is one of these models'."""
        self._doubtful = True

    def _structure(self) -> list[tuple[str, int]]:
        """Every name of every parameter of the models, and which tensor it is."""
        return [(n, id(p)) for top in self.tops() for n, p in top.named_parameters(remove_duplicate=False)]

    def _roots(self, held: dict[int, tuple[int, str]]) -> list[Root]:
        """Modules that hold the optimizers' parameters, in the order of those."""
        found = [Root(d.module, (i, d, names), *layout.read(self._torch, d.module.modules()))
                 for i, d, names in self.ddps()]  # fmt: skip
        covered = {id(p) for r in found for p in r.layouts.parameters(r.module)}
        if not held.keys() <= covered:
            found += _top_modules(self._torch, held.keys() - covered, [r.module for r in found])
        order = {key: at for at, key in enumerate(held)}

        def first(root: Root) -> int:
            ids = map(id, root.layouts.parameters(root.module))
            return min((order[i] for i in ids if i in order), default=len(order))

        return sorted((f for f in found if first(f) < len(order)), key=first)

    def _entry(self, index: int, kind: str, name: str, model: int, root: Root, tensor: Any,
               held: dict[int, tuple[int, str]]) -> Entry:  # fmt: skip
        lies = root.layouts.of.get(id(tensor))
        if lies is None and hasattr(tensor, "placements"):
            lies = layout.of_dtensor(tensor)
        sharing, peers = self._sharing(name, tensor, root, lies)
        broadcast = -1
        if root.ddp:  # what DDP was told to ignore it does not broadcast either
            broadcast = int(bool(getattr(root.ddp[1], "broadcast_buffers", False)) and sharing != "ignored")
        lies = lies or Layout(tuple(tensor.shape), tensor.numel(), 0, (), (), ())
        return Entry(index, kind, clean(name), model, type(root.module).__name__ if root.module is not None else "",
                     weakref.ref(tensor), lies.numel, held.get(id(tensor), (-1, ""))[0], sharing, peers, broadcast,
                     root.ddp[0] if root.ddp else -1, "x".join(map(str, lies.shape)) or "scalar", lies.full_numel,
                     lies.start, _ranks(lies.shards), _ranks(lies.mesh))  # fmt: skip

    def _sharing(self, name: str, tensor: Any, root: Root, lies: Layout | None) -> tuple[str, str]:
        if lies is not None:
            return "sharded", _ranks(lies.peers)
        if torchprivate.is_shard(tensor) or not root.readable:
            return "sharded", ""
        dist = torchprivate.distributed(self._torch)
        if root.ddp is None:
            beside = layout.data_parallel(root.layouts.of.values())
            if beside:
                return "outside", _ranks(beside)
            alone = dist is None or dist.get_world_size() == 1
            if alone or not torchprivate.only_default_group(self._torch):
                return "plain", ""
            return "plain", _ranks(range(dist.get_world_size()))
        _, wrapper, known = root.ddp
        peers = _ranks(dist.get_process_group_ranks(wrapper.process_group)) if dist is not None else ""
        if name in getattr(wrapper, "parameters_to_ignore", ()):
            return "ignored", peers
        if any(part in hook for hook in torchprivate.communication_hook_names(wrapper) for part in _PARTIAL_HOOKS):
            return "hook", peers
        return ("ddp" if name in known else "late"), peers


@dataclass(frozen=True)
class Root:
    """A model: the module at its top, its entry of `ddps` or None, how its parts lie, whether all of that is known."""

    module: Any
    ddp: Any
    layouts: Layouts
    readable: bool


def _ranks(ranks: Iterable[int]) -> str:
    return ",".join(str(r) for r in ranks)


def _aliases(module: Any) -> dict[int, list[str]]:
    """All names of each tensor that has several."""
    names: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(clean(name))
    return {key: found for key, found in names.items() if len(found) > 1}


def clean(name: str) -> str:
    """A tensor's name without what wrappers put into it."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name.removeprefix("module.")


def _top_modules(torch: Any, wanted: Iterable[int], known: list[Any]) -> list[Root]:
    """The largest modules alive that hold one of the wanted parameters and lie in no other module.

    Looks through the garbage collector's list: 50 to 100 ms, only when a model is not wrapped in DDP, once per model.
    Compares types, never instances, since a lazy proxy must not be touched.
    """
    left = set(wanted)
    module_type = torch.nn.Module
    modules = [o for o in gc.get_objects() if issubclass(type(o), module_type) and "_modules" in o.__dict__]
    inner = {id(child) for m in modules for child in m._modules.values() if child is not None}
    skip = {id(m) for m in known}
    tops = [m for m in modules if id(m) not in inner and id(m) not in skip]
    scored = []
    for m in tops:
        root = Root(m, None, *layout.read(torch, m.modules()))
        found = left & {id(p) for p in root.layouts.parameters(m)}
        if found:
            scored.append((len(found), root))
    chosen = []
    for _, root in sorted(scored, key=lambda s: -s[0]):
        mine = {id(p) for p in root.layouts.parameters(root.module)} & left
        if mine:
            chosen.append(root)
            left -= mine
    return chosen


def due(entries: list[Entry], step: int, everything: bool = False, whole: bool = False) -> list[Entry]:
    """The entries to look at in a pass of this step: all of them up to ELEMENTS_PER_PASS elements, else the small ones
    and a window over the others that moves with the step number alone, so that all ranks look at the same ones.

    `whole`: of sharded tensors all elements are looked at, not this rank's alone."""
    sizes = [e.full_numel if whole else e.numel for e in entries]
    if everything or sum(sizes) <= ELEMENTS_PER_PASS:
        return entries
    large = [i for i, n in enumerate(sizes) if n > SMALL_ELEMENTS]
    start, room, chosen = (step * 0x9E3779B1) % len(large), ELEMENTS_PER_PASS, set()
    for k in range(len(large)):
        i = large[(start + k) % len(large)]
        if room <= 0:
            break
        chosen.add(i)
        room -= sizes[i]
    return [e for i, e in enumerate(entries) if i in chosen or sizes[i] <= SMALL_ELEMENTS]
