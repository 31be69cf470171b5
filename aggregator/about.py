"""What the launchers say about a run: run.json and one node-NNNNN.json per node. Anything in them may be missing."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..rankagent import contract
from ..rankagent.contract import TdbgError
from ..rankagent.readback import read_json

Status = Literal["running", "finished", "failed", "killed"]

_ENDED: tuple[Status, ...] = ("finished", "failed", "killed")
FRESH_NS = 30 * 10**9  # a launcher refreshes its heartbeat every second or so; 30 s outlasts a stalled disk


@dataclass(frozen=True)
class Node:
    """One node's launcher; `attempts` holds for each attempt the ranks it started there."""

    node: int
    host: str = ""
    launcher_pid: int = 0
    heartbeat_ns: int = 0
    ended: bool = False
    attempts: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class About:
    """The run as its launchers describe it. `found`: there was a readable run.json."""

    id: str
    found: bool = False
    said_status: str = ""
    script: str = ""
    command: tuple[str, ...] = ()
    start_ns: int | None = None
    end_ns: int | None = None
    world_size: int | None = None
    nproc_per_node: int | None = None
    watch_steps: int = contract.DEFAULT_WATCH_STEPS
    host: str = ""
    launcher_pid: int = 0
    nodes: tuple[Node, ...] = ()


def read_about(run: Path) -> About:
    """Read both kinds of file. Raises TdbgError only for a run that a newer format wrote."""
    raw = read_json(run / "run.json")
    nodes = tuple(n for p in sorted(run.glob("node-*.json")) if (n := _node(p)))
    name = run.resolve().name
    if not isinstance(raw, dict):
        return About(name, nodes=nodes)
    if (number := _int(raw, "format") or 0) > contract.FORMAT:
        raise TdbgError(f"{run} has format {number}, this tdbg reads up to {contract.FORMAT}",
                        "read it with the tdbg version that wrote it, or a newer one")  # fmt: skip
    settings = raw.get("settings")
    watch = _int(settings, "watch_steps") if isinstance(settings, dict) else None
    command = raw.get("command")
    return About(
        id=_text(raw, "id") or name, found=True, said_status=_text(raw, "status"), script=_text(raw, "script"),
        command=tuple(str(a) for a in command) if isinstance(command, list) else (),
        start_ns=_int(raw, "start_ns"), end_ns=_int(raw, "end_ns"), world_size=_int(raw, "world_size"),
        nproc_per_node=_int(raw, "nproc_per_node"), host=_text(raw, "host"),
        watch_steps=contract.DEFAULT_WATCH_STEPS if watch is None else watch,
        launcher_pid=_int(raw, "launcher_pid") or 0, nodes=nodes,
    )  # fmt: skip


def status_of(about: About, all_closed: bool, now_ns: int | None = None) -> Status:
    """running only while a launcher shows life; a run that still says running without one was killed."""
    now = time.time_ns() if now_ns is None else now_ns
    for ended in _ENDED:
        if about.said_status == ended:
            return ended
    if any(_alive(n, now) for n in about.nodes):
        return "running"
    if not about.nodes and about.found and _starting(about, now):
        return "running"
    # without a launcher's word the ranks' own is all there is
    return "finished" if all_closed and about.said_status != "running" else "killed"


def _starting(about: About, now: int) -> bool:
    """Before the first node file is written the launcher's own start counts as its heartbeat."""
    return (now - (about.start_ns or 0)) < FRESH_NS and _process_lives(about.host, about.launcher_pid)


def _alive(node: Node, now: int) -> bool:
    return not node.ended and now - node.heartbeat_ns < FRESH_NS and _process_lives(node.host, node.launcher_pid)


def _process_lives(host: str, pid: int) -> bool:
    """False when the process is known to be gone; on another host only the heartbeat can tell."""
    if pid <= 0 or host != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's process: it is there
    return True


def _node(path: Path) -> Node | None:
    raw = read_json(path)
    if not isinstance(raw, dict):
        return None
    attempts: dict[int, tuple[int, ...]] = {}
    listed = raw.get("attempts")
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, dict) and isinstance(item.get("ranks"), dict):
            ranks = sorted(int(r) for r in item["ranks"] if str(r).isdigit())
            attempts[_int(item, "attempt") or 0] = tuple(ranks)
    return Node(_int(raw, "node") or 0, _text(raw, "host"), _int(raw, "launcher_pid") or 0,
                _int(raw, "heartbeat_ns") or 0, _int(raw, "end_ns") is not None, attempts)  # fmt: skip


def _int(raw: dict[str, Any], key: str) -> int | None:
    value = raw.get(key)
    if isinstance(value, str) and value.isdigit():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(raw: dict[str, Any], key: str) -> str:
    value = raw.get(key)
    return value if isinstance(value, str) else ""
