"""How each rank of a job that came to a halt stands: it waits for others, works, or is stuck.

Pure functions of one row per rank, as `detectors/hang` reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .waits import Place, place_of, user_code

# Of one core. A loop that polls every 10 ms takes 1 to 2 %, the threads of communication libraries less; a computation
# takes all that it can get, and time that it waits for a core counts as well.
BUSY = 0.1
# What is copied or fetched moves faster; a marker file that is polled ten times a second moves less.
IO_BYTES_PER_SECOND = 64 << 10

Standing = Literal["waits", "works", "stuck", "unknown"]


class Row(NamedTuple):
    """One rank of one attempt. Of a stall: its last look, if training did not go on after it."""

    attempt: int
    rank: int
    completed: int  # last step that it completed
    stalled: bool
    look: int  # 1 at the limit; 2 after at least twice as long
    told: bool  # all that it issued is known
    issued: list[dict[str, Any]]  # the last collective of each group (`positions.Last`)
    noticed_ns: int
    limit_ns: int
    since_ns: int
    quiet_ns: int
    window_ns: int
    busy_ns: int
    below_ns: int
    io_bytes: int
    device: bool
    closed: bool
    phase: str
    phase_since_ns: int
    state: str
    stacks: list[str]  # of that look
    stopping: bool  # it ran when the launcher began to stop the ranks
    last_stack: str  # that it gave then
    exit_code: int  # -1000: nobody saw it end
    stopped: bool
    ended_ns: int
    type: str  # class of its uncaught exception; empty without one
    message: str
    frames: str
    failed_step: int
    failed_ns: int
    orderly: bool


@dataclass(frozen=True)
class Stand:
    """A rank, how it stands, and where; `why` says what else is known of that."""

    row: Row
    standing: Standing
    place: Place | None = None
    why: str = ""

    @property
    def step(self) -> int:
        return max(1, self.row.failed_step or self.row.completed + 1)

    @property
    def text(self) -> str:
        if self.place is None:
            return self.why
        said = self.place.text
        return f"{said}, {self.why}" if self.why else said


def stand_in_stall(row: Row, world_size: int) -> Stand:
    """From the samples of a stall."""
    place = place_of(row.stacks[-1]) if row.stacks else None
    if place is None:
        return _without_stack(row)
    busy, waits_for_device = _busy(row), row.device and _constant(row.stacks)
    if place.kind == "communication" or (place.kind == "device" and waits_for_device):
        return Stand(row, "waits", place)
    if place.kind == "backward" and world_size > 1 and (not busy or waits_for_device):
        return Stand(row, "waits", Place(place.kind, place.where, "backward, in the reduction of gradients"))
    if not busy:
        return Stand(row, "stuck", place, _stopped(row))
    # a process that waits for its device spins; one that moves data or has busy workers does not only wait
    if waits_for_device and not _busy_below(row):
        return Stand(row, "waits", Place("device", place.where, place.what or "its device"))
    return Stand(row, "works", place)


def _without_stack(row: Row) -> Stand:
    if row.closed:
        return Stand(row, "stuck", None, "its program had come to its end, but the process did not end")
    return Stand(row, "stuck" if _stopped(row) else "unknown", None, _stopped(row) or "it gave no stack")


def _stopped(row: Row) -> str:
    return {"T": "stopped by a signal", "t": "held by a debugger", "D": "waiting for a disk or a file system"}.get(
        row.state, ""
    )


def _constant(stacks: Sequence[str]) -> bool:
    return len(stacks) > 1 and len(set(stacks)) == 1


def _busy(row: Row) -> bool:
    return row.busy_ns > BUSY * row.window_ns or _busy_below(row)


def _busy_below(row: Row) -> bool:
    moved = row.io_bytes * 1e9 > IO_BYTES_PER_SECOND * row.window_ns
    return row.below_ns > BUSY * row.window_ns or moved


def stand_at_the_end(row: Row) -> Stand:
    """From the exception that ended it, or from the stack that it gave when the launcher stopped the ranks."""
    if row.type:
        place = place_of(row.frames)
        return Stand(row, "waits" if place else "unknown", place)
    place = place_of(row.last_stack)
    if place is None:
        return Stand(row, "unknown", None, "it gave no stack")
    if place.kind in ("communication", "backward", "device"):
        return Stand(row, "waits", place)
    if any(name in row.last_stack for name in _HANDLING):
        return Stand(row, "unknown", place)  # the wait may have been over by then
    return Stand(row, "stuck", place)


def runs_on_the_spot(row: Row) -> bool:
    """Whether all stacks of this look lie in one function of the user's, called in one way: a loop without an end, or
    long work. At the limit nobody can tell these apart; what goes on for twice as long is worth a word."""
    return row.look > 1 and len(row.stacks) > 1 and len({user_code(s) for s in row.stacks}) == 1


_HANDLING = ("/traceback.py:", "excepthook", "/linecache.py:", "/warnings.py:", "/logging/__init__.py:")


def odd_ones(stands: Sequence[Stand]) -> tuple[list[Stand], bool]:
    """(those apart from a strict majority, True); without a majority (all of them, False); all alike ([], True)."""
    keys = [(s.step, s.place.what if s.place else "", s.place.where if s.place else "") for s in stands]
    if len(set(keys)) == 1:
        return [], True
    key, count = Counter(keys).most_common(1)[0]
    if 2 * count > len(stands):
        return [s for s, k in zip(stands, keys, strict=True) if k != key], True
    return list(stands), False
