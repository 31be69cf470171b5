"""Hands a run's numbers to an exporter, step by step, once each: `tdbg export`, also while the run goes on.

What was handed over is remembered by attempt and rank. While a run goes on, each rank's newest step is held back: its
rows may not all be there yet. Steps are read in stretches, so that memory does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .about import status_of
from .findings import Verdict
from .gradnorm import is_sharded, sharded_norms
from .metrics import METRICS
from .store import Store
from .verdict import judge

STRETCH = 50_000  # numbers read at a time: some 10 MB


@dataclass(frozen=True)
class Point:
    """One number of one rank and step; `time_ns` is the rank's wall clock when it was recorded."""

    metric: str
    attempt: int
    step: int
    rank: int
    value: float
    time_ns: int


class Exporter(Protocol):
    """One tracker; `where` says in words where things went.

    Calls come in this order: points (again and again), incidents (whenever they changed), close.
    """

    where: str

    def points(self, points: Sequence[Point]) -> None:
        """Numbers by attempt, step, rank and metric; each comes once."""

    def incidents(self, verdict: Verdict) -> None:
        """The verdict as it is now."""

    def close(self, status: str) -> None:
        """Everything is handed over; `status` is the run's: running where the user stopped following it."""


@dataclass(frozen=True)
class Exported:
    """How much was handed over."""

    points: int
    status: str


def export(store: Store, exporter: Exporter, follow: bool, wait: Callable[[], None]) -> Exported:
    """Export all there is; with `follow` until the run has ended, calling `wait` between two looks.

    KeyboardInterrupt from `wait` ends it as the end of the run would: all that was read is handed over and closed.
    """
    done = _Done()
    count, status, verdict = 0, "running", None
    try:
        while True:
            status = status_of(store.about, _all_closed(store))
            for points in _new(store, done, whole=not follow or status != "running"):
                exporter.points(points)
                count += len(points)
            latest = judge(store)
            if verdict is None or latest.incidents != verdict.incidents or latest.status != verdict.status:
                verdict = latest
                exporter.incidents(latest)
            if not follow or status != "running":
                break
            wait()
            store.refresh()
    except KeyboardInterrupt:
        pass
    exporter.close(status)
    return Exported(count, status)


def _all_closed(store: Store) -> bool:
    return all(p.state and p.state.closed for p in store.processes if p.kind == "rank")


class _Done:
    """The last step of each attempt and rank that was handed over."""

    def __init__(self) -> None:
        self.steps: dict[tuple[int, int], int] = {}


def _new(store: Store, done: _Done, whole: bool) -> Iterator[list[Point]]:
    """What is there and was not handed over, by step. `whole`: the newest steps too."""
    ends = {(a, r): last if whole else last - 1 for a, r, last in store.rows(
        "SELECT attempt, rank, max(step) FROM step WHERE rank >= 0 GROUP BY ALL")}  # fmt: skip
    sharded = _sharded(store)
    for attempt in sorted({a for a, _ in ends}):
        mine = {r: last for (a, r), last in ends.items() if a == attempt}
        begins = {r: done.steps.get((attempt, r), 0) for r in mine}
        first, last = min(begins.values()) + 1, max(mine.values())
        width = max(1, STRETCH // (len(METRICS) * len(mine)))
        for low in range(first, last + 1, width):
            high = min(last, low + width - 1)
            points = [p for p in _read(store, attempt, low, high, sharded) if begins.get(p.rank, last) < p.step
                      <= mine.get(p.rank, 0)]  # fmt: skip
            if points:
                yield sorted(points, key=lambda p: (p.step, p.rank, p.metric))
        for rank, step in mine.items():
            done.steps[attempt, rank] = max(step, begins[rank])


def _read(store: Store, attempt: int, low: int, high: int, sharded: dict[Any, float]) -> Iterator[Point]:
    """Every metric of some steps. Where a step has several rows of one, the last one holds."""
    for name, m in METRICS.items():
        rows = store.rows(f"""
            SELECT step, rank, arg_max(CAST({m.value} AS DOUBLE), seq), max(time_ns) FROM {m.table}
            WHERE ({m.where}) AND attempt = {attempt} AND step BETWEEN {low} AND {high} AND rank >= 0 GROUP BY ALL
        """)
        for step, rank, value, time_ns in rows:
            if name == "grad_norm" and sharded:  # a row of the table holds the parts of one rank only
                value = sharded.get((rank, attempt, step))
            if value is not None:
                yield Point(name, attempt, step, rank, value, time_ns)


def _sharded(store: Store) -> dict[Any, float]:
    if not is_sharded(store):
        return {}
    return {(rank, attempt, step): norm for rank, attempt, step, norm in sharded_norms(store)}
