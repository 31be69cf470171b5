"""Samples that more than one rank consumes in one pass, although the ranks train one model on one data set.

Reads     loader, batch (training passes), sampler, tensor and param (which ranks are replicas), input (sliced batches)
Says      the ranks, how many of their samples others consume too, the step of the first repeat
Unknown   ranks whose relation or whose data set can't be told; random augmentation of data without ids
Blind to  samples drawn with replacement; what lies beyond the first 1/R of a pass on each of R ranks
Do        use a DistributedSampler (the framework must know it is distributed), or split an iterable data set by rank
          as well as by worker; a sampler that every rank seeds for itself overlaps too
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, EvidenceState, Finding, Severity
from ..wording import ranks_text

CODE = "SHARD_OVERLAP"
NEEDS = {"batch": 1, "loader": 1}
PARAMS = {
    "compared": 1_000_000,  # samples, about 2 s on two cores; of a larger run a share of the ids, alike on all ranks
    "stream": 4096,  # samples of a pass over iterable data that are compared per rank: bounds memory on endless streams
}

# Of n samples that are dealt to R ranks each rank's first n // R are compared: a correct split has no repeat there,
# whatever it pads at the end (DistributedSampler) or wraps around to (endless samplers). `key` is the id, or the digest
# of a sample that has no id. Ranks are compared with those that train the same model: `peers`, by `relation`.
SQL = """
WITH relation AS (
    SELECT rank, attempt,
           CASE WHEN bool_or(sharing IN ('ddp', 'late', 'hook') AND peers <> '') THEN 'replicas'
                WHEN bool_or(sharing = 'sharded') THEN
                     CASE WHEN bool_or(regexp_matches(model_type, '^(FSDP|FullyShardedDataParallel)')) THEN 'fsdp'
                          ELSE 'sharded' END
                WHEN bool_or(peers <> '' AND attempt IN (SELECT attempt FROM reduced_by_hand)) THEN 'plain'
                WHEN bool_or(peers <> '') THEN 'apart' ELSE 'unknown' END AS relation,
           coalesce(max(peers) FILTER (sharing IN ('ddp', 'late', 'hook')), '') AS ddp_peers,
           hash(list(DISTINCT (name, shape)).list_sort()) AS signature
    FROM tensor WHERE kind = 'param' GROUP BY ALL
), pass AS (
    SELECT rank, attempt, pid, loader, iterator, whole, nth_loader, nth_pass FROM training_pass
), split AS (
    SELECT rank, attempt, pid, sampler, any_value(class_name) AS class_name, max(num_replicas) AS replicas,
           max(dataset_length) AS length
    FROM sampler GROUP BY ALL
), told AS (
    SELECT p.*, l.iterable, l.dataset_class, l.dataset_length, l.dataset_digest, l.levels,
           coalesce(CASE WHEN s.length > 0 THEN s.length END,
                    TRY_CAST(json_extract_string(TRY_CAST(l.levels AS JSON), '$[#-1][1]') AS BIGINT),
                    l.dataset_length) AS dealt, l.batch_size, l.replacement, l.dispatched,
           coalesce(s.class_name, l.sampler_class) AS sampler_class, coalesce(s.replicas, 0) AS replicas,
           coalesce(r.relation, 'replicas') AS relation,
           CASE r.relation WHEN 'replicas' THEN r.ddp_peers WHEN 'plain' THEN r.signature::VARCHAR
                WHEN 'apart' THEN r.signature::VARCHAR ELSE '' END AS peers
    FROM pass p JOIN loader l USING (rank, attempt, pid, loader, iterator)
    LEFT JOIN split s ON s.rank = l.rank AND s.attempt = l.attempt AND s.pid = l.pid AND s.sampler = l.sampler
    LEFT JOIN relation r ON r.rank = p.rank AND r.attempt = p.attempt
), meant AS (
    SELECT *, hash(nth_loader, nth_pass, relation, peers, iterable, dataset_class, dataset_length) AS cohort,
           count(*) OVER alike AS members,
           CASE WHEN min(levels) OVER alike = max(levels) OVER alike THEN min(dealt) OVER alike ELSE dataset_length END
               AS length
    FROM told
    WINDOW alike AS (
        PARTITION BY attempt, nth_loader, nth_pass, relation, peers, iterable, dataset_class, dataset_length)
), totals AS (
    SELECT rank, attempt, pid, loader, iterator, sum(greatest(samples, 0)) AS samples, max(index) AS last_index,
           max(len(ids)) AS most_ids, max(len(digests)) AS most_digests
    FROM training_batch GROUP BY ALL
), room AS (  -- where batches vary in size, `largest` ends the compared part too early, never too late
    SELECT m.*, t.last_index, CASE WHEN m.iterable THEN t.most_digests ELSE t.most_ids END AS largest,
           CASE WHEN m.iterable OR m.length <= 0 THEN $stream ELSE m.length // m.members END AS room
    FROM meant m JOIN totals t USING (rank, attempt, pid, loader, iterator) WHERE m.members > 1
), thin AS (  -- of a large run the ids with a small hash, which are the same ones on every rank
    SELECT CASE WHEN sum(room) <= $compared THEN 18446744073709551615::UBIGINT
                ELSE (1.8e19 * $compared / sum(room))::UBIGINT END AS cutoff
    FROM room
), placed AS (
    SELECT r.rank, r.attempt, r.cohort, b.step, NOT r.whole OR b.index < r.last_index AS body, thin.cutoff,
           r.room - b.index * r.largest AS keep, CASE WHEN r.iterable THEN b.digests ELSE b.ids END AS keys, b.digests
    FROM batch b JOIN room r USING (rank, attempt, pid, loader, iterator), thin
    WHERE b.index * r.largest < r.room AND b."end" = ''
), flat AS MATERIALIZED (
    SELECT rank, attempt, cohort, step, body, key, digest FROM (
        SELECT rank, attempt, cohort, step, body, cutoff, unnest(keys[1:keep]) AS key, unnest(digests[1:keep]) AS digest
        FROM placed)
    WHERE hash(key) <= cutoff
), shared AS (
    SELECT attempt, cohort, key, min(digest) = max(digest) AS same, count(digest) > 1 AS seen, count(*) AS sharers,
           coalesce(min(rank) FILTER (body) <> max(rank) FILTER (body), FALSE) AS body
    FROM flat WHERE key IS NOT NULL GROUP BY ALL HAVING min(rank) <> max(rank)
), hits AS (
    SELECT f.rank, f.attempt, f.cohort, f.key, f.step, s.same, s.seen, s.body, s.sharers,
           row_number() OVER (PARTITION BY f.attempt, f.cohort, f.key ORDER BY f.step, f.rank) > 1 AS again
    FROM flat f JOIN shared s USING (attempt, cohort, key)
), hit AS (
    SELECT rank, attempt, cohort, count(DISTINCT key) AS affected, count(DISTINCT key) FILTER (body) AS body,
           count(DISTINCT key) FILTER (seen) AS seen, count(DISTINCT key) FILTER (seen AND same) AS same,
           max(sharers) AS sharers, min(step) FILTER (again) AS first_step, max(step) AS last_step
    FROM hits GROUP BY ALL
), used AS (
    SELECT rank, attempt, cohort, count(key) AS used, count(key) - count(DISTINCT key) AS repeats
    FROM flat GROUP BY ALL
), recurring AS (
    SELECT rank, attempt, count(*) AS recurring, count(*) FILTER (fixed) AS fixed FROM (
        SELECT rank, attempt, any_value(fixed) AS fixed FROM (
            SELECT f.rank, f.attempt, m.nth_loader, m.iterable, f.key, min(f.digest) = max(f.digest) AS fixed,
                   count(DISTINCT m.nth_pass) AS passes
            FROM flat f JOIN meant m USING (rank, attempt, cohort)
            WHERE m.nth_pass <= 4 AND f.digest IS NOT NULL
              AND f.rank IN (SELECT DISTINCT rank FROM meant ORDER BY rank LIMIT 4) GROUP BY ALL)
        WHERE passes > 1 GROUP BY rank, attempt, nth_loader, key) GROUP BY ALL
), sliced AS (
    SELECT b.rank, b.attempt, count(*) FILTER (
        i.rows > 0 AND i.rows < b.samples OR i.elements > 0 AND i.elements * 2 <= w.elements) * 2 > count(*) AS sliced
    FROM (SELECT rank, attempt, pid, step, min(samples) AS samples FROM training_batch GROUP BY ALL) b
    JOIN input i USING (rank, attempt, pid, step)
    LEFT JOIN input w ON w.source = 'batch' AND (w.rank, w.attempt, w.pid, w.step) = (b.rank, b.attempt, b.pid, b.step)
    WHERE i.source = 'forward' GROUP BY ALL
)
SELECT m.attempt, m.nth_loader, m.nth_pass, m.cohort::VARCHAR, m.rank, m.members, m.relation, m.iterable,
       m.length, m.dataset_digest, m.batch_size, m.replacement, m.dispatched, m.sampler_class, m.replicas, t.samples,
       coalesce(u.used, 0), coalesce(u.repeats, 0), coalesce(h.affected, 0), coalesce(h.body, 0), coalesce(h.seen, 0),
       coalesce(h.same, 0), coalesce(c.recurring, 0), coalesce(c.fixed, 0), coalesce(s.sliced, FALSE),
       coalesce(h.sharers, 0), coalesce(h.first_step, 0), coalesce(h.last_step, 0)
