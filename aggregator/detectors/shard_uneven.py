"""Ranks get different numbers of batches in a pass, or batches of different size.

Reads     loader, batch (training passes), event (Join), tensor and param (whether the ranks train one model)
Says      the ranks that stand apart, planned and consumed batches, batch sizes
Unknown   data whose batch sizes vary on each rank by design
Blind to  data that reaches the model without a torch DataLoader
Do        split the data so that every rank gets as many batches, drop or pad the rest, or train under the Join
          context manager
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..groups import split
from ..wording import ranks_text

CODE = "SHARD_UNEVEN"
NEEDS = {"batch": 1, "loader": 1}
PARAMS: dict[str, object] = {}

# The last batch of a pass may be shorter and says nothing about the batch size.
SQL = """
WITH pass AS (
    SELECT rank, attempt, pid, loader, iterator, whole, nth_loader, nth_pass FROM training_pass
), sized AS (
    SELECT *, index < max(index) OVER (PARTITION BY rank, attempt, pid, loader, iterator) AS inner_batch
    FROM training_batch
), taken AS (
    SELECT rank, attempt, pid, loader, iterator, count(*) AS batches, sum(greatest(samples, 0)) AS samples,
           min(step) AS first_step, max(step) AS last_step, count(*) FILTER (inner_batch AND samples > 0) AS sized,
           coalesce(min(samples) FILTER (inner_batch AND samples > 0), 0) AS smallest,
           coalesce(max(samples) FILTER (inner_batch AND samples > 0), 0) AS largest
    FROM sized GROUP BY ALL
), joined AS (
    SELECT attempt FROM event WHERE kind = 'join' GROUP BY attempt
), alone AS (
    SELECT rank, attempt FROM tensor WHERE kind = 'param' GROUP BY ALL
    HAVING bool_and(sharing = 'plain' AND (peers = '' OR attempt NOT IN (SELECT attempt FROM reduced_by_hand)))
)
SELECT p.attempt, p.nth_loader, p.nth_pass, p.rank, l.batches, t.batches, t.samples, p.whole, t.sized, t.smallest,
       t.largest, t.first_step, t.last_step, l.sampler_class, p.attempt IN (SELECT attempt FROM joined),
       EXISTS (SELECT 1 FROM alone a WHERE a.rank = p.rank AND a.attempt = p.attempt),
       p.nth_pass < max(p.nth_pass) OVER (PARTITION BY p.rank, p.attempt, p.nth_loader)
