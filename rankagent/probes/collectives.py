"""Collectives: per process group what this rank issued, in order, and from which line.

Writes    collective, collective_step
Costs     13 us a call in a tight loop, 65 to 85 us between the calls of a real step; one sleeping thread
Blind to  what C++ issues (DDP's buckets, FSDP1, functional collectives) until the job fails or hangs: then torch's flight
          recorder is read; send and recv; calls under torch.compile and in CUDA graph capture

A row is written before the call, so that it is there when the call never comes back. Watched steps have a row per call,
other steps for their first few; what comes after those is counted and digested per step, and the last calls are kept in
memory for the moment in which the job fails or its launcher asks (`asked`).
"""

from __future__ import annotations

import json
import os
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple
from zlib import crc32

from .. import asked, flightrecorder, guard, signatures, torchprivate
from ..agent import Agent, Emit, StepInfo, now_ns
from ..callsite import CallSites, caller
from ..patch import Undo, replace, undo_all
from ..tables import Column, Table
from .failure import PROBE

COLLECTIVE = Table("collective", (
    Column("group", "text", "", "name of the process group, the same on all its ranks"),
    Column("ranks", "int64[]", "", "its global ranks in its own order; empty beyond 64: as in the group's first row"),
    Column("position", "int64", "", "call: nth collective of the group issued from Python in this process, from 1; "
           "recorder: torch's own sequence number"),
    Column("op", "text", "", "all_reduce, broadcast, barrier and so on"),
    Column("signature", "text", "", "types, numbers of elements, reduction: what all ranks must have alike"),
    Column("root", "int32", "", "global rank of the source or destination; -1 none or unknown"),
    Column("site", "text", "", "innermost line of the user's program, 'file.py:line function'; empty for torch's own"),
    Column("callers", "text", "", "the lines that called that one, innermost first, joined by ' < '"),
    Column("source", "text", "", "call: seen in Python; recorder: read from torch's flight recorder at a failure"),
), "one row per collective, written before it is issued")  # fmt: skip

STEP = Table("collective_step", (
    Column("group", "text", "", "name of the process group"),
    Column("ranks", "int64[]", "", "its global ranks; empty beyond 64"),
    Column("first", "int64", "", "position of the first of these calls"),
    Column("count", "int32", "", "calls of this step that have no row of their own"),
    Column("digest", "int64", "", "of their ops, signatures and roots in order"),
    Column("site_digest", "int64", "", "of their call sites in order"),
    Column("site_sum", "int64", "", "of their call sites in any order"),
), "one row per group and step in which calls got no row of their own")  # fmt: skip

TABLES = (COLLECTIVE, STEP)
FEW = 8  # rows a step outside the watch: 8 cold rows stay below 100 us, and most loops issue fewer calls
MOST = 512  # rows a watched step: an evaluation that reduces at every batch
KEPT = 256  # calls kept in memory: 6 steps of a model of 12 sharded units
LISTED_RANKS = 64  # a list of 1,000 ranks in each row would be 4 KB
STEPS_KEPT = 64
WHOLE = frozenset({"backward", "checkpoint", "load"})  # phases that hold their collectives
ANSWER = "flight.json"
_MASK = (1 << 63) - 1
_PRIME = 1099511628211  # FNV-1a's


@dataclass
class Group:
    """One process group and what was issued on it; the counters below `position` are the step's own."""

    name: str
    ranks: tuple[int, ...]
    position: int = 0
    told: bool = False  # a row has its ranks
    first: int = 0
    count: int = 0
    digest: int = 0
    site_digest: int = 0
    site_sum: int = 0

    @property
    def listed(self) -> tuple[int, ...]:
        return self.ranks if len(self.ranks) <= LISTED_RANKS or not self.told else ()

    def add(self, kind: str, place: str) -> None:
        """A call without a row of its own."""
        self.first = self.first or self.position
        self.count += 1
        at = crc32(place.encode())
        self.digest = (self.digest * _PRIME ^ crc32(kind.encode())) & _MASK
        self.site_digest = (self.site_digest * _PRIME ^ at) & _MASK
        self.site_sum = (self.site_sum + at * at) & _MASK

    def clear(self) -> None:
        self.first = self.count = self.digest = self.site_digest = self.site_sum = 0


class Call(NamedTuple):  # a frozen dataclass takes 2 us more to make
    """One call as its row has it. `written` tells whether it has one."""

    step: int
    time_ns: int
    position: int
    root: int
    group: str
    ranks: tuple[int, ...]
    op: str
    signature: str
    site: str
    callers: str
    written: bool = False
    source: str = "call"

    @property
    def fixed(self) -> tuple[int, int]:
        return self.position, self.root

    @property
    def variable(self) -> tuple[Any, ...]:
        return self.group, self.ranks, self.op, self.signature, self.site, self.callers, self.source


