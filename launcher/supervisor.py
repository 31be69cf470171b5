"""The node's watcher: a thread beside torchrun that samples the machine, seals what the ranks wrote and notes who died.

It sleeps until the next sample is due, a process has ended or a group has started; one round takes some milliseconds.
Whatever goes wrong in it becomes a `node_note` row and a line in node-NNNNN.json, and training goes on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tdbg.rankagent import contract
from tdbg.rankagent.nodetables import EXIT, SAMPLER_NOTE
from tdbg.rankagent.record import Recorder

from . import flights
from .deaths import Deaths, Process
from .guard import describe, guarded
from .node.process import Tree
from .processes import RankProcesses
from .revision import revision
from .rundir import JsonFile
from .sampling import Sampler, Target
from .stalls import Stalls
from .torchelastic import Group

HEARTBEAT_SECONDS = 1.0
MOST_NOTES = 100  # a fault that words itself anew each second must not fill the disk
CODE_SECONDS = 0.1  # between looks for an exit code that is still missing
OOM_LOOK_BACK_NS = 10_000_000_000  # a killed process of some 100 GB takes seconds to be taken down after the kill
SEAL_SECONDS = 60.0  # for what is left at the end: a full segment takes about 0.1 s
SEAL_SECONDS_AFTER_SIGNAL = 5.0  # a scheduler that said SIGTERM says SIGKILL soon (Slurm: 30 s)


class Supervisor:
    """Watches one node of a run. It is the `Listener` of `torchelastic`; its own thread does all the work."""

    def __init__(
        self, run: Path, node: int, node_file: JsonFile, run_file: JsonFile | None, recorder: Recorder,
        make_sampler: Callable[[Supervisor], Sampler], clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns, stall_seconds: float = contract.DEFAULT_STALL_SECONDS,
    ) -> None:  # fmt: skip
        self._node, self._node_file, self._run_file, self._recorder = node, node_file, run_file, recorder
        self._make_sampler, self._clock, self._now_ns = make_sampler, clock, now_ns
        self._sampler: Sampler | None = None
        self.deaths = Deaths(on_death=lambda: self._wake.set(), now_ns=now_ns)
        self.ranks = RankProcesses(run, self.deaths)
        self._stalls = Stalls(node, recorder, stall_seconds, Tree().below, clock, now_ns)
        self._groups: deque[Group] = deque()
        self._late_notes: deque[str] = deque()  # of the main thread's: rows are written by ours
        self._wake, self._busy, self._ending = threading.Event(), threading.Lock(), threading.Event()
        self._sample_due = self._heartbeat_due = 0.0
        self._oom_kills: deque[tuple[int, int]] = deque(maxlen=128)
        self._noted: set[tuple[str, str]] = set()
        self._deadline = 0.0
        self._thread = threading.Thread(target=self._watch, name="tdbg-supervisor", daemon=True)

    # ---------------------------------------------------------------- told by torchrun's main thread

    def started(self, group: Group) -> None:
        self.deaths.follow(Process(rank, group.attempt, pid) for rank, pid in group.pids.items())
        self._groups.append(group)
        self._sample_due = 0.0
        self._wake.set()

    def stopping(self, ended: Mapping[int, int]) -> None:
        """Ranks that still run say where they stand, before they are told to stop: 0.5 s at the very most."""
        try:
            left = [f for f in self.ranks.recording() if f.pid not in ended]
            self._stalls.stopping(left)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as e:  # never torchelastic's own
            self._late_notes.append(describe(e))
        finally:
            self.deaths.stopping(ended)

    def stopped(self, codes: Mapping[int, int]) -> None:
        self.deaths.codes(codes)
        self._wake.set()

    def still(self) -> AbstractContextManager[object]:
        return self._busy

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        self.deaths.start()
        self._thread.start()

    def close(self, seconds: float = SEAL_SECONDS) -> bool:
        """Note the last deaths and seal the rest, for at most `seconds`. False when that did not come to an end."""
        self._deadline = self._clock() + seconds
        self._ending.set()
        self._wake.set()
        self._thread.join(timeout=seconds + 1.0)
        self.deaths.close()
        return not self._thread.is_alive()

    def note(self, about: str, text: str) -> None:
        """Write down, once, what could not be observed."""
        if (about, text) in self._noted or len(self._noted) >= MOST_NOTES:
            return
        self._noted.add((about, text))
        self._node_file.values["notes"].append({"time_ns": self._now_ns(), "about": about, "text": text})
        self._recorder.write(SAMPLER_NOTE, 0, (self._node,), (about, text))

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        self._guard("supervisor", self._begin)
        with self._busy:
            self._guard("supervisor", self.round)
        self._guard("revision", self._note_revision)
        while not self._ending.is_set():
            with self._busy:
                self._guard("supervisor", self.round)
            self._wake.wait(self._seconds_to_next())
            self._wake.clear()
        with self._busy:
            self._guard("supervisor", self.finish)

    def _guard(self, about: str, call: Callable[..., Any], *args: Any) -> Any:
        return guarded(lambda text: self.note(about, text), call, *args)

    def _begin(self) -> None:
        self._sampler = self._make_sampler(self)
        self._oom_kills.append((self._now_ns(), self._sampler.oom_kills))

    def _note_revision(self) -> None:
        if self._run_file is not None:
            self._run_file.update(revision=revision(Path(self._run_file.values["cwd"])))

    def _seconds_to_next(self) -> float:
        wanted = CODE_SECONDS if self.deaths.waiting() else HEARTBEAT_SECONDS
        return max(0.0, min(wanted, self._sample_due - self._clock()))

    def round(self) -> None:
        """One look at everything; each part for itself, so that one that fails takes no other with it."""
        self._guard("supervisor", self._note_groups)
        self._guard("supervisor", self._look)
        self._guard("supervisor", self._note_deaths)
        self._guard("stalls", self._watch_progress)
        if self._clock() >= self._sample_due:
            self._guard("host", self._sample)
        self._guard("seal", self._seal)
        if self._clock() >= self._heartbeat_due:
            self._guard("supervisor", self._heartbeat)

    def finish(self) -> None:
        """What remains when torchrun is done."""
        self._guard("supervisor", self._note_groups)
        self._guard("supervisor", self._look, True)
        self._guard("supervisor", self._note_deaths, True)
        self._guard("stalls", self._stalls.write)
        if self._sampler is not None:
            self._guard("gpu", self._sampler.close)
        self._guard("seal", self._seal)
        self._recorder.close(0)
        self._guard("seal", self.ranks.seal_own, Path(self._recorder.folder))
        now = self._now_ns()
        self._guard("supervisor", lambda: self._node_file.update(heartbeat_ns=now, end_ns=now))

    def _note_groups(self) -> None:
        while self._groups:
            group = self._groups.popleft()
            self.ranks.expect(group)
            self._enter(group.attempt, group.started_ns, group.pids)
            if self._run_file is not None:
                self._run_file.update(world_size=group.world_size)

    def _look(self, now: bool = False) -> None:
        for p in self.ranks.look(now):
            self._enter(p.attempt, self._now_ns(), {p.rank: p.pid})

    def _watch_progress(self) -> None:
        while self._late_notes:
            self.note("stalls", self._late_notes.popleft())
        self._stalls.write()
        self._stalls.look(self.ranks.recording())

    def _enter(self, attempt: int, started_ns: int, pids: Mapping[int, int]) -> None:
        ranks = {str(r): {"pid": p, "exit_code": None, "ended_ns": None} for r, p in sorted(pids.items())}
        entries = self._node_file.values["attempts"]
        same = next((e for e in entries if e["attempt"] == attempt and not set(e["ranks"]) & set(ranks)), None)
        if same is not None:  # ranks of another launcher's making are found one by one
            same["ranks"].update(ranks)
        else:
            entries.append({"attempt": attempt, "start_ns": started_ns, "ranks": ranks})
        self._heartbeat_due = 0.0

    def _note_deaths(self, last: bool = False) -> None:
        for p in self.deaths.take(last):
            self._recorder.attempt = p.attempt
            row = (self._node, p.pid, p.exit_code, p.ended_ns, p.stopped, self._new_oom_kills(p.ended_ns))
            self._recorder.write(EXIT, self.ranks.last_step(p.rank, p.attempt), row, rank=p.rank)
            self._guard("flights", self._take_last_words, p)
            for attempt in self._node_file.values["attempts"]:
                entry = attempt["ranks"].get(str(p.rank))
                if entry is not None and entry["pid"] == p.pid:
                    entry.update(exit_code=p.exit_code, ended_ns=p.ended_ns, stopped_by_launcher=p.stopped)
            self._heartbeat_due = 0.0

    def _take_last_words(self, p: Process) -> None:
        for folder in self.ranks.folders(p):
            flights.take(folder, self._recorder, p.rank, p.attempt)
            flights.forget(folder)

    def _new_oom_kills(self, ended_ns: int) -> int:
        """OOM kills in the cgroup since the last sample that surely came before this death."""
        now = self._sampler.host.oom_kills() if self._sampler else -1
        older = [kills for t, kills in self._oom_kills if t <= ended_ns - OOM_LOOK_BACK_NS]
        before = older[-1] if older else self._oom_kills[0][1] if self._oom_kills else -1
        return now - before if now >= 0 and before >= 0 else -1

    def _sample(self) -> None:
        self._sample_due = self._clock() + HEARTBEAT_SECONDS  # in case this one raises
        if self._sampler is None:
            return
        targets = [Target(p.rank, p.attempt, pid, step) for p, pid, step in self.ranks.targets()]
        started = self._clock()
        self._sample_due = started + self._sampler.sample(targets)
        self._oom_kills.append((self._now_ns(), self._sampler.oom_kills))

    def _seal(self) -> None:
        deadline = self._deadline if self._ending.is_set() else None
        for text in self.ranks.seal(Path(self._recorder.folder), lambda: deadline is None or self._clock() < deadline):
            self.note("seal", text)

    def _heartbeat(self) -> None:
        now = self._now_ns()
        self._heartbeat_due = self._clock() + HEARTBEAT_SECONDS
        self._recorder.update_state(0, now)
        self._node_file.update(heartbeat_ns=now)
