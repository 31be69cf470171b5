"""Planted faults in real jobs: the verdict names code, ranks, step and subject; their healthy twins are silent.

One script trains; its first argument names what is planted in it, `none` for the twin. A fault that begins at a step
begins at STEP. Consequences of a fault (replicas part, the next loss is NaN) may be reported too and are not asserted,
but no other rank may be blamed in them where a majority is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kit.job import Spec, job, run

STEP, EPOCH_STEPS, EPOCHS = 6, 8, 3
STEPS = EPOCH_STEPS * EPOCHS

TRAIN = f"""
import contextlib, copy, os, signal, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

plants = sys.argv[1].split("+")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
last = rank == world - 1
if "not-seeded" not in plants and not ("rank-unseeded" in plants and last):
    torch.manual_seed(7)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)
        scale = torch.linspace(0.5, 1.5, 16)
        if "buffer" in plants and rank == 1:
            scale[3] = 9.0
        self.register_buffer("scale", scale)
        self.norm = nn.BatchNorm1d(16) if "batchnorm" in plants or "batchnorm-own" in plants else nn.Identity()
        if "dead" in plants:
            self.norm = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
            nn.init.constant_(self.norm[0].bias, -100.0)
    def forward(self, x):
        return self.second(self.norm(torch.tanh(self.first(x)) * self.scale))

batch, size = 4, 4 * {EPOCH_STEPS} * world
data_rng = torch.Generator().manual_seed(1)
x = torch.randn(size, 8, generator=data_rng)
y = x.sum(1, keepdim=True).sin()
data = TensorDataset(x, y)

part = None
if "modulo" in plants:
    part = range(rank % (world - 1), size, world - 1)
elif "missing" in plants:
    part = range(rank, size, world + 1)
elif "uneven" in plants:  # the last rank holds half as much and halves its batches
    share = size // (2 * world - 1)
    part = range(2 * rank * share, min(2 * (rank + 1) * share, size))
    batch = 2 if last else 4
elif "shards" in plants:
    part = range(rank, size, world)
sampler = None
if part is None and "no-sampler" not in plants:
    sampler = DistributedSampler(data, seed=5 if "sampler-seed" in plants and last else 0)
if "nan-input" in plants and last:
    x[list(sampler)[batch * ({STEP} - 1) + 1], 2] = float("nan")  # a sample of batch STEP of the first epoch
generator = torch.Generator().manual_seed(3)
loader = DataLoader(Subset(data, part) if part is not None else data, batch_size=batch, sampler=sampler,
                    shuffle=sampler is None, generator=generator)

net = Net()
if "no-buffer-broadcast" in plants or "buffer" in plants or "batchnorm-own" in plants:
    model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
elif "unwrapped" in plants:
    model = net
else:
    model = nn.parallel.DistributedDataParallel(net)
if "buffer" in plants and rank == 1:
    net.scale[3] = 9.0  # wrapping has made the buffers equal once
if "late-layer" in plants:
    net.head = nn.Linear(1, 1)
threshold = 1e6 if "late-layer" in plants else 0.05 if "clip" in plants and rank == 0 else 1.0
decay = 0.3 if "decay" in plants and last else 0.01
betas = (0.9, 0.99 if "betas" in plants and last else 0.999)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=decay, betas=betas)
if "groups" in plants:
    plain = [p for n, p in net.named_parameters() if n.endswith("bias") or (last and n == "second.weight")]
    rest = [p for p in net.parameters() if all(p is not q for q in plain)]
    optimizer = torch.optim.AdamW([{{"params": rest}}, {{"params": plain, "weight_decay": 0.0}}], lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, {STEP} - 1, 0.5)
if "nan-grad" in plants and last:
    net.second.weight.register_hook(lambda g: g * float("nan") if step == {STEP} else g)

