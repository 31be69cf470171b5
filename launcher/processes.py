"""The folders that the ranks of this node make: which are ours, the step each has reached, and their sealing.

On a shared disk the run holds other nodes' folders too, which are theirs to seal. Ours are those of the ranks and
attempts that torchrun started here; where that is not known (another launcher), those of our own descendants.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tdbg.rankagent import contract
from tdbg.rankagent.contract import TdbgError
from tdbg.rankagent.readback import read_state, segments

from .deaths import Deaths, Process, runs
from .guard import describe
from .node.process import Tree
from .torchelastic import Group

LOOK_SECONDS = 10.0  # between looks when every rank has its folder; before that, each round
MOST_FAILURES = 3  # of sealing one process's segments; the reader can do without


@dataclass
class Folder:
    """One rank process's folder. `pid` is of the process that records, below the one torchrun started or the same."""

    path: Path
    rank: int
    attempt: int
    pid: int
    sealed: bool = False
    failures: int = 0


class RankProcesses:
    """What this node's ranks have made so far. Used by the supervisor's thread alone."""

    def __init__(self, run: Path, deaths: Deaths, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._deaths, self._clock = run, deaths, clock
        self._expected: set[tuple[int, int]] = set()
        self._folders: dict[str, Folder] = {}
        self._tree = Tree()
        self._look_due = 0.0
        self.told = True  # torchrun tells which ranks it starts; False for any other launcher

    def expect(self, group: Group) -> None:
        self._expected |= {(rank, group.attempt) for rank in group.pids}

    def look(self, now: bool = False) -> list[Process]:
        """Find new folders. Gives the processes that are followed from now on because of them."""
        missing = self._expected - {(f.rank, f.attempt) for f in self._folders.values()}
        if not (now or missing or not self.told or self._clock() >= self._look_due):
            return []
        found = []
        self._look_due = self._clock() + LOOK_SECONDS
        for name in os.listdir(self._run / "records"):
            parsed = contract.parse_process_dir(name)
            if name in self._folders or parsed is None or parsed[0] != "rank":
                continue
            _, rank, attempt, pid = parsed
            if not (((rank, attempt) in self._expected) if self.told else self._is_below_us(pid)):
                continue
            self._folders[name] = Folder(self._run / "records" / name, rank, attempt, pid)
            if not self.told:
                found.append(Process(rank, attempt, pid))
        self._deaths.follow(found)
        return found

    def _is_below_us(self, pid: int) -> bool:
        return pid in self._tree.below(os.getpid())

    def last_step(self, rank: int, attempt: int) -> int:
        """Last step that the rank completed in this attempt; 0 when it recorded none."""
        states = [read_state(f.path) for f in self._folders.values() if (f.rank, f.attempt) == (rank, attempt)]
        return max((s.step for s in states if s is not None), default=0)

    def targets(self) -> Iterator[tuple[Process, int, int]]:
        """(process, pid to sample, last step): the recording process where it is another, as below a shell wrapper."""
        for p in self._deaths.running():
            alive = [f for f in self._of(p) if f.pid == p.pid or runs(f.pid)]
            yield p, alive[-1].pid if alive else p.pid, self.last_step(p.rank, p.attempt)

    def recording(self) -> list[Folder]:
        """The folders of the processes that record now, the newest of each rank. May be called from any thread."""
        folders = list(self._folders.values())
        found = {}
        for p in self._deaths.running():
            alive = [f for f in folders if (f.rank, f.attempt) == (p.rank, p.attempt) and runs(f.pid)]
            found.update({p.rank: alive[-1]} if alive else {})
        return list(found.values())

    def folders(self, p: Process) -> list[Path]:
        """The record folders of this rank in this attempt."""
        return [f.path for f in self._of(p)]

    def _of(self, p: Process) -> list[Folder]:
        return [f for f in self._folders.values() if (f.rank, f.attempt) == (p.rank, p.attempt)]

    def seal(self, own: Path, may_go_on: Callable[[], bool]) -> Iterator[str]:
        """Seal full segments, and all of a process that has ended. Gives a sentence for each segment that can't be."""
        for folder in self._folders.values():
            if folder.sealed or folder.failures >= MOST_FAILURES:
                continue
            ended = not runs(folder.pid)
            waiting = segments(folder.path)
            for segment in waiting if ended else waiting[:-1]:
                if not may_go_on():
                    yield "the rest was left unsealed at the end; it is read as it is"
                    return
                try:
                    from tdbg.rankagent import seal  # pyarrow: 0.3 s, and only when there is something to seal

                    seal.seal_segment(self._run, folder.path, segment)
                except (TdbgError, OSError) as e:
                    folder.failures += 1
                    yield f"{folder.path.name}/{segment.name} stays as it is: {describe(e)}"
                    break
            else:
                folder.sealed = ended
        self._seal_full(own)

    def _seal_full(self, own: Path) -> None:
        if len(segments(own)) > 1:
            from tdbg.rankagent import seal

            seal.seal_process(self._run, own, ended=False)

    def seal_own(self, own: Path) -> None:
        """Seal the launcher's own rows once its recorder is closed."""
        from tdbg.rankagent import seal

        seal.seal_process(self._run, own, ended=True)
