"""Every reduction that all ranks of a model agree on, beside what their own gradients add up to.

The query adds up the ranks' sketches per step and tensor and bounds what rounding may make of the sum; a row says
whether one common factor explains all tensors. Of the first steps where it does not, the row holds the ranks' numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy

from .conservation import Cells

BOUNDS: Final[Mapping[str, object]] = {
    # Hoeffding: a bound at 8 deviations fails with 2 exp(-32) = 2.5e-14 a number, 2.5e-6 in 10^8 numbers.
    "deviations": 8.0,
    # Sketches are stored in single precision, sums are made in double (window 2,040: below 2^-36 of the norm).
    "stored": 2.0**-24, "summed": 2.0**-36,
    # Unit roundoff of the wire. Single precision has room for hardware that truncates.
    "float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8,
    # Below these a value may be rounded to nothing: half the smallest number of float16, the smallest normal float32.
    "float16_tiny": 2.0**-25, "tiny": 2.0**-126,
    # R - 1 additions and a division before or after them; 2 more for what a program does to the result itself.
    "more_roundings": 3.0,
    "window": 2040.0,
    "shown_steps": 2,
}  # fmt: skip

# One number per tensor catalogue: ranks with the same one hold the same tensors (or parts of the same ones) in the same
# order, and reduce over the same ranks.
CATALOGUE: Final = """
    SELECT rank, attempt, pid, generation,
           bit_xor(hash(index, name, model, model_type, shape, dtype, sharing,
                        CASE WHEN sharing = 'sharded' THEN shards ELSE peers END)) AS family
    FROM tensor WHERE kind = 'param' GROUP BY ALL
