"""A training that announces each step it has finished, and what a recording lost of those."""

from __future__ import annotations

from pathlib import Path

from kit.job import Ended, job

# Every finished step is announced through write(2), after the optimizer's step has returned.
TRAIN = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn

victim, at, steps, pause, doing = (float(a) if "." in a else int(a) for a in sys.argv[1:6])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(steps, 4, 8, generator=torch.Generator().manual_seed(rank))
announced = os.open(f"done-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(announced, f"{os.getpid()}\\n".encode())
for step in range(1, steps + 1):
    optimizer.zero_grad()
    loss = model(data[step - 1]).square().mean()
    if (rank, step, doing) == (victim, at, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    os.write(announced, f"{step}\\n".encode())
    os.write(1, f"{rank} {step} {loss.item().hex()}\\n".encode())  # one write, so that ranks' lines never mix
    if (rank, step, doing) == (victim, at, 0):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(pause)
dist.destroy_process_group()
"""
NOBODY = -1
AFTER_STEP, IN_STEP, FROM_OUTSIDE = range(3)
WHEN = ("by itself, after a step", "by itself, in a step", "from outside")


def train(ranks: int, steps: int, victim: int = NOBODY, at: int = 0, pause: float = 0.0, doing: int = AFTER_STEP):  # type: ignore[no-untyped-def]
    return job(TRAIN, ranks=ranks, arguments=[str(a) for a in (victim, at, steps, float(pause), doing)])


def announced(folder: Path, rank: int) -> list[int]:
    """The rank's pid, then the steps it said it had finished."""
    path = folder / f"done-{rank}"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def lost_steps(ended: Ended, ranks: int) -> list[str]:
    """A sentence for each rank that finished steps the run does not have."""
    kept: dict[int, set[int]] = {}
    for rank, step in ended.rows("SELECT rank, step FROM step"):
        kept.setdefault(rank, set()).add(step)
    found = []
    for rank in range(ranks):
        lost = sorted(set(announced(ended.folder, rank)[1:]) - kept.get(rank, set()))
        if lost:
            found.append(f"rank {rank} lost step(s) {lost}")
    return found
