"""The record file: frames in preallocated, memory-mapped segments. Written by a rank, read by anyone, torn or whole.

A row is one memory copy: no system call, no thread, no lock held by training. What was written survives `kill -9`,
because the pages belong to the kernel. Blocks are reserved before a segment is mapped: on a full disk the recorder
loses rows and counts them, where a sparse mapping would kill the process with SIGBUS.

    segment   header (64 bytes: magic, format, rank, attempt, pid, number, start), then frames, then zeros
    frame     crc32, payload length, table id, 0, seq | payload          (little endian, padded to 8 bytes)
    table 0   payload is a table description (`Table.to_json`), given before the table's first row in each segment
    row       rank, attempt, step, time_ns, fixed columns | per variable column: byte length, item size, bytes
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import time
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import contract
from .tables import Table

SEGMENT_BYTES = 1 << 20  # about 400 steps of all tables; 0.3 ms to reserve and map on ext4
MAGIC = b"TDBGREC\0"
HEADER = struct.Struct("<8sIiiqIq")
HEADER_BYTES = 64
FRAME = struct.Struct("<IIHHQ")
_CRC = struct.Struct("<I")
VAR = struct.Struct("<IB")
TEXT_LIMIT_BYTES = 64 << 10  # longer texts are cut: a hostile exception message must not fill the disk
RETRY_ROWS = 1024  # after a segment could not be had, this many rows are dropped before the next try

STATE = struct.Struct("<8sIiiqqqqqqqqi")
STATE_BYTES = 4096
# Two more parts of the state page; an older writer left zeros there.
POSITION = struct.Struct("<qq16s")  # phases entered so far, wall clock of the last change, phase
POSITION_AT = 512
ASKING = struct.Struct("<iiq")  # how to get the Python stack of training (`stacks`): signal, file descriptor, thread
ASKING_AT = 576


@dataclass(frozen=True)
class State:
    """What a process says about itself in its `state` page. `closed`: 0 running, 1 ended in order."""

    rank: int
    attempt: int
    pid: int
    start_ns: int
    step: int
    heartbeat_ns: int
    rows: int
    dropped: int
    disabled: int
    phase_since_ns: int
    closed: int
    phase: str = ""
    entered: int = 0  # phases entered so far: it grows while steps take long
    signal: int = 0  # that makes the training thread write its stack; 0 for none
    stacks_fd: int = -1  # where it writes it
    thread: int = 0  # the training thread, by the kernel's number


@dataclass(frozen=True)
class _Layout:
    """How one table's rows are packed: `packer` covers frame head and fixed part in one call."""

    number: int
    packer: struct.Struct
    payload_bytes: int
    kinds: tuple[str, ...]
    description: bytes


