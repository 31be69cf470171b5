"""What the agent sees of FSDP's parameters and gradients. One process is a whole group of its own here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from kit.agent import Rows, read, running
from tdbg.rankagent import fingerprint
from tdbg.rankagent.sketch import sketch_cpu

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("FSDP2 of torch before 2.6 runs on CUDA only", allow_module_level=True)
fully_shard = fsdp.fully_shard


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def shard2(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(net.first, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def shard1(net: Net, **settings: Any) -> nn.Module:
    device = torch.device("cpu")
    net.first = FullyShardedDataParallel(net.first, device_id=device, **settings)
    return FullyShardedDataParallel(net, device_id=device, **settings)


WAYS = {
    "fsdp2": shard2,
    "fsdp1": shard1,
    "fsdp1-flat": lambda net: shard1(net, use_orig_params=False),
    "fsdp1-names": lambda net: shard1(net, use_orig_params=True),
    "fsdp1-grad": lambda net: shard1(net, use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
}


def own_gradients() -> dict[str, torch.Tensor]:
    """The gradients of the same step in a model that nothing wraps."""
    torch.manual_seed(0)
    net = Net()
    net(torch.ones(3, 4)).sum().backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def train(folder: Path, way: str, steps: int = 2) -> tuple[Rows, list[Any]]:
    seen: list[Any] = []
    with running(folder) as agent:

        def unit(found: Any, wire_dtype: str) -> None:
            seen.extend((o.entry.name, o.grad.clone(), o.factor) for o in found)

        agent.subscribe("test", "unit_gradients", unit)
        torch.manual_seed(0)
        model = WAYS[way](Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    rows = read(folder)
    assert [r["reason"] for r in rows["probe"] if r["state"] != "installed"] == []
    return rows, seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_s_own_gradient_is_seen_whole_before_fsdp_reduces_it(way: str, tmp_path: Path, group: None) -> None:
    rows, seen = train(tmp_path, way)
    assert {r["sharing"] for r in rows["tensor"]} == {"sharded"}
    alone = own_gradients()
    names = [r["name"] for r in rows["tensor"]]
    first = {name: grad for name, grad, _ in seen[: len(names)]}
    assert set(first) == set(names)
    if "first.weight" in names:
        for name, grad in alone.items():
            assert torch.equal(first[name], grad)
    else:
        whole = torch.cat([g.flatten() for n, g in alone.items() if n.startswith("last")])
        assert torch.equal(first["_flat_param"], whole)
    assert {factor for *_, factor in seen} == {1.0}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_the_forward_of_a_sharded_model_is_a_phase_and_its_inputs_are_seen(
    way: str, tmp_path: Path, group: None
) -> None:
    rows, _ = train(tmp_path, way)
    assert all(r["forward_ns"] > 0 for r in rows["phase"])
    assert [r["source"] for r in rows["input"]] == ["forward", "forward"]


def test_a_block_that_is_sharded_without_its_root_shows_no_model_inputs(tmp_path: Path, group: None) -> None:
    with running(tmp_path):
        net = Net()
        fully_shard(net.last, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    rows = read(tmp_path)
    assert [r["reason"] for r in rows["probe"] if r["state"] != "installed"] == []
    assert "input" not in rows
    assert {r["name"]: r["sharing"] for r in rows["tensor"]} == {
        "first.weight": "outside", "first.bias": "outside", "last.weight": "sharded", "last.bias": "sharded",
    }  # fmt: skip


def test_torch_is_as_it_was_when_the_agent_leaves(tmp_path: Path) -> None:
    from torch.distributed.fsdp import _runtime_utils
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    def names() -> list[Any]:
        return [_runtime_utils._reduce_grad, _runtime_utils._reduce_grad_no_shard, _fsdp_param_group.foreach_reduce,
                FSDPState.__dict__["_root_pre_forward"], FSDPState.__dict__["_post_forward"],
                FullyShardedDataParallel.__dict__["forward"]]  # fmt: skip

    before = names()
    with running(tmp_path):
        assert not any(a is b for a, b in zip(names(), before, strict=True))
    assert names() == before


def rows_of(rows: Rows, table: str, name: str, **where: Any) -> list[Any]:
    """One tensor's values in every row of a table: its norm, its sketch."""
    index = next(r["index"] for r in rows["tensor"] if r["name"] == name)
    found = []
    for row in rows[table]:
        if all(row[k] == v for k, v in where.items()):
            at = row["tensors"].index(index) if row["tensors"] else index
            found.append(((row["l2"] if "l2" in row else [-1.0] * (at + 1))[at], row["sketch"][2 * at : 2 * at + 2]))
    return found


