"""Which parameters change, and which get gradients: one line per tensor of a catalogue, over all its recorded steps.

Fingerprints of two steps are compared only where both are of the whole tensor: in a model above WHOLE_ELEMENTS those
of larger tensors are of a window that moves, except in the sweeps before the first update and at the end.

A gradient counts that came before the tensor's own update in its step. What comes after, as to a discriminator from the
generator's backward, is zeroed before the next; with closures no backward comes before the update, and all count.
"""

from __future__ import annotations

from typing import Final

WHOLE_ELEMENTS: Final = 4_000_000  # as the parameters probe decides which models it fingerprints in windows
WINDOW_ELEMENTS: Final = 2_040  # as the fingerprint does: a tensor up to this size is always looked at as a whole

_AT: Final = "rank, attempt, pid, generation"

# `wanted`: a query that gives (rank, attempt, pid, generation, index): the tensors to look at.
CHANGES: Final = """
    SELECT w.rank, w.attempt, w.pid, w.generation, w.index,
           coalesce(m.states, 0) AS states, coalesce(m.marks, 0) AS marks, m.moved, m.digest, m.first_mark, m.last_mark,
           coalesce(g.measured, 0) AS measured, coalesce(g.with_gradient, 0) AS with_gradient,
           coalesce(g.present, 0) AS present, g.first_measured, g.first_gradient, g.last_gradient, g.largest
    FROM ({wanted}) w
    LEFT JOIN (
        SELECT {at}, index, count(DISTINCT digest) AS states, count(DISTINCT step) AS marks,
               min(step) AS first_mark, max(step) AS last_mark, arg_min(digest, place) AS digest,
               max(step) FILTER (WHERE digest <> before) AS moved
        FROM (
            SELECT *, lag(digest) OVER (PARTITION BY {at}, index ORDER BY place) AS before
            FROM (
                SELECT p.*, t.numel, s.elements
                FROM (
                    SELECT {at}, greatest(step, 1) AS step, stage, len(tensors) = 0 AS entire,
                           step * 3 + CASE stage WHEN 'start' THEN 0 WHEN 'end' THEN 1 ELSE 2 END AS place,
                           unnest(CASE WHEN len(tensors) = 0 THEN range(len(digest)) ELSE tensors END) AS index,
                           unnest(digest) AS digest
                    FROM param SEMI JOIN ({wanted}) USING ({at})
                ) p
                SEMI JOIN ({wanted}) w USING ({at}, index)
                JOIN tensor t USING ({at}, index)
                JOIN (SELECT {at}, sum(numel) AS elements FROM tensor WHERE kind = 'param' GROUP BY ALL) s USING ({at})
                WHERE t.numel <= {window} OR s.elements <= {whole} OR stage = 'final' OR (stage = 'start' AND entire)
            )
        ) GROUP BY {at}, index
    ) m USING ({at}, index)
    LEFT JOIN (
        SELECT {at}, index, count(DISTINCT step) FILTER (WHERE l2 <> -2) AS measured,
               count(DISTINCT step) FILTER (WHERE l2 > 0) AS with_gradient,
               count(DISTINCT step) FILTER (WHERE l2 <> -1) AS present,
               min(step) FILTER (WHERE l2 <> -2) AS first_measured,
               min(step) FILTER (WHERE l2 > 0) AS first_gradient, max(step) FILTER (WHERE l2 > 0) AS last_gradient,
               max(l2) FILTER (WHERE isfinite(l2)) AS largest
        FROM (
            SELECT *, max(micro) FILTER (stage = 'reduced') OVER (PARTITION BY {at}, index, step) AS used
            FROM (
                SELECT {at}, step, stage, micro,
                       unnest(CASE WHEN len(tensors) = 0 THEN range(len(l2)) ELSE tensors END) AS index,
                       unnest(l2) AS l2
                FROM grad SEMI JOIN ({wanted}) USING ({at})
            ) SEMI JOIN ({wanted}) USING ({at}, index)
        ) WHERE stage <> 'local' OR used IS NULL OR used < 1 OR micro < used
        GROUP BY {at}, index
    ) g USING ({at}, index)
"""


def changes_sql(wanted: str) -> str:
    """Per wanted tensor: `states` (different contents seen), `marks` (steps at which it was seen), `moved` (last step
    at which it differed from the step before), `measured`, `with_gradient`, `present` (steps whose gradient was looked
    at, was not zero, was there at all)."""
    return CHANGES.format(wanted=wanted, at=_AT, window=WINDOW_ELEMENTS, whole=WHOLE_ELEMENTS)


def common(names: list[str]) -> str:
    """What names say of a place in the model: all, when there are few, else the first and how many more."""
    shown = ", ".join(names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
