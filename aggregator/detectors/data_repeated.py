"""One rank consumes the same samples several times in one pass: each worker reads the whole stream, or ids recur.

Reads     batch (training passes), loader, stream (whether anything random was drawn while batches were made)
Says      the ranks, the step of the first repeat, how many samples come from several workers
Unknown   iterable data without ids whose contents are drawn anew each time
Blind to  repeats from pass to pass, which are what epochs are; samples drawn with replacement
Do        in __iter__ of an IterableDataset take each worker's part by torch.utils.data.get_worker_info(), beside the
          rank's; of a sampler look at replacement and at the indices it gives
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard

CODE = "DATA_REPEATED"
NEEDS = {"batch": 1, "loader": 1}
PARAMS = {
    "stream": 4096,  # samples of a worker's stream that are compared: bounds memory on endless streams
    "passes": 4,  # passes of a loader that are judged: what is wired wrongly is wrong from the first
}

# Samples of iterable data are known by the digest of their content and the worker that gave them; others by their id.
SQL = """
WITH pass AS (
    SELECT p.*, l.iterable, l.workers, l.batch_size, l.samples AS declared, l.replacement, l.sampler_class,
           l.dataset_class,
           row_number() OVER (PARTITION BY p.rank, p.attempt, p.pid, p.loader ORDER BY p.iterator) AS nth
    FROM training_pass p JOIN loader l USING (rank, attempt, pid, loader, iterator)
), numbered AS (
    SELECT b.rank, b.attempt, b.pid, b.loader, b.iterator, b.step, b.index, b.worker, p.iterable,
           CASE WHEN p.iterable THEN b.digests ELSE b.ids END AS keys,
           sum(b.samples) OVER (PARTITION BY b.rank, b.attempt, b.pid, b.loader, b.iterator,
                                CASE WHEN p.iterable THEN b.worker END ORDER BY b.index) - b.samples AS before
    FROM batch b JOIN pass p USING (rank, attempt, pid, loader, iterator)
    WHERE b."end" = '' AND p.nth <= $passes AND (NOT p.iterable OR p.workers > 1)
), flat AS MATERIALIZED (
    SELECT * EXCLUDE (keys, before), before + generate_subscripts(keys, 1) AS place, unnest(keys) AS key
    FROM numbered WHERE NOT iterable OR before < $stream
), content AS (  -- per pass and content: who gave it
    SELECT rank, attempt, pid, loader, iterator, key, count(*) AS times, count(DISTINCT worker) AS givers,
           (list(step ORDER BY index))[2] AS again
    FROM flat GROUP BY ALL
), order_of AS (  -- each worker's stream up to where the shortest one ends
    SELECT rank, attempt, pid, loader, iterator, worker, list(key ORDER BY place) AS keys FROM flat
    WHERE iterable GROUP BY ALL
), shortest AS (
    SELECT rank, attempt, pid, loader, iterator, min(len(keys)) AS length, count(*) AS givers FROM order_of GROUP BY ALL
), alike AS (
    SELECT rank, attempt, pid, loader, iterator, max(s.givers) AS givers, max(s.length) AS length,
           count(DISTINCT o.keys[1:s.length]) = 1 AND max(s.givers) > 1 AS alike
    FROM order_of o JOIN shortest s USING (rank, attempt, pid, loader, iterator) GROUP BY ALL
), tally AS (
    SELECT rank, attempt, pid, loader, iterator, count(*) AS contents, sum(times)::BIGINT AS samples,
           count(*) FILTER (givers > 1) AS shared, coalesce(sum(times - givers), 0)::BIGINT AS within,
           count(*) FILTER (times > 1) AS repeated, min(again) FILTER (givers > 1 OR times > 1) AS again,
           (list(key ORDER BY key) FILTER (times > 1))[1:8] AS examples
    FROM content GROUP BY ALL
), recurring AS (
    SELECT rank, attempt, pid, loader, count(*) AS recurring FROM (
        SELECT rank, attempt, pid, loader, key FROM content GROUP BY ALL HAVING count(DISTINCT iterator) > 1)
    GROUP BY ALL
), moved AS (
    SELECT rank, attempt, pid, loader, bool_or(moves > 1) AS random FROM (
        SELECT rank, attempt, pid, loader, iterator, worker, name, count(DISTINCT digest) AS moves FROM (
            SELECT rank, attempt, pid, loader, iterator, worker, unnest(string_split(names, ',')) AS name,
                   unnest(digests) AS digest FROM stream) GROUP BY ALL) GROUP BY ALL
)
SELECT p.attempt, p.loader, p.dataset_class, p.rank, p.iterator, p.iterable, p.workers, p.batch_size, p.declared,
       p.replacement, p.sampler_class, p.whole, t.contents, t.samples, t.shared, t.within, t.repeated,
       coalesce(t.again, 0), t.examples, coalesce(a.givers, 0), coalesce(a.alike, FALSE), coalesce(r.recurring, 0),
       coalesce(m.random, TRUE)