def sketched(grad: torch.Tensor, index: int) -> list[float]:
    flat = grad.reshape(-1)
    return sketch_cpu(fingerprint.runs([flat]), [(index, 0, flat.numel())], False)[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_rows_hold_the_own_gradient_s_norm_and_sketch_and_what_was_left_of_it(
    way: str, tmp_path: Path, group: None
) -> None:
    rows, _ = train(tmp_path, way, steps=3)
    local = [r for r in rows["grad"] if r["stage"] == "local"]
    assert [(r["step"], r["micro"], r["valid"], r["synced"], r["tensors"]) for r in local] == [
        (step, 0, True, 1, []) for step in (1, 2, 3)
    ]
    assert [(r["step"], r["reduction"], r["wire"], r["digest"]) for r in rows["delivered"]] == [
        (step, "mean", "float32", []) for step in (1, 2, 3)
    ]
    alone = own_gradients()
    if "first.weight" in {r["name"] for r in rows["tensor"]}:
        expected = alone
    else:
        expected = {"_flat_param": torch.cat([g.flatten() for n, g in alone.items() if n.startswith("last")])}
    for name, grad in expected.items():
        index = next(r["index"] for r in rows["tensor"] if r["name"] == name)
        norm, numbers = rows_of(rows, "grad", name, stage="local", step=1)[0]
        assert norm == pytest.approx(grad.norm().item(), rel=1e-6)
        assert numbers == pytest.approx(sketched(grad, index), rel=1e-6)
        assert rows_of(rows, "delivered", name, step=1)[0][1] == numbers


def accumulated(folder: Path, way: str, unsynced: bool) -> Rows:
    """Two steps of two micro-batches each."""
    with running(folder):
        torch.manual_seed(0)
        model: Any = WAYS[way](Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                later = unsynced and micro == 0
                if way == "fsdp2":
                    model.set_requires_gradient_sync(not later)
                with model.no_sync() if later and way != "fsdp2" else nullcontext():
                    model(torch.ones(3, 4) + micro).sum().backward()
            optimizer.step()
    return read(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["fsdp2", "fsdp1", "fsdp1-names"])
def test_micro_batches_that_are_held_back_are_reduced_as_one(way: str, tmp_path: Path, group: None) -> None:
    rows = accumulated(tmp_path, way, unsynced=True)
    for table in ("grad", "delivered"):
        held = [r for r in rows[table] if r.get("stage", "local") == "local"]
        assert [(r["step"], r["micro"]) for r in held] == [(1, 1), (2, 1)]
    name = rows["tensor"][0]["name"]
    own, made = rows_of(rows, "grad", name, stage="local"), rows_of(rows, "delivered", name)
    assert [n for _, n in own] == [n for _, n in made]


def test_what_is_added_to_an_earlier_reduction_is_not_taken_for_its_own(tmp_path: Path, group: None) -> None:
    rows = accumulated(tmp_path, "fsdp2", unsynced=False)
    local = [r for r in rows["grad"] if r["stage"] == "local"]
    assert [(r["step"], r["micro"]) for r in local] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [(r["step"], r["micro"]) for r in rows["delivered"]] == [(1, 0), (2, 0)]


@pytest.mark.filterwarnings("ignore")
def test_fsdp_without_shards_accumulates_as_ddp_does(tmp_path: Path, group: None) -> None:
    rows = accumulated(tmp_path, "fsdp1-names", unsynced=False)  # of one rank it makes no shards
    own, made = rows_of(rows, "grad", "first.weight", stage="local"), rows_of(rows, "delivered", "first.weight")
    assert len(own) == 4
    assert [n for _, n in own] == [n for _, n in made]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["fsdp2", "fsdp1-names"])
def test_a_gradient_that_is_not_finite_is_the_own_one_s(way: str, tmp_path: Path, group: None) -> None:
    with running(tmp_path):
        model = WAYS[way](Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(torch.ones(3, 4)).sum() * torch.tensor(float("inf"))).backward()
        optimizer.step()
    rows = read(tmp_path)
    (local,) = (r for r in rows["grad"] if r["stage"] == "local")
    names = {r["index"]: r["name"] for r in rows["tensor"]}
    assert "last.weight" in {names[i] for i in local["nonfinite"]}


def test_windows_norms_are_told_where_the_wire_is_narrow(tmp_path: Path, group: None) -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with running(tmp_path):
        model = fully_shard(Net(), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    rows = read(tmp_path)
    (local,) = (r for r in rows["grad"] if r["stage"] == "local")
    assert local["window_l2"] == pytest.approx(local["l2"], rel=1e-2)
    assert [r["wire"] for r in rows["delivered"]] == ["bfloat16"]


def test_a_divisor_of_the_program_s_is_told(tmp_path: Path, group: None) -> None:
    with running(tmp_path):
        model: Any = fully_shard(Net(), mesh=init_device_mesh("cpu", (1,)))
        model.set_gradient_divide_factor(4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    rows = read(tmp_path)
    assert [r["reduction"] for r in rows["delivered"]] == ["gradient_divide_factor"]
    own, made = rows_of(rows, "grad", "first.weight", stage="local"), rows_of(rows, "delivered", "first.weight")
    assert made[0][1] == pytest.approx([n / 4 for n in own[0][1]])


def test_what_a_hook_of_the_program_s_changes_is_not_taken_for_the_reduction(tmp_path: Path, group: None) -> None:
    with running(tmp_path):
        model: Any = fully_shard(Net(), mesh=init_device_mesh("cpu", (1,)))
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    rows = read(tmp_path)
    assert [r["stage"] for r in rows["grad"]] == ["local", "reduced"]
    assert "delivered" not in rows
