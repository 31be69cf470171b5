"""What a table is: a name, typed columns with unit and meaning. Every frame and Parquet part carries this description.

Each row of each table also has the columns of `COMMON`, filled in by the recorder. A probe declares its `TABLE`
beside the code that fills it; the tables of the node's launcher are in `nodetables`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import struct
from dataclasses import dataclass, field
from functools import lru_cache

# type of a column -> struct code; None: variable length, stored after the fixed part
CODES: dict[str, str | None] = {
    "bool": "?", "int32": "i", "int64": "q", "float64": "d",
    "text": None, "int64[]": None, "float64[]": None, "float32[]": None,
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """One column: `type` is a key of CODES, `unit` an SI symbol or "" for a plain number or text."""

    name: str
    type: str
    unit: str
    meaning: str


COMMON = (
    Column("rank", "int32", "", "global rank; -1 for rows about a whole node"),
    Column("attempt", "int32", "", "elastic attempt, from 0"),
    Column("step", "int64", "", "optimizer step that the row belongs to, from 1; 0 before the first"),
    Column("time_ns", "int64", "ns", "wall clock, since 1970"),
    Column("seq", "int64", "", "order of writing within the process, without gaps unless rows were lost"),
    Column("pid", "int64", "", "process that wrote the row"),
)


@dataclass(frozen=True)
class Table:
    """A named list of columns. Raises ValueError on a column type that no record can hold."""

    name: str
    columns: tuple[Column, ...]
    meaning: str = ""
    fixed: tuple[Column, ...] = field(init=False)
    variable: tuple[Column, ...] = field(init=False)

    def __post_init__(self) -> None:
        for c in self.columns:
            if c.type not in CODES:
                raise ValueError(f"table {self.name}, column {c.name}: type {c.type!r} is none of {sorted(CODES)}")
        object.__setattr__(self, "fixed", tuple(c for c in self.columns if CODES[c.type]))
        object.__setattr__(self, "variable", tuple(c for c in self.columns if not CODES[c.type]))

    def packer(self) -> struct.Struct:
        """Layout of a row's fixed part: rank, attempt, step, time_ns, then the fixed columns in order."""
        return struct.Struct("<iiqq" + "".join(str(CODES[c.type]) for c in self.fixed))

    def to_json(self) -> str:
        """The description that each record segment carries, so that a run can be read without the probe's code."""
        columns = [[c.name, c.type, c.unit, c.meaning] for c in self.columns]
        return json.dumps({"name": self.name, "meaning": self.meaning, "columns": columns})

    @staticmethod
    def from_json(text: str) -> Table:
        raw = json.loads(text)
        return Table(raw["name"], tuple(Column(*c) for c in raw["columns"]), raw.get("meaning", ""))


@lru_cache(maxsize=1)
def known_tables() -> dict[str, Table]:
    """Every table this version writes, by name. Imports the probes' modules; none of them imports torch then."""
    from . import nodetables, probes

    found = {t.name: t for t in nodetables.TABLES}
    for info in pkgutil.iter_modules(probes.__path__):
        module = importlib.import_module(f"{probes.__name__}.{info.name}")
        for table in getattr(module, "TABLES", None) or (module.TABLE,):
            if table.name in found:
                raise ValueError(f"{module.__file__}: a table named {table.name!r} exists already")
            found[table.name] = table
    return found