FROM pass p JOIN tally t USING (rank, attempt, pid, loader, iterator)
LEFT JOIN alike a USING (rank, attempt, pid, loader, iterator)
LEFT JOIN recurring r USING (rank, attempt, pid, loader) LEFT JOIN moved m USING (rank, attempt, pid, loader)
ORDER BY p.attempt, p.loader, p.dataset_class, p.rank, p.iterator
"""

FEWEST_CONTENTS = 8  # 32-bit digests that agree on eight contents do so by chance once in 2**256
FEWEST_SHARED = 32  # contents that workers give in different order; fewer may be real duplicates in the data
SHARED_RATIO = 0.5  # of them given by several workers, while...
WITHIN_RATIO = 0.01  # ...a worker repeats next to nothing itself: else the data does, or the pass spans several epochs
MATERIAL_RATIO = 0.01  # of a pass: fewer recurring ids are how samplers fill up their last batches
REPEATED_BY_DESIGN = re.compile(r"repeat|^RASampler|replace|weight|oversampl|balanc", re.IGNORECASE)


class Row(NamedTuple):
    """One training pass of one rank."""

    attempt: int
    loader: int
    dataset: str
    rank: int
    iterator: int
    iterable: bool
    workers: int
    batch_size: int
    declared: int  # len(sampler); -1 unknown
    replacement: bool
    sampler: str
    whole: bool
    contents: int  # distinct ids or contents
    samples: int
    shared: int  # contents that more than one worker gave
    within: int  # repeats by one and the same worker
    repeated: int  # contents that came more than once
    again: int  # step of the first repeat
    examples: Sequence[int] | None
    givers: int  # workers that gave something
    alike: bool  # their streams are equal sample by sample as far as they go
    recurring: int  # contents that came in several passes
    random: bool  # something random was drawn while batches were made, or that is not known


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    yield from unheard(run)
    for _, members in groupby(rows, key=lambda r: (r.attempt, r.loader, r.dataset)):
        several = list(members)
        streams = [r for r in several if r.iterable and _read_by_all_workers(r)]
        if streams:
            yield _streams(streams)
        elif any(r.iterable and r.givers > 1 and r.random and not r.recurring for r in several):
            why = "iterable data without ids, whose contents are drawn anew each time: repeats can't be told"
            yield Abstention("INSUFFICIENT_EVIDENCE", why)
        ids = [r for r in several if not r.iterable and _ids_recur(r, run)]
        if ids:
            yield _ids(ids)


def _read_by_all_workers(row: Row) -> bool:
    if row.alike:
        return row.contents >= FEWEST_CONTENTS
    return (
        row.contents >= FEWEST_SHARED
        and row.shared >= SHARED_RATIO * row.contents
        and row.within <= WITHIN_RATIO * row.samples
    )


def _ids_recur(row: Row, run: RunFacts) -> bool:
    """Within one declared epoch, beyond what fills up the last round of batches of all ranks."""
    extra = row.samples - row.contents
    filling = max(1, row.batch_size) * max(1, run.world_size)
    declared = 0 < row.samples <= row.declared + filling
    if row.replacement or REPEATED_BY_DESIGN.search(row.sampler):
        return False
    return declared and extra > filling and extra > MATERIAL_RATIO * row.samples


def _streams(rows: Sequence[Row]) -> Finding:
    ranks = tuple(sorted({r.rank for r in rows}))
    first = min(rows, key=lambda r: r.again)
    return Finding(
        ranks=ranks,
        first_step=first.again,
        last_good_step=first.again - 1 if first.again > 1 else None,
        attempt=first.attempt,
        severity="warning",
        subject=first.dataset,
        summary=f"each of the {first.givers} workers gives the same samples of {first.dataset}, on {listed(ranks)}: "
        "the data set is not split by worker",
        evidence=tuple(
            Evidence(r.rank, r.again, f"contents that several workers gave in pass {r.iterator}",
                     f"{r.shared} of {r.contents}", "0")
            for r in rows[:16]
        ),
        next_check="in __iter__, take a share by torch.utils.data.get_worker_info()",
    )  # fmt: skip


def _ids(rows: Sequence[Row]) -> Finding:
    ranks = tuple(sorted({r.rank for r in rows}))
    first = min(rows, key=lambda r: r.again)
    return Finding(
        ranks=ranks,
        first_step=first.again,
        attempt=first.attempt,
        severity="note",  # oversampling is done this way too, and nothing in the data tells the two apart
        subject=first.sampler,
        summary=f"{first.sampler} gives {first.repeated} of {first.contents} samples of {first.dataset} more than once "
        f"in a pass, on {listed(ranks)}",
        evidence=tuple(
            Evidence(r.rank, r.again, "ids that recur in a pass", ", ".join(map(str, r.examples or ())), "none")
            for r in rows[:16]
        ),
        cannot_conclude=("whether samples are repeated by design",),
        next_check="look at the indices that the sampler gives",
    )  # fmt: skip
