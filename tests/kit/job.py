"""Real jobs: a script in a folder of its own under torchrun or tdbg-run, and what the run that it left says.

gloo workers sometimes abort when the interpreter ends, under plain torchrun too, so a job that ended by that is run
again (`TRIES` times in all), each time in a new folder. A job that outlives its time limit is killed with its ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from tdbg.aggregator.outputs.json import dumps, verdicts
from tdbg.aggregator.store import Store
from tdbg.aggregator.verdict import judge

BIN = Path(sys.executable).parent
TORCHRUN, TDBG_RUN = str(BIN / "torchrun"), str(BIN / "tdbg-run")
TRIES = 3
LIMIT_S = 150.0
ABORTED = "terminate called without an active exception"
_OURS = ("TDBG_", "TORCHELASTIC_", "MASTER_")


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what another run may have left in it; one thread a rank."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    return kept | {"OMP_NUM_THREADS": "1"} | more


@dataclass(frozen=True)
class Spec:
    """A job: files by name (`job.py` is the script), the ranks, what stands before and behind the script's name."""

    files: Mapping[str, str]
    ranks: int = 2
    arguments: Sequence[str] = ()
    options: Sequence[str] = ()
    script: Sequence[str] = ("job.py",)
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, launcher: str) -> list[str]:
        return [launcher, "--standalone", "--nproc-per-node", str(self.ranks), *self.options, *self.script,
                *self.arguments]  # fmt: skip


def job(text: str, **more: Any) -> Spec:
    """The usual job: one script."""
    return Spec({"job.py": text}, **more)


class Ended:
    """A job that is over: exit code, output, and its run if one was recorded."""

    def __init__(self, folder: Path, store: Path, code: int) -> None:
        self.folder, self.store, self.code = folder, store, code
        self.out, self.err = ((folder / name).read_text(errors="replace") for name in ("stdout.txt", "stderr.txt"))

    def __repr__(self) -> str:
        return f"exit code {self.code}\n{self.out[-3000:]}\n{self.err[-6000:]}"

    @property
    def lines(self) -> list[str]:
        """Lines of stdout in an order that doesn't depend on which rank was faster."""
        return sorted(self.out.splitlines())

    @property
    def run(self) -> Path:
        (run,) = self.store.iterdir()
        return run

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """What `tdbg verdicts RUN --json` prints, made in this process: starting a program takes a second each time."""
        with Store(self.run) as store:
            said: dict[str, Any] = json.loads(dumps(verdicts(judge(store))))
        return said

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """A query over the run's tables."""
        with Store(self.run) as store:
            return store.rows(sql)

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """Incidents above a note."""
        return [i for i in self.verdict["incidents"] if i["severity"] != "note"]

    def found(self, code: str) -> list[dict[str, Any]]:
        """The incidents of one reason code."""
        return [i for i in self.verdict["incidents"] if i["reason_code"] == code]


class Job:
    """A job that runs. Output goes to files, so nothing waits for a reader."""

    def __init__(self, folder: Path, spec: Spec, recorded: bool = True, store: Path | None = None) -> None:
        folder.mkdir(parents=True)
        self.folder, self.store = folder, store or folder / "store"
        for name, text in spec.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        with (folder / "stdout.txt").open("wb") as out, (folder / "stderr.txt").open("wb") as err:
            self.process = subprocess.Popen(
                spec.command(TDBG_RUN if recorded else TORCHRUN), cwd=folder, stdout=out, stderr=err,
                env=environment(TDBG_DIR=str(self.store), **spec.env), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def until(self, seen: Callable[[str], bool], limit_s: float = LIMIT_S) -> str:
        """Wait until stdout is as wanted; the job must not end before. Returns stdout."""
        deadline = time.monotonic() + limit_s
        while True:
            over = self.process.poll() is not None
            out = (self.folder / "stdout.txt").read_text(errors="replace")
            if seen(out):
                return out
            if over or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the job never came this far: {self.finish()}")
            time.sleep(0.02)

    def kill(self) -> None:
        """End the launcher and every process below it."""
        try:
            launcher = psutil.Process(self.process.pid)
            below = [launcher, *launcher.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in below:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def finish(self, limit_s: float = LIMIT_S) -> Ended:
        """Wait for the end, however it comes."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()
            raise AssertionError(
                f"not over within {limit_s:.0f} s: {Ended(self.folder, self.store, self.process.returncode)}"
            ) from None
        return Ended(self.folder, self.store, self.process.returncode)


def again(attempt: Callable[[int], Ended]) -> Ended:
    """`attempt(number)`, repeated as long as gloo's abort at exit is what ended it."""
    for number in range(TRIES):
        ended = attempt(number)
        if not (ended.code and ABORTED in ended.err):
            break
    return ended


def run(folder: Path, spec: Spec, recorded: bool = True, limit_s: float = LIMIT_S, act: Any = None) -> Ended:
    """A whole job below `folder`; `act(job)` is called while it runs, e.g. to send a signal."""
    name = "recorded" if recorded else "plain"

    def attempt(number: int) -> Ended:
        running = Job(folder / f"{name}-{number}", spec, recorded)
        if act is not None:
            act(running)
        return running.finish(limit_s)

    return again(attempt)


def both(folder: Path, spec: Spec, act: Any = None) -> tuple[Ended, Ended]:
    """The same job under torchrun and under tdbg-run."""
    return run(folder, spec, recorded=False, act=act), run(folder, spec, act=act)
