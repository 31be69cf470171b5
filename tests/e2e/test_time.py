"""Where the time goes, in one real job: data that becomes slow at a step, a rank that saves after every other one."""

from __future__ import annotations

from kit.job import job, run

JOB = """
import io, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SLOW_FROM, STEPS = 41, 75


class Rows(Dataset):
    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, i):
        time.sleep(0.03 if i // 2 + 1 >= SLOW_FROM else 0.0)
        return torch.ones(8) * i


class Disk(io.BytesIO):
    def write(self, data):
        time.sleep(0.01)
        return super().write(data)


dist.init_process_group("gloo")
torch.manual_seed(0)
rows = Rows()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for step, x in enumerate(DataLoader(rows, batch_size=1, sampler=DistributedSampler(rows, shuffle=False)), start=1):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    if dist.get_rank() == 0 and step % 2 == 0:
        torch.save(model.module.state_dict(), Disk())
dist.destroy_process_group()
"""


def test_the_slow_step_and_the_saving_rank_are_named_and_nobody_straggles(tmp_path):
    ended = run(tmp_path, job(JOB))
    assert ended.code == 0, ended
    (slow,) = ended.found("SLOWDOWN")
    assert (slow["ranks"], slow["subject"]) == ([0, 1], "data")
    assert abs(slow["first_step"] - 41) <= 1
    (stall,) = ended.found("CHECKPOINT_STALL")
    assert (stall["ranks"], stall["subject"]) == ([0], "checkpoint")
    assert {i["reason_code"] for i in ended.alarms} <= {"SLOWDOWN", "CHECKPOINT_STALL", "DATA_STARVED"}
