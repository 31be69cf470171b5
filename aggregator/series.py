"""A metric by rank and step, thinned for drawing: at most so many points a line, so many lines, and nothing odd lost.

Of many steps each line keeps the lowest and the highest value of every stretch; of many ranks only those that are
marked keep a line of their own, and the others become a band (lowest, median, highest). So a plot of a thousand ranks
and a million steps is as large as one of eight ranks, and a spike of one step on one rank stays in it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from .gradnorm import is_sharded, sharded_norms
from .metrics import METRICS
from .store import Store

STRETCHES = 240  # of a line, two points each: more than the pixels of a phone, as many as those of a small plot
MOST_LINES = 8  # ranks that are told apart by colour and dash; more of them become a band
MOST_MARKED = 4


@dataclass(frozen=True)
class Line:
    """One rank's values, by step; NaN and Inf stay what they are."""

    rank: int
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Band:
    """Many ranks: per stretch its first step, the lowest, median and highest finite value of all of them."""

    ranks: int
    steps: tuple[int, ...]
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Series:
    """One metric of one attempt; `lines` hold the marked ranks, and all of them where they are few."""

    metric: str
    unit: str
    meaning: str
    attempt: int
    lines: tuple[Line, ...]
    band: Band | None = None
    lasts: bool = False  # a value holds until the next

    @property
    def finite(self) -> list[float]:
        """Every finite value that is drawn."""
        own = [v for line in self.lines for v in line.values if math.isfinite(v)]
        return own + [v for part in ((self.band.low, self.band.high) if self.band else ()) for v in part]

    @property
    def highest(self) -> float:
        return max(self.finite, default=0.0)

    @property
    def steps(self) -> tuple[int, int]:
        every = [s for line in self.lines for s in line.steps] + list(self.band.steps if self.band else ())
        return min(every), max(every)


def series(store: Store, metric: str, attempt: int, marked: Collection[int] = ()) -> Series | None:
    """One metric of an attempt, or None where nothing of it was recorded.

    Cost: two queries over the metric's table; memory by what is drawn, not by what was recorded.
    """
    m = METRICS[metric]
    if metric == "grad_norm" and is_sharded(store):
        store.connection.execute("CREATE OR REPLACE TEMP TABLE drawn (rank INT, step BIGINT, value DOUBLE)")
        rows = [(r, s, v) for r, a, s, v in sharded_norms(store) if a == attempt and s > 0]
        if rows:
            store.connection.executemany("INSERT INTO drawn VALUES (?, ?, ?)", rows)
    else:
        store.connection.execute(
            f"CREATE OR REPLACE TEMP TABLE drawn AS SELECT rank, step, CAST({m.value} AS DOUBLE) AS value "
            f"FROM {m.table} WHERE ({m.where}) AND step > 0 AND attempt = {int(attempt)} AND rank >= 0"
        )
    if m.lasts:  # up to the last step that the rank took
        store.connection.execute(f"""
            INSERT INTO drawn SELECT rank, ends.step, value
            FROM (SELECT rank, arg_max(value, step) AS value FROM drawn GROUP BY rank)
            JOIN (SELECT rank, max(step) AS step FROM step WHERE attempt = {int(attempt)} GROUP BY rank) ends
            USING (rank)
        """)
    ((ranks, first, last),) = store.rows(
        "SELECT list(DISTINCT rank ORDER BY rank), min(step), max(step) FROM drawn WHERE value IS NOT NULL"
    )
    if not ranks:
        return None
    width = max(1, math.ceil((last - first + 1) / STRETCHES))
    alone = ranks if len(ranks) <= MOST_LINES else [r for r in ranks if r in set(marked)][:MOST_MARKED]
    lines = _lines(store, alone, first, width)
    band = None if len(alone) == len(ranks) else _band(store, alone, first, width, len(ranks) - len(alone))
    return Series(metric, m.unit, m.meaning, attempt, lines, band, m.lasts)


def _lines(store: Store, ranks: Collection[int], first: int, width: int) -> tuple[Line, ...]:
    """Of each stretch the step and value of the lowest, the highest and the first non-finite one."""
    if not ranks:
        return ()
    rows = store.rows(f"""
        WITH mine AS (
            SELECT * FROM drawn WHERE value IS NOT NULL AND rank IN ({", ".join(str(int(r)) for r in ranks)})
        ), kept AS (
            SELECT rank, unnest([arg_min(step, value) FILTER (isfinite(value)), arg_max(step, value) FILTER
                   (isfinite(value)), min(step) FILTER (NOT isfinite(value))]) AS step
            FROM mine GROUP BY rank, (step - {int(first)}) // {int(width)}
        )
        SELECT rank, step, any_value(value) FROM mine SEMI JOIN kept USING (rank, step) GROUP BY ALL ORDER BY ALL
    """)
    by_rank: dict[int, list[tuple[int, float]]] = {}
    for rank, step, value in rows:
        by_rank.setdefault(rank, []).append((step, value))
    return tuple(Line(rank, *(tuple(c) for c in zip(*points, strict=True))) for rank, points in by_rank.items())


def _band(store: Store, without: Collection[int], first: int, width: int, ranks: int) -> Band:
    others = f"AND rank NOT IN ({', '.join(str(int(r)) for r in without)})" if without else ""
    rows = store.rows(f"""
        SELECT min(step), min(value), median(value), max(value) FROM drawn
        WHERE isfinite(value) {others} GROUP BY (step - {int(first)}) // {int(width)} ORDER BY 1
    """)
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    return Band(ranks, *(tuple(c) for c in columns))
