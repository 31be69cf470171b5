"""The only code that opens a run: sealed parts and unsealed segments as DuckDB views, one per table, read-only.

    with Store(run) as store:
        store.rows("SELECT rank, max(step) FROM step GROUP BY rank")

Tables that nobody wrote are empty views with their columns, so that every query is valid on every run. Files that
can't be read are left out, each with a warning; they never end the reading.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb

from ..rankagent.contract import TdbgError
from ..rankagent.tables import COMMON, Table, known_tables
from .about import About, read_about
from .damage import PartCheck, first_line, may_be_damage
from .parts import Collector, Part, Process, RunFiles, Writer
from .views import create_views

TYPES = {
    "bool": "BOOLEAN", "int32": "INTEGER", "int64": "BIGINT", "float64": "DOUBLE", "text": "VARCHAR",
    "int64[]": "BIGINT[]", "float64[]": "DOUBLE[]", "float32[]": "FLOAT[]",
}  # fmt: skip
MEMORY_LIMIT = "1536MiB"  # verdicts on 1,000 ranks must fit in 2 GiB with the interpreter; beyond it DuckDB spills
THREADS = 8  # more hardly help: the queries are bound by opening files, and training may need the cores
# Tables are read into memory, the smallest first, up to this much in all: rules then run twice as fast, and damage
# inside a file shows at once. The rest of the memory limit is for queries. Beyond it queries read the files again.
HOLD_BYTES = 640 << 20
LIST_EXPANSION = 4  # lists and texts in memory against the size of the compressed part; measured 2 to 5
RECENT_SEGMENTS = 2  # newest segments per process in schema `recent`: what a live screen needs, the same at any hour


class Store:
    """A run, open for reading. Raises TdbgError when there is no room to work in; damage only ever makes warnings."""

    def __init__(self, run: Path, live: bool = False) -> None:
        """`live`: the run is looked at again and again; nothing is held, and schema `recent` has its newest rows."""
        self.path, self._live = run, live
        self.about: About = read_about(run)
        self._temporary = tempfile.TemporaryDirectory(prefix="tdbg-")
        folder = os.path.realpath(self._temporary.name)
        self.connection = _connect(os.path.realpath(run), folder)
        self._collector = Collector(Path(os.path.realpath(run)), Path(folder))
        self._check = PartCheck(self.connection)
        self._viewed: tuple[Part, ...] | None = None
        self.files = RunFiles()
        self.refresh()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the temporary folder back."""
        self.connection.close()
        self._temporary.cleanup()

    def refresh(self) -> None:
        """Look again. Only segments and parts that are new or have changed are decoded or checked."""
        self.about = read_about(self.path)
        self.files = self._collector.collect()
        if self.files.parts != self._viewed:
            self._check.open_new(self.files.parts)
            self._create_views()
            self._viewed = self.files.parts

    @property
    def processes(self) -> tuple[Process, ...]:
        return self.files.processes

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for every file that was left out."""
        return (
            *self.files.foreign,
            *self.files.unread,
            *(f"{self._name(part.path)} was left out: {why}" for part, why in self._check.bad.values()),
        )

    @property
    def damaged_tables(self) -> dict[str, set[Writer]]:
        """Tables that lack parts because these can't be read, and whose parts they were."""
        lacking: dict[str, set[Writer]] = {}
        for part, _ in self._check.bad.values():
            lacking.setdefault(part.table, set()).add(part.writer)
        return lacking

    def stored_rows(self) -> dict[Writer, Counter[int]]:
        """Rows in readable parts, by writer and segment; to be held against the recorder's own count of frames."""
        rows: dict[Writer, Counter[int]] = {}
        for p in self._check.good(self.files.parts):
            rows.setdefault(p.writer, Counter())[p.segment] += self._check.rows[p.path]
        return rows

    def rows(self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of one query; when it meets a damaged file, of the same query without that file."""
        return self.query(sql, parameters)[1]

    def query(
        self, sql: str, parameters: Sequence[Any] | dict[str, Any] = ()
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Column names and all rows of one query. Raises duckdb.Error for a query that is wrong in itself."""
        while True:
            try:
                cursor = self.connection.execute(sql, parameters)
                return [d[0] for d in cursor.description or ()], cursor.fetchall()
            except duckdb.Error as e:
                if not may_be_damage(e) or not self.drop_damaged():
                    raise

    def drop_damaged(self) -> bool:
        """After a query failed: read every part through and leave out what can't be read. True when there was some."""
        before = len(self._check.bad)
        for parts in self._by_table(self.files.parts).values():
            self._check.bisect(parts, self._read)
        if len(self._check.bad) == before:
            return False
        self._create_views()
        return True

    def _read(self, parts: Sequence[Part]) -> None:
        values = ", ".join(quoted(c) for c in self._held(parts))
        self.connection.execute(f"SELECT bit_xor(hash({values})) FROM {self._source(parts)}").fetchall()

    def _name(self, path: str) -> str:
        return os.path.relpath(path, os.path.realpath(self.path))

    def _by_table(self, parts: Iterable[Part]) -> dict[str, list[Part]]:
        found: dict[str, list[Part]] = {}
        for p in self._check.good(parts):
            found.setdefault(p.table, []).append(p)
        return found

    # ------------------------------------------------------------ views

    def _create_views(self) -> None:
        by_table: dict[str, list[Part]] = {name: [] for name in known_tables()} | self._by_table(self.files.parts)
        hold = self._to_hold(by_table)
        newest = _newest_segments(self.files.parts)
        self.connection.execute("CREATE SCHEMA IF NOT EXISTS recent; CREATE SCHEMA IF NOT EXISTS held")
        for name, parts in by_table.items():
            self._create_view("main", name, self._hold(name, parts) if name in hold else self._select(name, parts))
            if self._live:
                recent = [p for p in parts if p.segment > newest[p.writer] - RECENT_SEGMENTS]
                self._create_view("recent", name, self._select(name, recent))
        create_views(self.connection)

    def _to_hold(self, by_table: dict[str, list[Part]]) -> set[str]:
        """Tables that fit into memory together. None for a live run, where they would be read anew at every look."""
        sizes = {name: self._size(parts) for name, parts in by_table.items() if parts and not self._live}
        hold, used = set(), 0
        for name in sorted(sizes, key=lambda n: sizes[n]):
            used += sizes[name]
            if used > HOLD_BYTES:
                break
            hold.add(name)
        return hold

    def _size(self, parts: list[Part]) -> int:
        """Bytes that a table will about take in memory."""
        row = 8 * len(self._held(parts))
        return sum(row * self._check.rows[p.path] + LIST_EXPANSION * p.bytes for p in parts)

    def _create_view(self, schema: str, table: str, select: str) -> None:
        self.connection.execute(f"CREATE OR REPLACE VIEW {schema}.{quoted(table)} AS {select}")

    def _hold(self, table: str, parts: list[Part]) -> str:
        """Read a table into memory, without the parts that can't be read. Returns the query for it."""
        name = f"held.{quoted(table)}"
        try:
            self.connection.execute(f"CREATE OR REPLACE TABLE {name} AS {self._select(table, parts)}")
        except duckdb.Error as e:
            if not may_be_damage(e):
                raise
            good = self._check.bisect(parts, self._read)
            if len(good) == len(parts):
                raise
            self.connection.execute(f"CREATE OR REPLACE TABLE {name} AS {self._select(table, good)}")
        return f"SELECT * FROM {name}"

    def _select(self, table: str, parts: list[Part]) -> str:
        """A table's rows with explicit columns; without parts an empty result of the right shape."""
        columns = self._columns(table, parts)
        if not parts:
            empty = ", ".join(f"CAST(NULL AS {kind}) AS {quoted(c)}" for c, kind in columns)
            return f"SELECT {empty} WHERE FALSE"
        held = self._held(parts)
        return f"SELECT {', '.join(_column(c, kind, held.get(c)) for c, kind in columns)} FROM {self._source(parts)}"

    def _source(self, parts: Sequence[Part]) -> str:
        """The parts as one relation. Parts of one description need no look into each file before every query."""
        alike = len({self._check.described[p.path] for p in parts}) == 1
        paths = ", ".join(_text(p.path) for p in parts)
        return f"read_parquet([{paths}], union_by_name={'false' if alike else 'true'}, hive_partitioning=false)"

    def _columns(self, table: str, parts: list[Part]) -> list[tuple[str, str]]:
        """(name, DuckDB type) of a table: as this version knows it, and what the parts hold beside."""
        columns = {c.name: TYPES[c.type] for c in COMMON}
        known = known_tables().get(table)
        columns |= {c.name: TYPES[c.type] for c in (known.columns if known else ())}
        return list(({**self._held(parts), **columns} if parts else columns).items())

    def _held(self, parts: Sequence[Part]) -> dict[str, str]:
        """(name, DuckDB type) of every column that some of these parts have."""
        held = {c.name: TYPES[c.type] for c in COMMON}
        for text in {self._check.described[p.path] for p in parts}:
            for c in Table.from_json(text).columns:
                held.setdefault(c.name, TYPES[c.type])
        return held


def _connect(run: str, temporary: str) -> duckdb.DuckDBPyConnection:
    """A connection that can open files of this run and of the temporary folder, and nothing else."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        connection = duckdb.connect(config={"memory_limit": MEMORY_LIMIT, "threads": min(cores, THREADS),
                                            "temp_directory": os.path.join(temporary, "spill")})  # fmt: skip
        connection.execute(f"SET allowed_directories = [{_text(run)}, {_text(temporary)}]")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
    except duckdb.Error as e:
        raise TdbgError(f"DuckDB can't be started: {first_line(e)}", "tdbg needs a working duckdb package") from None
    return connection


def _column(name: str, kind: str, held: str | None) -> str:
    """A column as the view shows it, from one that the parts hold with the same type, with another, or not at all."""
    if held == kind:
        return quoted(name)
    return f"CAST({quoted(name) if held else 'NULL'} AS {kind}) AS {quoted(name)}"


def _newest_segments(parts: Iterable[Part]) -> dict[Writer, int]:
    newest: dict[Writer, int] = {}
    for p in parts:
        newest[p.writer] = max(newest.get(p.writer, 0), p.segment)
    return newest


def quoted(name: str) -> str:
    """An SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
