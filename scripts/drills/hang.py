"""One rank of four stops in a random place: HANG names it within T + 5 s, while the job still hangs and is left alone.

T is shortened to 5 s here (TDBG_STALL_SECONDS), so that a run takes half a minute. With four runs or more two
follow in which nothing hangs: rank 0 works for twice as long as T while the others wait, and sleeps for less than T.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from kit.job import BIN, Ended, Job, job, run

from .row import Row

USUAL = 10
RANKS, STALL_S, SLACK_S = 4, 5.0, 5.0
PLACES = ("data loader", "forward", "skipped collective", "rank-0 checkpoint")
STARTED_S = 600.0  # a loaded machine takes its time to import torch four times

# `at` is the step in which the victim stops; it announces that with the wall clock.
TRAIN = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

place, victim, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=20))
rank = dist.get_rank()
metrics = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=20))

def stop():
    os.write(1, f"stops {time.time()}\\n".encode())
    while not os.path.exists("never"):
        time.sleep(0.2)

def here(where, step):
    return (where, rank, step) == (place, victim, at)

class Rows(Dataset):
    def __len__(self):
        return 1600
    def __getitem__(self, i):
        if here("data loader", i // 16 + 1):
            stop()
        return torch.full((8,), float(i % 7 + rank))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.calls = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), 0
    def forward(self, x):
        self.calls += 1
        if here("forward", self.calls):
            stop()
        return self.layers(x)

def save(model, step):
    if rank == 0:
        if here("rank-0 checkpoint", step):
            stop()
        if here("work", step):
            until = time.time() + 12.0
            while time.time() < until:
                sum(range(1000))
        if here("sleep", step):
            time.sleep(3.0)
        torch.save(model.state_dict(), "model.pt")
    dist.barrier()

torch.manual_seed(7)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
data = Rows()
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
for step, x in enumerate(loader, start=1):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    if here("skipped collective", step):
        os.write(1, f"stops {time.time()}\\n".encode())
    else:
        dist.all_reduce(loss.detach().clone(), group=metrics)
    if step % 10 == 0:
        save(model, step)
    if step == 60:
        break
    time.sleep(0.01)
os.write(1, f"{rank} done\\n".encode())
dist.destroy_process_group()
"""


def drill(times: int, chance: random.Random, folder: Path) -> Iterator[Row]:
    for number in range(times):
        place = PLACES[number % len(PLACES)] if times >= len(PLACES) else chance.choice(PLACES)
        at = 10 * chance.randint(1, 4) if place == "rank-0 checkpoint" else chance.randint(3, 40)
        victim = 0 if place == "rank-0 checkpoint" else chance.randrange(RANKS)
        misses = hang_misses(folder / str(number), place, victim, at, through_the_screen=number % 5 == 0)
        yield Row(f"rank {victim} of {RANKS}, step {at}, {place}", misses)
    for place in ("work", "sleep") if times >= len(PLACES) else ():
        yield Row(f"no hang: rank 0 has a long {place}", pause_misses(folder / place, place))


def program(place: str, victim: int, at: int):  # type: ignore[no-untyped-def]
    return job(TRAIN, ranks=RANKS, arguments=[place, str(victim), str(at)], env={"TDBG_STALL_SECONDS": str(STALL_S)})


def hang_misses(folder: Path, place: str, victim: int, at: int, through_the_screen: bool) -> list[str]:
    running = Job(folder, program(place, victim, at))
    try:
        stopped = float(running.until(lambda out: "stops " in out, STARTED_S).partition("stops ")[2].split()[0])
        found = asked_until(running, "HANG")
        misses = named_misses(found, victim, at) + late(running, stopped)
        if through_the_screen:
            misses += screen_misses(running)
        misses += harm(running)
    finally:
        running.kill()
    ended = running.finish()
    misses += named_misses(ended.found("HANG"), victim, at, "after it was killed")
    others = [
        i["reason_code"] for i in ended.alarms if i["reason_code"] not in ("HANG", "STEP_DESYNC", "COLLECTIVE_MISMATCH")
    ]
    return misses + ([f"also {others}"] if others else [])


def asked_until(running: Job, code: str) -> list[dict[str, Any]]:
    """Incidents from `tdbg verdicts --json`, asked again and again while the job hangs."""
    until = time.time() + STARTED_S
    while True:
        found = [i for i in said(running, "verdicts", "--json")["incidents"] if i["reason_code"] == code]
        if found or time.time() > until:
            return found


def late(running: Job, stopped_s: float) -> list[str]:
    """T is the run's own: on a loaded machine 20 slow steps are more than the floor. The rows tell from when on `tdbg`
    can say it."""
    sql = "SELECT min(time_ns), max_by(limit_ns, -time_ns) FROM stall WHERE event = 'stall'"
    ((noticed_ns, limit_ns),) = said(running, "sql", sql, "--json")["rows"]
    after_s, limit_s = (noticed_ns or 0) / 1e9 - stopped_s, (limit_ns or 0) / 1e9
    return [] if 0 < after_s <= limit_s + SLACK_S else [f"noticed after {after_s:.1f} s, T is {limit_s:.1f} s"]


def said(running: Job, *command: str) -> Any:
    done = subprocess.run([BIN / "tdbg", "--store", running.store, command[0], "latest", *command[1:]],
                          capture_output=True, text=True, check=False)  # fmt: skip
    return json.loads(done.stdout) if "--json" in command else done.stdout


def named_misses(found: list[dict[str, Any]], victim: int, at: int, when: str = "") -> list[str]:
    misses = []
    named = [(i["ranks"], i["severity"]) for i in found]
    if named != [([victim], "critical")]:
        misses.append(f"HANG says {named}, not rank {victim} {when}: {[i['summary'] for i in found]}")
    elif abs(found[0]["first_step"] - at) > 1:
        misses.append(f"HANG says step {found[0]['first_step']}, not {at} {when}")
    return misses


def screen_misses(running: Job) -> list[str]:
    screen = said(running, "watch")
    return [] if "HANG" in screen and "stuck" in screen else [f"the screen does not show it: {screen[-1500:]}"]


def harm(running: Job) -> list[str]:
    """The job must hang on as it did: nobody of it is gone."""
    below = psutil.Process(running.process.pid).children(recursive=True)
    alive = sum(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below)
    return [] if running.process.poll() is None and alive >= RANKS else [f"of the job {alive} processes are left"]


def pause_misses(folder: Path, place: str) -> list[str]:
    ended: Ended = run(folder, program(place, 0, 20), limit_s=STARTED_S)
    misses = [f"exit code {ended.code}"] if ended.code else []
    return misses + [f"{i['reason_code']}: {i['summary']}" for i in ended.alarms]
