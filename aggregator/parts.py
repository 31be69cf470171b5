"""The files that make up a run: sealed parts, and record segments that are sealed into a temporary folder for reading.

A segment that still exists is the truth: parts of the same process and segment are left aside, since a launcher may
have died between writing them and removing it. Nothing in the run folder is changed. What can't be read is left out
and named in a warning.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..rankagent import contract
from ..rankagent.contract import TdbgError
from ..rankagent.readback import Damage, read_json, read_state, segments
from ..rankagent.record import State

TABLE_NAME = re.compile(r"^[a-z][a-z0-9_]{0,62}$")

# kind, index, attempt, pid. Parts of a node's launcher don't carry its index in their path: it is -1 there.
Writer = tuple[str, int, int, int]


@dataclass(frozen=True)
class Part:
    """One Parquet file of one table; `fresh`: from a segment that is not sealed yet."""

    table: str
    path: str
    writer: Writer
    segment: int
    bytes: int
    fresh: bool = False


@dataclass(frozen=True)
class Process:
    """One recording process and what its files say of themselves. `unsealed` and `damage` are by segment number."""

    kind: str
    index: int
    attempt: int
    pid: int
    state: State | None
    unsealed: tuple[int, ...] = ()
    damage: dict[int, Damage] = field(default_factory=dict)

    @property
    def writer(self) -> Writer:
        """The key under which its parts are found."""
        return (self.kind, self.index if self.kind == "rank" else -1, self.attempt, self.pid)


@dataclass(frozen=True)
class RunFiles:
    """Everything to read, as of one look; `foreign` and `unread` are sentences about what was left out."""

    processes: tuple[Process, ...] = ()
    parts: tuple[Part, ...] = ()
    foreign: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


class NoRoom(TdbgError):
    """The temporary folder can't take what has to be sealed for reading: the whole reading ends."""