class Recorder:
    """Writes one process's segments. Never raises after construction: what can't be written is dropped and counted.

    Construction raises OSError when the folder or the state page can't be made (read-only store, full disk).
    Cost: about 1.5 us a row, one page fault per 4 KiB, and 0.3 ms per new segment.
    """

    def __init__(self, folder: Path, rank: int, attempt: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.folder, self.rank, self.attempt = str(folder), rank, attempt
        self.pid = os.getpid()
        self.segment_bytes = segment_bytes
        contract.make_private(folder)
        self._start_ns = time.time_ns()
        self._state = _map_file(os.path.join(self.folder, "state"), STATE_BYTES)
        self._map = self._state  # until the first row asks for a segment
        self._size = 0
        self._at = self._segment = self._seq = self._dropped = self._wait = self._disabled = self._entered = 0
        self._described: set[int] = set()
        self._layouts: dict[str, _Layout] = {}
        self.update_state(0, 0)

    def write(self, table: Table, step: int, fixed: Sequence[Any], variable: Sequence[Any] = (),
              rank: int | None = None) -> bool:  # fmt: skip
        """Append one row; `fixed` and `variable` in the table's column order. False when it had to be dropped."""
        try:
            layout = self._layouts.get(table.name) or self._layout(table)
            tail = b"".join(map(_encode, variable, layout.kinds)) if variable else b""
            if len(variable) != len(layout.kinds):
                raise ValueError(f"table {table.name} has {len(layout.kinds)} variable columns, got {len(variable)}")
            length = layout.payload_bytes + len(tail)
            end = self._at + FRAME.size + length
            if layout.number not in self._described or end + FRAME.size > self._size:
                if not self._make_room(layout, length):
                    self._dropped += 1
                    self._seq += 1  # the gap is the reader's proof of the loss
                    return False
                end = self._at + FRAME.size + length
            at, target = self._at, self._map
            layout.packer.pack_into(target, at, 0, length, layout.number, 0, self._seq,
                                    self.rank if rank is None else rank,
                                    self.attempt, step, time.time_ns(), *fixed)  # fmt: skip
            if tail:
                target[end - len(tail) : end] = tail
            _CRC.pack_into(target, at, zlib.crc32(target[at + 4 : end]))
            self._seq += 1
            self._at = at + padded(length)
            return True
        except (OSError, TypeError, ValueError, IndexError, struct.error, MemoryError):
            self._dropped += 1
            return False

    def update_state(self, step: int, heartbeat_ns: int, closed: int = 0) -> None:
        """Refresh the state page: 0.6 us, once a step."""
        STATE.pack_into(self._state, 0, MAGIC, contract.FORMAT, self.rank, self.attempt, self.pid, self._start_ns,
                         step, heartbeat_ns, self._seq, self._dropped, self._disabled, 0, closed)  # fmt: skip

    def enter(self, phase: str) -> None:
        """Say where training is from now on: 0.5 us. `other` is no work of its own and does not count as progress."""
        self._entered += phase != "other"
        POSITION.pack_into(self._state, POSITION_AT, self._entered, time.time_ns(), phase.encode())

    def answers_to(self, signal: int, fd: int, thread: int) -> None:
        """Say which signal makes the training thread write its stack, and where to."""
        ASKING.pack_into(self._state, ASKING_AT, signal, fd, thread)

    def disable(self) -> None:
        """Count one probe that switched itself off; the reader then knows that the recording is incomplete."""
        self._disabled += 1

    def lost(self, rows: int) -> None:
        """Count rows that never came here, such as device values that had no room; the reader sees them as dropped."""
        self._dropped += rows

    @property
    def dropped(self) -> int:
        return self._dropped

    def _layout(self, table: Table) -> _Layout:
        number = len(self._layouts) + 1
        row = table.packer()
        description = struct.pack("<H", number) + table.to_json().encode()
        kinds = tuple(c.type for c in table.variable)
        layout = _Layout(number, struct.Struct(FRAME.format + row.format[1:]), row.size, kinds, description)
        self._layouts[table.name] = layout
        return layout

    def _make_room(self, layout: _Layout, length: int) -> bool:
        """Room for the row, and for its table's description when this segment has none yet."""
        need = padded(length) + padded(len(layout.description)) + FRAME.size
        if self._at + need > self._size and not self._next_segment(need):
            return False
        if layout.number not in self._described:
            self._described.add(layout.number)
            head = FRAME.pack(0, len(layout.description), 0, 0, 0)[4:]
            crc = _CRC.pack(zlib.crc32(layout.description, zlib.crc32(head)))
            self._map[self._at : self._at + FRAME.size + len(layout.description)] = crc + head + layout.description
            self._at += padded(len(layout.description))
        return True

    def _next_segment(self, need: int) -> bool:
        if self._wait > 0:
            self._wait -= 1
            return False
        size = max(self.segment_bytes, HEADER_BYTES + need + 64)
        path = os.path.join(self.folder, f"{self._segment:05d}.rec")
        try:
            fresh = _map_file(path, size)
        except (OSError, ValueError):
            self._wait = RETRY_ROWS
            return False
        HEADER.pack_into(fresh, 0, MAGIC, contract.FORMAT, self.rank, self.attempt, self.pid, self._segment,
                          self._start_ns)  # fmt: skip
        if self._map is not self._state:
            self._map.close()
        self._map, self._size, self._at, self._described = fresh, size, HEADER_BYTES, set()
        self._segment += 1
        return True

    def close(self, step: int) -> None:
        """Mark the process as ended in order. Idempotent; rows after it are dropped."""
        self.update_state(step, time.time_ns(), closed=1)
        self._size, self._wait = 0, 1 << 60


def _map_file(path: str, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _reserve(fd, size)
        return mmap.mmap(fd, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def _reserve(fd: int, size: int) -> None:
    """Take the blocks now: a write into a hole of a full file system would kill the process, this raises OSError."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        left = size  # a file system that cannot reserve: write zeros
        while left > 0:
            left -= os.write(fd, bytes(min(left, 1 << 20)))


def padded(payload_bytes: int) -> int:
    return (FRAME.size + payload_bytes + 7) & ~7


def _encode(value: Any, kind: str) -> bytes:
    if kind == "text":
        text: bytes = value.encode("utf-8", "replace")[:TEXT_LIMIT_BYTES]
        return VAR.pack(len(text), 1) + text
    if not value:
        return _EMPTY
    if kind == "int64[]":
        try:
            raw = array("i", value).tobytes()  # ids that fit take half the room
        except OverflowError:
            raw = array("q", value).tobytes()
    else:
        raw = array("d" if kind == "float64[]" else "f", value).tobytes()
    return VAR.pack(len(raw), len(raw) // len(value)) + raw


_EMPTY = VAR.pack(0, 8)
CODES = {"float64[]": "d", "float32[]": "f"}
