"""What a Lightning module logs as its training loss, beside the loss that the backward of the same batch starts from.

Writes    reported
Costs     0.3 us per call of `log`; at watched steps 10 us and in the backward that follows 20 us for a row, on CUDA a
          copy that is read a step later
Blind to  loops that print; manual optimization, which may divide as it likes; names other than the loss's
"""

from __future__ import annotations

import re
from typing import Any

from .. import frameworks
from ..afterimport import when
from ..agent import Emit
from ..patch import Undo, replace, undo_all
from ..tables import Column, Table

TABLE = Table("reported", (
    Column("micro", "int32", "", "backward calls of this step before this one"),
    Column("value", "float64", "", "what was logged for the batch, before the framework averages it"),
    Column("optimised", "float64", "", "the loss that its backward starts from, loss scale removed"),
    Column("window", "int32", "", "accumulate_grad_batches: by this many the framework divides what training_step returns"),
    Column("name", "text", "", "under which name"),
), "one row per loss that was logged in a training step at a watched step")  # fmt: skip

# names that can mean nothing but the loss of a training step: loss, train_loss, train/loss_step
NAME = re.compile(r"((train|training|step|batch)[/_.-])*loss([/_.-](train|training|step|batch))*", re.IGNORECASE)
MODULES = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")


def install(emit: Emit) -> Undo:
    agent = emit.agent
    undos: list[Undo] = []
    pending: dict[str, tuple[Any, int]] = {}  # by name: a number or a detached scalar, and the window

    def noted(module: Any, name: Any, value: Any) -> None:
        if not isinstance(name, str) or not NAME.fullmatch(name) or not agent.torch.is_grad_enabled():
            return
        window = frameworks.lightning_window(module)
        if window is None:
            return
        if isinstance(value, agent.torch.Tensor) and value.numel() == 1 and not value.is_complex():
            kept = value.detach().double().reshape(1)
            pending[name] = (kept if kept.is_cuda else kept.item()), window
        elif isinstance(value, (int, float)):
            pending[name] = float(value), window

    def begin(root: Any) -> None:
        logged = dict(pending)
        pending.clear()
        if not logged or root is None or root.numel() != 1 or root.is_complex():
            return
        values = [v for v, _ in logged.values()]
        scale = agent.scale
        parts = [
            root.detach(),
            *([scale] if scale is not None else []),
            *(v for v in values if not isinstance(v, float)),
        ]
        step, micro = agent.window.step, agent.backwards

        def write(read: list[Any]) -> None:
            figures = [r[0] for r in read]
            optimised = figures.pop(0) / (figures.pop(0) if scale is not None else 1.0)
            for (name, (_, window)), value in zip(logged.items(), values, strict=True):
                shown = value if isinstance(value, float) else figures.pop(0)
                emit(TABLE, (micro, shown, optimised, window), (name,), step=step)

        agent.landing.land([p.detach().double().reshape(1) for p in parts], write)

    def log(original: Any) -> Any:
        def log(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if agent.watching:
                given = dict(zip(("name", "value"), args, strict=False)) | kwargs
                emit.guarded(noted, self, given.get("name"), given.get("value"))
            return result

        return log

    def watch(module: Any) -> None:
        owner = getattr(module, "LightningModule", None)
        if "log" in vars(owner or object):
            undos.append(replace(owner, "log", log))

    for name in MODULES:
        when(name, lambda module: emit.guarded(watch, module))
    emit.on("backward_begin", begin)
    emit.on("step_closed", lambda info: pending.clear())
    return lambda: undo_all(undos)()
