"""A batch with wrong labels on one rank, a part that is scaled up for good, labels that are all masked: real jobs.

One script trains; its argument names what is planted from step STEP on, `none` for the healthy twin.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.job import Ended, job, run

STEP, STEPS = 42, 56

TRAIN = f"""
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

plant = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5)
centres = torch.randn(6, 12)
labels = torch.arange(6).repeat({STEPS} * 4)[torch.randperm({STEPS} * 24)]
data = centres[labels] + 0.3 * torch.randn(len(labels), 12)
wrong = labels.clone()
if plant == "labels":  # samples of rank 1's batch of step {STEP}: every second one of 24
    wrong[24 * ({STEP} - 1) + 1 : 24 * {STEP} : 2] = (wrong[24 * ({STEP} - 1) + 1 : 24 * {STEP} : 2] + 1) % 6
rows = TensorDataset(data, wrong)
loader = DataLoader(rows, batch_size=12, sampler=DistributedSampler(rows, shuffle=False))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(12, 16), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(32, 6)
    def forward(self, x, weight):
        right = self.right(x)
        right = right.detach() * (1 - weight) + right * weight  # the same values, a gradient so many times as large
        return self.out(torch.cat([self.left(x), right], 1))

model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(loader, start=1):
    there = step >= {STEP}
    if plant == "masked" and there:
        y = torch.full_like(y, -100)
    logits = model(x, 8.0 if plant == "branch" and there else 1.0)
    loss = nn.functional.cross_entropy(logits, y, ignore_index=-100, reduction="sum") / 12
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""
OURS = ("LOSS_SPIKE", "GRAD_SPIKE", "GRAD_VANISHED")


def _ended(folder: Path, plant: str) -> Ended:
    ended = run(folder, job(TRAIN, arguments=(plant,)))
    assert ended.code == 0, ended
    return ended


def _said(ended: Ended) -> dict[str, tuple[list[int], int, str]]:
    return {i["reason_code"]: (i["ranks"], i["first_step"], i["subject"]) for i in ended.alarms}


def test_a_batch_of_wrong_labels_names_rank_step_and_samples(tmp_path: Path) -> None:
    ended = _ended(tmp_path, "labels")
    said = _said(ended)
    assert said.pop("LOSS_SPIKE") == ([1], STEP, "loss")
    assert set(said) <= {"GRAD_SPIKE"}
    assert all((ranks, first) == ([1], STEP) for ranks, first, _ in said.values())
    (incident,) = ended.found("LOSS_SPIKE")
    samples = [e["value"] for e in incident["evidence"] if e["metric"] == "ids of the batch's samples"]
    assert samples == [", ".join(str(24 * (STEP - 1) + 1 + 2 * i) for i in range(12))]


def test_a_branch_whose_gradients_grow_for_good_is_named(tmp_path: Path) -> None:
    said = _said(_ended(tmp_path, "branch"))
    ranks, first, subject = said.pop("GRAD_SPIKE")
    assert (said, ranks, first) == ({}, [0, 1], STEP)
    assert subject.startswith("right.")


@pytest.mark.parametrize(
    ("plant", "expected"), [("masked", {"GRAD_VANISHED": ([0, 1], STEP, "all gradients")}), ("none", {})]
)
def test_labels_that_are_all_masked_and_the_healthy_twin(tmp_path: Path, plant: str, expected: object) -> None:
    ended = _ended(tmp_path, plant)
    assert _said(ended) == expected
    codes = {v["reason_code"]: v["outcome"] for v in ended.verdict["verdicts"]}
    if plant == "none":
        assert {codes[c] for c in OURS} == {"CLEAR"}
