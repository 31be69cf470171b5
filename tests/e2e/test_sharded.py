"""Real sharded programs: who is named when replicas part, silence where nothing did, and training that is not touched.

One script trains; its arguments name how the model is laid out and what is planted, `none` for the healthy twin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kit.job import Spec, both, job, run

STEP, STEPS = 5, 9

TRAIN = f"""
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

layout, plant = sys.argv[1:]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(8))
    def forward(self, x):
        return self.head(torch.tanh(self.body(self.embed(x) * self.scale)))

net = Net()
if plant == "own":  # of each rank its own from the start, as experts are
    with torch.no_grad():
        net.embed.weight += rank
        net.embed.bias += rank
device, mesh = torch.device("cpu"), init_device_mesh("cpu", (world,))
seed = rank
if layout == "ddp-ignored":
    names = ["embed.weight", "embed.bias"]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    model = nn.parallel.DistributedDataParallel(net)
elif layout == "zero":
    model = nn.parallel.DistributedDataParallel(net)
elif layout.startswith("fsdp1"):
    more = {{"use_orig_params": layout != "fsdp1-flat", "device_id": device}}
    if layout == "fsdp1-hybrid":
        more |= dict(sharding_strategy=ShardingStrategy.HYBRID_SHARD,
                     device_mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard")))
    if layout == "fsdp1-ignored":
        more |= dict(ignored_modules=[net.embed], sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    net.body = FullyShardedDataParallel(net.body, **more)
    model = FullyShardedDataParallel(net, **more)
elif layout == "tp":
    model = parallelize_module(net, mesh, {{"body.0": ColwiseParallel(), "body.2": RowwiseParallel()}})
    seed = 0
else:
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))
    more = {{"mesh": mesh}}
    if layout == "fsdp2-bf16":
        more["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    fully_shard(net.body, **more)
    if layout != "fsdp2-noroot":
        fully_shard(net, **more)
    model = net
adam = torch.optim.AdamW
if layout == "zero":
    optimizer = ZeroRedundancyOptimizer(net.parameters(), adam, lr=1e-2)
else:
    optimizer = adam(model.parameters(), lr=1e-2)

data = torch.Generator().manual_seed(seed)
for step in range(1, {STEPS} + 1):
    x = torch.randn(4, 6, generator=data)
    optimizer.zero_grad()
    out = (model.module if plant == "module" else model)(x)
    if plant == "nan" and rank == world - 1 and step == {STEP}:
        out.register_hook(lambda g: g * float("nan"))
    out.square().mean().backward()
    if plant == "shard" and rank == world - 1 and step == {STEP}:
        with torch.no_grad():
            parts = [getattr(p, "_local_tensor", p) for p in net.body.parameters()]
            next(p for p in parts if p.numel()).view(-1)[0] += 0.5
    if plant == "reduced":
        for p in [*net.embed.parameters(), *net.head.parameters()]:
            dist.all_reduce(p.grad)
            p.grad /= world
    optimizer.step()
    if plant == "averaged":
        for p in [*net.embed.parameters(), *net.head.parameters()]:
            dist.all_reduce(p.data)
            p.data /= world
sums = [float(getattr(p, "_local_tensor", p).detach().double().sum()) for p in model.parameters()]
sys.stdout.write(f"{{rank}} {{sums}}\\n")  # one write: under python -u a print is several, and ranks' lines mix
dist.destroy_process_group()
"""

EACH = """
import runpy, sys
import torch.distributed as dist

dist.init_process_group("gloo")
end = dist.destroy_process_group
dist.init_process_group, dist.destroy_process_group = lambda *_: None, lambda: None  # one group for all of them
for layout in sys.argv[1:]:
    sys.argv = ["train.py", layout, "none"]
    runpy.run_path("train.py", run_name="__main__")
end()
"""


def said(folder: Path, layout: str, plant: str, ranks: int) -> list[dict[str, Any]]:
    """Incidents above a note."""
    ended = run(folder, job(TRAIN, ranks=ranks, arguments=(layout, plant)))
    assert ended.code == 0, ended
    assert ended.rows("SELECT name, reason FROM probe WHERE state = 'disabled'") == []
    return ended.alarms


@pytest.mark.parametrize(
    ("layout", "plant", "ranks"),
    [
        ("hsdp", "none", 4),
        ("fsdp2-noroot", "reduced", 2),
        ("fsdp2-noroot", "averaged", 2),
        ("fsdp1-ignored", "own", 2),
        ("tp", "none", 2),
        ("zero", "none", 2),
    ],
)
def test_is_silent_where_every_rank_does_right(tmp_path: Path, layout: str, plant: str, ranks: int) -> None:
    assert said(tmp_path, layout, plant, ranks) == []


@pytest.mark.parametrize("layout", ["hsdp", "fsdp1-hybrid"])
def test_names_the_pair_of_replicas_whose_shard_was_altered(tmp_path: Path, layout: str) -> None:
    first, *_ = said(tmp_path, layout, "shard", 4)
    assert (first["reason_code"], first["severity"], first["ranks"]) == ("PARAM_DESYNC", "critical", [1, 3])
    assert (first["first_step"], first["last_good_step"]) == (STEP, STEP - 1)
    assert first["subject"].startswith("body.")


@pytest.mark.parametrize("layout", ["fsdp1-ignored", "fsdp2-noroot", "ddp-ignored"])
def test_names_what_a_wrapper_leaves_out_and_each_rank_trains_alone(tmp_path: Path, layout: str) -> None:
    (found,) = said(tmp_path, layout, "none", 2)
    assert (found["reason_code"], found["ranks"], found["first_step"]) == ("PARAM_DESYNC", [0, 1], 1)
    assert found["subject"].startswith("embed.")


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2-bf16"])
def test_names_the_rank_whose_own_gradient_is_not_finite_before_fsdp_spreads_it(tmp_path: Path, layout: str) -> None:
    first, *_ = said(tmp_path, layout, "nan", 2)
    assert (first["reason_code"], first["severity"], first["ranks"]) == ("NONFINITE_GRAD", "critical", [1])
    assert (first["first_step"], first["last_good_step"], first["subject"]) == (STEP, STEP - 1, "head.bias")


def test_sharded_optimizer_spreads_what_one_rank_computed_from_its_own_gradient(tmp_path: Path) -> None:
    (found,) = said(tmp_path, "zero", "module", 2)
    assert (found["reason_code"], found["ranks"], found["first_step"]) == ("GRAD_DESYNC", [0, 1], 1)


@pytest.mark.parametrize(("layouts", "ranks"), [(("fsdp1", "fsdp1-flat", "fsdp2"), 2), (("hsdp",), 4)])
def test_training_is_the_same_to_the_bit(tmp_path: Path, layouts: tuple[str, ...], ranks: int) -> None:
    spec = Spec({"job.py": EACH, "train.py": TRAIN}, ranks=ranks, arguments=layouts)
    plain, recorded = both(tmp_path, spec)
    assert (plain.code, recorded.code, len(plain.lines)) == (0, 0, ranks * len(layouts)), (plain, recorded)
    assert plain.lines == recorded.lines
