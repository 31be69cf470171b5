"""Whole run folders from rows: real recorders write them, sealing is the launcher's own, run.json and nodes beside.

`write_run(store, healthy(ranks=2))` is a finished, sealed, complete run; every way to harm it is an argument or a file
operation on what it returns.
"""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from tdbg.rankagent import contract, nodetables
from tdbg.rankagent.record import Recorder
from tdbg.rankagent.seal import seal_process
from tdbg.rankagent.tables import known_tables

from .rows import Rows

NODE_PID = 999
NODE_TABLES = {t.name for t in nodetables.TABLES}
SMALL_SEGMENT = 1 << 16  # several segments a rank in a small run

Writer = tuple[str, int, int, int]


def write_run(store: Path, rows: Rows, name: str = "20260101-120000-train-0a1b", *, status: str = "finished",
              world_size: int | None = None, seal: bool = True, closed: bool = True, describe: bool = True,
              segment_bytes: int = SMALL_SEGMENT, **about: Any) -> Path:  # fmt: skip
    """Write `rows` as a run of `store`; its ranks are those that have rows. `about` goes into run.json."""
    run = store / name
    recorders: dict[Writer, Recorder] = {}
    for table, row in sorted(_all_rows(rows), key=lambda tr: tr[1]["seq"]):
        _write(run, recorders, table, row, segment_bytes)
    for recorder in recorders.values():
        if closed:
            recorder.close(_last_step(recorder))
    if seal:
        for writer in recorders:
            seal_process(run, contract.process_dir(run, *writer), ended=True)
    ranks = {(a, i) for kind, i, a, _ in recorders if kind == "rank"}
    world = world_size if world_size is not None else 1 + max((r for _, r in ranks), default=-1)
    if describe:
        describe_run(run, status, world, ranks, **about)
    return run


def describe_run(run: Path, status: str, world_size: int, ranks: set[tuple[int, int]], **about: Any) -> None:
    """run.json and node-00000.json as the launcher leaves them; `heartbeat_ns` and `launcher_pid` show life."""
    run.mkdir(parents=True, exist_ok=True)
    now = time.time_ns()
    heartbeat, pid = about.pop("heartbeat_ns", now), about.pop("launcher_pid", NODE_PID)
    attempts = [{"attempt": a, "ranks": {str(r): {"pid": 100 + r} for b, r in sorted(ranks) if b == a}}
                for a in sorted({a for a, _ in ranks})]  # fmt: skip
    (run / "run.json").write_text(json.dumps({
        "schema": "tdbg.run/1", "format": contract.FORMAT, "id": run.name, "script": "train.py",
        "command": ["train.py"], "start_ns": now - 10**9, "end_ns": None if status == "running" else now,
        "status": status, "world_size": world_size, "nnodes": "1", "nproc_per_node": str(world_size),
        "host": socket.gethostname(), "launcher_pid": pid, "settings": {"watch_steps": 100}, **about,
    }))  # fmt: skip
    (run / "node-00000.json").write_text(json.dumps({
        "node": 0, "host": socket.gethostname(), "launcher_pid": pid, "start_ns": now, "heartbeat_ns": heartbeat,
        "end_ns": None if status == "running" else now, "attempts": attempts, "notes": [],
    }))  # fmt: skip


def parts(run: Path, table: str, rank: int | None = None) -> list[Path]:
    """Sealed parts of one table, of one rank or of all."""
    return sorted((run / "tables" / table).glob(f"{'*' if rank is None else f'rank={rank:05d}'}/part-*.parquet"))


def record_dirs(run: Path, rank: int) -> list[Path]:
    """Folders of the processes that were this rank."""
    return sorted((run / "records").glob(f"rank-{rank:05d}.*"))


def _all_rows(rows: Rows) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for table in known_tables():
        cursor = rows.connection.execute(f'SELECT * FROM "{table}"')
        names = [d[0] for d in cursor.description or ()]
        found += [(table, dict(zip(names, values, strict=True))) for values in cursor.fetchall()]
    return found


def _write(run: Path, recorders: dict[Writer, Recorder], table: str, row: dict[str, Any], segment_bytes: int) -> None:
    node = table in NODE_TABLES
    writer = (
        ("node", 0, 0, NODE_PID) if node else ("rank", row["rank"], row["attempt"], row["pid"] or 100 + row["rank"])
    )
    if writer not in recorders:
        recorder = Recorder(contract.process_dir(run, *writer), -1 if node else row["rank"], writer[2], segment_bytes)
        recorder.pid = writer[3]
        recorders[writer] = recorder
    described = known_tables()[table]
    fixed = [row[c.name] for c in described.fixed]
    variable = [row[c.name] for c in described.variable]
    assert recorders[writer].write(described, row["step"], fixed, variable, rank=row["rank"])
    recorders[writer].update_state(max(row["step"], _last_step(recorders[writer])), time.time_ns())


def _last_step(recorder: Recorder) -> int:
    from tdbg.rankagent.readback import read_state

    state = read_state(Path(recorder.folder))
    return state.step if state else 0
