"""What the program told its framework about how it trains: how many backwards it accumulates before an update.

Writes    declared
Costs     a row per trainer that is built; one attribute read of each before watched updates, a row when it has changed
Blind to  loops without a framework; frameworks other than Accelerate, the Hugging Face Trainer and Lightning
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ..afterimport import when
from ..agent import Emit
from ..patch import Undo, replace, undo_all
from ..tables import Column, Table

TABLE = Table("declared", (
    Column("value", "float64", "", "the number in force from this step on"),
    Column("source", "text", "", "framework and class that were told: accelerate.Accelerator, transformers.Trainer, lightning.Trainer"),
    Column("key", "text", "", "what was declared: gradient_accumulation_steps"),
), "one row per declaration, and per change of it that a watched update showed")  # fmt: skip

STEPS = "gradient_accumulation_steps"
Read = Callable[[Any], Any]
# module that defines it, class, name to show, how the number is read from an object
DECLARE: tuple[tuple[str, str, str, Read], ...] = (
    ("accelerate.accelerator", "Accelerator", "accelerate.Accelerator", lambda a: a.gradient_accumulation_steps),
    ("transformers.trainer", "Trainer", "transformers.Trainer", lambda t: t.args.gradient_accumulation_steps),
    ("lightning.pytorch.trainer.trainer", "Trainer", "lightning.Trainer", lambda t: t.accumulate_grad_batches),
    ("pytorch_lightning.trainer.trainer", "Trainer", "lightning.Trainer", lambda t: t.accumulate_grad_batches),
)


def install(emit: Emit) -> Undo:
    agent = emit.agent
    undos: list[Undo] = []
    told: list[Told] = []

    def look(one: Told) -> None:
        owner = one.owner()
        value = None if owner is None else one.read(owner)
        if isinstance(value, int) and value > 0 and value != one.value:
            one.value = value
            emit(TABLE, (float(value),), (one.source, STEPS))

    def built(owner: Any, source: str, read: Read) -> None:
        if any(one.owner() is owner for one in told):
            return
        told[:] = [one for one in told if one.owner() is not None]
        told.append(Told(weakref.ref(owner), source, read))
        look(told[-1])

    def imported(name: str, source: str, read: Read, module: Any) -> None:
        emit.guarded(patch, module, name, source, read)

    def patch(module: Any, name: str, source: str, read: Read) -> None:
        owner = getattr(module, name, None)
        if owner is None:
            return

        def constructed(original: Any) -> Any:
            def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
                original(self, *args, **kwargs)
                emit.guarded(built, self, source, read)

            return __init__

        undos.append(replace(owner, "__init__", constructed))

    def before_update(optimizer: Any, number: int) -> None:
        if agent.watching:
            for one in told:
                look(one)

    for where, name, source, read in DECLARE:
        when(where, functools.partial(imported, name, source, read))
    emit.on("before_update", before_update)
    return undo_all(undos)


class Told:
    """A framework's object that was told a number, and the one last seen."""

    def __init__(self, owner: weakref.ReferenceType[Any], source: str, read: Read) -> None:
        self.owner, self.source, self.read = owner, source, read
        self.value = 0