step = 0
for epoch in range({EPOCHS}):
    if sampler is not None and not ("epoch" in plants and last):
        sampler.set_epoch(epoch)
    elif sampler is None:
        generator.manual_seed(3 + epoch + (100 * rank if "shards" in plants else 0))
    for features, target in loader:
        step += 1
        if step == {STEP} and last:
            if "exception" in plants:
                raise RuntimeError("planted")
            if "kill" in plants:
                os.kill(os.getpid(), signal.SIGKILL)
        if step == {STEP} // 2:
            saved = copy.deepcopy(optimizer.state_dict())
        if step == {STEP} and "resume-all" in plants:
            optimizer.load_state_dict(saved)
        if step == {STEP} and rank == 1:
            if "resume" in plants:
                optimizer.load_state_dict(saved)
            if "moments" in plants:
                for state in optimizer.state.values():
                    state["exp_avg"].zero_()
            if "weights" in plants:
                with torch.no_grad():
                    net.first.weight[0, 0] += 0.5
            if "lr" in plants:
                optimizer.param_groups[0]["lr"] = 5e-3
            if "batchnorm" in plants:
                net.norm.running_mean += 1
        halves = features.chunk(2), target.chunk(2)
        micros = zip(*halves) if "accumulate" in plants or "no-sync" in plants else [(features, target)]
        optimizer.zero_grad()
        for micro, (one, want) in enumerate(micros):
            waits = ("accumulate" in plants and micro == 0) or "no-sync" in plants
            with model.no_sync() if waits else contextlib.nullcontext():
                out = (model.module if "module" in plants else model)(one)
                if "late-layer" in plants:
                    out = net.head(out)
                loss = nn.functional.mse_loss(out, want) / (2 if len(features) != len(one) else 1)
                if "nan-loss" in plants and step == {STEP} and last:
                    loss = loss * float("nan")
                loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), threshold)
        if "nan-param" in plants and step == {STEP} and last:
            optimizer.state[net.first.bias]["exp_avg_sq"].fill_(-1.0)
        optimizer.step()
        if ("schedule" in plants and last) or "schedules" in plants:
            schedule.step()