class Collector:
    """Looks at a run folder, again and again for a live run: a segment is decoded once per change of its bytes."""

    def __init__(self, run: Path, temporary: Path) -> None:
        self.run, self.temporary = run, temporary
        self._real = os.path.realpath(run)
        self._decoded: dict[str, tuple[int, Damage, tuple[Part, ...]]] = {}  # segment path -> checksum, ...
        self._count = 0
        self._foreign: list[str] = []
        self._unread: list[str] = []

    def collect(self) -> RunFiles:
        """Records first, then tables: a segment that is sealed in between shows up among the parts."""
        self._foreign, self._unread = [], []
        processes, fresh = [], []
        for folder in self._folders(self.run / "records"):
            key = contract.parse_process_dir(folder.name)
            if key is None:
                self._foreign.append(f"records/{folder.name} was not made by tdbg; left out")
                continue
            process, parts = self._process(key, folder)
            processes.append(process)
            fresh += parts
        waiting = {(p.writer, s) for p in processes for s in p.unsealed}
        sealed = [p for p in self._sealed() if (p.writer, p.segment) not in waiting]
        return RunFiles(tuple(processes), (*sealed, *fresh), tuple(self._foreign), tuple(self._unread))

    def _process(self, key: Writer, folder: Path) -> tuple[Process, list[Part]]:
        kind, index, attempt, pid = key
        state = read_state(folder)  # first: what it announces is then in the segments by the time these are read
        damage: dict[int, Damage] = {}
        parts: list[Part] = []
        unsealed = []
        for segment in segments(folder):
            if not self._inside(segment):
                continue
            try:
                damage[int(segment.stem)], found = self._decode(segment, key)
            except NoRoom:
                raise
            except TdbgError as e:
                if segment.exists():
                    self._unread.append(f"{self._name(segment)} can't be read and was left out: {e.message}")
                continue  # else: sealed while we looked, its parts are there now
            parts += found
            unsealed.append(int(segment.stem))
        damage = {**_noted(folder), **damage}
        return Process(kind, index, attempt, pid, state, tuple(unsealed), damage), parts

    def _decode(self, segment: Path, key: Writer) -> tuple[Damage, tuple[Part, ...]]:
        try:
            checksum = zlib.crc32(segment.read_bytes())
        except OSError as e:
            raise TdbgError(f"{segment}: {e.strerror or e}") from None
        known = self._decoded.get(str(segment))
        if known and known[0] == checksum:
            return known[1], known[2]
        from ..rankagent.seal import rows_by_table, write_part  # pyarrow: 0.25 s that a sealed run need not pay

        self._count += 1
        root = self.temporary / f"{self._count:06d}"
        kind, index, attempt, pid = key
        number, damage, parts = int(segment.stem), Damage(), []
        for table, rows in rows_by_table(segment, damage).values():
            path = contract.part_path(root, table.name, kind, index, attempt, pid, number)
            try:
                write_part(path, table, rows)
            except OSError as e:
                raise NoRoom(f"can't write to the temporary folder {self.temporary}: {e.strerror or e}",
                             "free some room there, or set TMPDIR to another folder") from None  # fmt: skip
            parts.append(Part(table.name, str(path), key, number, path.stat().st_size, True))
        if known and known[2]:
            shutil.rmtree(Path(known[2][0].path).parents[3], ignore_errors=True)
        self._decoded[str(segment)] = (checksum, damage, tuple(parts))
        return damage, tuple(parts)

    def _sealed(self) -> Iterator[Part]:
        for table in self._folders(self.run / "tables"):
            if not TABLE_NAME.match(table.name):
                self._foreign.append(f"tables/{table.name} was not made by tdbg; left out")
                continue
            for where in self._folders(table):
                yield from self._parts_in(table.name, where)

    def _parts_in(self, table: str, where: Path) -> Iterator[Part]:
        who = contract.parse_writer(where.name)
        if who is None:
            self._foreign.append(f"{self._name(where)} was not made by tdbg; left out")
            return
        for entry in self._entries(where):
            if entry.name.startswith(".part-"):
                continue  # being written, or cut off by a crash: its segment still exists
            key = contract.parse_part(entry.name)
            if key is None:
                self._foreign.append(f"{self._name(Path(entry.path))} was not made by tdbg; left out")
            elif self._inside(Path(entry.path), entry.is_symlink()):
                attempt, pid, segment = key
                yield Part(table, entry.path, (*who, attempt, pid), segment, entry.stat().st_size)

    def _folders(self, parent: Path) -> Iterator[Path]:
        if not self._inside(parent):
            return
        for entry in self._entries(parent):
            path = Path(entry.path)
            if not self._inside(path, entry.is_symlink()):
                continue
            if entry.is_dir():
                yield path
            elif not entry.name.startswith("."):
                self._foreign.append(f"{self._name(path)} was not made by tdbg; left out")

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as found:
                return sorted(found, key=lambda e: e.name)
        except FileNotFoundError:
            return []
        except OSError as e:
            self._unread.append(f"{self._name(folder)} can't be read: {e.strerror or e}; left out")
            return []

    def _inside(self, path: Path, linked: bool | None = None) -> bool:
        """A link may not lead the reader out of the run, nor to nothing; a pipe or device would block it."""
        if path.is_symlink() if linked is None else linked:
            real = os.path.realpath(path)
            if not (real.startswith(self._real + os.sep) and os.path.exists(real)):
                self._unread.append(f"{self._name(path)} is a link that leads out of the run; left out")
                return False
        if path.exists() and not (path.is_file() or path.is_dir()):
            self._unread.append(f"{self._name(path)} is neither a file nor a folder; left out")
            return False
        return True

    def _name(self, path: Path) -> str:
        return os.path.relpath(path, self.run)


def _noted(folder: Path) -> dict[int, Damage]:
    """sealed.json by segment; entries that make no sense are passed over (their rows then lack an account)."""
    raw: Any = read_json(folder / "sealed.json")
    noted: dict[int, Damage] = {}
    for name, values in raw.items() if isinstance(raw, dict) else ():
        if name.isdecimal() and isinstance(values, dict):
            plain = vars(Damage())
            fitting = {k: v for k, v in values.items() if k in plain and type(v) is type(plain[k])}
            noted[int(name)] = Damage(**fitting)
    return noted
