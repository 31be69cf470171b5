"""What a Hugging Face Trainer writes to its log as the training loss, beside what it got from its training steps.

Writes    logged
Costs     per micro-batch two additions on the loss; per log entry a few look-ups and a short row
Blind to  loops that print; subclasses whose `training_step` or `log` never calls the Trainer's own; other trainers
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

from .. import frameworks
from ..afterimport import when
from ..agent import Emit
from ..patch import Undo, replace, undo_all
from ..tables import Column, Table

TABLE = Table("logged", (
    Column("first", "int64", "", "first step whose loss the entry is about; `step` is the last"),
    Column("global_step", "int64", "", "the trainer's own count of updates"),
    Column("updates", "int32", "", "updates by that count since the entry before; 0 unknown"),
    Column("micros", "int32", "", "training steps (micro-batches) since then"),
    Column("returned", "float64", "", "sum of the losses that they returned on this rank; NaN unknown"),
    Column("magnitude", "float64", "", "sum of their absolute values"),
    Column("entered", "float64", "", "the loss that the trainer handed to its log; NaN: no number"),
    Column("stands", "float64", "", "the same after all callbacks ran; NaN: no number, or taken out"),
    Column("history", "float64", "", "what the trainer's history of the log holds then; NaN: no number, or no such entry"),
    Column("callbacks", "text", "", "classes of the callbacks that were handed the entry, comma separated"),
), "one row per log entry of a trainer that has a training loss")  # fmt: skip
KEY = "loss"
ENDED = "train_loss"  # the trainer's last entry of a training: what was not logged until then never is


@dataclass
class Since:
    """What a trainer's training steps returned since its last log entry. Sums stay on the loss's device."""

    micros: int = 0
    first: int = 0
    last: int = 0
    begun_at: int = -1  # the trainer's global step before the first of them
    returned: Any = 0.0
    magnitude: Any = 0.0
    known: bool = True
    inside: int = 0  # depth of training_step: a program may log figures of its own from there


def install(emit: Emit) -> Undo:
    agent = emit.agent
    kept: weakref.WeakKeyDictionary[Any, Since] = weakref.WeakKeyDictionary()
    undos: list[Undo] = []

    def enter(trainer: Any) -> Since:
        since = kept.setdefault(trainer, Since())
        if since.begun_at < 0:
            since.begun_at = int(trainer.state.global_step)
        since.inside += 1
        return since

    def leave(since: Since, loss: Any) -> None:
        since.inside -= 1
        since.last = agent.window.step
        since.first = since.first or since.last
        since.micros += 1
        if not hasattr(loss, "detach") or loss.numel() != 1 or loss.is_complex():
            since.known = False
            return
        value = loss.detach().double().reshape(()) if loss.is_cuda else float(loss.detach())
        since.returned = since.returned + value
        since.magnitude = since.magnitude + abs(value)

    def training_step(original: Any) -> Any:
        def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            since, loss = emit.guarded(enter, self), None
            try:
                loss = original(self, *args, **kwargs)
            finally:  # also where it raised: without a loss the sum is not known
                if since is not None:
                    emit.guarded(leave, since, loss)
            return loss

        return training_step

    def before(trainer: Any, logs: Any) -> float | None:
        since = kept.get(trainer)
        if since is None or since.inside or not isinstance(logs, dict):
            return None
        if ENDED in logs:
            del kept[trainer]
            return None
        return number(logs[KEY]) if KEY in logs and since.micros else None

    def after(trainer: Any, logs: dict[str, Any], entered: float) -> None:
        since = kept.pop(trainer)
        history = frameworks.last_logged(trainer)
        updates = int(trainer.state.global_step) - since.begun_at
        about = (since.first, int(trainer.state.global_step), max(0, updates), since.micros)
        figures = (entered, number(logs.get(KEY)), number(history.get(KEY)))
        callbacks = ",".join(frameworks.trainer_callbacks(trainer))

        def write(returned: float, magnitude: float) -> None:
            sums = (returned, magnitude) if since.known else (math.nan, math.nan)
            emit(TABLE, (*about, *sums, *figures), (callbacks,), step=since.last)

        if isinstance(since.returned, float):
            write(since.returned, since.magnitude)
        else:
            both = agent.torch.stack([since.returned, since.magnitude])
            agent.landing.land([both], lambda read: write(*read[0]))

    def log(original: Any) -> Any:
        def log(self: Any, logs: Any, *args: Any, **kwargs: Any) -> Any:
            entered = emit.guarded(before, self, logs)
            result = original(self, logs, *args, **kwargs)
            if entered is not None:
                emit.guarded(after, self, logs, entered)
            return result

        return log

    def watch(module: Any) -> None:
        owner = getattr(module, "Trainer", None)
        if owner is not None and all(name in vars(owner) for name in ("training_step", "log")):
            undos.append(replace(owner, "training_step", training_step))
            undos.append(replace(owner, "log", log))

    when("transformers.trainer", lambda module: emit.guarded(watch, module))
    return lambda: undo_all(undos)()


def number(value: Any) -> float:
    """A figure of a log, also where it was formatted; NaN for anything else. A device tensor is not read."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return math.nan
    return float(value) if isinstance(value, (int, float)) else math.nan
