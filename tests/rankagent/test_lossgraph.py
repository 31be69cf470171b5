"""Which losses are said to be undivided: only those of which it is certain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from kit.agent import record
from tdbg.rankagent.lossgraph import ignored_indices, undivided

X = torch.ones(4, 3)
Y = torch.tensor([0, 1, 1, 0])


def _out() -> torch.Tensor:
    return X @ torch.ones(3, 2, requires_grad=True)


def _loss() -> torch.Tensor:
    return F.cross_entropy(_out(), Y)


@pytest.mark.parametrize(
    "loss",
    [_loss, lambda: F.mse_loss(_out(), X[:, :2]), lambda: (_out() ** 2).mean(), lambda: _loss() + (_out() ** 2).mean(),
     lambda: _loss().double().reshape(1), lambda: F.binary_cross_entropy_with_logits(_out(), torch.ones(4, 2))],
)  # fmt: skip
def test_a_mean_that_nothing_divides(loss: Callable[[], torch.Tensor]) -> None:
    assert undivided(loss(), False)
    assert undivided(loss() * torch.tensor(65536.0), True)


@pytest.mark.parametrize(
    "loss",
    [lambda: _loss() / 4, lambda: _loss() * 0.25, lambda: 0.25 * _loss(), lambda: (_loss() / 4).float().clone(),
     lambda: F.cross_entropy(_out(), Y, reduction="sum") / torch.tensor(7), lambda: (_out() ** 2).sum(),
     lambda: _loss() / 4 + (_out() ** 2).mean() / 4, lambda: _loss() + (_out() ** 2).mean() / 4,
     lambda: (F.cross_entropy(_out(), Y, reduction="none") / 4).mean(), lambda: X.mean()],
)  # fmt: skip
def test_what_was_divided_or_may_have_been(loss: Callable[[], torch.Tensor]) -> None:
    assert not undivided(loss(), False)
    assert not undivided(loss() * torch.tensor(65536.0), True)


def _train(divide: Callable[[int], float]) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for micro in range(2):
            loss = F.cross_entropy(net(X), Y)
            (loss / divide(micro) if divide(micro) != 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_is_undivided_when_each_of_its_losses_is(tmp_path) -> None:  # type: ignore[no-untyped-def]
    assert [r["undivided"] for r in record(tmp_path / "a", lambda: _train(lambda m: 1))["loss"]] == [True, True]
    assert [r["undivided"] for r in record(tmp_path / "b", lambda: _train(lambda m: 1 + m))["loss"]] == [False, False]


def test_unwatched_steps_are_not_looked_at(tmp_path) -> None:  # type: ignore[no-untyped-def]
    rows = record(tmp_path, lambda: _train(lambda m: 1), watch_steps=0, budget=1e-9)["loss"]
    assert not all(r["undivided"] for r in rows)


def test_nothing_that_the_graph_saved_is_unpacked() -> None:
    unpacked: list[object] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        loss = _loss() / 4
    assert not undivided(loss, False)
    assert not undivided(loss * torch.tensor(2.0), True)
    assert unpacked == []


@pytest.mark.parametrize(
    ("loss", "said"),
    [(_loss, {-100}), (lambda: F.cross_entropy(_out(), Y, ignore_index=0) / 3 + 0.1 * (_out() ** 2).mean(), {0}),
     (lambda: F.cross_entropy(_out(), Y, reduction="sum", label_smoothing=0.1, ignore_index=1), {1}),
     (lambda: _loss() + F.cross_entropy(_out(), Y, ignore_index=1), {-100, 1}), (lambda: (_out() ** 2).mean(), set()),
     (lambda: X.mean(), set())],
)  # fmt: skip
def test_the_index_that_a_loss_ignores(loss: Callable[[], torch.Tensor], said: set[int]) -> None:
    assert ignored_indices(loss()) == said
