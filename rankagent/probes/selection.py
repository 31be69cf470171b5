"""By which metric a trainer was to choose its best model or stop early, and whether it ever saw that metric.

Writes    selection
Costs     a few attribute reads at the end of each training
Blind to  loops without a framework; trainings that raised; overrides of `train` or `fit` that never call the framework's
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from .. import frameworks
from ..afterimport import when
from ..agent import Emit
from ..patch import Undo, replace, undo_all
from ..tables import Column, Table

TABLE = Table("selection", (
    Column("higher", "bool", "", "higher values are taken for better"),
    Column("seen", "int32", "", "log entries that held the metric; for Lightning 1 or 0: whether any callback could see it"),
    Column("source", "text", "", "transformers.Trainer or lightning.Trainer"),
    Column("setting", "text", "", "what goes by the metric: load_best_model_at_end, metric_for_best_model, or a callback's class"),
    Column("metric", "text", "", "name of the metric"),
    Column("best", "text", "", "checkpoint that was chosen by it; empty for none"),
    Column("schedule", "text", "", "when the trainer was to evaluate and to save, as it was told; empty unknown"),
), "one row per such setting at the end of each training")  # fmt: skip

Settings = Iterator[tuple[bool, int, str, str, str, str]]  # the columns but for `source`
EARLY = "EarlyStoppingCallback"


def install(emit: Emit) -> Undo:
    undos: list[Undo] = []

    def look(trainer: Any, source: str, settings: Callable[[Any], Settings]) -> None:
        for higher, seen, *texts in settings(trainer):
            emit(TABLE, (higher, seen), (source, *texts))

    def imported(name: str, source: str, settings: Callable[[Any], Settings], module: Any) -> None:
        emit.guarded(patch, module, name, source, settings)

    def patch(module: Any, name: str, source: str, settings: Callable[[Any], Settings]) -> None:
        owner = getattr(module, "Trainer", None)
        if name not in vars(owner or object):
            return

        def trains(original: Any) -> Any:
            def train(self: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(self, *args, **kwargs)
                emit.guarded(look, self, source, settings)
                return result

            return train

        undos.append(replace(owner, name, trains))

    for where, name, source, settings in (
        ("transformers.trainer", "train", "transformers.Trainer", hugging_face),
        ("lightning.pytorch.trainer.trainer", "fit", "lightning.Trainer", lightning),
        ("pytorch_lightning.trainer.trainer", "fit", "lightning.Trainer", lightning),
    ):
        when(where, functools.partial(imported, name, source, settings))
    return lambda: undo_all(undos)()


def hugging_face(trainer: Any) -> Settings:
    """What a Hugging Face Trainer was told to choose by. It looks for the metric under its name with `eval_` before."""
    args, state = trainer.args, trainer.state
    metric = getattr(args, "metric_for_best_model", None)
    if not isinstance(metric, str):
        return
    settings = ["load_best_model_at_end" if getattr(args, "load_best_model_at_end", False) else "metric_for_best_model"]
    settings += [EARLY] if EARLY in frameworks.trainer_callbacks(trainer) else []
    name = metric if metric.startswith("eval_") else f"eval_{metric}"
    seen = sum(name in entry for entry in state.log_history)
    when_ = ", ".join(f"{what} {_schedule(args, what)}" for what in ("eval", "save"))
    for setting in settings:
        yield bool(args.greater_is_better), seen, setting, name, state.best_model_checkpoint or "", when_


def _schedule(args: Any, what: str) -> str:
    strategy = getattr(args, f"{what}_strategy", None)
    told = str(getattr(strategy, "value", strategy))
    return f"every {getattr(args, f'{what}_steps', '?')} steps" if told == "steps" else f"strategy {told}"


def lightning(trainer: Any) -> Settings:
    """What a Lightning Trainer's callbacks monitor."""
    known = frameworks.lightning_metrics(trainer)
    if known is None:
        return
    for callback in trainer.callbacks:
        metric = getattr(callback, "monitor", None)
        if isinstance(metric, str):
            best = getattr(callback, "best_model_path", "")
            higher = getattr(callback, "mode", "") == "max"
            yield higher, int(metric in known), type(callback).__name__, metric, best, ""
