"""Which losses are like each other: those of steps with the usual batch size and number of backwards of their rank.

A shorter last batch or accumulation window has a loss and gradients of its own, by whatever the program divides.
"""

from __future__ import annotations

from typing import Final

# A size is usual where so many steps of a rank have it; without a usual one (token budgets) all are alike.
USUAL: Final = 0.8

# CTE bodies; the result is `value`: one row per rank, attempt and step, NULL where the loss is not comparable.
COMPARABLE: Final = f"""
sized AS (  -- of an evaluation with autograd on, the step is told apart; the next are not
    SELECT rank, attempt, step, sum(samples) AS samples FROM batch
    WHERE samples > 0 AND "end" = '' AND grad_enabled GROUP BY rank, attempt, step
),
here AS (
    SELECT l.rank, l.attempt, l.step, l.total, l.backwards, l.nonfinite, coalesce(s.samples, i.rows) AS samples
    FROM loss l LEFT JOIN sized s USING (rank, attempt, step)
    LEFT JOIN (SELECT rank, attempt, step, max(rows) AS rows FROM input WHERE rows > 0 AND source = 'forward'
               GROUP BY rank, attempt, step) i USING (rank, attempt, step)
    WHERE l.backwards > 0 AND l.step > 0
),
most AS (
    SELECT rank, attempt, mode(samples) AS samples, mode(backwards) AS backwards, count(*) AS steps
    FROM here GROUP BY ALL
),
usual AS (
    SELECT h.rank, h.attempt,
           CASE WHEN count(*) FILTER (h.samples = m.samples) >= {USUAL} * count(h.samples) THEN any_value(m.samples)
           END AS samples,
           CASE WHEN count(*) FILTER (h.backwards = m.backwards) >= {USUAL} * count(*) THEN any_value(m.backwards)
           END AS backwards
    FROM here h JOIN most m USING (rank, attempt) GROUP BY ALL
),
value AS (
    SELECT h.rank, h.attempt, h.step,
           CASE WHEN h.nonfinite = 0 AND isfinite(h.total) AND h.backwards = coalesce(u.backwards, h.backwards)
                     AND (h.samples IS NULL OR u.samples IS NULL OR h.samples = u.samples)
                THEN h.total / h.backwards END AS value
    FROM here h JOIN usual u USING (rank, attempt)
)
"""
