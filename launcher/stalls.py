"""Notices that the job makes no progress, and notes each rank's position and stacks. It only watches.

Progress is whatever a rank's own files show: a step, a phase entered (a batch, a forward, a backward, a checkpoint), a
row written. While any rank of this node makes some, the job runs. What a stall is worth is for the reader to say: here
it is noted how long nothing came, where each rank stands, whether it worked meanwhile, and what it issued last.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tdbg.rankagent.nodetables import STACK, STALL
from tdbg.rankagent.readback import read_state, segments
from tdbg.rankagent.record import Recorder, State

from . import dumps, flights
from .node.process import Work, holds_device, work
from .processes import Folder

STEP_TIMES = 20  # x the 99th percentile of step times: the slowest of a run are seldom ten times as slow as that
GAPS = 3  # x the longest time without progress that ended by itself: such a pause (a checkpoint) may come again
# Before the second step code is compiled, data are fetched and prepared on one rank while the others wait: minutes.
STARTING = 10
STEPS_TO_START = 2
SAMPLES = 3  # stacks in a row: one that works is seldom caught at one place three times
SPACING_SECONDS = 2.0  # between them, less where the limit is short: SPACING_SHARE of it
SPACING_SHARE = 5
ANSWER_SECONDS = 0.3  # a rank answers within milliseconds; one that waits for a disk does not answer at all
LAST_CALLS_SECONDS = 1.0  # once a stall: a rank that spins in Python hands the interpreter over every 5 ms
STOPPING_SECONDS = 0.15  # that stopping the ranks may be put off
# A stall is looked at again: a rank that worked may be stuck by then. Each time after twice as long, to save the disk.
FIRST_AGAIN_SECONDS, LAST_AGAIN_SECONDS = 10.0, 600.0
BLIND_SECONDS = 10.0  # without a look of ours: then we were stopped or starved, and the ranks surely as well
KEPT_STEPS = 1000  # step times
ROWS_SECONDS = 3.0  # between looks for new rows: that reads a segment, 1 ms, and most progress shows without


@dataclass(frozen=True)
class Position:
    """What a rank's files say about how far it is. `rows` is looked at only while nothing else changes."""

    step: int
    entered: int
    rows: int = -1


@dataclass(frozen=True)
class Sample:
    """One look at a rank: what it has used so far, and its stack if it gave one."""

    time_s: float
    work: Work
    frames: str


