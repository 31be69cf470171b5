"""Which Parquet parts of a run can be read. All are tried at once; when that fails, the bad ones are looked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import duckdb

from ..rankagent.tables import Table
from .parts import Part

Attempt = Callable[[Sequence[Part]], object]


class PartCheck:
    """What is known about each part so far: rows and table description of the good ones, the reason for the bad."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self.rows: dict[str, int] = {}
        self.described: dict[str, str] = {}
        self.bad: dict[str, tuple[Part, str]] = {}

    def open_new(self, parts: Iterable[Part]) -> None:
        """Read the footers of parts not seen before: cut files, other formats, other programs' Parquet."""
        new = [p for p in parts if p.path not in self.described and p.path not in self.bad]
        for p in self.bisect(new, self._footers):
            if p.path not in self.described:
                self.bad[p.path] = (p, "it is no Parquet file of tdbg")

    def good(self, parts: Iterable[Part]) -> list[Part]:
        """Those that can be read, as far as is known."""
        return [p for p in parts if p.path not in self.bad]

    def bisect(self, parts: Sequence[Part], attempt: Attempt) -> list[Part]:
        """The parts on which `attempt` works; the others are noted as bad, with DuckDB's own words."""
        if not parts:
            return []
        try:
            attempt(parts)
            return list(parts)
        except duckdb.Error as e:
            if not may_be_damage(e):
                raise
            if len(parts) == 1:
                self.bad[parts[0].path] = (parts[0], first_line(e))
                return []
        middle = len(parts) // 2
        return self.bisect(parts[:middle], attempt) + self.bisect(parts[middle:], attempt)

    def _footers(self, parts: Sequence[Part]) -> None:
        paths = [p.path for p in parts]
        ask = self._connection.execute
        counts = dict(ask("SELECT file_name, num_rows FROM parquet_file_metadata(?)", [paths]).fetchall())
        described = ask(
            "SELECT decode(value), list(file_name) FROM parquet_kv_metadata(?) "
            "WHERE key = 'tdbg.table'::BLOB GROUP BY ALL", [paths]).fetchall()  # fmt: skip
        table_of = {p.path: p.table for p in parts}
        for text, names in described:
            name = _table_name(text)
            for path in names:
                if table_of.get(path) == name:
                    self.rows[path], self.described[path] = counts[path], text


def may_be_damage(error: Exception) -> bool:
    """Whether a query failed on what it read, rather than on how it was written or on a lack of memory."""
    return isinstance(error, duckdb.Error) and not isinstance(error, _NOT_DAMAGE)


_NOT_DAMAGE = (
    duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException, duckdb.PermissionException,
    duckdb.OutOfMemoryException, duckdb.InterruptException,
)  # fmt: skip


def first_line(error: Exception) -> str:
    """An error in one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _table_name(text: str) -> str:
    try:
        return Table.from_json(text).name
    except (ValueError, KeyError, TypeError):
        return ""
