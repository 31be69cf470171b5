"""The norm of a sharded model's gradient: each rank measured its own part, the squares add up here.

A part that several ranks hold (replicas of a shard, duplicates in tensor parallelism) counts once. A step of which any
part was not measured has no norm.
"""

from __future__ import annotations

from typing import Final

from .store import Store

# `{schema}` as in `ranks`; the tensor catalogue is written once, so it is read from main
_SQL: Final = """
WITH sharded AS (SELECT DISTINCT attempt FROM main.tensor WHERE mesh <> ''),
cell AS (
    SELECT rank, attempt, pid, generation, step, unnest(l2) AS l2,
           unnest(CASE WHEN len(tensors) > 0 THEN tensors ELSE range(len(l2)) END) AS index
    FROM {schema}.grad
    WHERE stage = 'reduced' AND attempt IN (SELECT attempt FROM sharded)
    QUALIFY step >= max(step) OVER (PARTITION BY attempt) - {back}
),
part AS (
    SELECT c.rank, c.attempt, c.step, t.model, t.name, t.mesh,
           -- -1: no gradient; a rank may hold no element of a tensor
           CASE WHEN c.l2 >= 0 THEN c.l2 * c.l2 WHEN c.l2 = -1 OR t.numel = 0 THEN 0 END
               / CASE WHEN t.sharing = 'sharded' THEN len(string_split(t.peers, ',')) ELSE 1 END AS square
    FROM cell c JOIN main.tensor t USING (rank, attempt, pid, generation, index)
),
whole AS (
    SELECT attempt, step, model, name, mesh, sum(square) AS square FROM part WHERE mesh <> '' GROUP BY ALL
    HAVING count(square) = len(string_split(mesh, ','))
)
SELECT p.rank, p.attempt, p.step, sqrt(sum(CASE WHEN p.mesh = '' THEN p.square ELSE w.square END)) AS norm
FROM part p LEFT JOIN whole w USING (attempt, step, model, name, mesh)
GROUP BY p.rank, p.attempt, p.step
HAVING bool_and(CASE WHEN p.mesh = '' THEN p.square ELSE w.square END IS NOT NULL)
"""
ALL_STEPS: Final = 1 << 62
LAST_STEPS: Final = 1  # while a run is going on, some ranks are a step behind


def sharded_norms(store: Store, schema: str = "main", back: int = ALL_STEPS) -> list[tuple[int, int, int, float]]:
    """(rank, attempt, step, norm) of sharded attempts, of the steps that lie at most `back` behind the last one."""
    return store.rows(_SQL.replace("{schema}", schema).replace("{back}", str(back)))


def is_sharded(store: Store) -> bool:
    """Whether some rank holds only a part of a tensor."""
    return bool(store.rows("SELECT 1 FROM tensor WHERE mesh <> '' LIMIT 1"))
