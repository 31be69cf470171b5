"""kill -9 of tdbg-run in mid-training: the run can still be read in full."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import psutil

from kit.job import Ended, Job, run

from .row import Row
from .training import announced, lost_steps, train

USUAL = 5


def drill(times: int, chance: random.Random, folder: Path) -> Iterator[Row]:
    for number in range(times):
        ranks, at, wait = chance.randint(2, 3), chance.randint(1, 30), chance.choice((0.0, 4.0))

        def strike(running: Job, at: int = at, wait: float = wait) -> None:
            running.until(lambda _: at in announced(running.folder, 0)[1:])
            left = psutil.Process(running.process.pid).children(recursive=True)
            running.process.kill()
            psutil.wait_procs(left, timeout=wait)  # ranks may train on without their launcher
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=10)

        ended = run(folder / str(number), train(ranks, 60, pause=0.02), act=strike)
        what = f"tdbg-run of {ranks} ranks at step {at}, ranks killed {wait:.0f} s later"
        yield Row(what, launcher_misses(ended, ranks))


def launcher_misses(ended: Ended, ranks: int) -> list[str]:
    misses = lost_steps(ended, ranks)
    if ended.verdict["status"] != "killed":
        misses.append(f"status {ended.verdict['status']}")
    if ended.verdict["data_quality"]["ranks_seen"] != list(range(ranks)):
        misses.append(f"ranks seen: {ended.verdict['data_quality']['ranks_seen']}")
    misses += [f"also {i['reason_code']}: {i['summary']}" for i in ended.alarms if i["reason_code"] != "RANK_FAILED"]
    return misses
