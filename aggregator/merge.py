"""Brings the node-local folders of one multi-node run together: `tdbg merge DIR ...`.

Each node's launcher wrote a run folder of its own, under one id, with its own ranks. The merged folder is what one
shared folder would have been, so that every command reads it. Nothing of the inputs changes. What a node is missing
shows as missing ranks: a merged run is as incomplete as its parts.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..rankagent import contract
from ..rankagent.contract import TdbgError
from ..rankagent.readback import read_json
from .about import About, read_about, status_of

FOLDERS = ("records", "tables", "logs")
# The gravest speaks for the run: one node whose launcher was killed makes it no finished one.
STATUS = ("killed", "failed", "running", "finished")
SKEW_NS = 600 * 10**9  # nodes whose clocks are off by more than ten minutes are not merged on trust
_SEALED = re.compile(r"part-.*\.parquet$")  # never written again: may be shared with the input


@dataclass(frozen=True)
class Merged:
    """What was made: `missing_nodes` of the number that the job was started with."""

    run: str
    path: Path
    sources: tuple[Path, ...]
    nodes: tuple[int, ...]
    ranks: tuple[int, ...]
    world_size: int | None
    files: int
    missing_nodes: int


def merge(sources: Sequence[Path], target: Path) -> Merged:
    """Make `target` from run folders of one run. Raises TdbgError, and then leaves nothing behind.

    Cost: sealed files are hard links where the file system can, copies elsewhere.
    """
    sources = list(dict.fromkeys(s.resolve() for s in sources))
    abouts = [read_about(s) for s in sources]
    _together(sources, abouts)
    if os.path.lexists(target):
        raise TdbgError(f"{target} is there already", "give another place with -o")
    files = _files(sources)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=".merge-"))  # 0700; commands pass over hidden folders
    try:
        for folder in FOLDERS[:2]:
            contract.make_private(building / folder)
        for relative, source in files.items():
            _take(source / relative, building / relative)
        (building / "run.json").write_text(json.dumps(_run_json(sources, abouts), indent=1))
        os.chmod(building / "run.json", 0o600)
        os.rename(building, target)
    except OSError as e:
        raise TdbgError(f"{target} could not be made: {e.strerror or e} ({e.filename})",
                        "nothing was left behind; the input folders are as they were") from None  # fmt: skip
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return _summary(sources, abouts, target, len(files))


def _together(sources: Sequence[Path], abouts: Sequence[About]) -> None:
    """Whether these are parts of one run; TdbgError names the two that don't fit."""
    if len(sources) < 2:
        raise TdbgError("merge takes the folders of two nodes or more", "tdbg merge NODE-0/RUN NODE-1/RUN -o RUN")
    first, its = sources[0], abouts[0]
    for source, about in zip(sources, abouts, strict=True):
        if not about.found:
            raise TdbgError(f"{source} has no readable run.json", "merge takes whole run folders that tdbg-run made")
        if status_of(about, all_closed=False) == "running":
            raise TdbgError(f"{source} is still being recorded", "merge when all nodes have ended")
        for what, mine, other, same in (
            ("the id", its.id, about.id, _one_id(its.id, about.id)),
            ("the script", its.script, about.script, its.script == about.script),
            ("the world size", its.world_size, about.world_size,
             None in (its.world_size, about.world_size) or its.world_size == about.world_size),
            ("the start (ns)", its.start_ns, about.start_ns, _together_in_time(its, about)),
        ):  # fmt: skip
            if not same:
                raise TdbgError(f"{first} and {source} are not of one run: {what} is {mine!r} and {other!r}",
                                "give the folders of one job's nodes")  # fmt: skip


def _one_id(a: str, b: str) -> bool:
    """The same, or one is the other with the number that a store appends where the name was taken."""
    return a == b or any(re.fullmatch(rf"{re.escape(x)}-\d+", y) for x, y in ((a, b), (b, a)))


def _together_in_time(a: About, b: About) -> bool:
    """Nodes of one job run at one time; unknown times are no reason against it."""
    times = (a.start_ns, a.end_ns, b.start_ns, b.end_ns)
    if any(t is None for t in times):
        return True
    return max(a.start_ns or 0, b.start_ns or 0) <= min(a.end_ns or 0, b.end_ns or 0) + SKEW_NS


def _files(sources: Sequence[Path]) -> dict[Path, Path]:
    """Relative path -> the source it is taken from. A file that two of them have must be the same in both."""
    found: dict[Path, Path] = {}
    for source in sources:
        for relative in _listed(source):
            other = found.setdefault(relative, source)
            if other is not source and not filecmp.cmp(other / relative, source / relative, shallow=False):
                raise TdbgError(f"{other} and {source} both hold {relative}, and not the same",
                                "each node's ranks must be in one folder only")  # fmt: skip
    return found


def _listed(source: Path) -> Iterator[Path]:
    """Files of a run folder; links, devices and what begins with a dot are left out."""

    def failed(e: OSError) -> None:
        raise TdbgError(f"{e.filename} can't be read: {e.strerror}", "merge reads every file of the folders")

    yield from (p.relative_to(source) for p in sorted(source.glob("node-*.json")) if _plain(p))
    for folder in FOLDERS:
        if (source / folder).is_symlink() or not (source / folder).is_dir():
            continue
        for at, _, names in os.walk(source / folder, onerror=failed):
            yield from ((Path(at) / n).relative_to(source) for n in sorted(names)
                        if not n.startswith(".") and _plain(Path(at) / n))  # fmt: skip


def _plain(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _take(source: Path, to: Path) -> None:
    """A hard link of what is never written again, else a copy; readable by its user only."""
    contract.make_private(to.parent)
    if _SEALED.match(source.name):
        try:
            os.link(source, to)
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copyfile(source, to)
    os.chmod(to, 0o600)


def _run_json(sources: Sequence[Path], abouts: Sequence[About]) -> dict[str, Any]:
    """The first node's, over the time of all of them; the gravest status and the first exit code that is none."""
    every = [raw for s in sources if isinstance(raw := read_json(s / "run.json"), dict)]
    order = sorted(range(len(every)), key=lambda i: min((n.node for n in abouts[i].nodes), default=1 << 30))
    merged: dict[str, Any] = dict(every[order[0]])
    ends = [raw.get("end_ns") for raw in every]
    said = [status_of(about, all_closed=False) for about in abouts]
    codes = [raw.get("exit_code") for raw in every]
    merged["start_ns"] = min((raw["start_ns"] for raw in every if isinstance(raw.get("start_ns"), int)), default=None)
    known = [e for e in ends if isinstance(e, int)]
    merged["end_ns"] = max(known) if len(known) == len(ends) else None
    merged["status"] = min(said, key=STATUS.index)
    merged["exit_code"] = next((c for c in codes if c), codes[0])
    merged["id"] = min((a.id for a in abouts), key=len)
    return merged


def _summary(sources: Sequence[Path], abouts: Sequence[About], target: Path, files: int) -> Merged:
    made = read_about(target)
    nodes = sorted(n.node for n in made.nodes)
    ranks = sorted({r for n in made.nodes for attempt in n.attempts.values() for r in attempt})
    raw = read_json(target / "run.json")
    wanted = str(raw.get("nnodes", "")).rpartition(":")[2] if isinstance(raw, dict) else ""
    return Merged(made.id, target, tuple(sources), tuple(nodes), tuple(ranks), made.world_size, files,
                  max(0, int(wanted) - len(nodes)) if wanted.isdecimal() else 0)  # fmt: skip
