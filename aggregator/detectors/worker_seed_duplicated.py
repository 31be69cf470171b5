"""Several workers of one loader draw the same random numbers, each for other samples.

Reads     stream (where each worker's random streams stood at its first batches), loader, batch (training passes)
Says      the ranks, the stream, the workers; what was drawn from, not what was seeded
Unknown   workers that made fewer than two batches; iterable data sets, whose workers may share a stream on purpose
Blind to  generators deep inside user objects; the same numbers in workers of several ranks (RNG_DUPLICATED)
Do        in worker_init_fn seed numpy, random and generators of your own from
          torch.utils.data.get_worker_info().seed; a constant seed there makes every worker alike
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard

CODE = "WORKER_SEED_DUPLICATED"
NEEDS = {"loader": 1}
PARAMS = {
    "looks": 2,  # batches after which a stream must have moved twice: one that is set anew for each batch does not
}

# `alike`: workers whose stream began at the same state and moved with each batch. They drew the same numbers when it
# stood at the same place again after as many batches, or when it is known to have gone on unseeded from that state.
SQL = """
WITH flat AS (
    SELECT attempt, rank, pid, loader, iterator, worker, fetches, unnest(string_split(names, ',')) AS name,
           unnest(digests) AS digest, unnest(origins) AS origin
    FROM stream WHERE worker >= 0 AND fetches <= $looks
), lane AS (
    SELECT attempt, rank, pid, loader, iterator, worker, name, any_value(digest) FILTER (fetches = 0) AS start,
           any_value(digest) FILTER (fetches = 1) AS one, any_value(digest) FILTER (fetches = 2) AS two,
           min(origin) = max(origin) AND min(origin) >= 0 AS kept
    FROM flat GROUP BY ALL
), told AS (
    SELECT l.*, d.iterable, d.dataset_class, d.worker_init,
           row_number() OVER (PARTITION BY l.attempt, l.rank, l.loader, l.worker, l.name ORDER BY l.iterator) AS nth,
           two IS NOT NULL AND one <> start AND two <> one AND two <> start AS drawn,
           two IS NULL AND one <> start AS once
    FROM lane l JOIN loader d USING (attempt, rank, pid, loader, iterator)
    JOIN training_pass USING (attempt, rank, pid, loader, iterator)
    WHERE start <> 0
), alike AS (
    SELECT attempt, rank, loader, iterator, name, any_value(dataset_class) AS dataset_class,
           any_value(worker_init) AS worker_init, any_value(iterable) AS iterable,
           list(worker ORDER BY worker) AS workers, bool_and(drawn) AS drawn,
           min(one) = max(one) OR min(two) = max(two) AS again, bool_and(kept) AS kept
    FROM told WHERE drawn OR once GROUP BY attempt, rank, pid, loader, iterator, name, start
    HAVING count(DISTINCT worker) > 1
), replayed AS (
    SELECT attempt, rank, loader, min(iterator) AS iterator, name, any_value(dataset_class), any_value(worker_init),
           any_value(iterable), [worker], TRUE, min(one) = max(one) AND min(two) = max(two), FALSE
    FROM told WHERE drawn GROUP BY attempt, rank, loader, name, worker, start HAVING count(DISTINCT nth) > 1
)
SELECT attempt, loader, dataset_class, name, rank, iterator, workers, iterable, worker_init, drawn, again, kept, FALSE
FROM alike
UNION ALL SELECT attempt, loader, dataset_class, name, rank, iterator, workers, iterable, worker_init, drawn, again,
                 kept, TRUE FROM (SELECT * FROM replayed) AS r(attempt, rank, loader, iterator, name, dataset_class,
                 worker_init, iterable, workers, drawn, again, kept) WHERE again
ORDER BY ALL
"""


class Row(NamedTuple):
    """Workers whose stream began at one state; `replayed`: one worker, in several passes."""

    attempt: int
    loader: int
    dataset: str
    stream: str
    rank: int
    iterator: int
    workers: Sequence[int]
    iterable: bool
    worker_init: bool
    drawn: bool
    again: bool
    kept: bool
    replayed: bool


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    yield from unheard(run)
    for _, members in groupby(rows, key=lambda r: (r.attempt, r.loader, r.dataset)):
        several = list(members)
        same = [r for r in several if not r.replayed]
        proven = [r for r in same if r.drawn and (r.again or r.kept) and not r.iterable]
        if proven:
            yield _finding(proven)
        elif any(r.iterable for r in same):
            why = "an iterable data set may draw one stream in all workers on purpose, each keeping its share"
            yield Abstention("INSUFFICIENT_EVIDENCE", why)
        elif same:
            why = "streams that began alike were drawn from by too few batches, or may have been seeded in between"
            yield Abstention("INSUFFICIENT_EVIDENCE", why)
        again = [r for r in several if r.replayed and not r.iterable]
        if again and not proven:
            yield _each_pass(again)


def _finding(rows: Sequence[Row]) -> Finding:
    ranks = tuple(sorted({r.rank for r in rows}))
    streams = sorted({r.stream for r in rows})
    most = max(rows, key=lambda r: len(r.workers))
    first = {(r.rank, r.stream): r for r in reversed(rows)}
    return Finding(
        ranks=ranks,
        first_step=None,
        attempt=rows[0].attempt,
        severity="warning",
        subject=", ".join(streams),
        summary=f"{len(most.workers)} workers of the loader of {most.dataset} draw the same random numbers from "
        f"{' and '.join(streams)}, on {listed(ranks)}",
        evidence=tuple(
            Evidence(r.rank, None, f"workers that began {r.stream} at one state and drew from it",
                     ", ".join(map(str, r.workers)), "one worker each")
            for r in first.values()
        )[:16],
        cannot_conclude=("whether the worker_init_fn or a generator copied into every worker is the reason",)
        if most.worker_init
        else (),
        next_check="seed each worker's own streams from torch.utils.data.get_worker_info().seed",
    )  # fmt: skip


def _each_pass(rows: Sequence[Row]) -> Finding:
    ranks = tuple(sorted({r.rank for r in rows}))
    streams = sorted({r.stream for r in rows})
    return Finding(
        ranks=ranks,
        first_step=None,
        attempt=rows[0].attempt,
        severity="note",
        subject=", ".join(streams),
        summary=f"the workers of the loader of {rows[0].dataset} draw the same random numbers from "
        f"{' and '.join(streams)} in every pass, on {listed(ranks)}",
        evidence=tuple(
            Evidence(r.rank, None, f"{r.stream} in worker {r.workers[0]} at the start of a pass", "as before", "new")
            for r in rows[:8]
        ),
        next_check="seed each worker's own streams from torch.utils.data.get_worker_info().seed, new in each pass",
    )  # fmt: skip
