"""Whether a difference between replicas mattered: an expression for `replicas.parted_sql`, of what `param` holds."""

from __future__ import annotations

from typing import Final


def settled_sql(since: str) -> str:
    """True when the parameters agree after every step from the difference on (`since` is >=; or after it, >), or have
    come together again as often as only an average between the updates makes them.
    """
    return _SETTLED.replace("{since}", since)


# An average after every update is seen at the few tensors that are looked at before an update: they agree there and
# did not after the update before.
_SETTLED: Final = """coalesce((SELECT bool_and(NOT differs) FROM (
        SELECT attempt, step, min(hash(tensors, digest)) <> max(hash(tensors, digest)) AS differs
        FROM param WHERE stage = 'end' GROUP BY attempt, step HAVING min(rank) <> max(rank)) p
        WHERE p.attempt = a.attempt AND p.step {since} a.first // 4), FALSE)
    OR (SELECT count(*) FILTER (differed AND NOT differs) >= 2 FROM (
        SELECT attempt, step, differs, lag(differs) OVER (PARTITION BY attempt, stage ORDER BY step) AS differed FROM (
            SELECT attempt, step, stage, min(hash(tensors, digest)) <> max(hash(tensors, digest)) AS differs
            FROM param GROUP BY attempt, step, stage HAVING min(rank) <> max(rank))
        ) p WHERE p.attempt = a.attempt AND p.step {since} a.first // 4)
    OR (SELECT count(*) FILTER (differed AND NOT differs) >= 2 FROM (
        SELECT s.attempt, s.step, min(hash(s.tensors, s.digest)) <> max(hash(s.tensors, s.digest)) AS differs,
               min(hash(e.part)) <> max(hash(e.part)) AS differed
        FROM param s JOIN (
            SELECT n.rank, n.attempt, n.pid, n.generation, n.step, n.seq,
                   list_transform(n.tensors, lambda i: p.digest[i + 1]) AS part
            FROM param n JOIN param p ON n.rank = p.rank AND n.attempt = p.attempt AND n.pid = p.pid
             AND n.generation = p.generation AND n.step = p.step + 1
            WHERE n.stage = 'start' AND p.stage = 'end' AND len(n.tensors) > 0 AND len(p.tensors) = 0
        ) e USING (rank, attempt, pid, generation, step, seq)
        GROUP BY s.attempt, s.step HAVING min(s.rank) <> max(s.rank)
        ) p WHERE p.attempt = a.attempt AND p.step {since} a.first // 4)"""
