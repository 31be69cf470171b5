"""Which loads of weights were resumes: training went on from where a checkpoint was saved. Pure functions over events.

Weights are loaded for many reasons: fine-tuning, evaluation, a teacher, going back to the best. A resume is told by
what the program itself did: it put other training state back, an earlier attempt of the same run wrote the file, or its
counters went on from those in the file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

STATE = ("optimizer", "scheduler", "scaler")


class Event(NamedTuple):
    """A row of the checkpoint table, and what is known beside it."""

    installed: bool  # the recording was made by a version that sees checkpoints
    rank: int | None  # None: there is no row at all
    attempt: int
    pid: int
    step: int
    seq: int
    time_ns: int
    number: int
    source: int
    backwards: int
    object: int
    nth: int
    params: int
    entries: int
    covered: int
    position: int
    lr: float
    event: str
    part: str
    path: str
    class_name: str
    parts: str
    epoch: int | None  # of an applied model: epoch of the first pass of a shuffling sampler after it
    skipped: int  # and batches that this pass left out
    draws: bool  # random numbers are drawn in training
    lrs: int  # learning rates in force in the attempt
    reached: int | None  # of a scheduler: its furthest position from there on
    pace: float | None  # and its largest advance per step

    @property
    def held(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.parts) if self.parts else {}
        return found


@dataclass
class Restored:
    """What one process put back between two backwards, and what stood at the updates after it."""

    rank: int
    attempt: int
    events: list[Event]
    file: Event | None = None  # the load that the weights came from
    held: dict[str, Any] = field(default_factory=dict)  # by that file and by others of its folder
    saved: Event | None = None  # where this run wrote that file
    why: str = ""  # this is a resume; empty: nothing shows it

    def applied(self, part: str) -> list[Event]:
        return [e for e in self.events if e.event == "apply" and e.part == part]

    def standing(self, part: str, nth: int, number: int | None = None) -> list[Event]:
        return [e for e in self.events if e.event == "update" and (e.part, e.nth) == (part, nth)
                and number in (None, e.object)]  # fmt: skip

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.held.get("counters", {}))

    @property
    def step(self) -> int:
        return self.standing("optimizer", 1)[0].step


def restored(events: Sequence[Event]) -> Iterator[Restored]:
    """Every time that a process put weights back into what it then trained."""
    saves = sorted((e for e in events if e.event == "save"), key=lambda e: e.time_ns)
    processes: dict[tuple[int, int, int], list[Event]] = {}
    for e in events:
        if e.rank is not None:
            processes.setdefault((e.attempt, e.rank, e.pid), []).append(e)
    for (attempt, rank, _), own in sorted(processes.items()):
        for backwards in sorted({e.backwards for e in own if e.event == "update"}):
            group = [e for e in own if e.backwards == backwards and e.event != "save"]
            found = Restored(rank, attempt, group)
            if not found.applied("model") or not found.standing("optimizer", 1):
                continue
            _origin(found, [e for e in own if e.event == "load"], saves)
            found.why = _why(found, [e for e in own if e.event == "save"])
            yield found


def _origin(found: Restored, loads: Sequence[Event], saves: Sequence[Event]) -> None:
    sources = {e.source for e in found.applied("model")}
    files = [e for e in loads if e.number in sources]
    # the whole state speaks before a file of weights, such as pretrained ones that the snapshot then replaces
    found.file = max(files, key=lambda e: (len(e.held), e.seq), default=None)
    if found.file is None:
        return
    folder = os.path.dirname(found.file.path)
    for e in (*found.events, found.file):
        if e.event == "load" and (e is found.file or os.path.dirname(e.path) == folder):
            found.held |= e.held
    before = [s for s in saves if s.path == found.file.path and s.time_ns < found.file.time_ns]
    found.saved = before[-1] if found.file.path and before else None


def _why(found: Restored, saves: Sequence[Event]) -> str:
    whole = any(e.covered == e.params > 0 for e in found.standing("optimizer", 1))
    touched = any(e.covered > 0 for e in found.standing("optimizer", 1)) or any(
        e.entries < e.params for e in found.applied("model"))  # fmt: skip
    put_back = [p for p in STATE if any(e.entries > 0 or e.position > 0 or p == "scaler" for e in found.applied(p))]
    if touched and put_back:
        return f"state of the {' and '.join(put_back)} was loaded with the weights"
    if not whole or found.file is None:
        return ""
    if found.saved is not None and found.saved.attempt < found.attempt and found.saved.backwards > 0:
        return f"attempt {found.saved.attempt} of this run saved the file"
    if any(v > 0 for v in found.counters.values()):
        moved = [e for e in found.applied("model") if (e.epoch or 0) > 0 or e.skipped > 0]
        if moved or found.applied("data"):
            return "the data goes on from a later place"
        if "optimizer" in found.held and _goes_on(found, saves):
            return "the counters that it saves go on from those in the file"
    return ""


def _goes_on(found: Restored, saves: Iterable[Event]) -> bool:
    """Whether the next checkpoint of the same name counts on from the loaded one: the next epoch, or as many steps more
    as were taken. Counters of a training that only takes over weights begin again."""
    file = found.file
    later = [s for s in saves if file and s.seq > file.seq and _family(s.path) == _family(file.path)]
    for s in later[:1]:
        taken = s.step - found.step
        for name, count in s.held.get("counters", {}).items():
            was = found.counters.get(name, 0)
            if was > 0 and taken > 0 and count - was == (1 if "epoch" in name.lower() else taken):
                return True
    return False


def _family(path: str) -> str:
    """A name without its numbers: ckpt_5.pt and ckpt_6.pt are files of one series."""
    return re.sub(r"\d+", "#", os.path.basename(path)) if path else path
