"""Makes the run folder and keeps its two kinds of JSON file: run.json (the run) and node-NNNNN.json (this machine).

Both are rewritten whole under another name and renamed, so a reader never sees half of one. Folders are 0700: what a
job logs about its data is nobody else's business. Raises OSError or TdbgError; the caller goes on without recording.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tdbg.rankagent import contract
from tdbg.rankagent.contract import TdbgError
from tdbg.rankagent.readback import read_json

RUN_SCHEMA = "tdbg.run/1"
NAME_CHARACTERS = 80  # of a run id: leaves room for the part names below it in any file system's 255
ALIVE_NS = 60_000_000_000  # a node refreshes its file every second; silent for a minute: its launcher is gone
_JOBS = (
    ("slurm", "SLURM_JOB_ID", ("SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
    ("pbs", "PBS_JOBID", ()),
    ("lsf", "LSB_JOBID", ()),
)
_NODE_INDEX = ("SLURM_NODEID", "OMPI_COMM_WORLD_NODE_RANK", "NODE_RANK")


def plain(name: str) -> str:
    """`name` with only letters, digits, dot, dash and underscore, fit for a folder and for a URL."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:NAME_CHARACTERS] or "run"


def fresh_id(script: str, now_s: float, token: str = "") -> str:
    """`YYYYMMDD-HHMMSS-<script stem>-<4 hex>` in local time."""
    when = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    return plain(f"{when}-{plain(Path(script).stem)[:40]}-{token or secrets.token_hex(2)}")


def shared_id(env: Mapping[str, str], rdzv_id: str, endpoint: str, script: str) -> str:
    """An id that all nodes of a job arrive at: the rendezvous id, the scheduler's job, or the endpoint they share."""
    if rdzv_id and rdzv_id != "none":
        return plain(rdzv_id)
    for scheduler, variable, more in _JOBS:
        if env.get(variable):
            return plain("-".join([scheduler, env[variable], *(env[m] for m in more if env.get(m))]))
    return plain(f"{Path(script).stem[:40]}-{zlib.crc32(endpoint.encode()) & 0xFFFF:04x}")


def node_index(env: Mapping[str, str], node_rank: int | None, nodes: int, launcher: str) -> int:
    """Index of this node. `node_rank` is None when the rendezvous hands indexes out later: then the scheduler's number,
    or one from `launcher`, which no other launcher of the job shares: too large to meet an index, and out of so many
    that 1,000 nodes meet by chance once in 4,000 jobs."""
    if nodes <= 1:
        return 0
    if node_rank is not None:
        return node_rank
    for variable in _NODE_INDEX:
        if env.get(variable, "").isdecimal():
            return int(env[variable])
    return 10_000 + zlib.crc32(launcher.encode()) % 2_000_000_000  # a column of 32 bits holds it


def make_run_folder(store: Path, name: str, shared: bool) -> Path:
    """A folder for the run: new for a single node; with several, the one a peer made a moment ago, or new.

    A name that an earlier run has gets -2, -3 and so on.
    """
    contract.make_private(store)
    for n in range(1, 10_000):
        folder = store / (name if n == 1 else f"{name}-{n}")
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            if not (shared and still_running(folder)):
                continue
        contract.make_private(folder / "records")
        contract.make_private(folder / "tables")
        return folder
    raise TdbgError(f"{store} has 10,000 runs named {name}", "give another name with --tdbg-run-name")


def still_running(folder: Path, now_ns: int | None = None) -> bool:
    """Whether a run is being recorded there: not ended, and some node (or the folder itself) was touched just now."""
    now_ns = time.time_ns() if now_ns is None else now_ns
    run = read_json(folder / "run.json")
    if isinstance(run, dict) and run.get("end_ns"):
        return False
    beats = [n.get("heartbeat_ns") for n in map(read_json, folder.glob("node-*.json")) if isinstance(n, dict)]
    newest = max([b for b in beats if isinstance(b, int)], default=folder.stat().st_mtime_ns)
    return now_ns - newest < ALIVE_NS


class JsonFile:
    """A JSON object on disk that is changed by `update` and replaced whole."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = dict(values)

    def create(self) -> bool:
        """Write it if no other process did. False when one had; raises OSError."""
        try:
            with open(self.path, "x"):
                pass
        except FileExistsError:
            return False
        self.write()
        return True

    def update(self, **values: Any) -> None:
        self.values.update(values)
        self.write()

    def write(self) -> None:
        """Replace the file. Raises OSError on a full or read-only disk; the old content stays."""
        hidden = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            fd = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as f:
                json.dump(self.values, f, indent=1)
            os.replace(hidden, self.path)
        except OSError:
            hidden.unlink(missing_ok=True)
            raise


def run_json(folder: Path, **values: Any) -> JsonFile:
    """run.json of a run that begins now; `values` are the keys that only the caller knows."""
    base: dict[str, Any] = {
        "schema": RUN_SCHEMA, "format": contract.FORMAT, "id": folder.name, "command": [], "script": "", "cwd": "",
        "start_ns": time.time_ns(), "end_ns": None, "status": "running", "exit_code": None, "world_size": None,
        "nnodes": "1", "nproc_per_node": "1", "max_restarts": 0, "host": "", "user": "", "launcher_pid": os.getpid(),
        "versions": {}, "revision": None, "settings": {},
    }  # fmt: skip
    unknown = set(values) - set(base)
    if unknown:
        raise TdbgError(f"run.json has no key {sorted(unknown)}", "add it to rundir.run_json")
    return JsonFile(folder / "run.json", base | values)


def node_json(folder: Path, node: int, host: str) -> JsonFile:
    """node-NNNNN.json of a node that begins now."""
    now = time.time_ns()
    return JsonFile(folder / f"node-{node:05d}.json", {
        "node": node, "host": host, "launcher_pid": os.getpid(), "start_ns": now, "end_ns": None, "heartbeat_ns": now,
        "attempts": [], "notes": [],
    })  # fmt: skip
