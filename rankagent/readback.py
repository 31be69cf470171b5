"""Reading what `record` wrote: rows of a segment, torn or whole, a process's state page, its segments."""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import contract
from .record import (
    ASKING,
    ASKING_AT,
    CODES,
    FRAME,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    POSITION,
    POSITION_AT,
    STATE,
    VAR,
    State,
    padded,
)
from .tables import Table


@dataclass
class Damage:
    """What a reader met: `frames` read, `damaged` ones with a wrong checksum, `torn` when the end is cut."""

    frames: int = 0
    damaged: int = 0
    torn: bool = False
    first_seq: int = -1
    last_seq: int = -1
    note: str = ""


Row = dict[str, Any]


def read_segment(path: Path, damage: Damage | None = None) -> Iterator[tuple[Table, Row]]:
    """Rows of one segment, in order. Skips what is damaged and notes it; raises TdbgError for a foreign file.

    Memory: one segment. A frame whose checksum fails is passed over when its length is believable, else reading ends.
    """
    damage = damage if damage is not None else Damage()
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise contract.TdbgError(f"{path}: {e.strerror or e}", "is the run folder readable?") from None
    if len(data) < HEADER_BYTES or data[:8] != MAGIC:
        if not data.strip(b"\0"):
            return  # reserved, never written: the process ended between two system calls
        raise contract.TdbgError(f"{path} is not a tdbg record file", "remove it from the run folder")
    _, fmt, _, _, pid, _, _ = HEADER.unpack_from(data)
    if fmt > contract.FORMAT:
        raise contract.TdbgError(f"{path} has record format {fmt}, this tdbg reads up to {contract.FORMAT}",
                                 "read it with the tdbg version that wrote it, or a newer one")  # fmt: skip
    tables: dict[int, tuple[Table, struct.Struct]] = {}
    at = HEADER_BYTES
    while at + FRAME.size <= len(data):
        crc, length, number, _, seq = FRAME.unpack_from(data, at)
        if crc == 0 and length == 0:
            break
        payload = data[at + FRAME.size : at + FRAME.size + length]
        if len(payload) < length:
            damage.torn = True
            break
        if zlib.crc32(payload, zlib.crc32(data[at + 4 : at + FRAME.size])) != crc:
            following = data[at + padded(length) : at + padded(length) + 4]
            if not following.strip(b"\0"):
                damage.torn = True  # the last frame of a killed process
                break
            damage.damaged += 1
            at += padded(length)
            continue
        at += padded(length)
        if number == 0:
            try:
                table = Table.from_json(payload[2:].decode())
                tables[struct.unpack_from("<H", payload)[0]] = (table, table.packer())
            except (ValueError, KeyError, TypeError, struct.error) as e:
                damage.damaged += 1
                damage.note = f"a table description can't be read: {e}"
            continue
        if number not in tables:
            damage.damaged += 1
            continue
        try:
            row = _decode(payload, *tables[number])
        except (ValueError, struct.error) as e:
            damage.damaged += 1
            damage.note = f"a row of {tables[number][0].name} can't be read: {e}"
            continue
        row["seq"], row["pid"] = seq, pid
        damage.frames += 1
        damage.first_seq = seq if damage.first_seq < 0 else damage.first_seq
        damage.last_seq = seq
        yield tables[number][0], row


def _decode(payload: bytes, table: Table, packer: struct.Struct) -> Row:
    values = packer.unpack_from(payload)
    row: Row = dict(zip(("rank", "attempt", "step", "time_ns"), values, strict=False))
    row.update(zip((c.name for c in table.fixed), values[4:], strict=True))
    at = packer.size
    for c in table.variable:
        length, itemsize = VAR.unpack_from(payload, at)
        at += VAR.size
        raw = payload[at : at + length]
        if len(raw) < length:
            raise ValueError(f"column {c.name} is cut short")
        at += length
        row[c.name] = raw.decode("utf-8", "replace") if c.type == "text" else _numbers(raw, c.type, itemsize)
    return row


def _numbers(raw: bytes, kind: str, itemsize: int) -> list[Any]:
    numbers = array(CODES.get(kind, "i" if itemsize == 4 else "q"))
    numbers.frombytes(raw)  # ValueError when the bytes are no whole number of items
    return numbers.tolist()


def read_state(folder: Path) -> State | None:
    """The state page of a process's folder; None when it is absent, short or foreign."""
    try:
        with open(folder / "state", "rb") as f:
            raw = f.read(ASKING_AT + ASKING.size)
        magic, fmt, rank, attempt, pid, start, step, beat, rows, dropped, disabled, _, closed = STATE.unpack_from(raw)
    except (OSError, struct.error):
        return None
    if magic != MAGIC or fmt > contract.FORMAT:
        return None
    entered, since, phase, signal, fd, thread = 0, 0, b"", 0, -1, 0
    if len(raw) >= ASKING_AT + ASKING.size:
        entered, since, phase = POSITION.unpack_from(raw, POSITION_AT)
        signal, fd, thread = ASKING.unpack_from(raw, ASKING_AT)
    return State(rank, attempt, pid, start, step, beat, rows, dropped, disabled, since, closed,
                 phase.rstrip(b"\0").decode("utf-8", "replace"), entered, signal, fd, thread)  # fmt: skip


def segments(folder: Path) -> list[Path]:
    """Record segments of a process that are not sealed yet, in order."""
    return sorted(p for p in folder.glob("*.rec") if p.stem.isdigit())


def read_json(path: Path) -> Any:
    """A JSON file of the run folder; None when absent or cut in the middle."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
