"""An exception while data was read was caught and hidden: samples were exchanged for others, or left out.

Reads     making (what a data set or a collate function did inside), batch (exceptions that came out), loader, stream
Says      the ranks, the first step, which samples, what was given instead, the class of the exception
Unknown   loaders whose workers did not report; handled exceptions in data whose contents are random
Blind to  data sets of installed packages and those without Python code
Do        look at the except clause in the data set or the collate function named, let it raise once, and mend or
          leave out the samples listed; count what is skipped
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard

CODE = "DATA_ERROR_SWALLOWED"
NEEDS = {"loader": 1, "batch": 1}
PARAMS = {
    # what more samples than this do, raise inside or be exchanged, is by design: a cache that lacks them at first
    "habit": 0.5,
    "copies": 3,  # samples with the content of others: one pair may be in the data, and 3 pairs agree once in 2**96
    "clean": 2,  # times as many samples, all different, show that the data does not repeat by itself
    "compared": 400_000,  # samples whose contents are compared
}

# kinds: exchanged (another sample was given), copied (raised inside and has another sample's content), none (None after
# an exception), dropped (the collate function handled exceptions and gave fewer), raised (out of the loader, and the
# program went on). Kinds that may be meant: filtered (None without an exception), short (fewer than asked, where most
# batches are whole), handled (exceptions in less than half of the samples of iterable data, which has no ids to miss)
SQL = """
WITH told AS (
    SELECT *, samples_traced > 0 AND CASE WHEN len(instead_of) > 0  -- whatever else raises inside, as a cache does
                  THEN sum(len(instead_of)) OVER lane > $habit * max(samples_traced) OVER lane
                  ELSE samples_caught > $habit * samples_traced END AS habit,
           CASE WHEN len(instead_of) > 0 THEN 'exchanged' WHEN none_caught > 0 THEN 'none'
                WHEN nones > 0 THEN 'filtered'
                WHEN made < 0 OR made >= asked THEN NULL
                WHEN outside > 0 AND (same_size > 0 OR outside >= asked - made) THEN 'dropped'
                WHEN same_size * 2 > judged THEN 'short' END AS kind
    FROM making WINDOW lane AS (PARTITION BY attempt, rank, pid, loader, iterator, worker)
), lost AS (
    SELECT attempt, rank, pid, loader, iterator, step, kind, habit, exceptions,
           CASE kind WHEN 'exchanged' THEN instead_of ELSE none_ids END AS ids,
           CASE kind WHEN 'exchanged' THEN instead ELSE [] END AS instead,
           CASE kind WHEN 'exchanged' THEN len(instead_of) WHEN 'none' THEN nones WHEN 'filtered' THEN nones
                ELSE asked - made END AS samples
    FROM told WHERE kind IS NOT NULL
), content AS MATERIALIZED (
    SELECT DISTINCT attempt, loader, id, digest FROM (
        SELECT attempt, loader, unnest(ids) AS id, unnest(digests) AS digest FROM batch
        WHERE len(ids) = len(digests) AND (attempt, loader) IN (
            SELECT (attempt, loader) FROM told WHERE kind IS NULL AND len(caught_ids) > 0 AND NOT habit)
        LIMIT $compared)
), suspect AS (
    SELECT DISTINCT attempt, rank, pid, loader, iterator, step, exceptions, unnest(caught_ids) AS id
    FROM told WHERE NOT habit
), sharing AS (
    SELECT attempt, loader, digest, count(DISTINCT id) AS ids FROM content GROUP BY ALL
), judged AS (
    SELECT c.attempt, c.loader, c.id, c.digest, s.ids > 1 AS copy,
           (c.attempt, c.loader, c.id) IN (SELECT (attempt, loader, id) FROM suspect) AS suspect
    FROM content c JOIN sharing s USING (attempt, loader, digest)
), clear AS (
    SELECT attempt, loader FROM judged GROUP BY ALL
    HAVING count(DISTINCT id) FILTER (suspect) >= $copies
       AND bool_and(copy) FILTER (suspect)
       AND count(DISTINCT id) FILTER (NOT suspect) >= $clean * count(DISTINCT id) FILTER (suspect)
       AND count(DISTINCT digest) FILTER (NOT suspect) = count(DISTINCT id) FILTER (NOT suspect)
), copied AS (
    SELECT s.attempt, s.rank, s.pid, s.loader, s.iterator, s.step, 'copied', FALSE, s.exceptions, [s.id],
           coalesce((SELECT [min(o.id)] FROM judged j JOIN judged o USING (attempt, loader, digest)
                     WHERE j.attempt = s.attempt AND j.loader = s.loader AND j.id = s.id AND o.id <> s.id), []), 1
    FROM suspect s JOIN clear c USING (attempt, loader)
), raised AS (
    SELECT attempt, rank, pid, loader, iterator, step, 'raised', FALSE, "end", ids, [],
           greatest(len(ids), samples, 0)
    FROM batch b
    WHERE "end" NOT IN ('', 'StopIteration', 'StopAsyncIteration', 'GeneratorExit', 'KeyboardInterrupt', 'SystemExit')
      AND EXISTS (FROM batch n WHERE n.attempt = b.attempt AND n.rank = b.rank AND n.pid = b.pid
                  AND n.loader = b.loader AND n.seq > b.seq AND n."end" = '')
), handled AS (
    SELECT m.attempt, m.rank, m.pid, m.loader, m.iterator, m.step, 'handled', FALSE, m.exceptions, [], [], m.outside
    FROM told m JOIN loader l USING (attempt, rank, pid, loader, iterator)
    WHERE l.iterable AND m.kind IS NULL AND m.outside > 0 AND m.outside < $habit * m.asked
), every AS (
    FROM lost UNION ALL FROM copied UNION ALL FROM raised UNION ALL FROM handled
), random AS (  -- something random was drawn while batches were made: contents may be new each time
    SELECT attempt, rank, pid, loader FROM (
        SELECT attempt, rank, pid, loader, unnest(string_split(names, ',')) AS name, iterator, worker,
               unnest(digests) AS digest FROM stream)
    GROUP BY attempt, rank, pid, loader, iterator, worker, name HAVING count(DISTINCT digest) > 1
), unsure AS (
    SELECT s.attempt, s.rank, any_value(l.dataset_class) AS class, count(DISTINCT s.id) AS samples
    FROM suspect s JOIN loader l USING (attempt, rank, pid, loader, iterator)
    SEMI JOIN random r ON (s.attempt, s.rank, s.pid, s.loader) = (r.attempt, r.rank, r.pid, r.loader)
    ANTI JOIN clear c ON (s.attempt, s.loader) = (c.attempt, c.loader)
    ANTI JOIN lost o ON (s.attempt, s.rank, s.pid, s.loader) = (o.attempt, o.rank, o.pid, o.loader)
    GROUP BY ALL HAVING samples >= $copies
), placed AS (
    SELECT e.*, coalesce((SELECT min(b.step) FROM batch b
                          WHERE (b.attempt, b.rank, b.pid, b.loader, b.iterator)
                              = (e.attempt, e.rank, e.pid, e.loader, e.iterator) AND list_contains(b.ids, e.ids[1])),
                         e.step) AS at
    FROM every e
), silent AS (
    SELECT l.attempt, l.rank, any_value(l.dataset_class) AS class FROM loader l
    ANTI JOIN stream s USING (attempt, rank, pid, loader) GROUP BY ALL
), untraced AS (
    SELECT l.attempt, l.rank, any_value(l.dataset_class) AS class FROM loader l
    JOIN stream s USING (attempt, rank, pid, loader) WHERE s.untraced > 0 GROUP BY ALL
)
SELECT p.attempt, p.kind, p.rank, any_value(l.dataset_class), count(*), sum(p.samples)::BIGINT, min(p.at), max(p.at),
       bool_or(p.habit), flatten(list(p.ids ORDER BY p.at))[1:8], flatten(list(p.instead ORDER BY p.at))[1:8],
       any_value(p.exceptions)
