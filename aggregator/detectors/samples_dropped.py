"""A material part of the data never reaches training: dropped for filling no batch, or cut off by the loop.

Reads     loader, batch (training passes; passes that gave nothing), sampler
Says      how many samples of a pass are dropped, whether they are the same ones in each pass, the batch size at fault
Unknown   passes that did not end; iterable data, whose length is not known
Blind to  what a data set leaves out before it has a length
Do        drop_last=False, or a batch size that divides the data; a loop that ends a pass early leaves the same
          samples out each time unless the order is shuffled
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity

CODE = "SAMPLES_DROPPED"
NEEDS = {"batch": 1, "loader": 1}
PARAMS = {
    "compared": 4_000_000,  # samples whose ids are looked at, pass after pass: 3 s on two cores
    "candidate": 0.05,  # of a pass that must be lost before ids are looked at: half the smallest share that alarms
}

# `offered` is what the samplers would give with no batch left out. A DistributedSampler deals its whole data set, a
# sampler whose batches are dealt to several ranks is one for all of them, else each rank has its own. A user's sampler
# of batches does not tell: the data set's length stands for it.
SQL = """
WITH pass AS (
    SELECT rank, attempt, pid, loader, iterator, whole, nth_loader, nth_pass FROM training_pass
), taken AS (
    SELECT rank, attempt, pid, loader, iterator, count(*) AS batches, sum(greatest(samples, 0)) AS samples,
           sum(len(ids)) AS ids, min(step) AS first_step, max(step) AS last_step
    FROM training_batch GROUP BY ALL
), split AS (
    SELECT rank, attempt, pid, sampler, max(dataset_length) AS length, bool_or(drop_last) AS drop_last,
           max(num_replicas) AS replicas
    FROM sampler GROUP BY ALL
), told AS (
    SELECT p.*, t.batches, t.samples, t.ids, t.first_step, t.last_step, l.iterable, l.replacement, l.skipped,
           l.batch_size, l.drop_last OR coalesce(s.drop_last, FALSE) AS drop_last, l.sampler_class, l.dataset_class,
           l.batches AS planned, l.dispatched,
           CASE WHEN s.length > 0 AND s.replicas > 1 THEN s.length WHEN l.samples >= 0 THEN l.samples
                ELSE coalesce(TRY_CAST(json_extract_string(TRY_CAST(l.levels AS JSON), '$[#-1][1]') AS BIGINT), -1) END
               AS offered,
           coalesce(s.length > 0 AND s.replicas > 1, FALSE) OR l.sharers > 1 OR l.dispatched > 0 OR l.samples < 0 AS one
    FROM pass p JOIN taken t USING (rank, attempt, pid, loader, iterator)
    JOIN loader l USING (rank, attempt, pid, loader, iterator)
    LEFT JOIN split s ON s.rank = l.rank AND s.attempt = l.attempt AND s.pid = l.pid AND s.sampler = l.sampler
), size AS (
    SELECT attempt, nth_loader, nth_pass, list(rank ORDER BY rank) AS who, bool_and(whole) AS whole,
           bool_or(iterable) AS iterable, bool_or(replacement) AS replacement, bool_or(skipped > 0) AS resumed,
           bool_or(drop_last) AS drop_last, max(batch_size) AS batch_size, any_value(sampler_class) AS sampler_class,
           any_value(dataset_class) AS dataset_class, bool_or(one) AS one, min(offered) AS least,
           CASE WHEN bool_or(one) THEN max(offered) ELSE sum(offered) END AS offered, sum(samples) AS consumed,
           sum(ids) AS ids, min(batches) AS batches, max(planned) AS planned, min(first_step) AS first_step,
           max(last_step) AS last_step
    FROM told GROUP BY ALL
), looked AS (  -- passes whose ids are worth a look, up to a bound
    SELECT attempt, nth_loader, nth_pass, one FROM size
    WHERE NOT iterable AND NOT replacement AND NOT resumed AND offered > 0 AND ids > 0
      AND consumed < offered * (1 - $candidate)
    QUALIFY sum(ids) OVER (ORDER BY nth_pass, attempt, nth_loader) - ids < $compared
), seen AS (
    SELECT k.attempt, k.nth_loader, count(DISTINCT k.nth_pass) AS looked,
           count(DISTINCT (CASE WHEN k.one THEN -1 ELSE t.rank END, b.id)) AS seen
    FROM looked k JOIN told t USING (attempt, nth_loader, nth_pass)
    JOIN (SELECT rank, attempt, pid, loader, iterator, unnest(ids) AS id FROM training_batch) b
        ON (b.rank, b.attempt, b.pid, b.loader, b.iterator) = (t.rank, t.attempt, t.pid, t.loader, t.iterator)
    GROUP BY ALL
), empty AS (
    SELECT b.attempt, row_number() OVER (PARTITION BY b.attempt ORDER BY b.loader) AS nth_loader, b.loader,
           list(DISTINCT b.rank ORDER BY b.rank) AS who, max(l.batch_size) AS batch_size,
           (sum(l.samples / l.sharers) / count(DISTINCT b.iterator))::BIGINT AS offered,
           any_value(l.sampler_class) AS sampler_class, any_value(l.dataset_class) AS dataset_class, max(b.step) AS step
    FROM batch b JOIN loader l USING (rank, attempt, pid, loader, iterator)
    WHERE b."end" = 'StopIteration' AND b.index = 0 AND l.drop_last AND l.samples > 0 AND l.skipped = 0
      AND l.dispatched = 0 AND NOT l.iterable
    GROUP BY b.attempt, b.loader
)
SELECT z.attempt, z.nth_loader, z.nth_pass, z.who, z.whole, z.iterable, z.replacement, z.resumed, z.drop_last,
       z.batch_size, z.sampler_class, z.dataset_class, z.one, CASE WHEN z.least < 0 THEN -1 ELSE z.offered END,
       z.consumed, z.batches, z.planned, z.first_step, z.last_step, coalesce(s.looked, 0), coalesce(s.seen, 0),
       z.nth_pass < max(z.nth_pass) OVER (PARTITION BY z.attempt, z.nth_loader)
