"""Memory in real jobs: a leak on one rank, a rank that holds more, a failed allocation, a cache that levels off."""

from __future__ import annotations

from pathlib import Path

import pytest

from kit.job import Ended, job, run

# `what` is what rank 1 does with 4 MiB at each step
TRAIN = """
import resource, sys
import torch
import torch.distributed as dist
from torch import nn

what = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(60, 4, 8, generator=torch.Generator().manual_seed(rank))
kept = [torch.ones(400 << 18)] if what == "bank" and rank == 1 else []
for step in range(60):
    if rank == 1 and (what == "leak" or (what == "cache" and step < 25)):
        kept.append(torch.ones(1 << 20))
    if rank == 1 and what == "oom" and step == 30:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
        hidden = torch.ones(1 << 26)
    optimizer.zero_grad()
    model(data[step]).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def trained(folder: Path, what: str, ranks: int = 3) -> Ended:
    return run(folder, job(TRAIN, ranks=ranks, arguments=[what]))


@pytest.mark.parametrize(("what", "code"), [("leak", "MEMORY_LEAK"), ("bank", "MEMORY_IMBALANCE")])
def test_what_one_rank_keeps_is_told_with_its_rank(tmp_path: Path, what: str, code: str) -> None:
    ended = trained(tmp_path, what)
    assert ended.code == 0, ended
    said = [(i["reason_code"], i["ranks"], i["severity"]) for i in ended.alarms]
    slower = [
        ("STRAGGLER", [1], "warning")
    ]  # to fill 4 MiB a step takes as long as the step: true where cores are free
    assert said in ([(code, [1], "warning")], [(code, [1], "warning"), *slower]), ended.alarms


def test_a_cache_that_levels_off_is_silent(tmp_path: Path) -> None:
    ended = trained(tmp_path, "cache", 2)
    assert ended.code == 0, ended
    assert ended.alarms == []


def test_an_allocation_that_fails_names_rank_step_and_request(tmp_path: Path) -> None:
    ended = trained(tmp_path, "oom", 2)
    assert ended.code != 0
    (found,) = ended.found("OOM")
    assert (found["ranks"], found["first_step"], found["severity"]) == ([1], 31, "critical")
    said = {e["metric"]: e["value"] for e in found["evidence"]}
    assert said["asked for"] == "256 MiB"
    assert ended.alarms == [found]  # the rank's end follows it
    (end,) = ended.found("RANK_FAILED")
    assert (end["ranks"], end["severity"]) == ([1], "note")
    assert end["summary"].startswith("follows OOM at step 31: ")
