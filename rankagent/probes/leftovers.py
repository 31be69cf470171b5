"""Whether the gradient that one update has used is still there when the next one is made of it.

Writes    leftover
Costs     at watched updates a copy of the smallest gradient of each optimizer, and at the backwards up to its next update
          two passes over that: 10 us each
Blind to  optimizers that step inside the backward; gradients that FSDP1 sets aside; zeroing that leaves out the one
          parameter looked at, or only that one
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import torchprivate
from ..agent import Emit
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("leftover", (
    Column("optimizer", "int32", "", "optimizer of this process, see optim"),
    Column("kept", "bool", "", "the same bits, not zero, were there when the first backward after its last update began, and something was at every later one up to this update"),
    Column("parameter", "text", "", "parameter whose gradient was looked at"),
), "one row per optimizer and update that follows a watched one")  # fmt: skip

TRIED = 4  # small parameters that are looked at until one has a gradient that is not zero


def install(emit: Emit) -> Undo:
    agent = emit.agent
    watched: dict[int, Sentinel] = {}

    def before_update(optimizer: Any, number: int) -> None:
        sentinel = watched.pop(number, None)
        if sentinel is not None and sentinel.seen is not None:
            name, step = sentinel.name, agent.window.step

            def landed(values: list[Any]) -> None:
                emit(TABLE, (number, bool(values[0][0])), (name,), step=step)

            agent.landing.land([sentinel.seen.double().reshape(1)], landed)
        if agent.watching:
            fresh = choose(optimizer)
            if fresh is not None:
                watched[number] = fresh

    def choose(optimizer: Any) -> Sentinel | None:
        held = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        for p in sorted(held, key=lambda p: p.numel())[:TRIED]:
            grad = torchprivate.local_shard(p.grad)
            if grad.is_sparse or not grad.numel() or not torchprivate.readable(grad):
                continue
            # on a device it isn't asked: the host would wait, and what is zero shows as zero at the next backward
            if grad.is_cuda or bool(grad.any()):
                entry = agent.catalogue.entry(p)
                return Sentinel(p, grad.detach().clone(), entry.name if entry is not None else "")
        return None

    def backward_begin(root: Any) -> None:
        for sentinel in watched.values():
            sentinel.look()

    emit.on("before_update", before_update)
    emit.on("backward_begin", backward_begin)
    return lambda: None


class Sentinel:
    """One parameter's gradient as an update used it. `seen`: None before the next backward, else whether it is there
    still, as a scalar on the gradient's device."""

    def __init__(self, parameter: Any, used: Any, name: str) -> None:
        self._ref, self._used, self.name = weakref.ref(parameter), used, name
        self.seen: Any = None

    def look(self) -> None:
        """A backward begins."""
        p = self._ref()
        grad = torchprivate.local_shard(p.grad).detach() if p is not None and p.grad is not None else None
        if grad is None or grad.shape != self._used.shape or grad.device != self._used.device:
            self.seen = (self._used != self._used).any() & False
        elif self.seen is None:
            self.seen = (grad == self._used).all() & grad.any()
        else:
            self.seen = self.seen & grad.any()
