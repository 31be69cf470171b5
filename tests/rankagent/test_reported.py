"""What the reported probe records of a module shaped like Lightning's; the real one is in tests/e2e."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kit.agent import record

WHERE = "lightning.pytorch.core.module"
Log = Callable[[Any, torch.Tensor], None]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Any, ...]]]:
    """A function that records three steps of two batches of a module, which logs as it is told before each backward."""

    def run(folder: Path, log: Log, watch_steps: int = 100, hook: str = "training_step", **trainer: Any) -> Any:
        class LightningModule(torch.nn.Linear):
            automatic_optimization = True

            def log(self, name: str, value: Any, prog_bar: bool = False) -> str:
                return name

        module = types.ModuleType(WHERE)
        module.LightningModule = LightningModule  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, WHERE, module)
        told = {"accumulate_grad_batches": 2, "strategy": SimpleNamespace(handles_gradient_accumulation=False)}
        before = vars(LightningModule)["log"]

        def program() -> None:
            net = LightningModule(2, 1, bias=False)
            torch.nn.init.ones_(net.weight)
            net._trainer, net._current_fx_name = SimpleNamespace(**told | trainer), hook
            optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
            for step in range(3):
                for micro in range(2):
                    loss = net(torch.full((1, 2), 1.0 + step + micro)).sum()
                    log(net, loss)
                    (loss / 2).backward()
                optimizer.step()

        rows = record(folder, program, watch_steps=watch_steps)
        assert vars(LightningModule)["log"] is before
        assert ("reported", "disabled") not in [(r["name"], r["state"]) for r in rows["probe"]]
        return [tuple(r[c] for c in ("step", "micro", "name", "value", "optimised", "window"))
                for r in rows.get("reported", [])]  # fmt: skip

    return run


def test_a_logged_loss_stands_beside_the_loss_of_its_backward(tmp_path: Path, train: Any) -> None:
    said = train(tmp_path, lambda net, loss: net.log("train_loss", loss, prog_bar=True))
    assert said[:3] == [(1, 0, "train_loss", 2.0, 1.0, 2), (1, 1, "train_loss", 4.0, 2.0, 2),
                        (2, 0, "train_loss", 4.0, 2.0, 2)]  # fmt: skip
    assert len(said) == 6


def test_numbers_and_several_names_and_keywords(tmp_path: Path, train: Any) -> None:
    def log(net: Any, loss: torch.Tensor) -> None:
        net.log(name="loss", value=3)
        net.log("train/loss_step", loss.item())
        net.log("contrastive_loss", loss)
        net.log("val_loss", loss)

    assert [r[2:4] for r in train(tmp_path, log)][:2] == [("loss", 3.0), ("train/loss_step", 2.0)]


@pytest.mark.parametrize(
    "told",
    [{"hook": "validation_step"}, {"strategy": SimpleNamespace(handles_gradient_accumulation=True)}, {"strategy": None},
     {"accumulate_grad_batches": "auto"}],
)  # fmt: skip
def test_where_the_division_is_not_known_nothing_is_recorded(tmp_path: Path, train: Any, told: dict[str, Any]) -> None:
    assert train(tmp_path, lambda net, loss: net.log("loss", loss), **told) == []


def test_manual_optimization_and_values_that_are_no_loss_are_left_out(tmp_path: Path, train: Any) -> None:
    def log(net: Any, loss: torch.Tensor) -> None:
        net.log("loss", torch.ones(3))
        net.automatic_optimization = False
        net.log("loss", loss)
        net.automatic_optimization = True
        with torch.no_grad():
            net.log("loss", loss)

    assert train(tmp_path, log) == []