"""

# The narrowest of the types in which FSDP sent a step's units.
WIRE: Final = """CASE WHEN list_contains(string_split(any_value(wire), ','), 'bfloat16') THEN 'bfloat16'
                WHEN list_contains(string_split(any_value(wire), ','), 'float16') THEN 'float16'
                WHEN any_value(wire) = 'float64' THEN 'float64' ELSE 'float32' END"""

REDUCED: Final = f"""
WITH known AS (
    SELECT rank, attempt, pid, generation, index, name, dtype, numel, FALSE AS sharded, '' AS part, 1 AS copies,
           len(peers) - len(replace(peers, ',', '')) + 1 AS peers
    FROM tensor WHERE kind = 'param' AND peers <> '' AND sharing IN ('ddp', 'plain')
    UNION ALL  -- of a sharded tensor the ranks that reduce it hold one copy together, in hybrid forms several
    SELECT rank, attempt, pid, generation, index, name, dtype, full_numel, TRUE,
           CASE WHEN peers = '' THEN CAST(rank AS VARCHAR) ELSE peers END,
           greatest(len(list_intersect(string_split(peers, ','), string_split(shards, ','))), 1),
           len(string_split(shards, ','))
    FROM tensor WHERE kind = 'param' AND shards <> '' AND sharing = 'sharded'
),
catalogue AS ({CATALOGUE}),
result AS (
    SELECT rank, attempt, pid, generation, step, micro, TRUE AS delivered, reduction, tensors, sketch, digest
    FROM delivered WHERE len(digest) > 0 AND reduction <> 'by hand'
    UNION ALL  -- no wrapper reduces: what the optimizer gets, after the last backward
    SELECT rank, attempt, pid, generation, greatest(step, 1), micro - 1, FALSE, '', tensors, sketch, digest
    FROM grad WHERE stage = 'reduced' AND len(sketch) > 0
),
agreed AS (
    SELECT c.family, r.attempt, r.step, r.micro, r.delivered, any_value(r.reduction) AS reduction,
           any_value(r.tensors) AS tensors, arg_min(r.sketch, r.rank) AS sketch, list(r.rank ORDER BY r.rank) AS ranks
    FROM result r JOIN catalogue c USING (rank, attempt, pid, generation)
    GROUP BY c.family, r.attempt, r.step, r.micro, r.delivered, hash(r.tensors)
    HAVING min(r.rank) <> max(r.rank) AND min(hash(r.digest)) = max(hash(r.digest))
       AND min(r.reduction) = max(r.reduction)
),
scattered AS (
    SELECT c.family, d.rank, d.attempt, d.pid, d.generation, d.step, d.micro, d.reduction, d.wire,
           CAST(unnest(d.sketch[1:len(d.sketch):2]) AS DOUBLE) AS a,
           CAST(unnest(d.sketch[2:len(d.sketch):2]) AS DOUBLE) AS b,
           unnest(CASE WHEN len(d.tensors) > 0 THEN d.tensors ELSE range(len(d.sketch) // 2) END) AS index
    FROM delivered d JOIN catalogue c USING (rank, attempt, pid, generation) WHERE len(d.wire) > 0
),
shard AS (  -- one part each, of which all replicas agree
    SELECT s.family, s.attempt, s.step, s.micro, s.index, count(*) AS ranks, any_value(k.peers) AS peers,
           min(s.reduction) AS reduction, min(s.wire) AS wire, any_value(s.a) AS a, any_value(s.b) AS b
    FROM scattered s JOIN known k USING (rank, attempt, pid, generation, index) WHERE k.sharded
    GROUP BY s.family, s.attempt, s.step, s.micro, s.index, k.part
    HAVING count(*) = any_value(k.copies) AND min(s.a) = max(s.a) AND min(s.b) = max(s.b)
       AND min(s.reduction) = max(s.reduction) AND min(s.wire) = max(s.wire)
),
gathered AS (
    SELECT family, attempt, step, micro, index, any_value(reduction) AS reduction, {WIRE} AS wire,
           sum(a) AS a, sum(b) AS b, sum(abs(a)) AS held_a, sum(abs(b)) AS held_b
    FROM shard GROUP BY family, attempt, step, micro, index
    HAVING sum(ranks) = any_value(peers) AND min(reduction) = max(reduction) AND min(wire) = max(wire)
       AND any_value(wire) NOT LIKE '%float8%'
),
whole AS (
    SELECT family, attempt, step, micro FROM agreed UNION SELECT family, attempt, step, micro FROM gathered
),
uneven AS (  -- from here on the ranks' backwards of one number are no longer reduced with each other
    SELECT attempt, min(step) AS step FROM (
        SELECT attempt, step FROM step GROUP BY attempt, step HAVING min(backwards) <> max(backwards)
    ) GROUP BY attempt
),
own AS MATERIALIZED (
    SELECT g.rank, g.attempt, g.step, g.micro, c.family, g.tensors, g.l2, g.sketch, g.scale, g.window_l2
    FROM grad g JOIN catalogue c USING (rank, attempt, pid, generation) LEFT JOIN uneven u ON u.attempt = g.attempt
    WHERE g.stage = 'local' AND g.valid AND len(g.sketch) > 0 AND (u.step IS NULL OR g.step < u.step)
),
part AS (
    SELECT family, attempt, step, micro, rank, scale, CAST(unnest(sketch[1:len(sketch):2]) AS DOUBLE) AS a,
           CAST(unnest(sketch[2:len(sketch):2]) AS DOUBLE) AS b,
           unnest(CASE WHEN len(window_l2) > 0 THEN CAST(window_l2 AS DOUBLE[]) ELSE l2 END) AS norm,
           CASE WHEN len(window_l2) > 0 THEN 1 ELSE scale END AS times,
           unnest(CASE WHEN len(tensors) > 0 THEN tensors ELSE range(len(l2)) END) AS index
    FROM own
),
total AS (
    SELECT family, attempt, step, micro, index, sum(a) AS a, sum(b) AS b, sum(abs(a)) AS abs_a, sum(abs(b)) AS abs_b,
           sum(greatest(norm, 0) * times) AS norm, count(*) AS ranks, max(scale) AS scale
    FROM part SEMI JOIN whole USING (family, attempt, step, micro)
    GROUP BY ALL
),
facts AS (
    SELECT c.family, k.attempt, k.index, any_value(k.name) AS name, any_value(k.peers) AS peers,
           any_value(k.dtype) AS dtype, any_value(k.numel) AS numel, bool_or(k.sharded) AS sharded
    FROM known k JOIN catalogue c USING (rank, attempt, pid, generation) GROUP BY c.family, k.attempt, k.index
),
reduced AS (
    SELECT family, attempt, step, micro, delivered, reduction, CAST(unnest(sketch[1:len(sketch):2]) AS DOUBLE) AS a,
           CAST(unnest(sketch[2:len(sketch):2]) AS DOUBLE) AS b, 0 AS held_a, 0 AS held_b, '' AS wire,
           unnest(CASE WHEN len(tensors) > 0 THEN tensors ELSE range(len(sketch) // 2) END) AS index
    FROM agreed
    UNION ALL SELECT family, attempt, step, micro, TRUE, reduction, a, b, held_a, held_b, wire, index FROM gathered
),
cell AS (
    SELECT r.family, r.attempt, r.step, r.micro, r.delivered, r.reduction, r.index, f.name, f.peers, t.norm, f.sharded,
           CASE WHEN r.reduction ILIKE '%bf16%' OR 'bfloat16' IN (f.dtype, r.wire) THEN $bfloat16
                WHEN r.reduction ILIKE '%fp16%' OR 'float16' IN (f.dtype, r.wire) THEN $float16
                WHEN f.dtype = 'float64' AND r.wire IN ('', 'float64') THEN $float64 ELSE $float32 END AS unit,
           CASE WHEN r.reduction ILIKE '%fp16%' OR 'float16' IN (f.dtype, r.wire) THEN $float16_tiny ELSE $tiny END
               * $deviations * (f.peers + $more_roundings) * sqrt(least(f.numel, $window)) AS least_error,
           unnest([1, 2]) AS piece, unnest([r.a, r.b]) AS x, unnest([t.a, t.b]) AS total,
           unnest([r.held_a, r.held_b]) AS held, unnest([t.abs_a, t.abs_b]) AS absolute, t.scale
    FROM reduced r JOIN total t USING (family, attempt, step, micro, index)
    JOIN facts f USING (family, attempt, index)
    WHERE t.ranks = f.peers AND t.norm > 0 AND f.sharded = (r.wire <> '')
),
margin AS (
    SELECT *, ($deviations * (peers + $more_roundings) * unit + $summed) * norm
               + $stored * (absolute + peers * held) + least_error AS own,
           ($deviations * (peers + $more_roundings) * greatest(unit, $bfloat16) + $summed) * norm
               + $stored * (absolute + peers * held) + least_error AS loose
    FROM cell WHERE isfinite(x) AND isfinite(total) AND isfinite(norm)
),
bounded AS (
    SELECT *, abs(x - total / peers) > own / peers + $stored * abs(x) AS off,
           CASE WHEN abs(total) > own THEN least(x / (total - own), x / (total + own)) ELSE abs(x) / (abs(total) + own)
           END * (1 - 2 * $stored) AS low,
           CASE WHEN abs(total) > own THEN greatest(x / (total - own), x / (total + own)) ELSE 'inf' END
               * (1 + 2 * $stored) AS high,
           CASE WHEN abs(total) > loose THEN least(x / (total - loose), x / (total + loose))
                ELSE abs(x) / (abs(total) + loose) END AS loose_low,
           CASE WHEN abs(total) > loose THEN greatest(x / (total - loose), x / (total + loose)) ELSE 'inf'
           END AS loose_high
    FROM margin
),
judged AS (
    SELECT family, attempt, step, micro, delivered, sharded, delivered AND any_value(reduction) = 'mean' AS declared,
           any_value(reduction) AS reduction, any_value(peers) AS peers, count(*) AS numbers,
           NOT delivered AND (max(scale) <> 1 OR bool_or((attempt, step) IN (SELECT (attempt, step) FROM clip)))
               AS rescaled,
           count(DISTINCT index) FILTER (off) AS off, max(low) AS low, min(high) AS high,
           max(loose_low) AS loose_low, min(loose_high) AS loose_high
    FROM bounded GROUP BY family, attempt, step, micro, delivered, sharded
),
shown AS (
    SELECT family, attempt, step, micro, delivered, sharded FROM judged
    WHERE CASE WHEN declared THEN off > 0 ELSE low > high END
    QUALIFY row_number() OVER (PARTITION BY family, attempt, delivered, sharded ORDER BY step, micro) <= $shown_steps
    UNION
    SELECT family, attempt, step, micro, delivered, sharded FROM judged WHERE NOT declared AND loose_low > loose_high
    QUALIFY row_number() OVER (PARTITION BY family, attempt, delivered, sharded ORDER BY step, micro) <= $shown_steps
),
detail AS (
    SELECT b.family, b.attempt, b.step, b.micro, b.delivered, b.sharded,
           list(b.index * 2 + b.piece - 1 ORDER BY b.index, b.piece) AS numbers,
           list(b.name ORDER BY b.index, b.piece) AS names, list(b.x ORDER BY b.index, b.piece) AS x,
           list(b.own ORDER BY b.index, b.piece) AS own, list(b.loose ORDER BY b.index, b.piece) AS loose
    FROM bounded b SEMI JOIN shown USING (family, attempt, step, micro, delivered, sharded)
    GROUP BY ALL
),
members AS (
    SELECT p.family, p.attempt, p.step, p.micro, s.delivered, s.sharded,
           list(p.rank ORDER BY p.rank, p.index) AS part_ranks,
           list(p.index ORDER BY p.rank, p.index) AS part_indices,
           list(p.a ORDER BY p.rank, p.index) AS a, list(p.b ORDER BY p.rank, p.index) AS b
    FROM part p JOIN shown s USING (family, attempt, step, micro) GROUP BY ALL
)
SELECT j.family, j.attempt, j.step, j.micro, j.delivered, j.sharded, j.declared, j.reduction, j.peers, j.rescaled,
       j.off, j.low, j.high, j.loose_low, j.loose_high, d.numbers, d.names, d.x, d.own, d.loose,
       m.part_ranks, m.part_indices, m.a, m.b, (SELECT step FROM uneven u WHERE u.attempt = j.attempt) AS uneven
FROM judged j LEFT JOIN detail d USING (family, attempt, step, micro, delivered, sharded)
LEFT JOIN members m USING (family, attempt, step, micro, delivered, sharded)
ORDER BY j.attempt, j.family, j.delivered, j.sharded, j.step, j.micro
"""


class Row(NamedTuple):
    """One reduction that all ranks agree on; the lists only of the first that do not fit, see `shown`."""

    family: int  # ranks with one and the same tensor catalogue
    attempt: int
    step: int
    micro: int
    delivered: bool  # as DDP or FSDP left it; else as the optimizer gets it
    sharded: bool  # FSDP's, put together from the parts that the ranks hold
    declared: bool  # DDP or FSDP itself reduced: the mean is what it promises
    reduction: str
    peers: int
    rescaled: bool  # a loss scale or clipping may have changed it since
    off: int  # tensors that are not the mean
    low: float  # range of common factors: sum of the ranks' own -> reduced; empty when low > high
    high: float
    loose_low: float  # the same for a wire of 8 bits of precision
    loose_high: float
    numbers: list[int] | None  # of the catalogue's tensors, two each
    names: list[str] | None
    x: list[float] | None
    own: list[float] | None
    loose: list[float] | None
    part_ranks: list[int] | None
    part_indices: list[int] | None
    a: list[float] | None
    b: list[float] | None
    uneven: int | None = None  # first step whose backwards the ranks do not have the same number of


def cells(row: Row, error: list[float] | None) -> Cells:
    """The numbers of a row's step as arrays."""
    numbers = {number: k for k, number in enumerate(row.numbers or ())}
    ranks = sorted(set(row.part_ranks or ()))
    line = {rank: k for k, rank in enumerate(ranks)}
    parts = numpy.zeros((len(ranks), len(numbers)))
    for rank, index, *pair in zip(row.part_ranks or (), row.part_indices or (), row.a or (), row.b or (), strict=True):
        for piece, value in enumerate(pair):
            if 2 * index + piece in numbers:
                parts[line[rank], numbers[2 * index + piece]] = value
    return Cells(numpy.array(row.x), parts, numpy.array(error), tuple(row.names or ()), ranks)
