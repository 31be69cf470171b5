"""Real jobs that accumulate and follow a schedule: what is said of the faulty one, and silence on its twin."""

from __future__ import annotations

from pathlib import Path

from kit.job import job, run

STEPS = 12

TRAIN = f"""
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

faulty = sys.argv[1] == "faulty"
dist.init_process_group("gloo")
torch.manual_seed(7)
x = torch.randn(2 * 2 * 3 * {STEPS}, 8)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
length = {STEPS} // 2 if faulty else {STEPS}  # of the schedule
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / length))
for n, (a, b) in enumerate(loader, start=1):
    loss = nn.functional.mse_loss(model(a), b)
    (loss if faulty else loss / 3).backward()
    if n % 3 == 0:
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
dist.destroy_process_group()
"""
CODES = ("LR_EXHAUSTED", "LOSS_NOT_NORMALISED")


def test_a_schedule_that_ends_halfway_and_losses_that_nothing_divides(tmp_path: Path) -> None:
    ended = run(tmp_path, job(TRAIN, arguments=["faulty"]))
    assert ended.code == 0, ended
    (gone,), (summed,) = (ended.found(code) for code in CODES)
    assert (gone["ranks"], gone["first_step"], gone["severity"]) == ([0, 1], STEPS // 2 + 1, "warning")
    assert (summed["ranks"], summed["first_step"], summed["severity"]) == ([0, 1], 1, "note")
    assert [i["reason_code"] for i in ended.alarms] == ["LR_EXHAUSTED"]


def test_a_schedule_that_ends_with_training_and_divided_losses(tmp_path: Path) -> None:
    ended = run(tmp_path, job(TRAIN, arguments=["healthy"]))
    assert ended.code == 0, ended
    assert [ended.found(code) for code in CODES] == [[], []]
    assert ended.alarms == []
    outcomes = {v["reason_code"]: v["outcome"] for v in ended.verdict["verdicts"]}
    assert [outcomes[code] for code in CODES] == ["CLEAR", "CLEAR"]