FROM size z LEFT JOIN seen s USING (attempt, nth_loader)
UNION ALL
SELECT attempt, -nth_loader, 1, who, TRUE, FALSE, FALSE, FALSE, TRUE, batch_size, sampler_class, dataset_class, FALSE,
       offered, 0, 0, 0, step, step, 1, 0, FALSE
FROM empty
ORDER BY 1, 2, 3
"""

# drop_last loses less than one round of batches a pass: of k whole rounds a share below 1/(k + 1). A tenth goes only in
# passes of fewer than ten rounds, a fifth of fewer than five: there the batch is too large for the data. Where each
# pass drops other samples, all are seen in time and only the pass is shorter; what no pass gives is lost for good.
LOST_RATIO = 0.1  # of the data that no pass gave
SHORT_RATIO = 0.2  # of each pass, other samples each time


class Row(NamedTuple):
    attempt: int
    loader: int  # order among the training loaders; negative for one that gave no batch at all
    nth_pass: int
    ranks: list[int]
    whole: bool
    iterable: bool
    replacement: bool
    resumed: bool
    drop_last: bool
    batch_size: int  # of one rank; -1 where a sampler of batches decides
    sampler_class: str
    dataset_class: str
    one: bool  # all ranks share out the samples of one sampler or data set
    offered: int  # samples of a pass before any is dropped, all ranks together; -1 unknown
    consumed: int
    batches: int
    planned: int
    first_step: int
    last_step: int
    looked: int  # passes of this loader whose ids were looked at
    seen: int  # different samples in them
    over: bool  # a later pass has begun

    @property
    def dropped(self) -> int:
        return self.offered - self.consumed

    @property
    def ratio(self) -> float:
        """Share of the pass that is dropped."""
        return self.dropped / self.offered

    @property
    def lost(self) -> float:
        """Share of the samples that is in none of the passes whose ids were looked at."""
        return (self.offered - self.seen) / self.offered


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    rows = list(rows)
    if not rows:
        yield Abstention("INSUFFICIENT_EVIDENCE", "no loader is known to feed training")
    for _, members in groupby(rows, key=lambda r: (r.attempt, r.loader)):
        passes = list(members)
        said = _judge(passes, run)
        if said is not None:
            yield said
    seen = {rank for r in rows for rank in r.ranks}
    if rows and len(seen) < run.world_size:
        yield Abstention("INSUFFICIENT_EVIDENCE", f"passes of {len(seen)} of {run.world_size} ranks were recorded")


def _judge(passes: Sequence[Row], run: RunFacts) -> Finding | Abstention | None:
    """What the passes over one loader show."""
    known = [r for r in passes if r.offered > 0 and not r.iterable and not r.replacement and not r.resumed]
    if not known:
        return Abstention("INSUFFICIENT_EVIDENCE", "how many samples a pass should give is not known")
    if known[0].one and len(known[0].ranks) < run.world_size:
        return Abstention("INSUFFICIENT_EVIDENCE", "ranks whose part of the data is not known share it")
    ended = [r for r in known if r.whole]
    dropping = [r for r in ended if r.drop_last]
    if dropping:
        return _dropped(dropping)
    if ended:
        return None
    cut = [r for r in known if r.over]
    return _cut(cut) if cut else Abstention("INSUFFICIENT_EVIDENCE", "no pass over the data has ended on every rank")


def _dropped(passes: Sequence[Row]) -> Finding | None:
    """Samples that fill no batch."""
    first = passes[0]
    if first.batch_size > 0 and first.dropped > first.batch_size * len(first.ranks):
        return None  # more than one round of batches: not this rule alone
    lost = first.ratio if len(passes) == 1 and not first.looked else first.lost if first.looked >= len(passes) else 0.0
    # What no pass gives is no more than what any of them drops, however little of one that was cut short was looked at.
    lost = min(lost, *(r.ratio for r in passes))
    severity: Severity = "warning" if first.batch_size > 0 else "note"
    which = "no pass gives them" if len(passes) > 1 else "the run has one whole pass"
    if lost < LOST_RATIO and first.ratio >= SHORT_RATIO:
        which = "other ones in other passes"
    elif lost < LOST_RATIO:
        severity = "note"
        if lost < LOST_RATIO / 2 or len(passes) == 1:
            return None
    rule = f"batches of {first.batch_size} on each rank" if first.batch_size > 0 else "its own batches"
    return Finding(
        ranks=tuple(first.ranks),
        first_step=max(1, first.last_step),  # only when the pass had ended were they dropped
        last_step=max(r.last_step for r in passes),
        attempt=first.attempt,
        severity=severity,
        subject=first.sampler_class,
        summary=f"{first.dropped} of {first.offered} samples of {first.dataset_class} ({first.ratio:.0%}) are dropped "
        f"in each pass: {rule}, drop_last leaves out what fills none; {which}",
        evidence=tuple(
            Evidence(None, r.last_step, f"samples consumed in pass {r.nth_pass}", str(r.consumed), str(r.offered))
            for r in passes[:4]
        ),
        cannot_conclude=() if first.batch_size > 0 else ("whether the sampler leaves them out by its own rule",),
        next_check="keep the last batch (drop_last=False), or use smaller batches",
    )


def _cut(passes: Sequence[Row]) -> Finding | Abstention | None:
    """A loop that leaves each pass at the same place, before its end, with the same samples never reached."""
    first = passes[0]
    if len(passes) < 2 or first.looked < len(passes):
        return Abstention("INSUFFICIENT_EVIDENCE", "no pass over the data has ended, and too little of them is known")
    if len({r.batches for r in passes}) > 1 or first.lost < LOST_RATIO:
        return None
    return Finding(
        ranks=tuple(first.ranks),
        first_step=max(1, first.last_step),
        last_step=max(r.last_step for r in passes),
        attempt=first.attempt,
        severity="note",
        subject=first.sampler_class,
        summary=f"the loop leaves each pass after {first.batches} of {first.planned} batches, and "
        f"{first.offered - first.seen} of {first.offered} samples of {first.dataset_class} ({first.lost:.0%}) are in "
        f"none of {len(passes)} passes",
        evidence=(
            Evidence(None, passes[-1].last_step, "different samples consumed", str(first.seen), str(first.offered)),
        ),
        cannot_conclude=("whether the pass is limited on purpose",),
        next_check="shuffle anew in each pass, or let the loop reach the end of the data",
    )
