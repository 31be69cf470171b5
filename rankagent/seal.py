"""Record segments -> Parquet parts. Run by the node's launcher while training goes on, and by the reader for the rest.

A segment's rows become one part per table (dot name, fsync, rename), then `sealed.json` notes the counts, then the
segment is removed. A crash between two of these steps leaves the segment: it is the truth and its parts are ignored,
so no row is lost or counted twice. Never imported in a rank (pyarrow).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from . import contract
from .readback import Damage, Row, read_json, read_segment, segments
from .tables import COMMON, Table

ARROW = {
    "bool": pa.bool_(), "int32": pa.int32(), "int64": pa.int64(), "float64": pa.float64(), "text": pa.string(),
    "int64[]": pa.list_(pa.int64()), "float64[]": pa.list_(pa.float64()), "float32[]": pa.list_(pa.float32()),
}  # fmt: skip


def arrow_schema(table: Table) -> pa.Schema:
    """The Parquet schema of a table; unit and meaning are in each field's metadata."""
    return pa.schema(
        [
            pa.field(c.name, ARROW[c.type], metadata={"unit": c.unit, "meaning": c.meaning})
            for c in (*COMMON, *table.columns)
        ],
        metadata={"tdbg.table": table.to_json(), "tdbg.format": str(contract.FORMAT)},
    )


def write_part(path: Path, table: Table, rows: list[Row]) -> None:
    """Write rows to a Parquet file that appears whole or not at all. Raises OSError when the disk is full."""
    contract.make_private(path.parent)
    schema = arrow_schema(table)
    columns = [pa.array([r[f.name] for r in rows], type=f.type) for f in schema]
    hidden = path.with_name("." + path.name)
    try:
        pq.write_table(pa.Table.from_arrays(columns, schema=schema), hidden, compression="zstd")
        with open(hidden, "rb") as f:
            os.fsync(f.fileno())
        os.replace(hidden, path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise


def rows_by_table(segment: Path, damage: Damage) -> dict[str, tuple[Table, list[Row]]]:
    """All rows of a segment, grouped by table, in the order they were written."""
    grouped: dict[str, tuple[Table, list[Row]]] = {}
    for table, row in read_segment(segment, damage):
        grouped.setdefault(table.name, (table, []))[1].append(row)
    return grouped


def seal_segment(run: Path, folder: Path, segment: Path) -> Damage:
    """Turn one full segment into parts and remove it. Raises TdbgError (foreign file) or OSError (disk full)."""
    kind, index, attempt, pid = contract.parse_process_dir(folder.name) or ("rank", -1, 0, 0)
    damage = Damage()
    for table, rows in rows_by_table(segment, damage).values():
        write_part(contract.part_path(run, table.name, kind, index, attempt, pid, int(segment.stem)), table, rows)
    noted: dict[str, Any] = read_json(folder / "sealed.json") or {}
    noted[segment.stem] = asdict(damage)
    hidden = folder / ".sealed.json"
    hidden.write_text(json.dumps(noted))
    os.replace(hidden, folder / "sealed.json")
    segment.unlink()
    return damage


def seal_process(run: Path, folder: Path, ended: bool) -> list[Damage]:
    """Seal a process's full segments; its last one too once the process has `ended`."""
    waiting = segments(folder)
    return [seal_segment(run, folder, s) for s in (waiting if ended else waiting[:-1])]


def sealed_damage(folder: Path) -> list[Damage]:
    """What was met while sealing this process's segments."""
    noted = read_json(folder / "sealed.json")
    if not isinstance(noted, dict):
        return []
    known = set(Damage.__dataclass_fields__)
    return [Damage(**{k: v for k, v in d.items() if k in known}) for d in noted.values() if isinstance(d, dict)]
