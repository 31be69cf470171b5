"""Resumes in real jobs: a complete one raises nothing, one that forgets a part names it.

The Trainer's own resume is complete; that nothing is said of it is checked where transformers is installed.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from kit.job import Ended, Spec, job, run
from tdbg.aggregator.compare import Comparison, compare, opened
from tdbg.aggregator.store import Store

TRAIN = """
import random, sys
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, parts = 6, sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
random.seed(rank)
np.random.seed(rank)

def build():
    net = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)

def train(net, optimizer, scheduler):
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        scheduler.step()

net, optimizer, scheduler = build()
train(net, optimizer, scheduler)
state = {"model": net.module.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
         "step": STEPS, "rng": (torch.get_rng_state(), random.getstate(), np.random.get_state())}
torch.save(state, f"state-{rank}.pt")
del net, optimizer, scheduler, state

net, optimizer, scheduler = build()
state = torch.load(f"state-{rank}.pt", weights_only=False)
net.module.load_state_dict(state["model"])
if "optimizer" in parts:
    optimizer.load_state_dict(state["optimizer"])
if "scheduler" in parts:
    scheduler.load_state_dict(state["scheduler"])
if "rng" in parts:
    torch.set_rng_state(state["rng"][0])
    random.setstate(state["rng"][1])
    np.random.set_state(state["rng"][2])
train(net, optimizer, scheduler)
dist.destroy_process_group()
"""


def resume(folder: Path, *parts: str) -> Ended:
    ended = run(folder, job(TRAIN, arguments=parts))
    assert ended.code == 0, ended
    return ended


def test_a_complete_resume_raises_nothing(tmp_path: Path) -> None:
    ended = resume(tmp_path, "optimizer", "scheduler", "rng")
    assert ended.found("RESUME_INCOMPLETE") == []
    assert ended.alarms == []
    (outcome,) = [v["outcome"] for v in ended.verdict["verdicts"] if v["reason_code"] == "RESUME_INCOMPLETE"]
    assert outcome == "CLEAR"
    held = [json.loads(parts) for (parts,) in ended.rows("SELECT parts FROM checkpoint WHERE event = 'save'")]
    assert [set(h) for h in held] == [{"model", "optimizer", "lr", "scheduler", "counters", "rng"}] * 2


def test_a_resume_that_forgets_the_optimizer_and_random_streams(tmp_path: Path) -> None:
    (found,) = resume(tmp_path, "scheduler").found("RESUME_INCOMPLETE")
    assert (found["ranks"], found["first_step"], found["severity"]) == ([0, 1], 7, "warning")
    assert found["subject"] == "optimizer, rng"


HUGGING_FACE = """
import os, torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

class Rows(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": x[:1]}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

    def forward(self, x, labels=None):
        out = self.layers(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}

for again in (False, "out/checkpoint-4"):
    torch.manual_seed(1)
    args = TrainingArguments(output_dir="out", num_train_epochs=2, per_device_train_batch_size=4, save_strategy="epoch",
                             learning_rate=1e-2, report_to="none", use_cpu=True, disable_tqdm=True, seed=3)
    Trainer(model=Net(), args=args, train_dataset=Rows()).train(resume_from_checkpoint=again)
"""


def test_the_trainers_own_resume_is_complete(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    ended = run(tmp_path, Spec({"job.py": HUGGING_FACE}))
    assert ended.code == 0, ended
    assert ended.found("RESUME_INCOMPLETE") == []
    (outcome,) = [v["outcome"] for v in ended.verdict["verdicts"] if v["reason_code"] == "RESUME_INCOMPLETE"]
    assert outcome == "CLEAR"  # it was seen to be a resume


GOES_ON = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(3)
net = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
first = 0
if len(sys.argv) > 1:
    state = torch.load(sys.argv[1], weights_only=False)
    first = state["step"]
    net.module.load_state_dict(state["model"])
    if "optimizer" in sys.argv:
        optimizer.load_state_dict(state["optimizer"])
for step in range(first, 12):
    torch.manual_seed(100 * step + rank)
    optimizer.zero_grad()
    net(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()
    if step == 5 and first == 0 and rank == 0:
        torch.save({"step": 6, "model": net.module.state_dict(), "optimizer": optimizer.state_dict()}, "state.pt")
dist.destroy_process_group()
"""


def test_a_resumed_run_beside_the_uninterrupted_one_is_the_drill_for_a_resume(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", job(GOES_ON))
    saved = str(whole.folder / "state.pt")
    complete = run(tmp_path / "complete", job(GOES_ON, arguments=(saved, "optimizer")))
    lacking = run(tmp_path / "lacking", job(GOES_ON, arguments=(saved,)))
    said = _compare(whole, complete)
    assert (said.outcome, said.offset, said.compared_steps) == ("IDENTICAL", 6, 6), said.why
    said = _compare(whole, lacking)
    assert (said.outcome, said.first_step, said.metric, said.ranks) == ("DIVERGED", 7, "optimizer state", (0, 1)), (
        said.why
    )


def _compare(a: Ended, b: Ended) -> Comparison:
    with Store(a.run) as one, Store(b.run) as other:
        return compare(one.rows, opened(one), other.rows, opened(other))