class Calls:
    """What was issued so far. Calls may come from any thread; rows only from the thread that trains."""

    def __init__(self, emit: Emit) -> None:
        self.emit, self.agent = emit, emit.agent
        torch = emit.agent.torch
        self._sites = CallSites(torch.__file__)
        self._compiling = getattr(torch.compiler, "is_compiling", lambda: False)
        self._lock = threading.Lock()
        self._named: dict[str, Group] = {}  # groups that exist
        self._groups: dict[tuple[str, tuple[int, ...]], Group] = {}  # all there ever were: positions go on
        self._reductions: dict[Any, str] = {}
        self._rows = 0
        self.recent: deque[Call] = deque(maxlen=KEPT)
        self._steps: deque[tuple[int, int]] = deque(maxlen=STEPS_KEPT)  # (when it ended, its number)
        self._unlisten: Undo | None = None

    # -------------------------------------------------------- per call

    def active(self) -> bool:
        agent = self.agent
        if not agent.live or self._compiling():
            return False
        cuda = agent.torch.cuda
        return not (cuda.is_initialized() and cuda.is_current_stream_capturing())

    def issued(self, shape: signatures.Shape, pg: Any, args: Any, kwargs: Any, frame: FrameType) -> None:
        with self._lock:
            group = self._named.get(pg.group_name) or self._find(pg.group_name)
            if group is None:
                return
            group.position += 1
            position = group.position
        site, callers = self._sites.of(frame)
        signature, root = signatures.read(shape, args, kwargs, self._reduction)
        if 0 <= root < len(group.ranks):
            root = group.ranks[root]
        written = self._may_write() and self._rows < (MOST if self.agent.watching else FEW)
        call = Call(self.agent.window.step, time.time_ns(), position, root, group.name, group.listed, shape.op,
                    signature, site, callers, written)  # fmt: skip
        self.recent.append(call)
        if written:
            self._rows += 1
            group.told = True
            self.emit(COLLECTIVE, call.fixed, call.variable)
        else:
            group.add(f"{shape.op}|{signature}|{root}", f"{site}|{callers}")

    def _may_write(self) -> bool:
        """Rows are the training thread's to write, and autograd's while that one waits in backward."""
        me = threading.get_ident()
        if me == self.agent.thread:
            return True
        return self.agent.phase == "backward" and all(t.ident != me for t in threading.enumerate())

    def _find(self, name: str) -> Group | None:
        """The group of this name; None when torch does not know its ranks."""
        ranks = torchprivate.group_ranks(self.agent.torch).get(name)
        if ranks is None:
            return None
        group = self._named[name] = self._groups.setdefault((name, ranks), Group(name, ranks))
        self._listen()
        return group

    def _listen(self) -> None:
        """Let the launcher ask. On a disk without FIFOs it can't; all else goes on."""
        if self._unlisten is None:
            undo = guard.attempt(lambda e: None, asked.listen, self.agent.recorder.folder, self.answer)
            self._unlisten = undo or (lambda: None)

    def _reduction(self, op: Any) -> str:
        kind = getattr(op, "op", op)
        name = self._reductions.get(kind)
        if name is None:
            name = self._reductions[kind] = str(getattr(kind, "name", kind))
        return name

    def inside(self, elapsed_ns: int) -> None:
        """Time that the training thread spent in a call or in the wait for one."""
        agent = self.agent
        if threading.get_ident() == agent.thread and agent.phase not in WHOLE:
            agent.add_phase("communication", elapsed_ns)
            if agent.phase != "other":
                agent.add_phase(f"communication_in_{agent.phase}", elapsed_ns)

    # -------------------------------------------------------- per step

    def step_closed(self, info: StepInfo) -> None:
        self._steps.append((time.time_ns(), info.step))
        self._rows = 0
        self._write_counts(info.step)
        if self._unlisten is None and torchprivate.group_ranks(self.agent.torch):
            self._listen()  # a wrapper's collectives come from C++: its recorder has them

    def _write_counts(self, step: int) -> None:
        for group in list(self._groups.values()):
            if group.count:
                fixed = (group.first, group.count, group.digest, group.site_digest, group.site_sum)
                self.emit(STEP, fixed, (group.name, group.listed), step=step)
                group.clear()

    def groups_change(self) -> None:
        """A group is about to go: its name may come back for other ranks."""
        self._named.clear()

    # -------------------------------------------------------- at a failure

    def failed(self, error: BaseException) -> None:
        self._write_counts(self.agent.window.step)
        for call in self.late():
            self.emit(COLLECTIVE, call.fixed, call.variable, step=call.step)

    def late(self) -> list[Call]:
        """What has no row yet: the last calls, and what the flight recorder holds. Any thread may ask."""
        return [c for c in list(self.recent) if not c.written] + self.flight_recorder_rows()

    def flight_recorder_rows(self) -> list[Call]:
        dump = torchprivate.flight_recorder(self.agent.torch)
        if dump is None:
            return []
        ranks = torchprivate.group_ranks(self.agent.torch)
        found = flightrecorder.entries(dump)
        places = sites_of(found, list(self.recent))
        ends = [at for at, _ in self._steps]
        numbers = [step for _, step in self._steps]
        rows, told = [], set[str]()
        for entry, (site, callers) in zip(found, places, strict=True):
            listed = ranks.get(entry.group, ())
            listed = () if len(listed) > LISTED_RANKS and entry.group in told else listed
            told.add(entry.group)
            over = bisect_right(ends, entry.created_ns)  # steps that were over by then
            step = numbers[over - 1] + 1 if over else max(numbers[0], 1) if numbers else self.agent.window.step
            rows.append(Call(step, entry.created_ns, entry.position, -1, entry.group, listed, entry.op,
                             entry.signature, site, callers, source="recorder"))  # fmt: skip
        return rows

    def answer(self) -> None:
        """The launcher asked: leave what is not in the record yet in a file beside it, for the launcher to take over."""
        rows = [[c.step, c.fixed, c.variable] for c in self.late()]
        path = os.path.join(self.agent.recorder.folder, ANSWER)
        with open(path + ".part", "w", encoding="utf-8") as f:
            json.dump(rows, f)
        os.replace(path + ".part", path)

    def end(self) -> None:
        asked.forget(self.agent.recorder.folder)

    def uninstall(self) -> None:
        if self._unlisten is not None:
            self._unlisten()