FROM pass p JOIN taken t USING (rank, attempt, pid, loader, iterator)
JOIN loader l USING (rank, attempt, pid, loader, iterator)
ORDER BY p.attempt, p.nth_loader, p.nth_pass, p.rank
"""

FEWEST_BATCHES = 5  # of one size on a rank before its size counts as constant
TAIL_RATIO = 0.05  # of a shard: a shorter last batch by less than this is how any split ends


class Row(NamedTuple):
    attempt: int
    loader: int
    nth_pass: int
    rank: int
    planned: int  # -1 unknown
    batches: int
    samples: int
    whole: bool
    sized: int  # batches before the last whose size is known
    smallest: int
    largest: int
    first_step: int
    last_step: int
    sampler_class: str
    joined: bool
    alone: bool  # no wrapper, and no process group known or no weights that agree: nothing couples the ranks
    over: bool  # a later pass has begun


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    rows = list(rows)
    if run.world_size < 2:
        yield Abstention("NOT_APPLICABLE", "one rank has nobody to share data with")
        return
    if any(r.joined for r in rows):
        yield Abstention("NOT_APPLICABLE", "the ranks train under Join, which is made for uneven shards")
        return
    coupled = [r for r in rows if not r.alone]
    for _, members in groupby(coupled, key=lambda r: (r.attempt, r.loader)):
        passes = [list(p) for _, p in groupby(members, key=lambda r: r.nth_pass)]
        first = next((found for p in passes if (found := _pass(p, run)) is not None), None)
        if first is not None:
            yield first
    yield from _unjudged(rows, coupled, run)


def _unjudged(rows: Sequence[Row], coupled: Sequence[Row], run: RunFacts) -> Iterator[Abstention]:
    seen = {r.rank for r in coupled}
    if not rows:
        yield Abstention("INSUFFICIENT_EVIDENCE", "no loader is known to feed training")
    elif not coupled:
        yield Abstention("INSUFFICIENT_EVIDENCE", "nothing is known to couple the ranks' models")
    elif len(seen) < run.world_size:
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", f"training passes of {len(seen)} of {run.world_size} ranks were recorded"
        )
    elif all(r.planned < 0 and not r.whole and not _constant(r) for r in coupled):
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", "batch sizes vary, no number of batches is planned, no pass has ended"
        )


def _pass(rows: Sequence[Row], run: RunFacts) -> Finding | None:
    """What one pass of one loader shows; the strongest of the four comparisons."""
    if len(rows) < 2:
        return None
    every = _differing(rows, lambda r: r.batches) if all(r.whole for r in rows) else {}
    if every:
        return _finding(rows, every, "batches", "warning", "consumed")
    planned = _differing(rows, lambda r: r.planned) if all(r.planned >= 0 for r in rows) else {}
    if planned and not all(r.whole for r in rows):
        return _finding(rows, planned, "batches", "note" if _stops_together(rows, run) else "warning", "planned")
    sizes = _differing(rows, lambda r: r.largest) if all(_constant(r) for r in rows) else {}
    if sizes:
        return _finding(rows, sizes, "batch size", "warning", "constant")
    samples = {r.rank: r.samples for r in rows}
    spread, most = max(samples.values()) - min(samples.values()), max(samples.values())
    steady = all(_constant(r) for r in rows) and all(r.whole for r in rows)
    # n modulo the ranks may fall on one rank; the same number of batches of the same size leaves only the last one
    if steady and spread > max(len(rows), TAIL_RATIO * most):
        return _finding(rows, samples, "samples", "note", "consumed")
    return None


def _constant(row: Row) -> bool:
    return row.sized >= FEWEST_BATCHES and row.smallest == row.largest


def _stops_together(rows: Sequence[Row], run: RunFacts) -> bool:
    """All left the pass after the same number of batches and went on: the loop stops at the shortest on purpose."""
    gone_on = all(r.over for r in rows) or run.status == "finished"
    return gone_on and len({r.batches for r in rows}) == 1


def _differing(rows: Sequence[Row], value: Callable[[Row], int]) -> Mapping[int, int]:
    values = {r.rank: value(r) for r in rows}
    return values if len(set(values.values())) > 1 else {}


def _finding(rows: Sequence[Row], values: Mapping[int, int], what: str, severity: Severity, how: str) -> Finding:
    parts = split(values)
    counts = ", ".join(
        f"{v} on {ranks_text(r for r in values if values[r] == v)}" for v in sorted(set(values.values()))[:4]
    )
    shown = [*parts.odd[:6], *[r for r in values if r not in parts.odd][:2]]
    expected = str(parts.shared) if parts.decided else "the same on all ranks"
    first = next(r for r in rows if r.rank == parts.odd[0])
    begin, end = max(1, min(r.first_step for r in rows)), max(1, min(r.last_step for r in rows))
    return Finding(
        ranks=parts.odd,
        # a size differs from the first batch on, a number of batches once the shortest pass is over
        first_step=end if how == "consumed" else begin,
        last_step=max(r.last_step for r in rows),
        attempt=first.attempt,
        severity=severity,
        subject=first.sampler_class,
        summary=f"ranks get uneven shards in pass {first.nth_pass}: {what} {how}: {counts}",
        evidence=tuple(Evidence(r, begin, f"{how} {what}", str(values[r]), expected) for r in shown),
        cannot_conclude=("whether the loop stops at the shortest shard",) if how == "planned" else (),
        next_check="split the data so that every rank has the same number of batches, or train under Join"
        if what == "batches"
        else "weight each rank's loss by its samples, or give every rank batches of one size",
    )
