"""Which modules without a gradient run, and on what."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kit.agent import record, running


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(8, 1)
        self.cut, self.late, self.idle = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        h = self.body(x).tanh()
        self.late(h)  # its result goes nowhere
        return self.head(torch.cat([h, self.cut(x).detach()], 1)).square().mean()


def _train(net: nn.Module, steps: int = 6) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(3, 4)).backward()
        optimizer.step()


def test_tells_modules_that_run_on_data_from_those_behind_others_and_idle_ones(tmp_path: Path) -> None:
    net = Net()
    rows = record(tmp_path, lambda: _train(net))["unreached"]
    said = {r["module"]: (r["calls"], r["from_data"]) for r in rows}
    assert said == {"cut": (3, 3), "late": (3, 0), "idle": (0, 0)}
    names = {t["index"]: t["name"] for t in record(tmp_path / "again", lambda: _train(Net()))["tensor"]}
    assert {names[i] for r in rows if r["module"] == "cut" for i in r["tensors"]} == {"cut.weight", "cut.bias"}
    assert not hooks()


def hooks() -> Any:
    return nn.modules.module._global_forward_pre_hooks


def test_hooks_are_gone_when_the_agent_is_before_they_were_done(tmp_path: Path) -> None:
    net = Net()
    with running(tmp_path):
        _train(net, 2)
        assert hooks()
        pickle.dumps(net)  # nothing of ours hangs on the model
    assert not hooks()


def test_evaluation_without_autograd_does_not_count(tmp_path: Path) -> None:
    net = Net()

    def program() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            with torch.no_grad():
                net.idle(torch.randn(3, 4))
            net(torch.randn(3, 4)).backward()
            optimizer.step()

    rows = record(tmp_path, program)["unreached"]
    assert {r["calls"] for r in rows if r["module"] == "idle"} == {0}


def test_nothing_is_written_where_every_parameter_has_a_gradient(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    assert "unreached" not in record(tmp_path, lambda: _train_mean(net))


def _train_mean(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        net(torch.randn(3, 4)).mean().backward()
        optimizer.step()