dist.destroy_process_group()
"""

# A rank's own environment, arguments and code, as a cluster with one stale node would give them.
MIXED = """
import os, sys
rank = int(os.environ["RANK"])
env = dict(os.environ)
if rank == 0:
    env["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
env["PYTHONPATH"] = os.path.abspath("old" if rank == 1 else "new") + os.pathsep + env.get("PYTHONPATH", "")
os.execve(sys.executable, [sys.executable, "job.py", "none"] + (["--extra"] if rank == 2 else []), env)
"""

MEMORY = """
import mmap, resource, sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(7)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data, kept = torch.randn(400, 4, 8, generator=torch.Generator().manual_seed(dist.get_rank())), []
for step in range(90):
    if step == 5:  # what a program needs is there by now
        used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
    block = mmap.mmap(-1, 8 << 20)  # address space only, no page is touched
    if sys.argv[1] == "leak" and dist.get_rank() == 1:
        kept.append(block)
    optimizer.zero_grad()
    model(data[step]).square().mean().backward()
    optimizer.step()
    dist.barrier()
dist.destroy_process_group()
"""


def train(plants: str, ranks: int) -> Spec:
    return job(TRAIN, ranks=ranks, arguments=(plants,))


def mixed() -> Spec:
    code = TRAIN.replace("import contextlib", "import helper\nimport contextlib", 1)
    files = {"job.py": code, "start.py": MIXED, "old/helper.py": "VALUE = 1\n", "new/helper.py": "VALUE = 2\n"}
    return Spec(files, ranks=3, script=("start.py",))


@dataclass(frozen=True)
class Fault:
    """What must be found: code, ranks, first step, and a text in the subject."""

    code: str
    ranks: list[int]
    step: int | None
    subject: str = ""


ALL3 = [0, 1, 2]
FAULTS: dict[str, tuple[Spec, list[Fault]]] = {
    "unwrapped": (train("unwrapped", 3), [Fault("PARAM_DESYNC", ALL3, 1)]),
    "module": (train("module", 2), [Fault("GRAD_DESYNC", [0, 1], 1), Fault("PARAM_DESYNC", [0, 1], 1)]),
    "late-layer": (train("late-layer", 3), [Fault("GRAD_DESYNC", ALL3, 1, "head.weight")]),
    "no-sync": (train("no-sync", 2), [Fault("GRAD_DESYNC", [0, 1], 1)]),
    "weights": (train("weights", 3), [Fault("PARAM_DESYNC", [1], STEP, "first.weight")]),
    "lr": (train("lr", 4), [Fault("HPARAM_DESYNC", [1], STEP, "lr"), Fault("PARAM_DESYNC", [1], STEP)]),
    "settings": (
        train("decay+clip+buffer", 3),
        [Fault("HPARAM_DESYNC", [2], 1, "weight_decay"), Fault("HPARAM_DESYNC", [0], 1, "max_norm"),
         Fault("BUFFER_DESYNC", [1], 1, "scale")],
    ),
    "moments": (train("moments", 3), [Fault("OPTIM_STATE_DESYNC", [1], STEP, "exp_avg of "),
                                      Fault("PARAM_DESYNC", [1], STEP)]),
    "resume": (train("resume", 4), [Fault("OPTIM_STATE_DESYNC", [1], STEP), Fault("PARAM_DESYNC", [1], STEP)]),
    "betas": (train("betas", 3), [Fault("HPARAM_DESYNC", [2], 1, "betas"), Fault("OPTIM_STATE_DESYNC", [2], 1)]),
    "groups": (train("groups", 3), [Fault("HPARAM_DESYNC", [2], 1, "param_groups"), Fault("PARAM_DESYNC", [2], 1)]),
    "schedule": (train("schedule", 3), [Fault("HPARAM_DESYNC", [2], STEP, "lr"), Fault("PARAM_DESYNC", [2], STEP)]),
    "nan-input": (train("nan-input", 3), [Fault("NONFINITE_INPUT", [2], STEP), Fault("NONFINITE_LOSS", [2], STEP)]),
    "nan-loss": (train("nan-loss", 3), [Fault("NONFINITE_LOSS", [2], STEP), Fault("NONFINITE_GRAD", [2], STEP)]),
    "nan-grad": (train("nan-grad", 3), [Fault("NONFINITE_GRAD", [2], STEP, "second.weight")]),
    "nan-param": (train("nan-param", 3), [Fault("NONFINITE_PARAM", [2], STEP, "first.bias")]),
    "dead": (train("dead", 2), [Fault("DEAD_MODULE", [0, 1], 1, "norm.1")]),
    "sampler-seed": (train("sampler-seed", 3), [Fault("SAMPLER_SEED_MISMATCH", [2], 1, "seed")]),
    "epoch": (train("epoch", 3), [Fault("SAMPLER_SEED_MISMATCH", [2], EPOCH_STEPS + 1, "epoch")]),
    "no-sampler": (train("no-sampler", 3), [Fault("SHARD_OVERLAP", ALL3, 1)]),
    "modulo": (train("modulo", 3), [Fault("SHARD_OVERLAP", [0, 2], 1)]),
    "missing": (train("missing", 3), [Fault("SHARD_MISSING", ALL3, None)]),
    "uneven": (train("uneven", 3), [Fault("SHARD_UNEVEN", [2], None)]),
    "not-seeded": (train("not-seeded", 2), [Fault("NOT_SEEDED", [0, 1], None)]),
    "rank-unseeded": (train("rank-unseeded", 3), [Fault("SEED_MISMATCH", [2], None)]),
    "identity": (
        mixed(),
        [Fault("IDENTITY_MISMATCH", [0], None, "CUBLAS_WORKSPACE"), Fault("IDENTITY_MISMATCH", [1], None, "helper"),
         Fault("IDENTITY_MISMATCH", [2], None, "argv")],
    ),
    "exception": (train("exception", 3), [Fault("RANK_FAILED", [2], STEP)]),
    "kill": (train("kill", 3), [Fault("RANK_FAILED", [2], STEP)]),
    "memory": (job(MEMORY, arguments=("leak",)), [Fault("OOM_PRECURSOR", [1], None, "address space")]),
}  # fmt: skip

# Of these the first speaks, and what follows it is a note.
ONE_ALARM = ("module", "weights", "lr", "moments", "resume", "betas", "groups", "schedule", "sampler-seed", "epoch")

TWINS: dict[str, Spec] = {
    "two ranks": train("none", 2),
    "three ranks": train("none", 3),
    "four ranks": train("none", 4),
    "accumulation under no_sync": train("accumulate", 2),
    "a resume on all ranks, a schedule on all ranks": train("resume-all+schedules", 3),
    "buffers that the next broadcast makes equal": train("batchnorm", 3),
    "statistics that each rank keeps for itself": train("batchnorm-own", 3),
    "shards that cover the data": train("shards", 3),
    "memory that is given back": job(MEMORY, arguments=("steady",)),
}


def blamed(found: list[dict[str, Any]], fault: Fault) -> list[dict[str, Any]]:
    """The incidents that say what was planted."""
    return [
        i for i in found
        if i["ranks"] == fault.ranks and fault.subject in (i["subject"] or "")
        and (fault.step is None or i["first_step"] == fault.step)
    ]  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_where_it_is(name: str, tmp_path: Path) -> None:
    spec, faults = FAULTS[name]
    ended = run(tmp_path, spec)
    assert (ended.code == 0) == (name not in ("exception", "kill")), ended
    for fault in faults:
        found = ended.found(fault.code)
        said = [(i["ranks"], i["first_step"], i["subject"], i["severity"]) for i in found]
        assert blamed(found, fault), f"{fault}: found {said}"
        (verdict,) = [v for v in ended.verdict["verdicts"] if v["reason_code"] == fault.code]
        assert verdict["outcome"] == "INCIDENT"
    if name in ONE_ALARM:
        assert [i["reason_code"] for i in ended.alarms] == [faults[0].code]


@pytest.mark.parametrize("name", TWINS)
def test_the_healthy_twin_is_silent(name: str, tmp_path: Path) -> None:
    ended = run(tmp_path, TWINS[name])
    assert ended.code == 0, ended
    assert [(i["reason_code"], i["ranks"], i["subject"], i["summary"]) for i in ended.alarms] == []
    quality = ended.verdict["data_quality"]
    assert (ended.verdict["status"], quality["complete"], quality["dropped_events"]) == ("finished", True, 0)
    assert set(quality["last_step"].values()) == {90 if "memory" in name else STEPS}
