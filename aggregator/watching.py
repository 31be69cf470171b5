"""A running run looked at again and again. What one look costs does not grow with the run.

Rank rows come from the newest segments only. The verdict reads everything, so it is made anew only after a pause in
proportion to what it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .about import Status, status_of
from .findings import Verdict
from .ranks import RankRow, rank_rows
from .store import Store
from .verdict import judge

# After a verdict of t seconds the next one waits 4 t: it takes a fifth of one core at most, training has the rest.
PAUSE_PER_SECOND = 4.0
LEAST_PAUSE_S = 1.0


@dataclass(frozen=True)
class Look:
    """What one look found. The verdict may be some looks old while the run goes on; at its end it is of now."""

    verdict: Verdict
    status: Status
    ranks: tuple[RankRow, ...]


class Watcher:
    """Looks at one run. Owns no thread: the caller decides when to look."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._verdict: Verdict | None = None
        self._due = 0.0

    def look(self) -> Look:
        """Read what is new."""
        store = self._store
        if self._verdict is not None:
            store.refresh()
        status = status_of(store.about, all(p.state and p.state.closed for p in store.processes if p.kind == "rank"))
        verdict = self._verdict
        if verdict is None or self._clock() >= self._due or status != verdict.status:
            began = self._clock()
            verdict = self._verdict = judge(store)
            took = self._clock() - began
            self._due = self._clock() + max(LEAST_PAUSE_S, PAUSE_PER_SECOND * took)
        rows = rank_rows(store, verdict.incidents, verdict.world_size, recent=True)
        return Look(verdict, status, rows)
