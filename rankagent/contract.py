"""The words that launcher, rank and reader share: variable names, run folder layout, format number, the one error.

Everything here is standard library only: a rank reads it before torch is imported.

    RUN/                                      one run, mode 0700
      run.json                                command, versions, world size, status (launcher of node 0)
      node-00000.json                         one per node: host, attempts, how each rank's process ended
      records/rank-00003.0.12345/             what process 12345 (rank 3, attempt 0) wrote
        state                                 one page: last step, drops, closed or not (`record.State`)
        00000.rec, 00001.rec …                frames (`record`); removed once sealed
        sealed.json                           frame counts of the segments sealed so far
        stacks                                Python stacks that the launcher asked for (`stacks`)
      records/node-00000.0.999/               the same format, written by the node's launcher
      tables/TABLE/rank=00003/part-0-12345-00000.parquet    sealed rows: attempt, pid, segment
      tables/TABLE/node=00000/part-…           the launcher's
"""

from __future__ import annotations

import os
import re
from pathlib import Path

FORMAT = 1  # number of the record format; raised when an old reader could misread a new run

# Environment variables. The first group is set by the user or by a flag, the second only by `tdbg-run` for its ranks.
STORE = "TDBG_DIR"
LIVE = "TDBG_LIVE"
OFF = "TDBG_OFF"
WATCH_STEPS = "TDBG_WATCH_STEPS"
BUDGET = "TDBG_BUDGET"
SAMPLE_SECONDS = "TDBG_SAMPLE_SECONDS"
RUN_NAME = "TDBG_RUN_NAME"
STALL_SECONDS = "TDBG_STALL_SECONDS"

RUN_DIR = "TDBG_RUN"  # absolute path of the run folder; its presence is the gate of both injection doors
BOOT = "TDBG_BOOT"  # absolute path of rankagent/boot.py, read by the .pth door
NODE = "TDBG_NODE"  # index of the node, 0 for a single one
CLAIM = "TDBG_CLAIM"  # pid of the process that claimed the rank; its children find another pid there

SETTINGS = (STORE, LIVE, OFF, WATCH_STEPS, BUDGET, SAMPLE_SECONDS, STALL_SECONDS, RUN_NAME)
INTERNAL = (RUN_DIR, BOOT, NODE, CLAIM)

DEFAULT_STORE = "tdbg_runs"
DEFAULT_WATCH_STEPS = 100
DEFAULT_BUDGET_PERCENT = 0.5
DEFAULT_STALL_SECONDS = 30.0

STACKS = "stacks"  # file of a process's record folder

_PROCESS = re.compile(r"^(rank|node)-(\d+)\.(\d+)\.(\d+)$")
_WRITER = re.compile(r"^(rank|node)=(\d+)$")
_PART = re.compile(r"^part-(\d+)-(\d+)-(\d+)\.parquet$")


class TdbgError(Exception):
    """What failed, on which file or value, and what to do. Printed as one or two lines, never as a traceback."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


def process_dir(run: Path | str, kind: str, index: int, attempt: int, pid: int) -> Path:
    """Folder of one recording process; `kind` is "rank" or "node"."""
    return Path(run) / "records" / f"{kind}-{index:05d}.{attempt}.{pid}"


def parse_process_dir(name: str) -> tuple[str, int, int, int] | None:
    """(kind, index, attempt, pid) of a folder name, None for a foreign one."""
    m = _PROCESS.match(name)
    return (m[1], int(m[2]), int(m[3]), int(m[4])) if m else None


def part_path(run: Path | str, table: str, kind: str, index: int, attempt: int, pid: int, segment: int) -> Path:
    """Sealed Parquet part of one segment of one process; `kind` and `index` as in `process_dir`."""
    return Path(run) / "tables" / table / f"{kind}={index:05d}" / f"part-{attempt}-{pid}-{segment:05d}.parquet"


def parse_writer(name: str) -> tuple[str, int] | None:
    """(kind, index) of a folder of parts, None for a foreign one."""
    m = _WRITER.match(name)
    return (m[1], int(m[2])) if m else None


def parse_part(name: str) -> tuple[int, int, int] | None:
    """(attempt, pid, segment) of a part's file name, None for a foreign file."""
    m = _PART.match(name)
    return (int(m[1]), int(m[2]), int(m[3])) if m else None


def make_private(path: Path | str) -> None:
    """Create a folder, and those of its parents that are missing, so that only its user may read them."""
    path = os.fspath(path)
    parent = os.path.dirname(path)
    if parent and not os.path.isdir(parent):
        make_private(parent)
    os.makedirs(path, mode=0o700, exist_ok=True)
