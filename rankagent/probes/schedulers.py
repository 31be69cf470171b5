"""Where each learning-rate scheduler stands: its position and, of ReduceLROnPlateau, what it counts.

Writes    schedule
Costs     per watched step seven attribute reads and a short row for each scheduler
Blind to  schedules without a torch scheduler; classes that never call the constructor of torch's
"""

from __future__ import annotations

import math
import weakref
from typing import Any

from ..agent import Emit
from ..patch import Undo, replace, undo_all
from ..tables import Column, Table

TABLE = Table("schedule", (
    Column("scheduler", "int32", "", "scheduler of this process, in the order of construction"),
    Column("optimizer", "int32", "", "optimizer that it steers, see optim"),
    Column("position", "int64", "", "last_epoch: how often it was stepped, or the epoch it was told; -1 unknown"),
    Column("bad_epochs", "int64", "", "ReduceLROnPlateau: passes without improvement so far; -1 for any other"),
    Column("cooldown", "int64", "", "ReduceLROnPlateau: passes that it still rests; -1 for any other"),
    Column("best", "float64", "", "ReduceLROnPlateau: best value so far; NaN for any other"),
    Column("end", "int64", "", "position at which its schedule is over, as it was told (total_steps, T_max, total_iters); -1 unknown, or it has none"),
    Column("class_name", "text", "", "class of the scheduler"),
), "one row per scheduler before each watched update")  # fmt: skip

ENDS = ("total_steps", "T_max", "total_iters")  # OneCycleLR; CosineAnnealingLR; LinearLR, ConstantLR, PolynomialLR


def install(emit: Emit) -> Undo:
    agent = emit.agent
    module = __import__("torch.optim.lr_scheduler", fromlist=["lr_scheduler"])
    made: list[weakref.ReferenceType[Any]] = []
    began = [0]  # step whose first update has been seen

    def note(scheduler: Any) -> None:
        if not any(ref() is scheduler for ref in made):
            made.append(weakref.ref(scheduler))

    def before_update(optimizer: Any, number: int) -> None:
        if began[0] == agent.window.step or not agent.watching:
            return
        began[0] = agent.window.step
        for n, ref in enumerate(made):
            scheduler = ref()
            if scheduler is not None:
                steered = getattr(scheduler, "optimizer", None)
                if steered is not None:
                    emit(TABLE, (n, agent.catalogue.add_optimizer(getattr(steered, "optimizer", steered)),
                                    whole(scheduler, "last_epoch"), whole(scheduler, "num_bad_epochs"),
                                    whole(scheduler, "cooldown_counter"), best(scheduler), end(scheduler)),
                         (type(scheduler).__name__,))  # fmt: skip

    def constructed(original: Any) -> Any:
        def __init__(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            original(scheduler, *args, **kwargs)
            emit.guarded(note, scheduler)

        return __init__

    emit.on("before_update", before_update)
    undos = []
    for name in ("LRScheduler", "ReduceLROnPlateau", "SequentialLR"):
        owner = getattr(module, name, None)
        if owner is not None and "__init__" in vars(owner):
            undos.append(replace(owner, "__init__", constructed))
    return undo_all(undos)


def whole(scheduler: Any, name: str) -> int:
    """A counter, -1 where the scheduler has none or it is no plain number."""
    value = getattr(scheduler, name, None)
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else -1


def end(scheduler: Any) -> int:
    """Where the schedule ends by its own settings; -1 for one without an end, or of a class not known here."""
    return next((found for name in ENDS if (found := whole(scheduler, name)) > 0), -1)


def best(scheduler: Any) -> float:
    """The best value that ReduceLROnPlateau has seen; NaN for any other, or while it is on a device."""
    value = getattr(scheduler, "best", None)
    return float(value) if isinstance(value, (int, float)) else math.nan
