"""Samples that no rank consumed in a whole pass, beyond what samplers and loaders drop by design.

Reads     loader, batch, sampler, tensor (whether the ranks train one model at all)
Says      how many samples of which data set, the first of them, the pass
Unknown   passes that did not end on every rank; iterable data; wrappers whose choice of samples is not known
Blind to  samples held out on purpose and never evaluated: they look the same, and the finding says so
Do        compare each rank's file list or index range with the whole; shards must be cut by rank and world size in
          one way; `tdbg incident RUN ID` lists ids that nobody read
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding

CODE = "SHARD_MISSING"
NEEDS = {"batch": 1, "loader": 1}
PARAMS = {
    "compared": 4_000_000,  # samples: passes are judged in order until there were so many; 3 s on two cores
    "shown": 8,  # missing ids that are listed: enough to see a pattern
}

# `levels` lists a loader's data sets from the root up. The deepest one that is the same on all ranks is what they share
# out among them (a random_split that all ranks made alike is not missing its other part). A sample counts as consumed
# when any other loader over that data set, of evaluation or training, handed it out.
SQL = """
WITH pass AS (
    SELECT rank, attempt, pid, loader, iterator, whole, nth_loader, nth_pass FROM training_pass
), alone AS (
    SELECT rank, attempt FROM tensor WHERE kind = 'param' GROUP BY ALL HAVING bool_and(sharing = 'plain' AND peers = '')
), taken AS (
    SELECT rank, attempt, pid, loader, iterator, count(*) AS batches, sum(len(ids)) AS samples,
           max(len(ids)) AS largest, max(step) AS last_step, min(step) AS first_step
    FROM training_batch GROUP BY ALL
), split AS (
    SELECT rank, attempt, pid, sampler, any_value(class_name) AS class_name, max(num_replicas) AS replicas,
           bool_or(drop_last) AS drop_last, max(dataset_length) AS length
    FROM sampler GROUP BY ALL
), layered AS (
    SELECT *, coalesce(TRY_CAST(TRY_CAST(levels AS JSON) AS JSON[])::VARCHAR[], []) AS chain FROM loader
), every_pass AS (
    SELECT p.*, t.samples, t.largest, t.last_step, t.first_step,
           p.whole OR (l.batches > 0 AND t.batches >= l.batches) AS over,
           l.iterable, l.replacement, l.chain, l.drop_last, l.batch_size,
           (l.sampler_class LIKE '%RandomSampler' OR l.sharers > 1) AND l.samples >= 0 AND l.samples <
               coalesce(TRY_CAST(json_extract_string(l.chain[-1], '$[1]') AS BIGINT), 0) AS capped, l.skipped,
           coalesce(s.class_name, l.sampler_class) AS sampler_class, coalesce(s.replicas, 0) AS replicas,
           CASE WHEN s.drop_last AND s.replicas > 0 THEN greatest(s.length, 0) % s.replicas ELSE 0 END AS split_tail,
           CASE WHEN l.drop_last AND l.batch_size > 0  -- one sampler dealt to several ranks has one remainder
                THEN ceil((greatest(l.samples, 0) % (l.batch_size * l.sharers)) / l.sharers) ELSE 0 END AS batch_tail,
           EXISTS (SELECT 1 FROM alone a WHERE a.rank = p.rank AND a.attempt = p.attempt) AS alone
    FROM pass p JOIN taken t USING (rank, attempt, pid, loader, iterator)
    JOIN layered l USING (rank, attempt, pid, loader, iterator)
    LEFT JOIN split s ON s.rank = l.rank AND s.attempt = l.attempt AND s.pid = l.pid AND s.sampler = l.sampler
), told AS (  -- a pass of a very large run is enough to see what is missing
    SELECT * FROM every_pass
    QUALIFY sum(samples) OVER (ORDER BY nth_pass, attempt, nth_loader)
            - sum(samples) OVER (PARTITION BY nth_pass, attempt, nth_loader) < $compared
), level AS (
    SELECT attempt, nth_loader, nth_pass, depth, array_to_string(chain[1:depth], '>') AS path, chain[depth] AS entry
    FROM (SELECT *, unnest(range(1, len(chain) + 1)) AS depth FROM told)
), size AS (
    SELECT attempt, nth_loader, nth_pass, count(*) AS ranks, bool_and(over) AS over, bool_or(iterable) AS iterable,
           bool_or(replacement) AS replacement, bool_or(alone) AS alone, any_value(sampler_class) AS sampler_class,
           max(replicas) AS replicas, max(split_tail) AS split_tail, sum(batch_tail) AS batch_tail,
           bool_or(drop_last) AS drop_last, max(batch_size) AS batch_size, max(largest) AS largest,
           sum(samples) AS samples, bool_or(capped) AS capped, max(skipped) AS skipped,
           max(last_step) AS last_step, min(first_step) AS first_step, list(rank ORDER BY rank) AS who
    FROM told GROUP BY ALL
), common AS (
    SELECT attempt, nth_loader, nth_pass, depth, any_value(path) AS path, any_value(entry) AS entry, count(*) AS holders
    FROM level GROUP BY attempt, nth_loader, nth_pass, depth
    HAVING min(path) = max(path) AND NOT bool_or(depth > 1 AND coalesce(json_extract_string(entry, '$[2]'), '') = '')
), base AS (
    SELECT c.attempt, c.nth_loader, c.nth_pass, max(c.depth) AS depth, arg_max(c.path, c.depth) AS path,
           arg_max(c.entry, c.depth) AS entry
    FROM common c JOIN size z ON z.attempt = c.attempt AND z.nth_loader = c.nth_loader AND z.nth_pass = c.nth_pass
                             AND z.ranks = c.holders GROUP BY ALL
), vague AS (  -- of a composed choice that differs between ranks nobody knows which part was meant to be held out
    SELECT DISTINCT l.attempt, l.nth_loader, l.nth_pass
    FROM level l LEFT JOIN base b USING (attempt, nth_loader, nth_pass)
    WHERE l.depth > 1 AND (coalesce(json_extract_string(l.entry, '$[2]'), '') = ''
                           OR l.depth > b.depth AND json_extract_string(l.entry, '$[3]') = 'composed')
), elsewhere AS (
    SELECT DISTINCT b.attempt, t.nth_loader, array_to_string(l.chain, '>') AS path, unnest(b.ids) AS id
    FROM batch b JOIN layered l USING (rank, attempt, pid, loader, iterator)
    LEFT JOIN every_pass t USING (rank, attempt, pid, loader, iterator)
    WHERE b."end" = '' AND (t.nth_loader IS NULL OR (SELECT count(DISTINCT nth_loader) FROM every_pass) > 1)
), covered AS (
    SELECT t.attempt, t.nth_loader, t.nth_pass, unnest(b.ids) AS id
    FROM told t JOIN training_batch b USING (rank, attempt, pid, loader, iterator)
    UNION ALL
    SELECT s.attempt, s.nth_loader, s.nth_pass, e.id
    FROM base s JOIN elsewhere e ON e.attempt = s.attempt AND starts_with(e.path, s.path)
                                AND e.nth_loader IS DISTINCT FROM s.nth_loader
), counted AS (
    SELECT attempt, nth_loader, nth_pass, count(DISTINCT id) AS consumed FROM covered GROUP BY ALL
), judged AS (
    SELECT z.*, b.depth, b.entry, coalesce(TRY_CAST(json_extract_string(b.entry, '$[1]') AS BIGINT), -1) AS length,
           coalesce(json_extract_string(b.entry, '$[0]'), '') AS class_name, coalesce(c.consumed, 0) AS consumed,
           v.attempt IS NOT NULL AS vague
    FROM size z LEFT JOIN base b USING (attempt, nth_loader, nth_pass)
    LEFT JOIN counted c USING (attempt, nth_loader, nth_pass)
    LEFT JOIN vague v USING (attempt, nth_loader, nth_pass)
), gone AS (
    SELECT attempt, nth_loader, nth_pass, list(id ORDER BY id)[1:$shown] AS ids FROM (
        SELECT attempt, nth_loader, nth_pass, unnest(range(length)) AS id FROM judged
        WHERE depth = 1 AND over AND NOT iterable AND consumed < length
        QUALIFY dense_rank() OVER (ORDER BY attempt, nth_loader, nth_pass) <= 1
    ) ANTI JOIN covered USING (attempt, nth_loader, nth_pass, id) GROUP BY ALL
)
SELECT j.attempt, j.nth_loader, j.nth_pass, j.who, j.over, j.iterable, j.replacement, j.alone, j.sampler_class,
       j.replicas, j.split_tail, j.batch_tail, j.drop_last, j.batch_size, j.largest, j.samples, j.capped, j.skipped,
       j.first_step, j.last_step, j.class_name, j.length, j.consumed, j.vague, coalesce(g.ids, [])
