"""The gradients that a real DDP job records as a rank's own are its own: held against a reference without any wrapper.

The script computes each rank's gradients once more with `torch.autograd.grad` on the bare module, which neither DDP
nor the agent sees, and writes their norms to a file; the recorded rows must say the same.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from kit.job import Ended, job, run

pytestmark = pytest.mark.xdist_group("gradients")  # the tests share what one job or build left

SCRIPT = """
import contextlib, json, os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

dist.init_process_group("gloo")
rank = dist.get_rank()

class Net(nn.Module):
    def __init__(self, branches):
        super().__init__()
        torch.manual_seed(7)
        self.a, self.b, self.out, self.branches = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 1), branches
    def forward(self, x, turn):
        hidden = (self.a if turn % 2 else self.b)(x) if self.branches else self.a(x) * self.b(x)
        return self.out(hidden.tanh()).square().mean()

def batch(*place):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(hash((rank, *place)) % 2**31))

steps = 0
norms = []

def train(name, **options):
    global steps
    model = nn.parallel.DistributedDataParallel(Net(name == "unused"), **options)
    if name == "hook":
        model.register_comm_hook(None, allreduce_hook)
    if name == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    micros = 3 if name == "no_sync" else 1
    params = dict(model.module.named_parameters())
    for turn in range(4):
        steps += 1
        reference = {n: torch.zeros_like(p) for n, p in params.items()}
        optimizer.zero_grad()
        for micro in range(micros):
            x = batch(turn, micro)
            own = torch.autograd.grad(model.module(x, turn), list(params.values()), allow_unused=True)
            for n, g in zip(params, own, strict=True):
                reference[n] += 0 if g is None else g
            with contextlib.nullcontext() if micro == micros - 1 else model.no_sync():
                model(x, turn).backward()
        reduced = {n: 0.0 if p.grad is None else p.grad.norm().item() for n, p in params.items()}
        norms.append({"name": name, "step": steps, "own": {n: g.norm().item() for n, g in reference.items()},
                      "reduced": reduced})
        optimizer.step()

train("default")
train("buckets", bucket_cap_mb=0.0001)
train("unused", find_unused_parameters=True)
train("static", static_graph=True)
train("no_sync")
train("hook")
train("fp16")
train("views", gradient_as_bucket_view=True)
with open(f"norms-{rank}.json", "w") as out:
    json.dump(norms, out)
dist.destroy_process_group()
"""
RANKS, STEPS = 2, 32


class Pass(NamedTuple):
    """One recorded row of gradients: norm and fingerprint by tensor name."""

    valid: bool
    l2: dict[str, float]
    digest: dict[str, int]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    done = run(tmp_path_factory.mktemp("gradients"), job(SCRIPT))
    assert done.code == 0, done
    return done


@pytest.fixture(scope="module")
def passes(ended: Ended) -> dict[tuple[int, int, str], Pass]:
    """The last row of each rank, step and stage."""
    names = {
        (rank, generation, index): name
        for rank, generation, index, name in ended.rows("SELECT rank, generation, index, name FROM tensor")
    }
    found = {}
    query = "SELECT rank, step, stage, generation, valid, tensors, l2, digest FROM grad ORDER BY seq"
    for rank, step, stage, generation, valid, tensors, l2, digest in ended.rows(query):
        named = [names[rank, generation, index] for index in tensors or range(len(l2))]
        found[rank, step, stage] = Pass(
            valid, dict(zip(named, l2, strict=True)), dict(zip(named, digest, strict=False))
        )
    return found


def reference(ended: Ended, rank: int) -> list[dict[str, object]]:
    norms: list[dict[str, object]] = json.loads((ended.folder / f"norms-{rank}.json").read_text())
    return norms


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", ["default", "buckets", "unused", "static", "no_sync", "hook", "fp16", "views"])
def test_a_local_gradient_is_this_ranks_own(
    name: str, rank: int, ended: Ended, passes: dict[tuple[int, int, str], Pass]
) -> None:
    steps = [n for n in reference(ended, rank) if n["name"] == name]
    assert len(steps) == 4
    for one in steps:
        seen = passes[rank, one["step"], "local"]
        assert seen.valid
        measured = {n: max(value, 0.0) for n, value in seen.l2.items()}  # -1 says that there is no gradient
        assert measured == pytest.approx(one["own"], rel=1e-5, abs=1e-12), one
        assert measured != pytest.approx(one["reduced"], rel=1e-3), "own and reduced gradients must be told apart here"


def test_every_step_has_own_gradients_of_both_ranks_and_what_ddp_made_of_them(
    ended: Ended, passes: dict[tuple[int, int, str], Pass]
) -> None:
    assert len([key for key in passes if key[2] == "local"]) == RANKS * STEPS
    query = "SELECT reduction, count(*) FROM delivered GROUP BY reduction ORDER BY reduction"
    hooked = [("allreduce_hook", 4 * RANKS), ("fp16_compress_hook", 4 * RANKS)]
    assert ended.rows(query) == [*hooked, ("mean", (STEPS - 8) * RANKS)]
    assert {v["reason_code"]: v["outcome"] for v in ended.verdict["verdicts"]}["REDUCTION_WRONG"] == "CLEAR"


def test_the_reduced_gradient_is_the_same_on_both_ranks(passes: dict[tuple[int, int, str], Pass]) -> None:
    for step in range(1, STEPS + 1):
        first, second = (passes[rank, step, "reduced"].digest for rank in range(RANKS))
        assert len(first) == 6
        assert first == second
    changing = {tuple(passes[0, step, "reduced"].digest.values()) for step in range(1, STEPS + 1)}
    # fingerprints of values: default, small buckets, static graph, plain hook and views train alike, bit for bit
    assert len(changing) == 4 * 4


def test_a_job_that_changes_its_wrapper_eight_times_is_healthy(ended: Ended) -> None:
    assert [(i["reason_code"], i["summary"]) for i in ended.alarms] == []
