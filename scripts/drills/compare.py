"""Two runs with one change at a known step, or with none that matters: tdbg compare dates the change exactly.

Two of three pairs have a change, drawn with its step, rank and size: a rate, a decay, a clipping threshold, another
batch, one rank's data, dropout, precision, a parameter written on one rank, an optimizer state that a resume lost. The
third has none, or what must pass for none: another number of threads, another order of sums, a correct resume, other
checkpoints, sleeps, another world size over the same batches; there a divergence is a miss.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.job import Ended, job, run
from tdbg.aggregator.compare import Comparison, compare, opened
from tdbg.aggregator.store import Store

from .row import Row

USUAL = 30
STEPS = 40

TRAIN = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

told = json.loads(sys.argv[1])
torch.set_num_threads(told.get("threads", 1))
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
change, at, size = told["change"], told["step"], told["size"]
now = 1


def struck(kind, one_rank=False):
    return change == kind and now >= at and not (one_rank and rank != told["rank"])


class Table(Dataset):
    def __init__(self):
        made = torch.Generator().manual_seed(told["seed"])
        self.x = torch.randn(512, told["inputs"], generator=made)
        self.y = self.x[:, :1].sin() + 0.1 * torch.randn(512, 1, generator=made)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        return (x * (1 + size) if struck("data", True) else x), self.y[i]


class Order:  # batches of the steps still to come, this rank's part of each
    def __init__(self, first):
        self.first = first

    def __iter__(self):
        whole = torch.Generator().manual_seed(told["seed"] + 1)
        batch = told["batch"]
        for step in range(1, told["steps"] + 1):
            drawn = torch.randperm(512, generator=whole)[:batch].tolist()
            if change == "batch" and step >= at:
                drawn = [(i + 1) % 512 for i in drawn]
            if step >= self.first:
                yield drawn[rank :: ranks]


torch.manual_seed(told["seed"])
width = told["width"]
layers = [nn.Linear(told["inputs"], width), nn.Tanh(), nn.Dropout(told["dropout"])]
for _ in range(told["depth"]):
    layers += [nn.Linear(width, width), nn.Tanh()]
net = nn.Sequential(*layers, nn.Linear(width, 1))
kinds = {"AdamW": lambda p: torch.optim.AdamW(p, lr=told["lr"], weight_decay=0.01),
         "SGD": lambda p: torch.optim.SGD(p, lr=told["lr"] * 5, momentum=0.9, weight_decay=0.01)}
model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=told.get("bucket_mb", 25))
optimizer = kinds[told["optimizer"]](model.parameters())
if told.get("resume"):
    kept = torch.load(told["resume"], weights_only=True)
    net.load_state_dict(kept["model"])
    if change != "state":
        optimizer.load_state_dict(kept["optimizer"])
    now = kept["step"] + 1
batches = iter(DataLoader(Table(), batch_sampler=Order(now)))  # which draws a number itself
if told.get("resume"):
    torch.set_rng_state(kept["random"])
for x, y in batches:
    for group in optimizer.param_groups:
        if change == "lr" and now == at:
            group["lr"] *= 1 + size
        if change == "decay" and now == at:
            group["weight_decay"] *= 10
    if struck("dropout"):
        net[2].p = min(0.9, told["dropout"] + size)
    if change == "write" and now == at and rank == told["rank"]:
        with torch.no_grad():
            net[0].weight[0, 0] += size
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=struck("precision")):
        out = model(x)
    apart = (out.float() - y).square()
    loss = apart.flip(0).sum() / len(apart) if told.get("order") else apart.mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), told["clip"] * (0.2 if struck("clip") else 1))
    optimizer.step()
    if rank == 0 and now in told.get("save", ()):
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": now,
                    "random": torch.get_rng_state()}, f"{told['to']}-{now}.pt")
    if told.get("sleep") and now % 7 == 0:
        time.sleep(0.05)
    now += 1
dist.barrier()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Change:
    """How the second run differs; what compare may call it; whether it is on one rank only."""

    name: str
    metrics: tuple[str, ...]
    one_rank: bool = False
    size: tuple[float, float] = (0.1, 1.0)


# A change of arithmetic shows in the first value of the step that it reaches: the loss, or a gradient where the update
# alone is touched. What is written into a parameter between two steps belongs to the later one.
CHANGES = (
    Change("lr", ("lr",)),
    Change("batch", ("samples",)),
    Change("dropout", ("loss", "gradient norm", "reduced gradient"), size=(0.2, 0.4)),
    Change("data", ("content of samples",), one_rank=True),
    Change("precision", ("loss", "gradient norm", "reduced gradient")),
    Change("state", ("optimizer state",)),
    Change("clip", ("reduced gradient", "parameter", "loss")),
    Change("decay", ("weight_decay",)),
    Change("write", ("loss", "parameter", "gradient norm"), one_rank=True, size=(0.3, 2.0)),
)
IDENTICAL = ("same", "sleep", "saves", "resume")
NOISE = ("threads", "order", "buckets", "world")


def drill(times: int, chance: random.Random, folder: Path) -> Iterator[Row]:
    changes, alike = list(CHANGES), [*IDENTICAL, *NOISE]
    chance.shuffle(changes)
    chance.shuffle(alike)
    for number in range(times):
        told: dict[str, Any] = {
            "seed": chance.randrange(10**6), "steps": STEPS, "inputs": chance.choice((4, 12)),
            "width": chance.choice((8, 32, 96)), "depth": chance.randint(1, 3), "batch": chance.choice((8, 16, 32)),
            "dropout": chance.choice((0.0, 0.1)), "optimizer": chance.choice(("AdamW", "SGD")),
            "lr": chance.choice((0.001, 0.003)), "clip": chance.choice((0.05, 0.2)), "change": "", "step": 0,
            "rank": chance.randrange(2), "size": 0.0, "to": str(folder / f"saved-{number}"),
        }  # fmt: skip
        place = folder / str(number)
        if number % 3 < 2:
            yield _changed(told, changes[(number - number // 3) % len(changes)], chance, place)
        else:
            yield _alike(told, alike[number // 3 % len(alike)], chance, place)


def _changed(told: dict[str, Any], change: Change, chance: random.Random, place: Path) -> Row:
    step = chance.randint(5, STEPS - 5)
    now = {"change": change.name, "step": step, "size": chance.uniform(*change.size)}
    if change.name == "state":
        told |= {"save": [step - 1], "optimizer": "AdamW"}
        now["resume"] = f"{told['to']}-{step - 1}.pt"
    said, misses = _laid(told, told | now, place)
    what = f"{change.name} at step {step}" + (f", rank {told['rank']}" if change.one_rank else "")
    if said.outcome != "DIVERGED" or said.first_step != step:
        misses.append(f"{said.outcome} at step {said.first_step}: {said.why}")
    elif said.metric not in change.metrics:
        misses.append(f"metric {said.metric}, not {' or '.join(change.metrics)}: {said.why}")
    # of a parameter written on one rank DDP's peers see nothing before the reduced gradient
    elif said.ranks != ((told["rank"],) if change.one_rank else (0, 1)):
        misses.append(f"ranks {said.ranks}: {said.why}")
    return Row(what, misses)


def _alike(told: dict[str, Any], kind: str, chance: random.Random, place: Path) -> Row:
    now: dict[str, Any] = dict[str, dict[str, Any]]({
        "same": {}, "sleep": {"sleep": True}, "saves": {"save": [5, 20]}, "threads": {"threads": 2},
        "order": {"order": True}, "buckets": {"bucket_mb": 0.001}, "world": {},
    }).get(kind, {})  # fmt: skip
    if kind == "resume":
        step = chance.randint(5, STEPS - 5)
        told |= {"save": [step]}
        now = {"resume": f"{told['to']}-{step}.pt"}
    if kind == "world":
        told |= {"dropout": 0.0}  # whose masks are each rank's own
    said, misses = _laid(told, told | now, place, ranks=4 if kind == "world" else 2)
    if said.outcome == "DIVERGED" or (kind in IDENTICAL and said.outcome != "IDENTICAL"):
        misses.append(f"{said.outcome} at step {said.first_step}: {said.why}")
    return Row(f"no change ({kind}): {said.outcome}", misses)


def _laid(told: dict[str, Any], now: dict[str, Any], place: Path, ranks: int = 2) -> tuple[Comparison, list[str]]:
    a = run(place / "a", job(TRAIN, arguments=[json.dumps(told)]))
    b = run(place / "b", job(TRAIN, arguments=[json.dumps(now)], ranks=ranks))
    with Store(a.run) as one, Store(b.run) as other:
        said = compare(one.rows, opened(one), other.rows, opened(other))
    return said, [f"the job ended with {e.code}: {e}" for e in (a, b) if _failed(e)]


def _failed(ended: Ended) -> bool:
    return ended.code != 0
