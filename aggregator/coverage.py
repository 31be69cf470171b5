"""What each pass over the training data consumed: batches and samples by all ranks, repeats, what nobody read."""

from __future__ import annotations

from dataclasses import dataclass

from .store import Store

# Ids are known where a loader has a sampler. A padded sampler gives a few samples twice; that is said, not judged.
SQL = """
WITH each AS (
    SELECT b.attempt, p.nth_loader, p.nth_pass, b.rank, b.samples, b.ids, p.whole, b.pid, b.loader, b.iterator
    FROM training_batch b JOIN training_pass p USING (rank, attempt, pid, loader, iterator)
), length AS (
    SELECT rank, attempt, pid, loader, iterator, max(dataset_length) AS length FROM loader GROUP BY ALL
), total AS (
    SELECT attempt, nth_loader, nth_pass, count(DISTINCT rank) AS ranks, count(*) AS batches,
           sum(samples) AS samples, bool_and(whole) AS whole, max(length) AS length, bool_and(len(ids) > 0) AS known
    FROM each LEFT JOIN length USING (rank, attempt, pid, loader, iterator) GROUP BY ALL
), ids AS (
    SELECT attempt, nth_loader, nth_pass, id, count(*) AS times, count(DISTINCT rank) AS ranks
    FROM (SELECT attempt, nth_loader, nth_pass, rank, unnest(ids) AS id FROM each) GROUP BY ALL
), counted AS (
    SELECT attempt, nth_loader, nth_pass, count(*) AS different, count(*) FILTER (ranks > 1) AS shared,
           count(*) FILTER (times > ranks) AS repeated FROM ids GROUP BY ALL
)
SELECT t.attempt, t.nth_loader, t.nth_pass, t.ranks, t.batches, t.samples, t.whole, t.length,
       CASE WHEN t.known THEN c.different END, CASE WHEN t.known THEN c.shared END,
       CASE WHEN t.known THEN c.repeated END
FROM total t LEFT JOIN counted c USING (attempt, nth_loader, nth_pass) ORDER BY ALL
"""
MOST = 200  # passes that are shown; the last ones are left out, and said


@dataclass(frozen=True)
class Pass:
    """One pass of all ranks over one loader. None: not known. `length`: samples in the data set, 0 for a stream."""

    attempt: int
    loader: int
    nth: int
    ranks: int
    batches: int
    samples: int
    whole: bool
    length: int | None
    different: int | None  # samples consumed at least once
    shared: int | None  # of them, by more than one rank
    repeated: int | None  # of them, several times by one rank

    @property
    def missing(self) -> int | None:
        """Samples that no rank consumed; None in a pass that did not come to its end, or where ids are unknown."""
        return self.length - self.different if self.whole and self.length and self.different is not None else None


def coverage(store: Store) -> tuple[Pass, ...]:
    """Every pass in order. Cost: one query that counts the ids of all batches, the largest table of most runs."""
    return tuple(Pass(*row) for row in store.rows(f"{SQL} LIMIT {MOST + 1}"))
