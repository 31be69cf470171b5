"""Whether the gradient that one update has used is still there for the next, and whether one was thrown away unused.

Writes    leftover; the column `discarded` of step
Costs     at watched updates a copy of the smallest gradient of each optimizer, and at the backwards up to its next update
          two passes over that: 10 us each; a flag at each zero_grad()
Blind to  optimizers that step inside the backward; gradients that FSDP1 sets aside; zeroing that leaves out the one
          parameter looked at, or only that one; gradients thrown away otherwise than by zero_grad(), or filled with zeros
          on an accelerator
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import torchprivate
from ..agent import Emit, StepInfo
from ..patch import Undo, replace, undo_all
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
    zeroed = [False]  # zero_grad() was called after a backward that no update has used yet
    compiling = getattr(agent.torch.compiler, "is_compiling", lambda: False)

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
        if zeroed[0]:
            zeroed[0] = False
            if agent.backwards > agent.discarded and not agent.window.stepped and nothing_left():
                agent.discarded = agent.backwards

    def nothing_left() -> bool:
        """Whether no optimizer holds a gradient: one model's may be zeroed while another's are kept for its turn."""
        for optimizer in agent.catalogue.optimizers().values():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    grad = torchprivate.local_shard(p.grad) if p.grad is not None else None
                    if grad is not None and (grad.is_cuda or bool(grad.any())):
                        return False
        return True

    def zero(original: Any) -> Any:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if not compiling() and agent.backwards and not agent.updating:
                zeroed[0] = True
            return original(owner, *args, **kwargs)

        return zero_grad

    def closed(info: StepInfo) -> None:
        zeroed[0] = False

    emit.on("before_update", before_update)
    emit.on("backward_begin", backward_begin)
    emit.on("step_closed", closed)
    optim = __import__("torch.optim.optimizer", fromlist=["optimizer"])
    return undo_all([replace(optim.Optimizer, "zero_grad", zero), replace(agent.torch.nn.Module, "zero_grad", zero)])


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
