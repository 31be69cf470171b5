"""What the selection probe records of trainers shaped like the frameworks'; the real ones are in tests/e2e."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.agent import record


class EarlyStoppingCallback:
    """Only its name is looked at."""


class ModelCheckpoint:
    """A callback of Lightning's kind."""

    def __init__(self, monitor: str | None, mode: str = "min", best: str = "") -> None:
        self.monitor, self.mode, self.best_model_path = monitor, mode, best


Make = Callable[..., Any]


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch) -> Make:
    """A function that records one training of a framework's trainer with these attributes."""

    def run(folder: Path, where: str, entry: str, error: Exception | None = None, **attributes: Any) -> Any:
        def train(self: Any, how: str) -> str:
            if error is not None:
                raise error
            return how

        kind = type("Trainer", (), {entry: train})
        module = types.ModuleType(where)
        module.Trainer = kind  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, where, module)

        def program() -> None:
            trainer = kind()
            vars(trainer).update(attributes)
            assert getattr(trainer, entry)("well") == "well"

        rows = record(folder, program)
        assert vars(kind)[entry] is train  # left as it was
        assert ("selection", "disabled") not in [(r["name"], r["state"]) for r in rows["probe"]]
        return [tuple(r[c] for c in ("setting", "metric", "higher", "seen", "best", "schedule"))
                for r in rows.get("selection", [])]  # fmt: skip

    return run


def _told(metric: str | None = "loss", log: tuple[str, ...] = (), early: bool = False, **args: Any) -> dict[str, Any]:
    told = {"metric_for_best_model": metric, "greater_is_better": False, "load_best_model_at_end": True,
            "eval_strategy": SimpleNamespace(value="steps"), "eval_steps": 500, "save_strategy": "epoch"}  # fmt: skip
    return {
        "args": SimpleNamespace(**told | args),
        "state": SimpleNamespace(log_history=[{key: 1.0} for key in log], best_model_checkpoint=None),
        "callback_handler": SimpleNamespace(callbacks=[EarlyStoppingCallback()] if early else []),
    }


HF = ("transformers.trainer", "train")
WHEN = "eval every 500 steps, save strategy epoch"


def test_a_best_model_that_waits_for_an_evaluation(tmp_path: Path, trains: Make) -> None:
    said = trains(tmp_path, *HF, **_told(early=True, log=("loss",)))
    assert said == [("load_best_model_at_end", "eval_loss", False, 0, "", WHEN),
                    ("EarlyStoppingCallback", "eval_loss", False, 0, "", WHEN)]  # fmt: skip


def test_a_metric_that_was_seen_and_which_way_is_better(tmp_path: Path, trains: Make) -> None:
    told = _told("eval_accuracy", ("eval_accuracy", "loss", "eval_accuracy"), greater_is_better=True)
    told["args"].load_best_model_at_end = False
    told["state"].best_model_checkpoint = "out/checkpoint-8"
    said = trains(tmp_path, *HF, **told)
    assert said == [("metric_for_best_model", "eval_accuracy", True, 2, "out/checkpoint-8", WHEN)]


def test_a_trainer_without_such_a_setting_leaves_no_row(tmp_path: Path, trains: Make) -> None:
    assert trains(tmp_path, *HF, **_told(None)) == []


def test_a_training_that_raised_raises_and_leaves_no_row(tmp_path: Path, trains: Make) -> None:
    with pytest.raises(ZeroDivisionError):
        trains(tmp_path, *HF, ZeroDivisionError(), **_told())


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_what_lightning_callbacks_monitor(tmp_path: Path, trains: Make, package: str) -> None:
    known = SimpleNamespace(_callback_metrics={"val_loss": 1.0})
    callbacks = [
        ModelCheckpoint("val_loss", best="a.ckpt"),
        ModelCheckpoint("val_acc", "max"),
        ModelCheckpoint(None),
        7,
    ]
    said = trains(tmp_path, f"{package}.trainer.trainer", "fit", callbacks=callbacks, _logger_connector=known)
    assert said == [("ModelCheckpoint", "val_loss", False, 1, "a.ckpt", ""),
                    ("ModelCheckpoint", "val_acc", True, 0, "", "")]  # fmt: skip


def test_a_lightning_whose_metrics_are_kept_elsewhere_is_left_out(tmp_path: Path, trains: Make) -> None:
    assert trains(tmp_path, "lightning.pytorch.trainer.trainer", "fit", callbacks=[ModelCheckpoint("val_loss")]) == []
