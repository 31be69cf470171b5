"""Whether models that no wrapper holds are replicas all the same: a query over what `param`, `grad`, `loss` hold."""

from __future__ import annotations

from typing import Final

# Attempts in which models that no wrapper holds are shown to be replicas: all their trained tensors agree after an
# update, or their gradients do before one, on ranks whose losses differ. Ranks that train on the same batches from the
# same seed agree as well, and show nothing. The first 128 steps are enough and keep a large run's query short.
TIED: Final = """
SELECT DISTINCT attempt FROM (
    SELECT attempt, step, min(h) = max(h) AS agree FROM (
        SELECT rank, attempt, step, stage, hash(tensors, digest) AS h FROM param
        WHERE stage = 'end' AND len(digest) > 0 AND step <= 128
        UNION ALL
        SELECT rank, attempt, step, stage, hash(tensors, digest) FROM grad
        WHERE stage = 'reduced' AND len(digest) > 0 AND step <= 128)
    GROUP BY attempt, step, stage HAVING min(rank) <> max(rank)
) JOIN (
    SELECT attempt, step, min(total) <> max(total) AS own FROM loss
    WHERE backwards > 0 AND step <= 128 GROUP BY attempt, step
) USING (attempt, step) WHERE agree AND own
"""