FROM placed p JOIN loader l USING (attempt, rank, pid, loader, iterator) GROUP BY ALL
UNION ALL SELECT attempt, 'silent', rank, class, 0, 0, 0, 0, FALSE, [], [], '' FROM silent
UNION ALL SELECT attempt, 'untraced', rank, class, 0, 0, 0, 0, FALSE, [], [], '' FROM untraced
UNION ALL SELECT attempt, 'unsure', rank, class, 0, samples, 0, 0, FALSE, [], [], '' FROM unsure
ORDER BY ALL
"""

NOT_SEEN = "whether samples are left out by design: no exception was seen inside"
SEEN = ("exchanged", "copied", "none", "dropped", "raised")  # kinds with an exception that was seen


class Row(NamedTuple):
    attempt: int
    kind: str
    rank: int
    dataset: str
    batches: int
    samples: int
    first_step: int
    last_step: int
    habit: bool
    ids: Sequence[int]
    instead: Sequence[int]
    exceptions: str


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    yield from unheard(run)
    for (_, kind, dataset), members in groupby(sorted(rows, key=_group), key=_group):
        several = list(members)
        if kind == "silent":
            who = listed({r.rank for r in several})
            why = f"how the batches of {dataset} were made on {who} was not reported"
            yield Abstention("INSUFFICIENT_EVIDENCE", why)
        elif kind == "untraced":
            who = listed({r.rank for r in several})
            why = f"a debugger or coverage tool on {who} traced the thread in which {dataset} makes its samples: " \
                  "exceptions handled inside could not be seen"  # fmt: skip
            yield Abstention("INSUFFICIENT_EVIDENCE", why)
        elif kind == "unsure":
            why = (
                f"{dataset} handled exceptions while it made {sum(r.samples for r in several)} samples: with contents "
                "drawn anew each time, whether they are those asked for can't be told"
            )
            yield Abstention("INSUFFICIENT_EVIDENCE", why)
        else:
            yield _finding(kind, several)


def _group(row: Row) -> tuple[int, str, str]:
    return row.attempt, row.kind, row.dataset


def _finding(kind: str, rows: Sequence[Row]) -> Finding:
    first = min(r.first_step for r in rows)
    samples = sum(r.samples for r in rows)
    names = ", ".join(sorted({r.exceptions for r in rows if r.exceptions}))
    ranks = tuple(sorted({r.rank for r in rows}))
    grave = kind in SEEN and not any(r.habit for r in rows)
    return Finding(
        ranks=ranks,
        first_step=first,
        last_good_step=first - 1 if first > 1 else None,
        last_step=max(r.last_step for r in rows),
        attempt=rows[0].attempt,
        severity="warning" if grave else "note",
        subject=rows[0].dataset,
        summary=_summary(kind, rows[0].dataset, samples, names) + f" on {listed(ranks)}",
        evidence=tuple(_evidence(kind, r) for r in rows),
        cannot_conclude=()
        if kind in SEEN
        else ("whether samples are left out, and by design" if kind == "handled" else NOT_SEEN,),
        next_check=_next(kind),
    )


def _summary(kind: str, dataset: str, samples: int, names: str) -> str:
    many = f"{samples} sample{'s' if samples != 1 else ''}"
    caught = f"after an exception that it handled itself ({names})" if names else ""
    return {
        "exchanged": f"{dataset} gave another sample in place of {many}, {caught}",
        "copied": f"{dataset} gave {many} the content of another one, {caught}",
        "none": f"{dataset} gave None for {many}, {caught}",
        "dropped": f"batches of {dataset} lost {many} in the collate function, which handled exceptions ({names})",
        "raised": f"{names} came out of the loader of {dataset} and was swallowed: {many} skipped",
        "handled": f"{dataset} handled {samples} exceptions while it gave its samples ({names})",
        "filtered": f"{dataset} gave None for {many}",
        "short": f"batches of {dataset} hold {many} fewer than the sampler asked for",
    }[kind]


def _evidence(kind: str, row: Row) -> Evidence:
    ids = ", ".join(map(str, row.ids))
    if row.instead:
        pairs = ", ".join(f"{b} for {a}" for a, b in zip(row.ids, row.instead, strict=False))
        return Evidence(row.rank, row.first_step, "samples given", pairs, f"those asked for: {ids}")
    what = f"{row.samples} in {row.batches} batch{'es' if row.batches != 1 else ''}" + (f", e.g. {ids}" if ids else "")
    if kind == "handled":
        return Evidence(row.rank, row.first_step, "exceptions handled inside", str(row.samples), "0")
    metric = {"none": "samples that are None", "filtered": "samples that are None"}.get(kind, "samples lost")
    return Evidence(row.rank, row.first_step, metric, what, "0")


def _next(kind: str) -> str:
    if kind == "raised":
        return "let the exception end the run, or remove the broken records from the data set beforehand"
    if kind in SEEN:
        return "read the samples named in the evidence by hand, outside of the handler, and see what is raised"
    return "count what is left out, and say so in the data set's length"
