"""Modules whose parameters the first backward left without a gradient: whether they run, and on what.

Writes    unreached
Costs     one look at every parameter after the first backward of a catalogue; then, where there are such modules, torch's
          global hook before each module's forward until three more backwards are over
Blind to  modules that a compiled graph runs; parts of models that FSDP shards; modules that are used later than that;
          keyword arguments
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from ..agent import Emit
from ..catalogue import Entry, clean
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("unreached", (
    Column("generation", "int32", "", "tensor catalogue that the tensors refer to"),
    Column("calls", "int64", "", "forward calls with autograd on during the backwards that were watched; 0: it did not run"),
    Column("from_data", "int64", "", "calls of them that got tensors of which none requires a gradient"),
    Column("backwards", "int32", "", "backwards that were watched"),
    Column("module", "text", "", "name of the module within its model"),
    Column("tensors", "int64[]", "", "catalogue indices of its own parameters that had no gradient"),
), "one row per module that holds such parameters itself, once per catalogue")  # fmt: skip

BACKWARDS = 3  # a module that is skipped at random once or twice still shows


@dataclass
class Watched:
    """One module whose own parameters had no gradient."""

    name: str
    entries: list[Entry]
    ref: weakref.ReferenceType[Any]
    calls: int = 0
    from_data: int = 0


def install(emit: Emit) -> Undo:
    agent = emit.agent
    looked = [0]  # catalogue generation that was looked at
    watched: dict[int, Watched] = {}  # by the module's id
    handle: list[Any] = []
    seen = [0]
    compiling = getattr(agent.torch.compiler, "is_compiling", lambda: False)

    def backward_end(whole: bool) -> None:
        if not whole or not agent.catalogue.params:
            return
        if watched:
            seen[0] += 1
            if seen[0] >= BACKWARDS:
                write()
            return
        if looked[0] != agent.catalogue.generation and agent.watching:
            looked[0], seen[0] = agent.catalogue.generation, 0
            look()

    def look() -> None:
        without = {}
        for e in agent.catalogue.params:
            p = e.tensor
            if p is not None and e.optimizer >= 0 and e.sharing != "sharded" and p.requires_grad and p.grad is None:
                without[id(p)] = e
        if not without:
            return
        for top in agent.catalogue.tops():
            for name, module in () if top is None else top.named_modules():
                if isinstance(module, agent.torch.jit.ScriptModule):
                    continue
                mine = [without[id(p)] for p in module._parameters.values() if id(p) in without]
                if mine:
                    watched[id(module)] = Watched(clean(name), mine, weakref.ref(module))
        if watched:
            # not on the modules themselves: there it would be copied and pickled with the model
            handle.append(agent.torch.nn.modules.module.register_module_forward_pre_hook(before))

    def before(module: Any, args: Any) -> None:
        if compiling():  # dynamo would trace what follows into the user's graph
            return
        w = watched.get(id(module))
        if w is not None and w.ref() is module:
            emit.guarded(count, w, args)

    def count(w: Watched, args: Any) -> None:
        if not agent.torch.is_grad_enabled():
            return
        w.calls += 1
        tensors = [a for a in args if isinstance(a, agent.torch.Tensor)]
        w.from_data += bool(tensors) and not any(t.requires_grad for t in tensors)

    def write() -> None:
        if looked[0] == agent.catalogue.generation:
            for w in watched.values():
                emit(TABLE, (looked[0], w.calls, w.from_data, seen[0]), (w.name, [e.index for e in w.entries]))
        forget()

    def forget() -> None:
        while handle:
            handle.pop().remove()
        watched.clear()

    emit.on("backward_end", backward_end)
    emit.on("close", forget)
    return forget
