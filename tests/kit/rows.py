"""Tables from rows: an in-memory run for detector tests, with every table and view and only the rows a test gives."""

from __future__ import annotations

import struct
from typing import Any

import duckdb

from tdbg.aggregator import detector
from tdbg.aggregator.detector import RunFacts
from tdbg.aggregator.findings import Abstention, Finding
from tdbg.aggregator.views import create_views
from tdbg.rankagent.tables import COMMON, known_tables

DUCKDB = {
    "bool": "BOOLEAN", "int32": "INTEGER", "int64": "BIGINT", "float64": "DOUBLE", "text": "VARCHAR",
    "int64[]": "BIGINT[]", "float64[]": "DOUBLE[]", "float32[]": "FLOAT[]",
}  # fmt: skip
EMPTY = {
    "bool": False, "int32": 0, "int64": 0, "float64": 0.0, "text": "", "int64[]": [], "float64[]": [], "float32[]": [],
}  # fmt: skip


# an ordinary training loop's
DEFAULTS = {("batch", "grad_enabled"): True, ("batch", "worker"): -1, ("loader", "sharers"): 1}


def bits(value: float) -> int:
    """A number as the optim_state table holds it."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


class Rows:
    """`Rows().add("step", rank=0, step=1)`; columns that a row leaves out are 0, false or empty, seq counts up."""

    def __init__(self) -> None:
        self.connection = duckdb.connect()
        self._seq = 0
        for table in known_tables().values():
            columns = ", ".join(f'"{c.name}" {DUCKDB[c.type]}' for c in (*COMMON, *table.columns))
            self.connection.execute(f'CREATE TABLE "{table.name}" ({columns})')
        create_views(self.connection)

    def add(self, table: str, **values: Any) -> Rows:
        columns = (*COMMON, *known_tables()[table].columns)
        unknown = set(values) - {c.name for c in columns}
        assert not unknown, f"table {table} has no column {sorted(unknown)}"
        self._seq += 1
        row = {c.name: EMPTY[c.type] for c in columns} | {"seq": self._seq, "time_ns": self._seq * 1_000_000}
        row |= {column: value for (of, column), value in DEFAULTS.items() if of == table} | values
        marks = ", ".join("?" for _ in columns)
        self.connection.execute(f'INSERT INTO "{table}" VALUES ({marks})', [row[c.name] for c in columns])
        return self

    def add_all(self, recorded: dict[str, list[dict[str, Any]]], *tables: str) -> Rows:
        """The rows that an agent wrote into these tables."""
        for table in tables:
            for row in recorded.get(table, []):
                self.add(table, **row)
        return self

    def judge(self, module: Any, **facts: Any) -> tuple[dict[str, str], list[tuple[str, Finding]]]:
        """(outcome by code, findings with their codes) of one detector over these rows."""
        ranks = "SELECT rank FROM step UNION SELECT rank FROM identity UNION SELECT rank FROM batch"
        seen = [r[0] for r in self.connection.execute(ranks).fetchall()]
        facts.setdefault("world_size", 1 + max(seen, default=0))
        ruling = detector.run(module, self.connection, RunFacts(**facts))
        return {v.reason_code: v.outcome for v in ruling.verdicts}, list(ruling.findings)


__all__ = ["Abstention", "Finding", "Rows", "RunFacts", "bits"]
