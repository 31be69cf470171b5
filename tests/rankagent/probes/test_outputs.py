"""Modules whose output never varies: which are followed, and what is said of real models that hold one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

from kit.agent import record, running
from kit.rows import Rows
from tdbg.aggregator.detectors import dead_module
from tdbg.aggregator.findings import Finding

STEPS = 30
WIDTH = 8


class Part(nn.Module):
    """A branch of a model as a function of its layers."""

    def __init__(self, forward: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.rule = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Any) -> Any:
        return self.rule(self, x)


class Net(nn.Module):
    """A healthy trunk beside the part under test."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.head = nn.Linear(4, WIDTH), part, nn.Linear(WIDTH, 2)

    def forward(self, x: Any) -> Any:
        h = self.first(x)
        return self.head(h + self.part(h))


def linear(bias: float | None = None, weight: float | None = None, rows: int = WIDTH) -> nn.Linear:
    layer = nn.Linear(WIDTH, rows)
    if bias is not None:
        nn.init.constant_(layer.bias, bias)
    if weight is not None:
        nn.init.constant_(layer.weight, weight)
    return layer


def zeroed(layer: Any, units: slice = slice(None), value: float = 0.0) -> Any:
    """A layer some of whose weights' rows are set; of one with a bias that instead."""
    (layer.weight if layer.bias is None else layer.bias).data[units] = value
    return layer


