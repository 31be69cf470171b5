"""The weights that training begins with, and what is said of real models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kit.agent import record
from kit.rows import Rows
from tdbg.aggregator.detectors import init_suspect
from tdbg.aggregator.findings import Finding


def mlp(depth: int = 3) -> nn.Sequential:
    sizes = [6] + [8] * depth
    parts = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(8, 2))


def changed(net: nn.Module, change: Callable[[Any], Any]) -> nn.Module:
    for layer in net.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            change(layer)
    return net


def _train(net: nn.Module, shape: tuple[int, ...], before: Callable[[nn.Module], Any] | None = None) -> None:
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)
    if before is not None:
        before(net)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(shape)).square().mean().backward()
        optimizer.step()


def _judged(rows: dict[str, Any]) -> tuple[str, list[Finding]]:
    assert not [r for r in rows["probe"] if r["state"] == "disabled"]
    recorded = Rows().add_all(rows, "initial", "param", "tensor", "checkpoint")
    outcomes, found = recorded.judge(init_suspect, world_size=1)
    return outcomes["INIT_SUSPECT"], [f for _, f in found]


def _run(
    folder: Path, net: nn.Module, shape: tuple[int, ...] = (4, 6), before: Any = None
) -> tuple[str, list[Finding]]:
    return _judged(record(folder, lambda: _train(net, shape, before)))


def twins() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 8)
            self.other = copy.deepcopy(self.one)

        def forward(self, x: Any) -> Any:
            return self.one(x) - self.other(2 * x)

    return Net()


def flat(value: float) -> Callable[[Any], Any]:
    def change(layer: Any) -> None:
        nn.init.constant_(layer.weight, value)
        nn.init.zeros_(layer.bias)

    return change


SUSPECT = {
    "one number everywhere": (lambda: changed(mlp(), flat(0.1)), "0.weight", "all weights are equal"),
    "zeros everywhere": (lambda: changed(mlp(), flat(0.0)), "0.weight", "all weights are equal"),
    "copies side by side": (twins, "one.weight", "a copy of another"),
    "a standard normal": (
        lambda: changed(nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 256)),
                        lambda layer: nn.init.normal_(layer.weight)), "2.weight", "multiply the size"),
}  # fmt: skip


@pytest.mark.parametrize("name", SUSPECT)
def test_a_doubtful_start_is_a_note(tmp_path: Path, name: str) -> None:
    make, subject, words = SUSPECT[name]
    torch.manual_seed(1)
    outcome, (found,) = _run(tmp_path, make())
    assert (outcome, found.severity, found.first_step, found.subject) == ("INCIDENT", "note", 1, subject)
    assert words in found.summary


def residual(last: float) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
            flat(last)(self.out)

        def forward(self, x: Any) -> Any:
            return x + self.out(torch.relu(self.inner(x)))

    head = nn.Linear(8, 8)
    flat(last)(head)
    return nn.Sequential(nn.Linear(6, 8), Block(), Block(), head)


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    net[2].weight = net[1].weight
    return net


def stack() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Linear(6, 8), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


def teacher() -> nn.Module:
    net = twins()
    net.get_submodule("other").requires_grad_(False)
    return net


MEANT = {
    "torch's own": mlp,
    "residual branches and a head of zeros": lambda: residual(0.0),
    "a regression from zeros": lambda: changed(nn.Sequential(nn.Linear(6, 2)), flat(0.0)),
    "zeros whose biases tell the units apart": lambda: changed(mlp(), lambda layer: nn.init.zeros_(layer.weight)),
    "identities": lambda: changed(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))),
                                  lambda layer: nn.init.eye_(layer.weight)),
    "tied": tied,
    "a stack that torch copies": stack,
    "a frozen teacher": teacher,
    "one large layer": lambda: changed(nn.Sequential(nn.Linear(6, 400), nn.ReLU(), nn.Linear(400, 8), nn.Linear(8, 8)),
                                       lambda layer: layer.weight.data.mul_(50.0 if layer.in_features == 400 else 1.0)),
    "an orthogonal draw": lambda: changed(mlp(), lambda layer: nn.init.orthogonal_(layer.weight)),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANT)
def test_what_is_drawn_or_meant_is_silent(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    assert _run(tmp_path, MEANT[name]()) == ("CLEAR", [])


def test_images_and_half_precision_are_looked_at_too(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, groups=4)).bfloat16()
    inputs = nn.Sequential(nn.Unflatten(0, (4, 3)), _Halved(), net)
    rows = record(tmp_path, lambda: _train(inputs, (12, 9, 9)))
    assert [(r["units"], r["inputs"], r["fan_in"]) for r in rows["initial"]] == [(4, 3, 27), (4, 4, 36)]
    assert _judged(rows) == ("CLEAR", [])


class _Halved(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.bfloat16()


def test_loaded_weights_are_no_draw(tmp_path: Path) -> None:
    def load(net: nn.Module) -> None:
        net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()})

    assert _run(tmp_path, twins(), before=load) == ("NOT_APPLICABLE", [])


def test_there_is_one_row_a_layer_and_none_later(tmp_path: Path) -> None:
    rows = record(tmp_path, lambda: _train(mlp(), (4, 6)))
    assert [(r["module"], r["place"], r["step"], r["trained"]) for r in rows["initial"]] == [
        ("0", 0, 1, True), ("2", 1, 1, True), ("4", 2, 1, True), ("6", 3, 1, True)]  # fmt: skip
