"""Collectives in real jobs: faults with both sides named, and programs whose ranks may differ, in which nobody is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kit.job import Ended, both, job, run

pytestmark = pytest.mark.xdist_group("collectives")

HEAD = """
import contextlib, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(3)
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, world = dist.get_rank(), dist.get_world_size()
"""

# Every program here is right on all ranks; the last line makes the flight recorder of all ranks be read as well.
HEALTHY = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 8)
    def forward(self, x, turn=0):
        return (self.a if turn % 2 else self.b)(x).square().mean()

def show(value):
    if rank == 0:
        print(value, flush=True)

model = DDP(Net(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pair = dist.new_group([0, 1])
halves = [dist.new_group([r]) for r in range(world)]
for turn in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(2, 4), turn)
    loss.backward()
    optimizer.step()
    if rank == 0:
        seed = torch.tensor([turn])
        dist.broadcast(seed, 0)
    else:
        seed = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(seed, 0)
    for root in range(world):  # each in turn gives its own
        if root == rank:
            part = torch.full((2,), float(rank))
            dist.all_reduce(part)
        else:
            part = torch.zeros(2)
            dist.all_reduce(part)
    if rank in (0, 1):
        dist.all_reduce(torch.ones(3), group=pair)
    dist.all_reduce(torch.ones(1), group=halves[rank])
    handles = [dist.all_reduce(torch.ones(n), async_op=True) for n in (1, 2, 3)]
    for handle in handles:
        handle.wait()
    everyone = [None] * world
    dist.all_gather_object(everyone, "x" * (rank + 1) * 50)
    dist.gather_object("y" * (rank + 1), everyone if rank == 0 else None)
    lists = [[rank] * 9] if rank == 0 else [None]
    dist.broadcast_object_list(lists)
    splits = [[i + j + 1 for j in range(world)] for i in range(world)]  # what rank i sends to rank j
    mine, theirs = splits[rank], [row[rank] for row in splits]
    dist.all_to_all_single(torch.empty(sum(theirs)), torch.ones(sum(mine)), theirs, mine)
    outs = [torch.empty(2) for _ in range(world)]
    dist.gather(torch.ones(2), outs if rank == 0 else None)
    dist.scatter(torch.ones(2), outs if rank == 0 else None)
    dist.reduce(torch.ones(2), 0)
    if rank == 0:
        dist.send(torch.ones(1), 1)
    if rank == 1:
        dist.recv(torch.ones(1), 0)
    if turn == 3:
        dist.monitored_barrier()
        if rank == 0:  # an evaluation of rank 0's own
            with torch.no_grad():
                model.module(torch.randn(9, 4))
    show((turn, loss.item(), part.tolist(), lists))
plain = DDP(nn.Linear(4, 1))
other = torch.optim.SGD(plain.parameters(), lr=0.1)
with Join([plain]):
    for turn in range(3 + rank):
        other.zero_grad()
        plain(torch.randn(2, 4)).mean().backward()
        other.step()
import torch.distributed._functional_collectives as funcol
show(funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist())
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
for layer in net:
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
sharded = torch.optim.SGD(net.parameters(), lr=0.1)
for turn in range(3):
    sharded.zero_grad()
    loss = net(torch.randn(2, 6)).square().mean()
    loss.backward()
    sharded.step()
    show(loss.item())
dist.barrier()
if "fail" in sys.argv:
    raise ValueError("every rank ends like this")
dist.destroy_process_group()
"""
)

FAULTS = (
    HEAD
    + """
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def mean(x):
    x = torch.tensor([x]); dist.all_reduce(x)

def norms():
    dist.all_reduce(torch.ones(7))

for turn in range(9):
    optimizer.zero_grad()
    loss = model(torch.randn(2, 4)).mean()
    loss.backward()
    optimizer.step()
    odd = turn == 5 and rank == 1
    if odd and "order" in sys.argv:
        norms(); mean(1.0)
    elif odd and "skipped" in sys.argv:
        norms()
    elif odd and "size" in sys.argv:
        mean(1.0); dist.all_reduce(torch.ones(9))
    elif odd and "barrier" in sys.argv:
        mean(1.0); norms(); dist.barrier()
    else:
        mean(1.0); norms()
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize("fault", ["order", "skipped", "size", "barrier"])
def test_the_odd_rank_of_three_is_named(tmp_path: Path, fault: str) -> None:
    ended = run(tmp_path, job(FAULTS, ranks=3, arguments=[fault]))
    assert ended.code != 0
    (found,) = ended.found("COLLECTIVE_MISMATCH")
    assert (found["ranks"], found["severity"]) == ([1], "critical"), ended
    assert found["first_step"] in (6, 7)
    assert "job.py:" in found["summary"]


def _same(plain: Ended, recorded: Ended) -> None:
    assert (plain.code, plain.lines) == (recorded.code, recorded.lines), recorded


def test_programs_whose_ranks_may_differ_are_silent_and_unchanged(tmp_path: Path) -> None:
    plain, recorded = both(tmp_path, job(HEALTHY, ranks=3))
    assert recorded.code == 0, recorded
    _same(plain, recorded)
    assert recorded.found("COLLECTIVE_MISMATCH") == []
    said = {v["reason_code"]: v["outcome"] for v in recorded.verdict["verdicts"]}
    assert said["COLLECTIVE_MISMATCH"] == "CLEAR"
    assert recorded.rows("SELECT count(*) FROM probe WHERE state = 'disabled'") == [(0,)]


@pytest.mark.skipif(not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"), reason="no flight recorder for gloo")
def test_the_recorder_of_a_failed_job_shows_no_mismatch_where_there_is_none(tmp_path: Path) -> None:
    ended = run(tmp_path, job(HEALTHY, ranks=3, arguments=["fail"]))
    assert ended.code != 0
    recorded = ended.rows("SELECT rank, count(*) FROM collective WHERE source = 'recorder' GROUP BY rank ORDER BY rank")
    assert len(recorded) == 3, recorded
    assert min(n for _, n in recorded) > 50, recorded
    assert ended.found("COLLECTIVE_MISMATCH") == []
