"""Whether the models that a step updates were in train or eval mode while its backwards ran.

Writes    mode
Costs     4 us a step; 4 us for each module of a model that is in eval mode in a backward, once after the close watch
Blind to  parts in eval mode below a model that is in train mode itself; modes that change between forward and backward
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from ..agent import Emit, StepInfo
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("mode", (
    Column("model", "int32", "", "model of this process, see tensor"),
    Column("backwards", "int32", "", "outermost backward calls of this step"),
    Column("in_eval", "int32", "", "of them, those that found the model in eval mode"),
    Column("before", "int64", "", "last step before this one that updated the model; 0 for none"),
    Column("sensitive", "int32", "", "modules in eval mode that behave otherwise in train mode: dropout, batch normalisation"),
    Column("training", "int32", "", "modules below it in train mode that are of this kind or hold trainable parameters; counted in eval mode"),
    Column("frozen", "int32", "", "parameters that are not trained; counted in eval mode"),
    Column("model_type", "text", "", "class of the model"),
    Column("names", "text", "", "names of the first modules counted under sensitive, comma separated"),
), "one row per model at the first step that updates it, and whenever whether all backwards found it in eval mode changes")  # fmt: skip

SHOWN = 32


@dataclass
class Walked:
    """What a walk over a model in eval mode found."""

    sensitive: int
    training: int
    frozen: int
    names: str


@dataclass
class Seen:
    """One model during the step in progress, and what the last row about it said."""

    ref: weakref.ReferenceType[Any]
    in_eval: int = 0
    updated: bool = False
    before: int = 0
    said: bool | None = None
    walked: Walked | None = None


def install(emit: Emit) -> Undo:
    agent = emit.agent
    nn = agent.torch.nn
    norms = (nn.modules.batchnorm._BatchNorm,)
    models: dict[int, Seen] = {}
    held: dict[int, set[int]] = {}  # optimizer -> the models that it updates
    made = [-1]  # generation of the catalogue that `held` is of
    count = [0]  # backwards of the step in progress

    def begin(root: Any) -> None:
        agent.catalogue.refresh(in_backward=True)
        count[0] += 1
        for number, model in enumerate(agent.catalogue.tops()):
            if model is None:
                continue
            seen = models.get(number)
            if seen is None or seen.ref() is not model:
                seen = models[number] = Seen(weakref.ref(model))
            if not model.training:
                seen.in_eval += 1
                # a model that others' training keeps in eval mode would be walked over at each of their steps
                if seen.in_eval == count[0] and (seen.walked is None or (agent.watching and seen.said is not True)):
                    seen.walked = walk(model)

    def walk(model: Any) -> Walked:
        names = []
        training = 0
        for name, module in model.named_modules():
            reacts = sensitive(module)
            if not module.training:
                if reacts:
                    names.append(name or type(module).__name__)
            elif reacts or any(p is not None and p.requires_grad for p in module._parameters.values()):
                training += 1
        frozen = sum(not p.requires_grad for p in model.parameters())
        return Walked(len(names), training, frozen, ",".join(names[:SHOWN]))

    def sensitive(module: Any) -> bool:
        if isinstance(module, nn.modules.dropout._DropoutNd):
            return bool(module.p > 0)
        if isinstance(module, norms):
            return bool(module.track_running_stats)
        dropout = getattr(module, "dropout", None)  # recurrent layers and attention keep theirs as a number
        return isinstance(dropout, float) and dropout > 0

    def before_update(optimizer: Any, number: int) -> None:
        if made[0] != agent.catalogue.generation:
            made[0] = agent.catalogue.generation
            held.clear()
            for entry in agent.catalogue.params:
                held.setdefault(entry.optimizer, set()).add(entry.model)
        for model in held.get(number, ()):
            if model in models:
                models[model].updated = True

    def closed(info: StepInfo) -> None:
        backwards, count[0] = count[0], 0
        for number, seen in models.items():
            if seen.updated and backwards:
                write(info.step, number, seen, backwards)
            seen.in_eval, seen.updated = 0, False

    def write(step: int, number: int, seen: Seen, backwards: int) -> None:
        whole, model = seen.in_eval == backwards, seen.ref()
        if whole is not seen.said and model is not None:
            found = seen.walked if whole and seen.walked is not None else Walked(0, 0, 0, "")
            emit(TABLE, (number, backwards, seen.in_eval, seen.before, found.sensitive, found.training, found.frozen),
                 (type(model).__name__, found.names), step=step)  # fmt: skip
        seen.said, seen.before = whole, step

    emit.on("backward_begin", begin)
    emit.on("before_update", before_update)
    emit.on("step_closed", closed)
    return lambda: None
