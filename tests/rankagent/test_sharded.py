"""What the agent sees of FSDP's parameters and gradients. One process is a whole group of its own here."""

from __future__ import annotations

from collections.abc import Iterator
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

        def unit(pairs: Any) -> None:
            seen.extend((e.name, g.clone(), factor) for e, g, factor in pairs)

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
