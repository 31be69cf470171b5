"""Views that several detectors share, over the raw tables of a run. SQL only; everything else stays in one detector.

`store` and the row-level tests create the same views, so a detector sees one shape of data wherever it runs.
"""

from __future__ import annotations

from typing import Final

import duckdb

# One row per tensor, stage and watched step: the lists of param, grad and buffer unfolded and named.
REPLICA: Final = """
CREATE OR REPLACE VIEW replica AS
WITH flat AS (
    SELECT 'param' AS source, stage, rank, attempt, pid, step, generation, nonfinite,
           unnest(CASE WHEN len(tensors) = 0 THEN range(len(digest)) ELSE tensors END) AS index,
           unnest(l2) AS l2, unnest(digest) AS digest, TRUE AS valid
    FROM param
    UNION ALL
    SELECT 'grad', stage, rank, attempt, pid, step, generation, nonfinite,
           unnest(CASE WHEN len(tensors) = 0 THEN range(len(l2)) ELSE tensors END),
           unnest(l2), CASE WHEN len(digest) = 0 THEN NULL ELSE unnest(digest) END, valid
    FROM grad
    UNION ALL
    SELECT 'buffer', stage, rank, attempt, pid, step, generation, []::BIGINT[],
           unnest(tensors), NULL, unnest(digest), TRUE
    FROM buffer
)
SELECT f.source, f.stage, f.rank, f.attempt, f.step, t.model || ':' || t.name AS key, t.name, t.model, t.model_type,
       t.shape, t.dtype, t.numel, t.trainable, t.optimizer, t.sharing, t.peers, t.broadcast, t.index,
       f.l2, f.digest, f.valid, list_contains(f.nonfinite, f.index) AS bad
FROM flat f JOIN tensor t USING (rank, attempt, pid, generation, index)
"""

# A pass over a loader feeds training when about as many backwards ran during it as it gave batches. Not "after each
# batch": with accumulation some trainers fetch a whole window first. Evaluation runs none, or fetches without autograd.
# It is whole when the loader said so, or gave all the batches that it has: some trainers count and never ask for more.
# Loaders and passes are matched between ranks by their order among those: an evaluation on one rank shifts nothing.
TRAINING_PASS: Final = """
CREATE OR REPLACE VIEW training_pass AS
SELECT *, dense_rank() OVER (PARTITION BY rank, attempt ORDER BY pid, loader) AS nth_loader,
       row_number() OVER (PARTITION BY rank, attempt, pid, loader ORDER BY iterator) AS nth_pass
FROM (
    SELECT b.rank, b.attempt, b.pid, b.loader, b.iterator, max(b.backwards) - min(b.backwards) AS backwards,
           count(*) FILTER (WHERE b."end" = '') AS batches,
           bool_or(b."end" = 'StopIteration') OR coalesce(max(l.skipped) = 0 AND max(l.batches) > 0
               AND count(*) FILTER (WHERE b."end" = '') >= max(l.batches), FALSE) AS whole
    FROM batch b LEFT JOIN loader l USING (rank, attempt, pid, loader, iterator)
    GROUP BY ALL
    HAVING max(b.backwards) > min(b.backwards) AND (max(b.backwards) - min(b.backwards)) * 2 >= count(*) - 1
       AND count(*) FILTER (WHERE b.grad_enabled) * 2 >= count(*)
)
"""

TRAINING_BATCH: Final = """
CREATE OR REPLACE VIEW training_batch AS
SELECT b.*, p.whole
FROM batch b JOIN training_pass p USING (rank, attempt, pid, loader, iterator)
WHERE b."end" = ''
"""

# Attempts in which models that no wrapper holds agree after one of the first updates: replicas, reduced by hand.
REDUCED_BY_HAND: Final = """
CREATE OR REPLACE VIEW reduced_by_hand AS
SELECT DISTINCT attempt FROM (
    SELECT attempt FROM param WHERE stage = 'end' AND len(digest) > 0 AND step <= 128 GROUP BY attempt, step
    HAVING min(rank) <> max(rank) AND min(hash(tensors, digest)) = max(hash(tensors, digest)))
"""

VIEWS: Final = (REPLICA, TRAINING_PASS, TRAINING_BATCH, REDUCED_BY_HAND)


def create_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the shared views; the raw tables must exist, empty ones included."""
    for sql in VIEWS:
        connection.execute(sql)
