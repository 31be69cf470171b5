"""What the program told its framework about training that its steps can be held against: accumulation.

Writes    declared
Costs     one attribute read per framework object and watched step; a row only on a change
Blind to  loops without a framework
"""

from __future__ import annotations

import weakref
from typing import Any

from ..afterimport import when
from ..agent import Emit
from ..patch import Undo, replace, undo_all
from ..tables import Column, Table

TABLE = Table("declared", (
    Column("value", "float64", "", "the value in force from this step on"),
    Column("source", "text", "", "who was told: Accelerator or Trainer of Lightning"),
    Column("key", "text", "", "what, e.g. gradient_accumulation_steps: backwards that an update is made of"),
), "one row per framework object and key, and per change")  # fmt: skip

ACCUMULATION = "gradient_accumulation_steps"
# module, class, attribute (accelerate 1.15, lightning 2.6); Hugging Face's Trainer builds an Accelerator
TOLD = (
    ("accelerate.accelerator", "Accelerator", "gradient_accumulation_steps"),
    ("lightning.pytorch.trainer.trainer", "Trainer", "accumulate_grad_batches"),
    ("pytorch_lightning.trainer.trainer", "Trainer", "accumulate_grad_batches"),
)


def install(emit: Emit) -> Undo:
    agent = emit.agent
    told: list[tuple[weakref.ReferenceType[Any], str, str]] = []
    last: dict[int, float] = {}
    undos: list[Undo] = []

    def before_update(optimizer: Any, number: int) -> None:
        if not agent.watching:
            return
        for n, (ref, source, attribute) in enumerate(told):
            owner = ref()
            value = getattr(owner, attribute, None) if owner is not None else None
            if isinstance(value, int) and last.get(n) != value:
                last[n] = float(value)
                emit(TABLE, (last[n],), (source, ACCUMULATION))

    def await_class(module: str, name: str, attribute: str) -> None:
        source = name if name == "Accelerator" else f"Lightning's {name}"

        def built(original: Any) -> Any:
            def __init__(owner: Any, *args: Any, **kwargs: Any) -> None:
                original(owner, *args, **kwargs)
                emit.guarded(told.append, (weakref.ref(owner), source, attribute))

            return __init__

        def patch(loaded: Any) -> None:
            owner = getattr(loaded, name, None)
            if owner is not None and "__init__" in vars(owner):
                undos.append(replace(owner, "__init__", built))

        when(module, lambda loaded: emit.guarded(patch, loaded))

    for module, name, attribute in TOLD:
        await_class(module, name, attribute)
    emit.on("before_update", before_update)
    return undo_all(undos)
