"""A store that fills up, and a read-only one: training must not notice, and what is lost is said."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kit.job import Ended, Job, again, run
from tdbg.aggregator.store import Store

from .row import Row
from .training import train

USUAL = 1
RANKS, STEPS, SIZE = 2, 2000, "3m"


def drill(times: int, chance: random.Random, folder: Path) -> Iterator[Row]:
    plain = run(folder / "plain", train(RANKS, STEPS), recorded=False)
    for number in range(times):
        for what, options in (("filled up", f"size={SIZE}"), ("read-only", f"size={SIZE},ro")):
            with mounted(folder / f"{number}-{what}", options) as why:
                store = folder / f"{number}-{what}"
                if why:
                    yield Row(f"store {what}: skipped, {why}", [])
                    continue
                ended = on_store(folder / f"{number}-{what}-jobs", store)
                yield Row(f"store of {SIZE}, {what}", disk_misses(plain, ended, what))


def on_store(folder: Path, store: Path) -> Ended:
    """The job with that store; what an aborted try left there goes first."""

    def attempt(number: int) -> Ended:
        for old in store.iterdir():
            shutil.rmtree(old)
        return Job(folder / str(number), train(RANKS, STEPS), store=store).finish()

    return again(attempt)


def disk_misses(plain: Ended, ended: Ended, what: str) -> list[str]:
    misses = []
    if ended.code != plain.code:
        misses.append(f"exit code {ended.code}, with torchrun {plain.code}")
    if ended.lines != plain.lines:
        misses.append("losses differ from torchrun's")
    if what == "read-only":
        if "not recording" not in ended.err:
            misses.append("tdbg-run did not say that it records nothing")
        return misses
    misses += uncounted(ended)
    quality = ended.verdict["data_quality"]
    if quality["complete"] or not quality["dropped_events"]:
        misses.append(f"the run is shown as complete: {quality}")
    if not any("drop" in w or "lost" in w for w in quality["warnings"]):
        misses.append(f"no warning says that rows were dropped: {quality['warnings']}")
    clear = [v["reason_code"] for v in ended.verdict["verdicts"] if v["outcome"] == "CLEAR"]
    if clear:
        misses.append(f"CLEAR without all rows: {clear}")
    misses += [f"also {i['reason_code']}: {i['summary']}" for i in ended.alarms]
    return misses


def uncounted(ended: Ended) -> list[str]:
    """A sentence for each rank that lost more than it says, or whose probes took the full disk for their own error."""
    kept = dict(ended.rows("SELECT rank, count(*) FROM step GROUP BY rank"))
    found = []
    with Store(ended.run) as store:
        for process in (p for p in store.processes if p.kind == "rank"):
            lost = STEPS - kept.get(process.index, 0)
            if process.state is None or process.state.dropped < lost:
                found.append(f"rank {process.index} lost {lost} steps and does not say so: {process.state}")
            elif process.state.disabled:
                found.append(f"rank {process.index}: {process.state.disabled} probes were switched off")
    return found


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[str]:
    """A small file system at `folder`; yields why there is none, empty when there is."""
    folder.mkdir(parents=True)
    if sys.platform != "linux" or os.geteuid() != 0:
        yield "only root on Linux may mount"
        return
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"mount says: {done.stderr.strip()}"
        return
    try:
        yield ""
    finally:
        subprocess.run(["umount", str(folder)], check=True)
