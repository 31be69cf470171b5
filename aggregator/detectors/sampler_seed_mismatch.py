"""Distributed samplers of one data set shuffle with different seeds or epochs, so that their shards overlap.

Reads     sampler, loader and batch (which samplers feed training), tensor (which ranks are replicas)
Says      seed or epoch, the ranks that differ, the step at which the first such pass began
Unknown   samplers that only some ranks have iterated
Blind to  samplers of other classes; SHARD_OVERLAP judges what was consumed
Do        give DistributedSampler the same seed on every rank, from a constant or a broadcast value, and call
          set_epoch with the same number everywhere
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import split
from ..wording import ranks_text

CODE = "SAMPLER_SEED_MISMATCH"
NEEDS = {"sampler": 1}
PARAMS: dict[str, object] = {}

# Samplers are matched by order of construction among those that split the same length into the same number of parts,
# so that an extra sampler for other data on one rank shifts nothing. A training sampler's k-th use is its k-th pass
# that fed backward: a glance at the first batch on one rank does not count.
SQL = """
WITH replicas AS (
    SELECT rank, attempt, max(peers) AS peers FROM tensor WHERE sharing IN ('ddp', 'late', 'hook') GROUP BY ALL
), known AS (
    SELECT rank, attempt, pid, sampler, any_value(class_name) AS class_name, dataset_length, num_replicas,
           row_number() OVER (PARTITION BY rank, attempt, dataset_length, num_replicas ORDER BY pid, sampler) AS nth
    FROM sampler GROUP BY rank, attempt, pid, sampler, dataset_length, num_replicas
), drawn AS (
    SELECT rank, attempt, pid, sampler, seq, step, seed, epoch, shuffle FROM sampler WHERE event = 'iter'
), pass AS (
    SELECT b.rank, b.attempt, b.pid, l.sampler, min(b.seq) AS seq, min(b.step) AS step
    FROM training_batch b JOIN loader l USING (rank, attempt, pid, loader, iterator)
    WHERE l.sampler >= 0 GROUP BY b.rank, b.attempt, b.pid, b.loader, b.iterator, l.sampler
), used AS (
    SELECT p.rank, p.attempt, p.pid, p.sampler, p.seq, p.step, d.seed, d.epoch, d.shuffle, TRUE AS training
    FROM pass p ASOF JOIN drawn d ON p.rank = d.rank AND p.attempt = d.attempt AND p.pid = d.pid
                                 AND p.sampler = d.sampler AND p.seq >= d.seq
    UNION ALL
    SELECT *, FALSE FROM drawn d ANTI JOIN pass p USING (rank, attempt, pid, sampler)
), counted AS (
    SELECT u.*, k.class_name, k.dataset_length, k.num_replicas, k.nth, coalesce(r.peers, '') AS peers,
           row_number() OVER (PARTITION BY u.rank, u.attempt, u.pid, u.sampler ORDER BY u.seq) AS k
    FROM used u JOIN known k USING (rank, attempt, pid, sampler) LEFT JOIN replicas r USING (rank, attempt)
), compared AS (
    SELECT attempt, peers, dataset_length, num_replicas, nth, training, k, any_value(class_name) AS class_name,
           greatest(min(step), 1) AS step, list(rank ORDER BY rank) AS ranks, list(seed ORDER BY rank) AS seeds,
           list(epoch ORDER BY rank) AS epochs, bool_and(shuffle) AS shuffled, min(seed) <> max(seed) AS seed_differs,
           min(epoch) <> max(epoch) AS epoch_differs
    FROM counted GROUP BY ALL
)
SELECT attempt, class_name, dataset_length, num_replicas, training, k, step, ranks, seeds, epochs, shuffled,
       shuffled AND seed_differs, shuffled AND epoch_differs
FROM compared
QUALIFY k = 1 OR row_number() OVER (
    PARTITION BY attempt, peers, dataset_length, num_replicas, nth, training
    ORDER BY shuffled AND (seed_differs OR epoch_differs) DESC, k) = 1
ORDER BY attempt, NOT training, step, nth, k
"""


class Row(NamedTuple):
    attempt: int
    class_name: str
    dataset_length: int
    num_replicas: int
    training: bool
    k: int  # k-th use of this sampler
    step: int
    ranks: list[int]
    seeds: list[int]
    epochs: list[int]
    shuffled: bool
    seed_differs: bool
    epoch_differs: bool


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    rows = list(rows)
    if run.world_size < 2:
        yield Abstention("NOT_APPLICABLE", "one rank has no other sampler to agree with")
        return
    for r in rows:
        if r.seed_differs:
            yield _finding(r, "seed", dict(zip(r.ranks, r.seeds, strict=True)))
        elif r.epoch_differs:
            yield _finding(r, "epoch", dict(zip(r.ranks, r.epochs, strict=True)))
    seen = {rank for r in rows for rank in r.ranks}
    if not rows:
        yield Abstention("INSUFFICIENT_EVIDENCE", "no sampler was iterated yet")
    elif not any(r.shuffled for r in rows):
        yield Abstention("NOT_APPLICABLE", "no distributed sampler shuffles: seed and epoch do not matter")
    elif len(seen) < run.world_size:
        yield Abstention("INSUFFICIENT_EVIDENCE", f"samplers of {len(seen)} of {run.world_size} ranks were seen in use")
    elif all(len(r.ranks) < 2 for r in rows):
        yield Abstention("INSUFFICIENT_EVIDENCE", "no two ranks have a sampler over data of the same length")


def _finding(row: Row, what: str, values: Mapping[int, int]) -> Finding:
    parts = split(values)
    role = "" if row.training else ", which does not feed training"
    shown = [*parts.odd[:6], *[r for r in values if r not in parts.odd][:2]]
    expected = f"{parts.shared}" if parts.decided else "the same on all ranks"
    return Finding(
        ranks=parts.odd,
        first_step=row.step,
        attempt=row.attempt,
        severity="critical" if row.training else "warning",
        subject=f"sampler.{what}",
        summary=(
            f"{ranks_text(parts.odd)} shuffle{'s' if len(parts.odd) == 1 else ''} with another {what} than the other "
            f"ranks from pass {row.k} on: {row.class_name} over {row.dataset_length} samples{role}"
            if parts.decided
            else f"ranks shuffle with different {what}s from pass {row.k} on: {row.class_name} over "
            f"{row.dataset_length} samples{role}"
        ),
        evidence=tuple(Evidence(r, row.step, f"sampler.{what}", str(values[r]), expected) for r in shown),
        cannot_conclude=() if parts.decided else (f"which rank's {what} was meant",),
        next_check="give every rank's sampler the same seed"
        if what == "seed"
        else "call sampler.set_epoch(epoch) on every rank before each pass",
    )
