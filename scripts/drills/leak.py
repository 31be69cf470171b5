"""Memory that grows towards a limit at a random rate is warned of 50 steps ahead; a cache that levels off is not.

The verdict of a leak is the one that could be had 50 steps before the end: rows of later steps are left out of it.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from kit.job import Ended, job, run
from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import memory_leak, oom_precursor
from tdbg.rankagent.tables import COMMON, known_tables

from .row import Row

USUAL = 20  # half of them leaks
AHEAD = 50  # steps
TABLES = ("memory", "step", "proc", "host")

# What is kept each step is drawn around `rate`; a plateau keeps until `room` is in use and then replaces the oldest.
# The limit is on top of what the process has when training begins.
LEAK = """
import random, resource, sys
import torch
from torch import nn

limit, quota, rate, room, steps, seed = sys.argv[1], *(float(a) for a in sys.argv[2:6]), int(sys.argv[6])
chance = random.Random(seed)
torch.manual_seed(seed)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
kept, size = [], 0.0

def train():
    optimizer.zero_grad()
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()

train()
what, line = {"as": (resource.RLIMIT_AS, "VmSize"), "data": (resource.RLIMIT_DATA, "VmData")}[limit]
used = next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith(line))
most = used + (int(quota) << 20)
resource.setrlimit(what, (most, most))
for step in range(int(steps)):
    more = rate * chance.uniform(0.7, 1.3)
    kept.append(torch.ones(int(more * 2**18)))
    size += more
    while size > room:
        size -= kept.pop(0).numel() / 2**18
    train()
"""


def drill(times: int, chance: random.Random, folder: Path) -> Iterator[Row]:
    for number in range(times):
        leaks = number % 2 == 0
        # the last of the leak's steps is the one that fails; its rate follows from how many there shall be
        limit, quota, steps = chance.choice(("as", "data")), chance.uniform(300, 900), chance.randint(110, 300)
        # a plateau takes up to 45 % of the room: beyond half of it nobody can tell it from a leak while it fills
        room = 1e9 if leaks else quota * chance.uniform(0.1, 0.45)
        rate = quota / steps if leaks else room / chance.randint(15, 60)
        arguments = [limit, quota, rate, room, steps + 100 if leaks else 200, chance.randint(0, 10**6)]
        spec = job(LEAK, ranks=1, arguments=[a if isinstance(a, str) else f"{a:.9g}" for a in arguments])
        ended = run(folder / str(number), spec)
        said = f"{'RLIMIT_AS' if limit == 'as' else 'RLIMIT_DATA'} {quota:.0f} MiB away"
        if leaks:
            yield Row(f"leak of {rate:.2f} MiB a step, {said}", leak_misses(ended))
        else:
            yield Row(f"plateau of {room:.0f} MiB, {rate:.2f} MiB a step, {said}", plateau_misses(ended))
        shutil.rmtree(folder / str(number))


def leak_misses(ended: Ended) -> list[str]:
    found = ended.found("OOM")
    misses = [] if found and found[0]["ranks"] == [0] else [f"OOM says {[(i['ranks'], i['summary']) for i in found]}"]
    if ended.code == 0:
        misses.append("the job did not run out of memory")
    rows, last = recorded(ended)
    until = last + 1 - AHEAD
    if not any(code == "OOM_PRECURSOR" for code, _ in judged_until(rows, until)):
        misses.append(f"no OOM_PRECURSOR at step {until}, {AHEAD} steps before the failure in step {last + 1}")
    return misses


def plateau_misses(ended: Ended) -> list[str]:
    misses = [] if ended.code == 0 else [f"exit code {ended.code}"]
    rows, last = recorded(ended)
    for until in (*range(25, last, 25), last):  # someone may look at any time
        alarms = [(c, f) for c, f in judged_until(rows, until) if until == last or c == "OOM_PRECURSOR"]
        misses += [f"{code} at step {until}: {f.summary}" for code, f in alarms if f.severity != "note"]
    return misses


def recorded(ended: Ended) -> tuple[Rows, int]:
    """What the rules on memory read, and the last step."""
    rows = Rows()
    for table in TABLES:
        columns = [c.name for c in (*COMMON, *known_tables()[table].columns)]
        names = ", ".join(f'"{c}"' for c in columns)
        data = ended.rows(f'SELECT {names} FROM "{table}"')
        if data:
            marks = ", ".join("?" for _ in columns)
            rows.connection.executemany(f'INSERT INTO "{table}" ({names}) VALUES ({marks})', data)
    return rows, ended.rows("SELECT max(step) FROM memory")[0][0]


def judged_until(rows: Rows, step: int) -> list[tuple[str, Finding]]:
    """What the rules said when this step was over."""
    rows.connection.begin()
    try:
        end = rows.connection.execute("SELECT max(time_ns) FROM memory WHERE step <= ?", [step]).fetchall()[0][0]
        for table in TABLES:
            rows.connection.execute(f'DELETE FROM "{table}" WHERE time_ns > {end}')
        return [f for rule in (oom_precursor, memory_leak) for f in rows.judge(rule, world_size=1)[1]]
    finally:
        rows.connection.rollback()
