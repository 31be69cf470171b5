"""Gradients that a program reduces by hand, seen through the hooks of process groups. One process is a group here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from kit.agent import Rows, record
from tdbg.rankagent import handreduced

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="groups have no hooks before torch 2.14"
)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


Between = Callable[[nn.Module], object]


def all_of_them(model: nn.Module) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad)


def train(between: Between, steps: int = 2) -> nn.Module:
    torch.manual_seed(5)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        between(model)
        optimizer.step()
    return model


def by_hand(rows: Rows) -> list[tuple[int, int, list[int], str]]:
    found = [r for r in rows.get("delivered", []) if r["reduction"] == "by hand"]
    assert not [r for r in found if r["digest"] or r["sketch"] or r["wire"]]
    return [(r["step"], r["micro"], list(r["tensors"]), r["ranks"]) for r in found]


def registered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many hooks of ours are on the group, after each change."""
    there: set[int] = set()
    history: list[int] = []

    def watch(name: str, change: Callable[[int], None]) -> None:
        call = getattr(dist.ProcessGroup, name)

        def noting(group: Any, hook_id: int, *hook: Any) -> None:
            call(group, hook_id, *hook)
            change(hook_id)
            history.append(len(there))

        monkeypatch.setattr(dist.ProcessGroup, name, noting)

    watch("register_pre_hook", there.add)
    watch("unregister_pre_hook", there.discard)
    return history


def test_names_the_tensors_whose_gradients_were_handed_over(tmp_path: Path) -> None:
    rows = record(tmp_path, lambda: train(all_of_them))
    assert by_hand(rows) == [(1, 0, [0, 1], "0"), (2, 0, [0, 1], "0")]


WAYS: dict[str, tuple[Between, list[int]]] = {
    "one": (lambda m: dist.all_reduce(m.bias.grad), [1]),
    "asynchronously": (lambda m: dist.all_reduce(m.bias.grad, async_op=True).wait(), [1]),
    "a view of it": (lambda m: dist.all_reduce(m.weight.grad.view(-1)), [0]),
    "divided before": (lambda m: dist.all_reduce(m.weight.grad.div_(1)), [0]),
    "a part": (lambda m: dist.all_reduce(m.weight.grad[0]), []),
    "a copy": (lambda m: dist.all_reduce(m.weight.grad.clone()), []),
    "parameters": (lambda m: [dist.all_reduce(p.data) for p in m.parameters()], []),
    "broadcast": (lambda m: dist.broadcast(m.weight.grad, 0), []),
    "nothing": (lambda m: None, []),
}


@pytest.mark.parametrize("way", WAYS)
def test_only_a_whole_gradient_given_to_an_all_reduce_counts(way: str, tmp_path: Path) -> None:
    between, tensors = WAYS[way]
    rows = record(tmp_path, lambda: train(between, steps=1))
    assert by_hand(rows) == ([(1, 0, tensors, "0")] if tensors else [])


def test_the_hook_is_there_only_until_the_update_of_a_watched_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = registered(monkeypatch)
    record(tmp_path, lambda: train(all_of_them))
    assert history == [1, 0, 1, 0]
    history.clear()
    record(tmp_path / "later", lambda: train(all_of_them, steps=3), watch_steps=1, budget=1e-9)
    assert history == [1, 0]


def test_values_are_what_they_are_without_us_and_a_hook_of_the_users_stays(tmp_path: Path) -> None:
    calls: list[str] = []
    dist.group.WORLD.register_pre_hook(0, lambda args: calls.append(args.name.name))
    expected = list(train(all_of_them).parameters())
    trained: list[nn.Module] = []
    record(tmp_path, lambda: trained.append(train(all_of_them)))
    assert all(map(torch.equal, trained[0].parameters(), expected))
    assert calls == ["ALLREDUCE"] * 8
    dist.group.WORLD.unregister_pre_hook(0)


def test_no_hook_while_another_thread_may_use_the_group(tmp_path: Path) -> None:
    end = threading.Event()
    beside = threading.Thread(target=end.wait)
    beside.start()
    try:
        assert by_hand(record(tmp_path, lambda: train(all_of_them))) == []
    finally:
        end.set()
        beside.join()


def test_a_hook_that_could_not_be_removed_is_silent_and_goes_at_the_next_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = registered(monkeypatch)
    end = threading.Event()
    beside = threading.Thread(target=end.wait)

    def between(model: nn.Module) -> None:
        all_of_them(model)
        if not beside.ident:
            beside.start()

    def program() -> None:
        train(between)
        end.set()
        beside.join()
        train(all_of_them, steps=1)

    rows = record(tmp_path, program)
    assert [step for step, *_ in by_hand(rows)] == [1, 3]
    assert history == [1, 0, 1, 0]


def test_an_error_of_ours_reaches_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(hand: Any, ranks: str, args: Any) -> None:
        raise ValueError("a test")

    monkeypatch.setattr(handreduced.HandReductions, "_see", broken)
    rows = record(tmp_path, lambda: train(all_of_them))
    assert by_hand(rows) == []
    assert [r["name"] for r in rows["probe"] if r["state"] == "disabled"] == ["gradients"]


def test_a_group_that_takes_no_hook_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("not implemented")

    monkeypatch.setattr(dist.ProcessGroup, "register_pre_hook", refuse)
    rows = record(tmp_path, lambda: train(all_of_them))
    assert by_hand(rows) == []
    assert not [r for r in rows["probe"] if r["state"] == "disabled"]


def test_our_number_is_neither_torchs_nor_a_small_one() -> None:
    assert 2**62 < handreduced.HOOK_ID < 2**63
