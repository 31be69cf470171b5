"""A model whose structure changes while it is trained gets a new catalogue; anything else does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kit.agent import record


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Any) -> Any:
        return self.head(self.emb(ids)).square().mean()


def _names(folder: Path, change: Callable[[Tied], object]) -> list[dict[str, str]]:
    """name -> aliases of each catalogue; `change` is called before the third of five steps."""

    def program() -> None:
        net = Tied()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(5):
            if step == 2:
                change(net)
            optimizer.zero_grad()
            net(torch.arange(6)).backward()
            optimizer.step()

    rows = record(folder, program)["tensor"]
    return [{r["name"]: r["aliases"] for r in rows if r["generation"] == g}
            for g in sorted({r["generation"] for r in rows})]  # fmt: skip


def test_a_tie_is_recorded_and_its_end_too(tmp_path: Path) -> None:
    def untie(net: Tied) -> None:
        net.head.weight = nn.Parameter(net.head.weight.detach().clone())

    assert _names(tmp_path, untie) == [{"emb.weight": "head.weight"}, {"emb.weight": "", "head.weight": ""}]


def test_a_part_that_is_added_late_is_noticed(tmp_path: Path) -> None:
    def add(net: Tied) -> None:
        net.register_parameter("lora", nn.Parameter(torch.zeros(2)))

    assert [set(n) for n in _names(tmp_path, add)] == [{"emb.weight"}, {"emb.weight", "lora"}]


def test_a_part_that_is_replaced_by_a_copy_is_noticed(tmp_path: Path) -> None:
    def copied(net: Tied) -> None:
        net.head = copy.deepcopy(net.head)

    assert _names(tmp_path, copied) == [{"emb.weight": "head.weight"}, {"emb.weight": "", "head.weight": ""}]


def test_another_model_that_is_built_changes_nothing(tmp_path: Path) -> None:
    assert len(_names(tmp_path, lambda net: nn.Linear(3, 3))) == 1
