"""Shuffling was asked for, yet two passes in a row consume the samples in the same order.

Reads     loader, batch (training passes), sampler, checkpoint (what was put back)
Says      the ranks, the first step of the repeated pass, the sampler
Unknown   fewer than two whole passes
Blind to  iterable data, which has no ids; orders that repeat with a period above one
Do        call sampler.set_epoch(epoch) before each pass, also on a batch sampler's inner sampler; after a resume with
          the epoch that goes on
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..wording import ranks_text

CODE = "EPOCH_NOT_RESHUFFLED"
NEEDS = {"batch": 1, "loader": 1}
PARAMS = {
    "fewest": 20,  # samples: two shuffles of 20 agree by chance once in 20! = 2.4e18
}

# A loader that is built anew for each epoch goes on where the last one over the same samples ended. A pass
# that begins after state was put back may be one that was taken before.
SQL = """
WITH pass AS (
    SELECT rank, attempt, pid, loader, iterator, bool_or(whole) AS whole, min(seq) AS first_seq, max(seq) AS last_seq,
           min(step) AS first_step, sum(len(ids)) AS samples, hash(list(hash(ids) ORDER BY index)) AS order_hash
    FROM training_batch GROUP BY ALL
), sampled AS (
    SELECT rank, attempt, pid, sampler, any_value(class_name) AS class_name, bool_or(shuffle) AS shuffle
    FROM sampler GROUP BY ALL
), told AS (
    SELECT p.*, coalesce(s.class_name, l.sampler_class) AS class_name,
           l.shuffle = 1 OR coalesce(s.shuffle, FALSE) AS shuffled,
           lag({'whole': p.whole, 'samples': p.samples, 'order_hash': p.order_hash, 'last_seq': p.last_seq}) OVER (
               PARTITION BY p.rank, p.attempt, p.pid, l.dataset_class, l.dataset_length, l.levels, l.sampler_class
               ORDER BY p.first_seq) AS before
    FROM pass p JOIN loader l USING (rank, attempt, pid, loader, iterator)
    LEFT JOIN sampled s ON s.rank = l.rank AND s.attempt = l.attempt AND s.pid = l.pid AND s.sampler = l.sampler
), pairs AS (
    SELECT *, coalesce(whole AND before.whole AND before.last_seq < first_seq AND samples >= $fewest
                       AND samples = before.samples, FALSE)
              AND NOT EXISTS (FROM checkpoint c WHERE c.event = 'apply' AND c.rank = told.rank
                              AND c.attempt = told.attempt AND c.pid = told.pid
                              AND c.seq BETWEEN before.last_seq AND told.last_seq) AS comparable
    FROM told
), judged AS (
    SELECT *, comparable AND order_hash = before.order_hash AS repeated FROM pairs
)
SELECT attempt, rank, class_name, bool_or(shuffled), count(*) FILTER (shuffled AND comparable),
       count(*) FILTER (shuffled AND repeated), coalesce(min(first_step) FILTER (shuffled AND repeated), 0),
       coalesce(max(first_step) FILTER (shuffled AND repeated), 0),
       coalesce(arg_min(samples, first_step) FILTER (shuffled AND repeated), 0)
FROM judged GROUP BY attempt, rank, class_name ORDER BY attempt, rank, class_name
"""


class Row(NamedTuple):
    attempt: int
    rank: int
    sampler_class: str
    shuffled: bool
    compared: int  # pairs of whole passes in a row
    repeated: int  # of them, pairs with one order
    first_step: int
    last_step: int
    samples: int


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    rows = list(rows)
    groups: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.repeated:
            groups[row.attempt, row.sampler_class].append(row)
    for members in groups.values():
        yield _finding(members)
    seen = {r.rank for r in rows}
    if not rows:
        yield Abstention("INSUFFICIENT_EVIDENCE", "no loader is known to feed training")
    elif not any(r.shuffled for r in rows):
        yield Abstention("NOT_APPLICABLE", "no training loader was asked to shuffle")
    elif not any(r.compared for r in rows):
        yield Abstention("INSUFFICIENT_EVIDENCE", "no two whole passes in a row over the same samples")
    elif len(seen) < run.world_size:
        yield Abstention("INSUFFICIENT_EVIDENCE", f"the passes of {len(seen)} of {run.world_size} ranks were recorded")


def _finding(members: Sequence[Row]) -> Finding:
    first = min(members, key=lambda r: r.first_step)
    ranks = tuple(r.rank for r in members)
    step = max(1, first.first_step)
    distributed = "Distributed" in first.sampler_class
    return Finding(
        ranks=ranks,
        first_step=step,
        last_good_step=None,
        last_step=max(r.last_step for r in members),
        attempt=first.attempt,
        severity="warning",
        subject=first.sampler_class,
        summary=f"{first.sampler_class} was asked to shuffle, yet on {ranks_text(ranks)} the pass that begins at step "
        f"{step} consumes its {first.samples} samples in the order of the pass before",
        evidence=tuple(
            Evidence(
                r.rank, r.first_step, "passes in the order of the one before", f"{r.repeated} of {r.compared}", "0"
            )
            for r in members[:8]
        ),
        next_check="call sampler.set_epoch(epoch) before each pass"
        if distributed
        else "do not seed the sampler's generator anew before each pass",
    )