class Stalls:
    """One node's ranks. `look` and `write` are the supervisor thread's, `stopping` the main thread's."""

    def __init__(
        self, node: int, recorder: Recorder, floor_s: float, below: Callable[[int], list[int]],
        clock: Callable[[], float] = time.monotonic, now_ns: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        self._node, self._recorder, self._floor_s, self._below = node, recorder, floor_s, below
        self._clock, self._now_ns = clock, now_ns
        self._asked: deque[tuple[Sequence[Folder], dict[int, str], set[Path]]] = deque()
        self._last_look_s = clock()
        self._rows_due_s = 0.0
        self._begin(-1)

    def _begin(self, attempt: int) -> None:
        """A new attempt: nothing is known of its pace."""
        self._attempt = attempt
        self._positions: dict[int, Position] = {}
        self._beat = (0, 0)  # step of one of them, when it closed
        self._step_s: deque[float] = deque(maxlen=KEPT_STEPS)
        self._longest_gap_s = 0.0
        self._progress_s, self._progress_ns = self._clock(), self._now_ns()
        self._stall = 0
        self._over()

    def _over(self) -> None:
        self._look = 0
        self._due_s = 0.0
        self._samples: list[dict[int, Sample]] = []
        self._told: set[Path] = set()  # folders of ranks that told what they issued last

    # ---------------------------------------------------------------- pace

    def limit_s(self) -> float:
        """How long nothing has to happen for this to be a stall."""
        times = sorted(self._step_s)
        usual = (
            times[min(int(0.99 * (len(times) - 1)), len(times) - 2)] if len(times) > 1 else 0.0
        )  # one pause is no pace
        limit = max(self._floor_s, STEP_TIMES * usual, GAPS * self._longest_gap_s)
        return limit if self._started() else max(limit, STARTING * self._floor_s)

    def _started(self) -> bool:
        return max((p.step for p in self._positions.values()), default=0) >= STEPS_TO_START

    def look(self, folders: Iterable[Folder]) -> None:
        """Look at what the ranks that run have come to."""
        now, blind = self._clock(), self._clock() - self._last_look_s > BLIND_SECONDS
        self._last_look_s = now
        ranks = {f.pid: f for f in folders}
        if not ranks:
            return
        newest = max(f.attempt for f in ranks.values())
        if newest != self._attempt:
            self._begin(newest)
        states = {pid: s for pid, f in ranks.items() if (s := read_state(f.path)) is not None}
        started = self._started()
        if states:
            self._time_step(states[min(states, key=lambda pid: ranks[pid].rank)])
        went_on, wrote = self._compare(ranks, states)
        if went_on or (wrote and not self._look):
            if started:  # the wait for the first steps says nothing about later ones
                self._longest_gap_s = max(self._longest_gap_s, now - self._progress_s)
            self._went_on(list(ranks.values()), states, now)
        elif blind and not self._look:
            self._progress_s, self._progress_ns = now, self._now_ns()
        elif states:
            self._quiet(ranks, states, now - self._progress_s)

    def _compare(self, ranks: dict[int, Folder], states: dict[int, State]) -> tuple[bool, bool]:
        """(some rank came further, some rank at least wrote a row). A failure writes rows and is no progress."""
        went_on = wrote = False
        rows_due = self._clock() >= self._rows_due_s
        if rows_due:
            self._rows_due_s = self._clock() + ROWS_SECONDS
        for pid, state in states.items():
            old = self._positions.get(pid)
            if old is None or (state.step, state.entered) != (old.step, old.entered):
                self._positions[pid] = Position(state.step, state.entered)
                went_on = True
            elif rows_due and not went_on:
                rows = _rows_mark(ranks[pid].path)
                wrote = wrote or (old.rows >= 0 and rows != old.rows)
                self._positions[pid] = Position(state.step, state.entered, rows)
        return went_on, wrote

    def _time_step(self, state: State) -> None:
        """Step times of one rank, as its state page shows them; the way to the second step is no measure."""
        step, beat = self._beat
        if state.step > step:
            if step >= STEPS_TO_START:
                self._step_s.append((state.heartbeat_ns - beat) / 1e9 / (state.step - step))
            self._beat = state.step, state.heartbeat_ns

    def _went_on(self, ranks: Sequence[Folder], states: dict[int, State], now: float) -> None:
        if self._look:
            self._write(ranks, states, "resumed", now - self._progress_s)
        self._progress_s, self._progress_ns = now, self._now_ns()
        self._over()

    # ---------------------------------------------------------------- a stall

    def _quiet(self, ranks: dict[int, Folder], states: dict[int, State], quiet_s: float) -> None:
        """Nothing came for so long: take the samples in time for the limit, then note the stall."""
        limit = self.limit_s()
        due = self._due_s or limit
        spacing = min(SPACING_SECONDS, limit / SPACING_SHARE)
        if quiet_s < due - (SAMPLES - 1 - len(self._samples)) * spacing:
            return
        if self._samples and self._clock() - max(s.time_s for s in self._samples[-1].values()) < 0.9 * spacing:
            return  # this look came late
        self._samples.append(self._sample(list(ranks.values())))
        if len(self._samples) < SAMPLES:
            return
        if not self._look:
            self._stall += 1
            self._told = self._last_calls(list(ranks.values()))
        self._look += 1
        self._write(list(ranks.values()), states, "stall", quiet_s)
        self._samples = []
        wait = min(max(limit, FIRST_AGAIN_SECONDS) * 2 ** (self._look - 1), LAST_AGAIN_SECONDS)
        self._due_s = quiet_s + wait

    def _sample(self, ranks: Sequence[Folder]) -> dict[int, Sample]:
        used = {f.pid: (self._clock(), work(f.pid, self._below(f.pid))) for f in ranks}
        frames = dumps.ask(((f.pid, f.path) for f in ranks), ANSWER_SECONDS)
        return {pid: Sample(when, so_far, frames.get(pid, "")) for pid, (when, so_far) in used.items()}

    def _last_calls(self, ranks: Sequence[Folder]) -> set[Path]:
        """What each rank issued last, as rows; nothing more is issued while it lasts, so once is enough."""
        told = flights.wait(flights.ask(f.path for f in ranks), LAST_CALLS_SECONDS)
        for f in ranks:
            if f.path in told:
                with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # half a file
                    flights.take(f.path, self._recorder, f.rank, f.attempt)
                    continue
                told.discard(f.path)
        return told

    def _write(self, ranks: Sequence[Folder], states: dict[int, State], event: str, quiet_s: float) -> None:
        limit = self.limit_s()
        for f in ranks:
            samples = [s[f.pid] for s in self._samples if f.pid in s]
            self._write_rank(f, states.get(f.pid), event, limit, quiet_s, samples, f.path in self._told)

    def _write_rank(self, f: Folder, state: State | None, event: str, limit_s: float, quiet_s: float,
                    samples: Sequence[Sample], told: bool) -> None:  # fmt: skip
        if state is None:
            return
        self._recorder.attempt = f.attempt
        window_s = samples[-1].time_s - samples[0].time_s if samples else 0.0
        used = samples[-1].work.since(samples[0].work) if samples else Work()
        stacks = [(n, s.frames) for n, s in enumerate(samples, start=1) if s.frames]
        row = (self._node, self._stall, self._look, f.pid, int(limit_s * 1e9), self._progress_ns, int(quiet_s * 1e9),
               state.phase_since_ns, int(window_s * 1e9), used.busy_ns, used.below_ns, used.io_bytes, len(stacks),
               holds_device(f.pid), bool(state.closed), told)  # fmt: skip
        words = (event, state.phase, samples[-1].work.state if samples else "")
        self._recorder.write(STALL, state.step, row, words, rank=f.rank)
        for sample, frames in stacks:
            self._recorder.write(
                STACK, state.step, (self._node, self._stall, self._look, sample), (frames,), rank=f.rank
            )

    # ---------------------------------------------------------------- the ranks are about to be stopped

    def stopping(self, ranks: Sequence[Folder]) -> None:
        """Ask for a last stack and the last collectives before the signal goes out; the supervisor's thread writes
        the rows, those of the collectives when it notes the rank's end."""
        asked = flights.ask(f.path for f in ranks)
        frames = dumps.ask(((f.pid, f.path) for f in ranks), STOPPING_SECONDS)
        self._asked.append((ranks, frames, flights.wait(asked)))

    def write(self) -> None:
        """Write the rows of `stopping`."""
        while self._asked:
            ranks, frames, told = self._asked.popleft()
            for f in ranks:
                if f.attempt != self._attempt:
                    self._begin(f.attempt)
                last = [Sample(0.0, Work(), frames.get(f.pid, ""))]
                self._write_rank(
                    f, read_state(f.path), "stopping", self.limit_s(), self._clock() - self._progress_s, last,
                    f.path in told,
                )  # fmt: skip


def _rows_mark(folder: Path) -> int:
    """A number that changes when a row is written: a checksum of the newest segment."""
    newest = segments(folder)[-1:]
    try:
        return zlib.crc32(newest[0].read_bytes(), len(newest[0].name)) | 1 if newest else 0
    except OSError:
        return 0
