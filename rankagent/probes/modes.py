"""Whether the models that a step updates, and the parts of them, were in train or eval mode while its backwards ran.

Writes    mode
Costs     4 us a step, 0.2 us more for each part with dropout or batch normalisation in it, at each backward; 4 us a module
          once a catalogue, and once after the close watch where the model is in eval mode in a backward
Blind to  a layer in eval mode by itself, as frozen statistics are; modes that change between forward and backward;
          parts of models whose parameters a wrapper made one
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from ..agent import Emit, StepInfo
from ..patch import Undo
from ..reacting import Module, parts, reacting, reaction, topmost
from ..tables import Column, Table

TABLE = Table("mode", (
    Column("model", "int32", "", "model of this process, see tensor"),
    Column("backwards", "int32", "", "outermost backward calls of this step"),
    Column("in_eval", "int32", "", "of them, those that found the model in eval mode"),
    Column("before", "int64", "", "last step before this one that updated the model; 0 for none"),
    Column("sensitive", "int32", "", "modules in eval mode that behave otherwise in train mode: dropout, normalisation that keeps statistics"),
    Column("training", "int32", "", "modules below it in train mode that are of this kind or hold trainable parameters; counted in eval mode"),
    Column("frozen", "int32", "", "parameters that are not trained; counted in eval mode"),
    Column("eval_loader", "int32", "", "last pass, see loader, whose batches found the first of `turned` in eval mode before this step, "
           "the model itself in train mode; -1 for none"),
    Column("eval_iterator", "int32", "", "see eval_loader"),
    Column("model_type", "text", "", "class of the model"),
    Column("names", "text", "", "names of the first modules counted under sensitive, comma separated"),
    Column("parts", "text", "", "parts of a model in train mode that all these backwards found in eval mode and gave gradients that this step "
           "uses, the outermost, comma separated"),
    Column("turned", "text", "", "those of them that the step `before` found in train mode; sensitive and names are about these"),
), "one row per model at the first step that updates it, and whenever whether all backwards found it in eval mode, or which "
   "parts they did, changes")  # fmt: skip

SHOWN = 32


@dataclass
class Walked:
    """What a walk over a model in eval mode found."""

    sensitive: int = 0
    training: int = 0
    frozen: int = 0
    names: str = ""


@dataclass
class Seen:
    """One model during the step in progress, and what was found at the update before."""

    ref: weakref.ReferenceType[Any]
    generation: int = -1  # of the catalogue, when its parts were listed
    parts: dict[str, Module] = field(default_factory=dict)
    in_eval: int = 0
    updated: bool = False
    before: int = 0
    said: bool | None = None
    walked: Walked | None = None
    off: list[str] | None = None  # parts that all backwards of this step so far found in eval mode
    was_off: list[str] = field(default_factory=list)  # that all those of the step `before` did
    used: set[str] = field(default_factory=set)  # of `off`, those whose gradients an optimizer uses
    evaluated: dict[str, tuple[int, int]] = field(default_factory=dict)  # part in eval mode -> a pass that found it so


def install(emit: Emit) -> Undo:
    agent = emit.agent
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
            if seen.generation != agent.catalogue.generation:
                seen.generation, seen.parts = agent.catalogue.generation, parts(model)
            if model.training:
                off = switched_off(seen)
                seen.off = off if seen.off is None else [p for p in seen.off if p in off]
            else:
                seen.in_eval += 1
                seen.off = []
                # a model that others' training keeps in eval mode would be walked over at each of their steps
                if seen.in_eval == count[0] and (seen.walked is None or (agent.watching and seen.said is not True)):
                    seen.walked = walk(model)

    def switched_off(seen: Seen) -> list[str]:
        return [name for name, part in seen.parts.items() if part.evaluating]

    def walk(model: Any) -> Walked:
        names = []
        training = 0
        for name, module in model.named_modules():
            reacts = reaction(module)
            if not module.training:
                if reacts:
                    names.append(name or type(module).__name__)
            elif reacts or any(p is not None and p.requires_grad for p in module._parameters.values()):
                training += 1
        frozen = sum(not p.requires_grad for p in model.parameters())
        return Walked(len(names), training, frozen, ",".join(names[:SHOWN]))

    def given(loader: int, number: int, again: bool, end: str) -> None:
        """A batch that may be an evaluation's; whether it was, the whole pass shows."""
        if again or not agent.torch.is_grad_enabled():
            for seen in models.values():
                model = seen.ref()
                if model is not None and model.training:
                    seen.evaluated.update((name, (loader, number)) for name in switched_off(seen))

    def before_update(optimizer: Any, number: int) -> None:
        if made[0] != agent.catalogue.generation:
            made[0] = agent.catalogue.generation
            held.clear()
            for entry in agent.catalogue.params:
                held.setdefault(entry.optimizer, set()).add(entry.model)
        for of in held.get(number, ()):
            seen = models.get(of)
            if seen is not None:
                seen.updated = True
                if seen.off and seen.off != seen.was_off:
                    seen.used.update(name for name in topmost(seen.off) if uses(number, seen.parts[name].ref()))

    def uses(number: int, part: Any) -> bool:
        """Whether the optimizer is about to use a gradient of this part."""
        given = (p for p in part.parameters() if p.requires_grad and p.grad is not None) if part is not None else ()
        return any((e := agent.catalogue.entry(p)) is not None and e.optimizer == number for p in given)

    def closed(info: StepInfo) -> None:
        backwards, count[0] = count[0], 0
        for number, seen in models.items():
            if seen.updated and backwards:
                write(info.step, number, seen, backwards)
                seen.evaluated.clear()
            seen.in_eval, seen.updated, seen.off = 0, False, None
            seen.used.clear()

    def write(step: int, number: int, seen: Seen, backwards: int) -> None:
        whole, model, off = seen.in_eval == backwards, seen.ref(), seen.off or []
        if model is not None and (whole is not seen.said or off != seen.was_off):
            shown = [name for name in topmost(off) if name in seen.used]
            turned = [name for name in shown if name not in seen.was_off and seen.before]
            found = (seen.walked or Walked()) if whole else within(model, turned)
            looked = seen.evaluated.get(turned[0], (-1, -1)) if turned else (-1, -1)
            emit(TABLE, (number, backwards, seen.in_eval, seen.before, found.sensitive, found.training, found.frozen, *looked),
                 (type(model).__name__, found.names, written(seen, shown), written(seen, turned)), step=step)  # fmt: skip
        seen.said, seen.before, seen.was_off = whole, step, off

    def within(model: Any, turned: list[str]) -> Walked:
        names = [m.name for part in turned for m in reacting(model, part) if m.evaluating]
        return Walked(sensitive=len(names), names=",".join(names[:SHOWN]))

    def written(seen: Seen, names: list[str]) -> str:
        return ",".join(seen.parts[name].name for name in names[:SHOWN])

    emit.on("backward_begin", begin)
    emit.on("batch_given", given)
    emit.on("before_update", before_update)
    emit.on("step_closed", closed)
    return lambda: None
