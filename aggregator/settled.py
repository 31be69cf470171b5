"""Whether a difference between replicas mattered: an expression for `replicas.parted_sql`, of what `param` holds."""

from __future__ import annotations

from typing import Final


def settled_sql(since: str) -> str:
    """True when the parameters agree after every step from the difference on (`since` is >=; or after it, >), or have
    come together again as often as only a periodic average makes them.
    """
    return _SETTLED.replace("{since}", since)


_SETTLED: Final = """coalesce((SELECT bool_and(NOT differs) FROM (
        SELECT attempt, step, min(hash(tensors, digest)) <> max(hash(tensors, digest)) AS differs
        FROM param WHERE stage = 'end' GROUP BY attempt, step HAVING min(rank) <> max(rank)) p
        WHERE p.attempt = a.attempt AND p.step {since} a.first // 4), FALSE)
    OR (SELECT count(*) FILTER (differed AND NOT differs) >= 2 FROM (
        SELECT attempt, step, differs, lag(differs) OVER (PARTITION BY attempt, stage ORDER BY step) AS differed FROM (
            SELECT attempt, step, stage, min(hash(tensors, digest)) <> max(hash(tensors, digest)) AS differs
            FROM param GROUP BY attempt, step, stage HAVING min(rank) <> max(rank))
        ) p WHERE p.attempt = a.attempt AND p.step {since} a.first // 4)"""