FROM judged j LEFT JOIN gone g USING (attempt, nth_loader, nth_pass)
ORDER BY j.attempt, j.nth_loader, j.nth_pass
"""


class Row(NamedTuple):
    attempt: int
    loader: int
    nth_pass: int
    ranks: list[int]
    over: bool  # the pass ended on every rank
    iterable: bool
    replacement: bool
    alone: bool
    sampler_class: str
    replicas: int  # parts of its DistributedSampler; 0 without one
    split_tail: int  # samples that its drop_last leaves out
    batch_tail: int  # samples that the loaders' drop_last leaves out, all ranks together
    drop_last: bool
    batch_size: int  # -1 where a sampler of batches decides
    largest: int  # samples in a batch
    samples: int
    capped: bool  # the sampler was told how many samples to draw
    skipped: int  # batches left out at the start, consumed before the pass was resumed
    first_step: int
    last_step: int
    class_name: str
    length: int  # of the data set that the ranks share out; -1 unknown
    consumed: int  # different samples of it
    vague: bool  # a wrapper's choice of samples is not known
    ids: list[int]


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    rows = list(rows)
    if run.world_size < 2:
        yield Abstention("NOT_APPLICABLE", "one rank shares its data with nobody")
        return
    if not rows:
        yield Abstention("INSUFFICIENT_EVIDENCE", "no loader is known to feed training")
    for _, members in groupby(rows, key=lambda r: (r.attempt, r.loader)):
        passes = list(members)
        reasons = [_why_unsure(r, run) for r in passes]
        short = [r for r, why in zip(passes, reasons, strict=True) if why is None and _missing(r) > 0]
        if short:
            said = _finding(short[0])
            yield replace(said, last_step=max(r.last_step for r in short))
        elif all(reasons):
            yield next(why for why in reasons if why is not None)


def _why_unsure(row: Row, run: RunFacts) -> Abstention | None:
    """Why this pass can't be judged; None when it can."""
    if row.iterable:
        return Abstention("INSUFFICIENT_EVIDENCE", "iterable data has no known length and no ids")
    if row.replacement or row.capped:
        return Abstention("NOT_APPLICABLE", "the sampler draws with replacement, or only a set number of samples")
    if row.skipped:
        return Abstention("INSUFFICIENT_EVIDENCE", "the pass was resumed: what was consumed before is not known")
    if row.alone:
        return Abstention("INSUFFICIENT_EVIDENCE", "no process group is known to join the ranks' models")
    if len(row.ranks) < run.world_size:
        return Abstention("INSUFFICIENT_EVIDENCE", f"{len(row.ranks)} of {run.world_size} ranks have this pass")
    if not row.over:
        return Abstention("INSUFFICIENT_EVIDENCE", "no pass over the data has ended on every rank")
    if row.length < 0 or row.consumed == 0:
        return Abstention("INSUFFICIENT_EVIDENCE", "the ranks have no data set of known length in common")
    if row.vague and _missing(row) > 0:
        return Abstention("INSUFFICIENT_EVIDENCE", "which samples a wrapper of the data set chooses is not known")
    return None


