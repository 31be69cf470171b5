"""In which mode a trained model was when it ran without autograd over the batches of a pass in which no backward ran.

Writes    evaluation
Costs     1 us a batch; of an evaluation 1.5 us a module called for one batch, 0.1 us for each that reacts to its mode; these
          are looked for once a model, 3 us a module
Blind to  data that comes from no torch DataLoader; one single batch that is fetched while autograd is on; programs
          that compile anything (a hook that comes and goes would compile it anew); evaluation before the first backward
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from ..agent import Emit
from ..patch import Undo
from ..reacting import Module, collects, reacting
from ..tables import Column, Table
from ..torchprivate import compiles

TABLE = Table("evaluation", (
    Column("loader", "int32", "", "see loader"),
    Column("iterator", "int32", "", "see loader"),
    Column("model", "int32", "", "model of this process, see tensor"),
    Column("backwards", "int64", "", "outermost backward calls of this process before it"),
    Column("forwards", "int32", "", "calls of the model without autograd for the batch that was looked at"),
    Column("in_eval", "bool", "", "the model itself was in eval mode in the first of them"),
    Column("reacting", "int32", "", "modules in it that compute something else in eval mode"),
    Column("dropout", "int32", "", "of them, those that drop at random, in train mode"),
    Column("norms", "int32", "", "of them, normalisations in train mode, whose statistics take in what they see"),
    Column("model_type", "text", "", "class of the model"),
    Column("names", "text", "", "names of the first modules counted under dropout and norms, comma separated"),
), "one row per model and pass over a loader, for the first batch that it ran on without autograd, no backward before it "
   "in the pass")  # fmt: skip

NAMES = 32
LOOKS = 3  # batches of a pass in which no trained model ran, as with averaged weights: then it is left alone
# Batches that a trainer takes ahead of their backwards look like those of an evaluation. A loader of which so many
# turned out to be none is only followed while autograd is off.
FUTILE = 8


@dataclass
class Found:
    """A model that ran without autograd since the batch was given."""

    model_type: str
    in_eval: bool
    reacting: int
    on: list[Module]
    forwards: int = 0


@dataclass(frozen=True)
class Look:
    """The batch that is looked at: of which pass, the trained models by id, and which of them ran on it."""

    key: tuple[int, int]
    tops: dict[int, int]
    found: dict[int, Found]


def install(emit: Emit) -> Undo:
    agent = emit.agent
    torch = agent.torch
    compiling = getattr(torch.compiler, "is_compiling", lambda: False)
    known: dict[int, list[Module]] = {}  # model -> what reacts in it
    made = [-1]  # generation of the catalogue that `known` is of
    current: list[Look] = []
    handle: list[Any] = []
    last: tuple[int, int] = (-1, -1)  # the pass that was looked at last
    looks = 0  # how often; LOOKS when no more is needed
    futile: dict[int, int] = {}

    def given(loader: int, number: int, again: bool, end: str) -> None:
        nonlocal last, looks
        finish()
        if end or not agent.backwards_total or threading.get_ident() != agent.thread:
            return
        if last != (loader, number):
            last, looks = (loader, number), 0
        if looks < LOOKS and ((again and futile.get(loader, 0) < FUTILE) or not torch.is_grad_enabled()):
            looks += 1
            begin()

    def begin() -> None:
        if compiles():
            return
        tops = {id(m): n for n, m in enumerate(agent.catalogue.tops()) if m is not None}
        current.append(Look(last, tops, {}))
        handle.append(torch.nn.modules.module.register_module_forward_pre_hook(before_forward))

    def before_forward(module: Any, args: Any) -> None:
        if not agent.live or emit.name in agent.disabled:
            forget()
        elif current and id(module) in current[0].tops and not compiling():
            emit.guarded(entered, current[0], module)

    def entered(look: Look, module: Any) -> None:
        if threading.get_ident() != agent.thread:
            return
        number = look.tops[id(module)]
        if torch.is_grad_enabled():
            futile[look.key[0]] = futile.get(look.key[0], 0) + 1
            forget()
        else:
            if number not in look.found:
                look.found[number] = looked(number, module)
            look.found[number].forwards += 1

    def looked(number: int, model: Any) -> Found:
        if made[0] != agent.catalogue.generation:
            made[0] = agent.catalogue.generation
            known.clear()
        if number not in known:
            known[number] = reacting(model)
        alive = [(r, m) for r in known[number] if (m := r.ref()) is not None]
        on = [r for r, m in alive if m.training and (r.kind != "norm" or collects(m))]
        return Found(type(model).__name__, not model.training, len(alive), on)

    def forget(root: Any = None) -> None:
        """What was looked at is no evaluation, or nothing more is to be seen of it."""
        while handle:
            handle.pop().remove()
        current.clear()

    def finish() -> None:
        """The batch that was looked at is done with."""
        nonlocal looks
        found = current[0].found if current else {}
        forget()
        for number, f in found.items():
            looks = LOOKS
            drops = sum(m.kind == "dropout" for m in f.on)
            emit(TABLE, (*last, number, agent.backwards_total, f.forwards, f.in_eval, f.reacting, drops, len(f.on) - drops),
                 (f.model_type, ",".join(m.name for m in f.on[:NAMES])))  # fmt: skip

    emit.on("batch_given", given)
    emit.on("backward_begin", forget)
    emit.on("ending", finish)
    emit.on("close", finish)
    return forget
