"""Until which step a run that still trains sees data for the first time: caches of whatever kind fill until then."""

from __future__ import annotations

from typing import Final

# `first_pass`: the step at which the first pass of a rank's training data ends, at the pace so far. No row where it is
# over, was left before its end, or has no known length.
FIRST_PASS: Final = """
opened AS (
    SELECT rank, attempt, loader, max(iterator) AS last, any_value(batches) AS batches FROM loader GROUP BY ALL
), going AS (
    SELECT o.rank, o.attempt, o.loader, o.batches, min(b.step) AS began, max(b.step) AS newest,
           max(b.index) + 1 AS given
    FROM opened o JOIN batch b ON o.rank = b.rank AND o.attempt = b.attempt AND o.loader = b.loader
    WHERE o.last = 0 AND o.batches > 0 GROUP BY ALL
    HAVING bool_or(b.grad_enabled) AND max(b."end") = '' AND max(b.index) + 1 < o.batches
), first_pass AS (
    SELECT rank, attempt, max(began + (newest - began + 1) * batches // given)::BIGINT AS ends FROM going GROUP BY ALL
)"""


def filling(ends: int, last: int, status: str) -> bool:
    """Whether growth up to step `last` may be a cache that fills until `ends`: only while the run goes on; a run that
    ended within its first pass is judged by what there is."""
    return status == "running" and ends > last