def _train(net: nn.Module, steps: int = STEPS, batch: int = 6, lr: float = 1e-3, each: Any = None) -> None:
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=lr)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        if each is not None:
            each(net, step)
        net(torch.randn(batch, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def _rows(folder: Path, part: Any, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    return record(folder, lambda: _train(Net(part) if part is not None else Net(nn.Identity()), **settings))


def _judged(rows: dict[str, Any]) -> tuple[str, list[Finding]]:
    assert not [r for r in rows["probe"] if r["state"] == "disabled"]
    tables = ("output", "constant", "grad", "tensor", "step")
    outcomes, found = Rows().add_all(rows, *tables).judge(dead_module, world_size=1)
    return outcomes["DEAD_MODULE"], [f for _, f in found]


def relu_block(bias: float, **how: Any) -> Part:
    return Part(lambda m, x: m.out(m.act(m.inner(x))), inner=linear(bias), act=nn.ReLU(**how), out=linear())


DEAD = {
    "a ReLU": (relu_block(-100.0), "part.act", "warning"),
    "in place": (relu_block(-100.0, inplace=True), "part.act", "warning"),
    "a function between two layers": (
        Part(lambda m, x: m.out(torch.relu(m.inner(x))), inner=linear(-100.0), out=linear()), "part", "warning"),
    "the last operation of a block": (
        Part(lambda m, x: torch.relu(m.inner(x)), inner=linear(-100.0)), "part", "warning"),
    "a sigmoid": (Part(lambda m, x: m.out(m.act(m.inner(x))), inner=linear(-200.0), act=nn.Sigmoid(), out=linear()),
                  "part.act", "warning"),
    "a branch times zero": (Part(lambda m, x: 0.0 * m.inner(x), inner=linear()), "part", "note"),
    "dropout of everything": (nn.Sequential(linear(), nn.Dropout(1.0)), "part.1", "note"),
    "what stands behind a frozen layer": (
        Part(lambda m, x: m.out(torch.relu(m.inner(x))), inner=linear(-100.0).requires_grad_(False), out=linear()),
        "part", "note"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEAD)
def test_a_dead_module_is_named(tmp_path: Path, name: str) -> None:
    part, subject, severity = DEAD[name]
    outcome, found = _judged(_rows(tmp_path, copy.deepcopy(part)))
    assert outcome == "INCIDENT"
    assert [(f.subject, f.severity, f.first_step, f.ranks) for f in found] == [(subject, severity, 1, (0,))]


def _expanded(m: Any, x: Any) -> Any:
    return m.places.weight[:1].expand(len(x), -1)


def _experts(m: Any, x: Any) -> Any:
    chosen = x[:, :0].sum(1) > 0
    return torch.zeros_like(x).masked_scatter(chosen[:, None], m.expert(x[chosen])) + m.shared(x)


HEALTHY = {
    "half of the units are dead": Part(
        lambda m, x: m.out(m.act(m.inner(x))), act=nn.ReLU(), out=linear(),
        inner=zeroed(linear(), slice(4), -100.0)),
    "a layer of zeros that moves": linear(0.0, 0.0),
    "an adapter of zeros": Part(lambda m, x: m.up(m.down(x)), down=nn.Linear(WIDTH, 2, bias=False),
                                up=zeroed(nn.Linear(2, WIDTH, bias=False))),
    "a gate that opens": Part(lambda m, x: m.scale * m.inner(x), inner=linear(), scale=nn.Parameter(torch.zeros(1))),
    "a position that knows no input": Part(_expanded, places=nn.Embedding(3, WIDTH)),
    "positions by number": Part(lambda m, x: m.places(torch.zeros(len(x), dtype=torch.long)),
                                places=nn.Embedding(3, WIDTH)),
    "padding alone": Part(lambda m, x: m.out(torch.relu(m.mix(m.words(torch.zeros(len(x), dtype=torch.long))))),
                          words=nn.Embedding(3, WIDTH, padding_idx=0), mix=linear(0.0), out=linear()),
    "a mean over the batch": Part(lambda m, x: m.inner(x.mean(0, keepdim=True)).expand_as(x), inner=linear()),
    "an expert without tokens": Part(_experts, expert=linear(), shared=linear()),
    "a softmax over one choice": Part(lambda m, x: m.inner(x) * m.gate(m.score(x)), inner=linear(), gate=nn.Softmax(1),
                                      score=linear(rows=1)),
    "a branch left out half of the time": Part(lambda m, x: m.inner(x) * float(torch.rand(()) < 0.5), inner=linear()),
    "frozen": Part(lambda m, x: torch.relu(m.inner(x)), inner=linear(-100.0).requires_grad_(False)),
    "one module used twice": Part(lambda m, x: m.act(m.inner(x)) + m.act(m.other(x)), act=nn.ReLU(),
                                  inner=linear(-100.0), other=linear()),
    "attention": Part(lambda m, x: m.layer(x[:, None])[:, 0],
                      layer=nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)),
    "recurrent": Part(lambda m, x: m.layer(x[:, None])[0][:, 0], layer=nn.LSTM(WIDTH, WIDTH, batch_first=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_meant_to_be_constant_or_moves_later_is_not(tmp_path: Path, name: str) -> None:
    assert _judged(_rows(tmp_path, copy.deepcopy(HEALTHY[name]))) == ("CLEAR", [])


def test_a_warm_up_from_a_rate_of_zero_does_not_make_zeros_dead(tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = Net(linear(0.0, 0.0))

    def program() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            net(torch.randn(6, 4)).square().mean().backward()
            optimizer.param_groups[0]["lr"] = 0.01 * (step > 25)
            optimizer.step()

    assert _judged(record(tmp_path, program)) == ("CLEAR", [])


def test_one_sample_a_batch_tells_a_dead_module_from_a_living_one(tmp_path: Path) -> None:
    assert _judged(_rows(tmp_path / "a", linear(), batch=1)) == ("CLEAR", [])
    _, found = _judged(_rows(tmp_path / "b", relu_block(-100.0), batch=1))
    assert [f.subject for f in found] == ["part.act"]


def test_a_module_that_dies_in_a_first_update_is_said_to_have_lived(tmp_path: Path) -> None:
    def kill(net: Any, step: int) -> None:
        if step == 5:
            net.part.inner.bias.data.fill_(-100.0)

    _, found = _judged(_rows(tmp_path, relu_block(0.0), each=kill, steps=40))
    assert [(f.subject, f.first_step, f.last_good_step) for f in found] == [("part.act", 9, 2)]
    assert "at which step between 3 and 9" in " ".join(found[0].cannot_conclude)


def test_few_looks_are_no_evidence(tmp_path: Path) -> None:
    outcome, found = _judged(_rows(tmp_path, relu_block(-100.0), steps=12))
    assert (outcome, found) == ("INSUFFICIENT_EVIDENCE", [])


def hooks() -> int:
    module = nn.modules.module
    return len(module._global_forward_hooks) + len(module._global_forward_pre_hooks)


def test_hooks_are_there_only_while_something_is_looked_at_and_never_on_the_model(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def each(net: Any, step: int) -> None:
        seen.append((step, hooks()))
        pickle.dumps(net.head)

    with running(tmp_path):
        _train(Net(linear()), each=each, steps=34)
        assert not hooks()
    assert [step for step, there in seen if there] == [2, 8, 32]
    with running(tmp_path / "again"):
        _train(Net(relu_block(-100.0)), steps=3)
        assert not hooks() or hooks() == 2
    assert not hooks()


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "selective", "transformed"])
def test_forwards_that_are_computed_in_another_way_give_the_same_bits(tmp_path: Path, how: str) -> None:
    def apply(m: Any, x: Any) -> Any:
        def inner(x: Any) -> Any:
            return m.out(m.act(m.inner(x)))

        if how == "transformed":
            return torch.func.vmap(inner, randomness="same")(x[:, None])[:, 0]
        more: dict[str, Any] = {}
        if how == "selective":

            def save(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
                return checkpoint.CheckpointPolicy.MUST_SAVE

            more = {"context_fn": lambda: checkpoint.create_selective_checkpoint_contexts(save)}
        return checkpoint.checkpoint(inner, x, use_reentrant=how == "reentrant", **more)

    def train() -> list[Any]:
        torch.manual_seed(1)
        net = Net(Part(apply, inner=linear(-100.0), act=nn.ReLU(), out=linear()))
        _train(net)
        return [p.detach().clone() for p in net.parameters()]

    alone, kept = train(), []
    rows = record(tmp_path, lambda: kept.extend(train()))
    assert all(torch.equal(a, b) for a, b in zip(alone, kept, strict=True))
    assert not [r for r in rows["probe"] if r["state"] == "disabled"]


def test_what_dynamo_has_compiled_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = Net(relu_block(-100.0))
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    rows = record(tmp_path, lambda: _train(torch.compile(net, backend=backend)))  # type: ignore[arg-type]
    assert len(graphs) == 1
    assert "output" not in rows
    assert _judged(rows)[0] == "INSUFFICIENT_EVIDENCE"