def sites_of(entries: Iterable[flightrecorder.Entry], calls: Iterable[Call]) -> list[tuple[str, str]]:
    """The call sites of the recorder's entries that Python issued: the first entry of its group after the call."""
    waiting: dict[str, deque[Call]] = {}
    for call in calls:
        waiting.setdefault(call.group, deque()).append(call)
    found = []
    for entry in entries:
        ahead, place = waiting.get(entry.group, deque()), ("", "")
        while ahead and ahead[0].time_ns <= entry.created_ns:
            call = ahead.popleft()
            if not (ahead and ahead[0].time_ns <= entry.created_ns):  # the last call before this entry
                place = (call.site, call.callers) if same_op(call.op, entry.op) else place
        found.append(place)
    return found


def same_op(called: str, recorded: str) -> bool:
    """Whether a call may be this entry: backends name the one-tensor forms in their own ways."""
    plain = [name.strip("_").lower().replace("_", "") for name in (called, recorded)]
    return plain[0].startswith(plain[1]) or plain[1].startswith(plain[0][:9])


def install(emit: Emit) -> Undo:
    agent: Agent = emit.agent
    classes = torchprivate.process_group(agent.torch)
    if classes is None:
        agent.recorder.write(PROBE, 0, (), (emit.name, "unavailable", "torch lacks ProcessGroup or its group_name"))
        return lambda: None
    process_group, work = classes
    calls = Calls(emit)

    def watch(shape: signatures.Shape) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def call(group: Any, *args: Any, **kwargs: Any) -> Any:
                if not calls.active():
                    return original(group, *args, **kwargs)
                emit.guarded(calls.issued, shape, group, args, kwargs, caller())
                began = now_ns()
                try:
                    return original(group, *args, **kwargs)
                finally:
                    calls.inside(now_ns() - began)

            return call

        return make

    def wait(original: Any) -> Any:
        def wait(handle: Any, *args: Any, **kwargs: Any) -> Any:
            if not calls.active():
                return original(handle, *args, **kwargs)
            began = now_ns()
            try:
                return original(handle, *args, **kwargs)
            finally:
                calls.inside(now_ns() - began)

        return wait

    undos: list[Undo] = [calls.uninstall, replace(work, "wait", wait)]
    known = vars(process_group)
    undos += [replace(process_group, n, watch(s)) for n, s in signatures.METHODS.items() if n in known]
    emit.on("step_closed", calls.step_closed)
    emit.on("ending", calls.groups_change)
    emit.on("failed", calls.failed)
    emit.on("close", calls.end)
    return undo_all(undos)
