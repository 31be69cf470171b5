"""Whether models that no wrapper holds are replicas all the same: a query over what the program did with its gradients,
and over what `param`, `grad`, `loss` hold."""

from __future__ import annotations

from typing import Final

# Attempts in which at least two ranks handed the gradients of all that they train, and of the very same tensors, to an
# all-reduce over a group of every rank: one model, whatever became of it later. A part of the tensors shows less:
# stages of a pipeline reduce an embedding that they share, and experts stay each rank's own.
_HANDED: Final = """
    WITH by_hand AS (SELECT DISTINCT attempt FROM delivered WHERE reduction = 'by hand')  -- seldom any
    SELECT f.attempt FROM (
        SELECT rank, attempt, pid, generation, step, ranks, flatten(list(tensors)) AS tensors
        FROM delivered WHERE reduction = 'by hand' AND step <= 128 GROUP BY ALL
    ) h
    JOIN (
        SELECT rank, attempt, pid, generation, list(index) AS trained,
               bit_xor(hash(index, name, model, model_type, shape, dtype)) AS family
        FROM tensor WHERE kind = 'param' AND trainable AND optimizer >= 0 AND attempt IN (FROM by_hand) GROUP BY ALL
    ) f USING (rank, attempt, pid, generation)
    LEFT JOIN (  -- tensors that this step did not use
        SELECT rank, attempt, pid, step, flatten(list(list_transform(list_filter(
                   list_zip(CASE WHEN len(tensors) > 0 THEN tensors ELSE range(len(l2)) END, l2), lambda x: x[2] = -1
               ), lambda x: x[1]))) AS indices
        FROM grad WHERE stage = 'reduced' AND step <= 128 AND attempt IN (FROM by_hand) GROUP BY ALL
    ) l USING (rank, attempt, pid, step)
    JOIN (
        SELECT attempt, list(DISTINCT CAST(rank AS VARCHAR)) AS everyone FROM tensor GROUP BY attempt
    ) e ON e.attempt = f.attempt
    WHERE len(list_intersect(f.trained, list_concat(h.tensors, coalesce(l.indices, [])))) = len(f.trained)
      AND len(list_intersect(e.everyone, string_split(h.ranks, ','))) = len(e.everyone)
    GROUP BY f.attempt, h.step, h.ranks, f.family, hash(list_sort(list_distinct(h.tensors)))
    HAVING count(DISTINCT f.rank) >= 2
"""

# And attempts in which all their trained tensors agree after an update, or their gradients do before one, on ranks
# whose losses differ. Ranks that train on the same batches from the same seed agree as well, and show nothing. The
# first 128 steps are enough and keep a large run's query short.
TIED: Final = f"""
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
UNION SELECT attempt FROM ({_HANDED})
"""
