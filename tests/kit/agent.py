"""An agent in the test's own process: record what a piece of training code does, then read the rows back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tdbg.rankagent import identity
from tdbg.rankagent.agent import Agent
from tdbg.rankagent.governor import Governor
from tdbg.rankagent.readback import read_segment, segments
from tdbg.rankagent.record import Recorder

Rows = dict[str, list[dict[str, Any]]]


@contextmanager
def running(folder: Path, watch_steps: int = 100, budget: float | None = 0.005) -> Iterator[Agent]:
    """An installed agent; afterwards torch is as it was. The rank is 0 of 1."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()  # what an earlier test compiled is not this program's
    role = identity.Role(rank=0, world_size=1, local_rank=0, attempt=0, node=0, run=str(folder))
    agent = Agent(torch, role, Recorder(folder / "records" / "rank-00000.0.1", 0, 0), Governor(watch_steps, budget))
    agent.install()
    try:
        yield agent
    finally:
        agent.close()
        agent.uninstall()


def read(folder: Path) -> Rows:
    """All rows below a run folder, by table, in order."""
    found: Rows = {}
    for process in sorted((folder / "records").iterdir()):
        for segment in segments(process):
            for table, row in read_segment(segment):
                found.setdefault(table.name, []).append(row)
    return found


def record(folder: Path, program: Callable[[], Any], **settings: Any) -> Rows:
    """Rows of a program run under an agent."""
    with running(folder, **settings):
        program()
    return read(folder)
