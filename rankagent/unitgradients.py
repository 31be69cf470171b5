"""A rank's own gradients of sharded tensors, taken unit by unit before FSDP scatters them, and what it left of them.

FSDP frees a unit's gradient as soon as it is reduced: norms and copies of windows are made on the spot, and what they
say is put together when the backward is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from . import fingerprint, torchprivate
from .agent import Emit
from .catalogue import Entry, due
from .gradientpass import NO_GRADIENT, UNMEASURED, Pass

NARROW = ("bfloat16", "float16", "float8")


@dataclass(frozen=True)
class OwnGradient:
    """This rank's gradient of a whole tensor. The mean of gradient / factor over the Entry's `shards` is reduced."""

    entry: Entry
    grad: Any
    factor: float  # 1 unless the program set a divisor of its own
    alone: bool  # the shard's gradient will be this reduction and nothing else: none was there, none is left for later


class UnitGradients:
    """Collects one backward. `taken`: catalogue index -> copy of the window, norm, whether it is not finite."""

    def __init__(self, emit: Emit) -> None:
        self._agent = emit.agent
        self.taken: dict[int, tuple[Any, Any, bool]] = {}
        self.wires: set[str] = set()
        self.own_divisor = False  # the program set one
        self._entries: list[Entry] = []
        self._generation = 0
        self._several: set[int] = set()  # reduced more than once in this backward: neither norm is that of their sum
        self._mixed: set[int] = set()  # something else is in the shard's gradient
        self._events: list[Any] = []  # of the streams in which windows were copied

    @property
    def narrow(self) -> bool:
        return any(wire.startswith(NARROW) for wire in self.wires)

    def take(self, found: list[OwnGradient], wire_dtype: str) -> None:
        """A unit is about to be reduced. On CUDA in a thread of autograd's and perhaps in a stream of FSDP's."""
        catalogue = self._agent.catalogue
        if self._generation != catalogue.generation:
            self.forget()
            sharded = [e for e in catalogue.params if e.sharing == "sharded"]
            self._entries = due(sharded, self._agent.window.step, whole=True)
            self._generation = catalogue.generation
        wanted = {e.index for e in self._entries}
        own = [o for o in found if o.entry.index in wanted and _usable(o)]
        if not own:
            return
        self.wires.add(wire_dtype)
        step = self._agent.window.step
        norms = fingerprint.norms([o.grad for o in own])
        windows = _copied([fingerprint.windowed(o.grad, step) for o in own])
        finite = [True] * len(own) if norms.is_cuda else [math.isfinite(n) for n in norms.tolist()]
        for k, o in enumerate(own):
            index = o.entry.index
            odd = not finite[k] and fingerprint.has_nonfinite(o.grad)
            if index in self.taken:
                self._several.add(index)
                odd = odd or self.taken[index][2]
            if not o.alone:
                self._mixed.add(index)
            self.own_divisor = self.own_divisor or o.factor != 1
            self.taken[index] = (windows[k], norms[k], odd)
        if norms.is_cuda:
            event = self._agent.torch.cuda.Event()
            event.record()
            self._events.append(event)

    def own(self) -> Pass | None:
        """The rank's own gradients of the backward that is over; None when no unit was reduced in it."""
        if not self.taken or self._generation != self._agent.catalogue.generation:
            return None
        self._wait()
        here = self._pass()
        for at, entry in enumerate(here.entries):
            p = entry.ref()
            if entry.index in self.taken and entry.index not in self._several:
                window = self.taken[entry.index][0]
                here.chosen.append(at)
                here.parts.append(window)
                here.places.append((entry.index, 0, window.numel()))
            elif p is not None and not p.requires_grad:
                here.l2[at] = NO_GRADIENT
        return here

    def nonfinite(self) -> list[int]:
        """Tensors that are not finite and whose norm does not tell, as they were reduced more than once."""
        return [i for i in sorted(self._several) if self.taken[i][2]]

    def delivered(self) -> Pass:
        """What the reduction left in this rank's shards of the same windows, nothing where it holds nothing of one."""
        here = self._pass()
        for at, entry in enumerate(here.entries):
            index = entry.index
            if index not in self.taken or index in self._several or index in self._mixed or entry.shard_start < 0:
                continue
            part = self._part(entry)
            if part is not None:
                here.chosen.append(at)
                here.parts.append(part)
                here.places.append((index, 0, part.numel()))
        return here

    def _part(self, entry: Entry) -> Any:
        """The window of the whole tensor with this rank's part of it, zero elsewhere; None when it can't be had.

        Whole windows, so that signs laid out once do for every step and rank.
        """
        p = entry.ref()
        if p is None:
            return None
        start, stop = fingerprint.window(entry.full_numel, self._agent.window.step)
        if not entry.numel:
            return torchprivate.local_shard(p).detach().new_zeros(stop - start)
        if p.grad is None or not torchprivate.same_placements(p, p.grad):
            return None
        grad = torchprivate.local_shard(p.grad).detach()
        if grad.numel() != entry.numel or grad.is_sparse or not torchprivate.readable(grad):
            return None
        low, high = max(start, entry.shard_start), min(stop, entry.shard_start + entry.numel)
        held = grad.reshape(-1)[low - entry.shard_start : high - entry.shard_start] if low < high else None
        if held is not None and high - low == stop - start:
            return held
        part = grad.new_zeros(stop - start)
        if held is not None:
            part[low - start : high - start] = held
        return part

    def _pass(self) -> Pass:
        params = self._agent.catalogue.params
        whole = len(self._entries) == len(params)
        here = Pass(self._entries, [] if whole else [e.index for e in self._entries], self._agent.window.step)
        here.l2 = [UNMEASURED] * len(here.entries)
        return here

    def _wait(self) -> None:
        """On a device: what comes next in this stream follows the copies, and their memory is kept until then."""
        if self._events:
            stream = self._agent.torch.cuda.current_stream()
            for event in self._events:
                stream.wait_event(event)
            for window, norm, _ in self.taken.values():
                window.record_stream(stream)
                norm.record_stream(stream)

    def forget(self) -> None:
        """The backward is over: no copy stays."""
        self.taken.clear()
        self.wires.clear()
        self._several.clear()
        self._mixed.clear()
        self._events.clear()
        self.own_divisor, self._generation, self._entries = False, 0, []


def _usable(own: OwnGradient) -> bool:
    grad = own.grad
    return bool(not grad.is_sparse and grad.is_floating_point() and grad.numel() == own.entry.full_numel > 0)


def _copied(parts: list[Any]) -> list[Any]:
    """Flat copies of tensors, in one call where they are of one dtype."""
    if len({p.dtype for p in parts}) > 1 or len(parts) == 1:
        return [p.detach().reshape(-1).clone() for p in parts]
    return list(torchprivate.flatten(parts).split([p.numel() for p in parts]))
