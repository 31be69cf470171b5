"""One of 4 ranks takes 10 % longer for its own work over 30 steps, in a random phase: STRAGGLER names both.

The work is virtual: each phase sleeps its time, so that four ranks need next to no core and two cores are enough. A
third of the runs has no straggler, and a third none but work that varies by 20 % from step to step: both must be
silent.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from kit.job import Ended, job, run

from .row import Row

USUAL = 12
RANKS, STEPS, LONG = 4, 70, 30
EVERYTHING = {"data": 10, "forward": 20, "backward": 30, "optimizer": 10}  # ms
MORE = 0.10 * sum(EVERYTHING.values())
SHAKEN = 0.2
KINDS = ("straggler", "none", "jitter")

TRAIN = """
import json, random, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

told = json.loads(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
chance = random.Random(told["seed"] + rank)
now = [0]


def work(phase):
    ms = told["ms"][phase] * (1 + told["shaken"] * chance.uniform(-1, 1))
    slow = rank == told["rank"] and phase == told["phase"] and told["first"] <= now[0] < told["first"] + told["long"]
    time.sleep((ms + told["more"] * slow) / 1000)


class Rows(Dataset):
    def __len__(self):
        return told["steps"]

    def __getitem__(self, i):
        now[0] += 1
        work("data")
        return torch.randn(8)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        work("backward")
        return grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x):
        work("forward")
        return self.second(Backward.apply(torch.tanh(self.first(x))))


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        work("optimizer")
        return super().step(closure)


torch.manual_seed(7)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = Optimizer(model.parameters(), lr=0.01)
torch.manual_seed(rank)
for x in DataLoader(Rows(), batch_size=1):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def drill(times: int, chance: random.Random, folder: Path) -> Iterator[Row]:
    for number in range(times):
        kind = KINDS[number % len(KINDS)]
        rank, phase = chance.randrange(RANKS), chance.choice(sorted(EVERYTHING))
        first = chance.randint(12, STEPS - LONG)
        told = {"ms": EVERYTHING, "shaken": SHAKEN if kind == "jitter" else 0.0, "steps": STEPS, "phase": phase,
                "rank": rank if kind == "straggler" else -1, "first": first, "long": LONG, "more": MORE,
                "seed": chance.randrange(10**6)}  # fmt: skip
        ended = run(folder / str(number), job(TRAIN, ranks=RANKS, arguments=[json.dumps(told)]))
        if kind == "straggler":
            what = f"rank {rank}, {phase}, steps {first} to {first + LONG - 1}"
            yield Row(f"+10 %: {what}", straggler_misses(ended, rank, phase, first))
        else:
            yield Row("no straggler" if kind == "none" else "none, work varies by 20 %", other_alarms(ended))


def straggler_misses(ended: Ended, rank: int, phase: str, first: int) -> list[str]:
    found = [(i["ranks"], i["subject"], i["first_step"]) for i in ended.found("STRAGGLER")]
    misses = [] if ended.code == 0 else [f"the job ended with {ended.code}"]
    if [f[:2] for f in found] != [([rank], phase)]:
        said = [v["why"] for v in ended.verdict["verdicts"] if v["reason_code"] == "STRAGGLER"]
        misses.append(f"STRAGGLER says {found}: {said}")
    elif abs(found[0][2] - first) > 2:
        misses.append(f"STRAGGLER says from step {found[0][2]} on, it was {first}")
    return misses + other_alarms(ended, "STRAGGLER")


def other_alarms(ended: Ended, *expected: str) -> list[str]:
    return [f"also {i['reason_code']}: {i['summary']}" for i in ended.alarms if i["reason_code"] not in expected]