FROM meant m JOIN totals t USING (rank, attempt, pid, loader, iterator)
LEFT JOIN used u USING (rank, attempt, cohort) LEFT JOIN hit h USING (rank, attempt, cohort)
LEFT JOIN recurring c ON c.rank = m.rank AND c.attempt = m.attempt
LEFT JOIN sliced s ON s.rank = m.rank AND s.attempt = m.attempt
ORDER BY m.attempt, m.nth_loader, m.nth_pass, m.cohort, m.rank
"""

REPEATED_BY_DESIGN = re.compile(r"repeat|^RASampler", re.IGNORECASE)  # augmentation gives one sample to several ranks
FEWEST_CONTENTS = 8  # content digests (32 bits) that agree on eight ids do so by chance once in 2**256
FEWEST_REPEATS = 32  # samples without an id: fewer may be real duplicates in the data
WITHIN_RATIO = 0.01  # of a rank's own samples that repeat: above it the data or the draw itself repeats
SAME_RATIO, OTHER_RATIO = 0.9, 0.5  # of ids with contents that agree: one data set (a batch may be damaged) | not one
STREAM_RATIO = 0.2  # independent shuffles share about 1/R; below a fifth duplicates in the data could do it
ALL_RATIO = 0.99  # of a stream's samples: the ranks read the same stream


class Row(NamedTuple):
    attempt: int
    loader: int
    nth_pass: int
    cohort: str  # ranks that train one model and read data of one class and length in this pass
    rank: int
    members: int
    relation: str  # replicas, fsdp, sharded, plain (replicas without a wrapper), apart (weights differ) or unknown
    iterable: bool
    length: int
    digest: str
    batch_size: int
    replacement: bool
    dispatched: int  # ranks that rank 0 reads for
    sampler_class: str
    replicas: int  # parts that its DistributedSampler makes; 0 without one
    samples: int
    used: int  # samples compared
    repeats: int  # of them, repeats on this rank itself
    affected: int  # of them, consumed by another rank as well
    body: int  # of these, not only in a last batch
    seen: int  # of these, with content digests on several ranks
    same: int  # of these, with equal contents
    recurring: int  # ids that this rank consumed in several passes
    fixed: int  # of them, with the same contents each time
    sliced: bool  # the model got fewer rows than the batch had, or half its elements or less
    sharers: int  # most ranks that share one sample
    first_step: int
    last_step: int


def _unsure(why: str) -> Abstention:
    return Abstention("INSUFFICIENT_EVIDENCE", why)


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    rows = list(rows)
    if run.world_size < 2:
        yield Abstention("NOT_APPLICABLE", "one rank has nobody to share samples with")
        return
    for _, members in groupby(rows, key=lambda r: (r.attempt, r.loader)):
        said = [_judge(list(c)) for _, c in groupby(members, key=lambda r: (r.nth_pass, r.cohort))]
        found = [s for s in said if isinstance(s, Finding)]
        if found:
            yield replace(found[0], last_step=max(f.last_step or 0 for f in found))
        yield from (s for s in said if isinstance(s, Abstention))
    seen = {r.rank for r in rows}
    if len(seen) < run.world_size:
        yield _unsure(f"training batches of {len(seen)} of {run.world_size} ranks were recorded")


def _judge(rows: Sequence[Row]) -> Finding | Abstention | None:
    """What one pass of one loader over one data set shows."""
    first = rows[0]
    if first.members < 2:
        return _unsure(f"no other rank reads data like that of {ranks_text([first.rank])}")
    if any(r.replacement or REPEATED_BY_DESIGN.search(r.sampler_class) for r in rows):
        return Abstention("NOT_APPLICABLE", "samples are drawn with replacement or repeated on purpose")
    if any(r.dispatched for r in rows):
        return Abstention("NOT_APPLICABLE", "rank 0 reads for all ranks and deals each its part")
    if first.relation == "unknown":
        return _unsure("no process group is known to join the ranks' models")
    if first.relation == "apart":
        return _unsure("no wrapper holds the models, and their weights never agree: parts, or trainings of their own?")
    if sum(r.used > 0 for r in rows) < 2:
        return _unsure("the batches carry neither ids nor contents that could be compared")
    if any(r.repeats > WITHIN_RATIO * r.used for r in rows):
        return _unsure("ranks consume samples more than once themselves")
    sharers = _sharers_of_stream(rows) if first.iterable else _sharers(rows)
    if not sharers:
        return _meaningless(rows) if first.iterable else None
    return _why_unsure(rows, sharers) or _finding(rows, sharers)


def _sharers(rows: Sequence[Row]) -> list[Row]:
    """Ranks that share ids with others beyond what the split may pad."""
    first = rows[0]
    if first.replicas == first.members:
        padding = 0  # it pads outside the compared part
    else:
        part = first.replicas if first.replicas > 1 else first.members * max(1, first.batch_size)
        padding = -first.length % part  # up to the next whole round, of samples or, for samplers of batches, of batches
    tail_only = not any(r.body for r in rows) or first.replicas > 1
    # an id that k ranks share counts k times here, and is k - 1 >= k / 2 repeats
    if tail_only and sum(r.affected for r in rows) // 2 <= padding:
        return []
    return [r for r in rows if r.affected]


def _sharers_of_stream(rows: Sequence[Row]) -> list[Row]:
    found = [r for r in rows if r.affected >= FEWEST_REPEATS and r.affected > STREAM_RATIO * r.used]
    return found if len(found) > 1 else []


def _meaningless(rows: Sequence[Row]) -> Abstention | None:
    """Contents that never recur prove nothing: random augmentation makes every digest new."""
    if any(r.recurring >= FEWEST_CONTENTS or r.affected for r in rows):
        return None
    return _unsure("iterable data without ids, whose contents never recur: repeats can't be told")


def _why_unsure(rows: Sequence[Row], sharers: Sequence[Row]) -> Abstention | None:
    """Why shared samples are no proof here; None when they are."""
    first = rows[0]
    whole_groups = all(r.affected > SAME_RATIO * r.used for r in rows)
    if all(r.sliced for r in rows):
        return _unsure("the model gets fewer rows than a batch has: each rank may take a slice")
    if first.relation == "sharded" or (first.relation == "fsdp" and whole_groups and first.sharers < first.members):
        return _unsure("ranks hold parts of the model; those of one tensor-parallel group must read the same")
    return None if first.iterable else _other_data(rows, sharers)


def _other_data(rows: Sequence[Row], sharers: Sequence[Row]) -> Abstention | None:
    """Equal ids in data sets that are not one prove nothing; None when the ranks read the same data."""
    split = all(r.replicas > 1 for r in rows)
    equal = len({r.digest for r in rows}) == 1 and rows[0].digest != ""
    seen, same = sum(r.seen for r in sharers), sum(r.same for r in sharers)
    known = max(r.seen for r in sharers) >= FEWEST_CONTENTS
    if known and same < OTHER_RATIO * seen:
        recurring, fixed = sum(r.recurring for r in rows), sum(r.fixed for r in rows)
        judged = recurring >= FEWEST_CONTENTS
        if judged and fixed >= SAME_RATIO * recurring:
            return _unsure("the ranks' data sets hold different contents under the same ids")
        augmented = judged and fixed < OTHER_RATIO * recurring
        if not split and not (augmented and equal):
            return _unsure("contents differ under the same ids: augmented, or other data")
        return None
    if equal or split or (known and same >= SAME_RATIO * seen):
        return None
    return _unsure("whether the ranks read one data set can't be told")


def _finding(rows: Sequence[Row], sharers: Sequence[Row]) -> Finding:
    first, ranks = rows[0], tuple(r.rank for r in sharers)
    step = max(1, min((r.first_step for r in sharers if r.first_step), default=1))
    everything = all(r.samples > SAME_RATIO * r.length for r in rows)
    unsharded = everything and not first.iterable and len(sharers) == len(rows)
    share = max(r.affected / r.used for r in sharers)
    partly = first.iterable and not all(r.affected > ALL_RATIO * r.used for r in sharers)
    state: EvidenceState = "INFERRED" if partly else "OBSERVED"
    severity: Severity = "critical" if state == "OBSERVED" and (unsharded or share > OTHER_RATIO) else "warning"
    alike = "samples of equal content" if first.iterable else "samples"
    summary = f"{ranks_text(ranks)} consume the same {alike} in pass {first.nth_pass}: up to {share:.0%} of a rank's"
    if unsharded:
        summary = f"the data was not sharded: in pass {first.nth_pass} each of {len(rows)} ranks consumes all of it"
    return Finding(
        ranks=ranks,
        first_step=step,
        last_step=max(r.last_step for r in sharers),
        attempt=first.attempt,
        severity=severity,
        evidence_state=state,
        subject=first.sampler_class,
        summary=summary,
        evidence=tuple(
            Evidence(r.rank, r.first_step or step, "samples that another rank consumes too",
                     f"{r.affected} of the first {r.used}", "0") for r in sharers[:8]
        ),
        cannot_conclude=("whether the data itself holds duplicates",) if first.iterable else (),
        next_check="give the loader a DistributedSampler with one part per rank, and one seed and epoch on all of them"
        if not first.iterable
        else "let the data set yield every R-th sample, from the rank's own number on",
    )  # fmt: skip