def _missing(row: Row) -> int:
    """Samples that nobody consumed, 0 when that is no more than what a split leaves over by design."""
    dropped = row.batch_tail
    if row.drop_last and row.batch_size > 0:  # a sampler of batches deals whole rounds of batches to the ranks
        dropped = max(dropped, row.length % (len(row.ranks) * row.batch_size))
    if row.batch_size <= 0:  # a batch sampler of the user's: what does not fill a round of one batch per rank
        dropped = max(dropped, (len(row.ranks) - 1) * row.largest)
    # a split by hand into len // R each leaves fewer than R over
    allowed = max(row.split_tail, 0 if row.replicas > 1 else len(row.ranks) - 1) + dropped
    missing = row.length - row.consumed
    return missing if missing > allowed else 0


def _finding(row: Row) -> Finding:
    missing = _missing(row)
    first = ", ".join(str(i) for i in row.ids)
    return Finding(
        ranks=tuple(row.ranks),
        first_step=max(1, row.last_step),  # only when the pass had ended were they missed
        attempt=row.attempt,
        severity="warning",
        subject=row.sampler_class,
        summary=f"{missing} of {row.length} samples of {row.class_name} were consumed by no rank in pass "
        f"{row.nth_pass} (steps {max(1, row.first_step)} to {row.last_step})"
        + (f"; the first ids are {first}" if first else ""),
        evidence=(
            Evidence(
                None, row.last_step, "different samples consumed by all ranks", str(row.consumed), str(row.length)
            ),
            Evidence(None, row.last_step, "samples consumed by all ranks", str(row.samples), ""),
        ),
        cannot_conclude=("whether they were held out on purpose",),
        next_check="compare the ranks' index ranges or file lists with the length of the whole data set",
    )
