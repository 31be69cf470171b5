"""Replicas agree on the reduced gradient, yet it is not what their own gradients add up to.

Reads     grad (stages local and reduced), delivered, tensor, clip
Says      which rank's part is missing or counted otherwise, else which tensors are off, from which step on; a sum or
          another divisor in place of the mean
Unknown   own gradients of some replica not seen; reductions of the program's own that no common factor describes
Blind to  steps between two passes; elements outside the step's windows; faults below the rounding of the wire's dtype
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy

from ..conservation import Cause, Cells, explain
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..groups import interval, listed, unheard
from ..wording import counted

CODE = "REDUCTION_WRONG"
NEEDS = {"grad": 1, "tensor": 1}
PARAMS: Mapping[str, object] = {
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
# A common factor that holds for every tensor is a law of the run when it did so at some steps before. One step may be
# chance where there is one tensor only; three are none, as each has two numbers of its own.
LAW_STEPS = 3

SQL = """
WITH known AS (
    SELECT rank, attempt, pid, generation, index, name, dtype, numel,
           len(peers) - len(replace(peers, ',', '')) + 1 AS peers
    FROM tensor WHERE kind = 'param' AND peers <> '' AND sharing IN ('ddp', 'plain')
),
catalogue AS (
    SELECT rank, attempt, pid, generation,
           bit_xor(hash(index, name, model, model_type, shape, dtype, sharing, peers)) AS family
    FROM tensor WHERE kind = 'param' GROUP BY ALL
),
result AS (
    SELECT rank, attempt, pid, generation, step, micro, TRUE AS delivered, reduction, tensors, sketch, digest
    FROM delivered
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
own AS MATERIALIZED (
    SELECT g.rank, g.attempt, g.step, g.micro, c.family, g.tensors, g.l2, g.sketch, g.scale, g.window_l2
    FROM grad g JOIN catalogue c USING (rank, attempt, pid, generation)
    WHERE g.stage = 'local' AND g.valid AND len(g.sketch) > 0
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
    FROM part SEMI JOIN agreed USING (family, attempt, step, micro)
    GROUP BY ALL
),
facts AS (
    SELECT c.family, k.attempt, k.index, any_value(k.name) AS name, any_value(k.peers) AS peers,
           any_value(k.dtype) AS dtype, any_value(k.numel) AS numel
    FROM known k JOIN catalogue c USING (rank, attempt, pid, generation) GROUP BY c.family, k.attempt, k.index
),
reduced AS (
    SELECT family, attempt, step, micro, delivered, reduction, CAST(unnest(sketch[1:len(sketch):2]) AS DOUBLE) AS a,
           CAST(unnest(sketch[2:len(sketch):2]) AS DOUBLE) AS b,
           unnest(CASE WHEN len(tensors) > 0 THEN tensors ELSE range(len(sketch) // 2) END) AS index
    FROM agreed
),
cell AS (
    SELECT r.family, r.attempt, r.step, r.micro, r.delivered, r.reduction, r.index, f.name, f.peers, t.norm,
           CASE WHEN r.reduction ILIKE '%bf16%' OR f.dtype = 'bfloat16' THEN $bfloat16
                WHEN r.reduction ILIKE '%fp16%' OR f.dtype = 'float16' THEN $float16
                WHEN f.dtype = 'float64' THEN $float64 ELSE $float32 END AS unit,
           CASE WHEN r.reduction ILIKE '%fp16%' OR f.dtype = 'float16' THEN $float16_tiny ELSE $tiny END
               * $deviations * (f.peers + $more_roundings) * sqrt(least(f.numel, $window)) AS least_error,
           unnest([1, 2]) AS piece, unnest([r.a, r.b]) AS x, unnest([t.a, t.b]) AS total,
           unnest([t.abs_a, t.abs_b]) AS absolute, t.scale
    FROM reduced r JOIN total t USING (family, attempt, step, micro, index)
    JOIN facts f USING (family, attempt, index)
    WHERE t.ranks = f.peers AND t.norm > 0
),
margin AS (
    SELECT *, ($deviations * (peers + $more_roundings) * unit + $summed) * norm
               + $stored * absolute + least_error AS own,
           ($deviations * (peers + $more_roundings) * greatest(unit, $bfloat16) + $summed) * norm
               + $stored * absolute + least_error AS loose
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
    SELECT family, attempt, step, micro, delivered, delivered AND any_value(reduction) = 'mean' AS declared,
           any_value(reduction) AS reduction, any_value(peers) AS peers, count(*) AS numbers,
           NOT delivered AND (max(scale) <> 1 OR bool_or((attempt, step) IN (SELECT (attempt, step) FROM clip)))
               AS rescaled,
           count(DISTINCT index) FILTER (off) AS off, max(low) AS low, min(high) AS high,
           max(loose_low) AS loose_low, min(loose_high) AS loose_high
    FROM bounded GROUP BY family, attempt, step, micro, delivered
),
shown AS (
    SELECT family, attempt, step, micro, delivered FROM judged
    WHERE CASE WHEN declared THEN off > 0 ELSE low > high END
    QUALIFY row_number() OVER (PARTITION BY family, attempt, delivered ORDER BY step, micro) <= $shown_steps
    UNION
    SELECT family, attempt, step, micro, delivered FROM judged WHERE NOT declared AND loose_low > loose_high
    QUALIFY row_number() OVER (PARTITION BY family, attempt, delivered ORDER BY step, micro) <= $shown_steps
),
detail AS (
    SELECT b.family, b.attempt, b.step, b.micro, b.delivered,
           list(b.index * 2 + b.piece - 1 ORDER BY b.index, b.piece) AS numbers,
           list(b.name ORDER BY b.index, b.piece) AS names, list(b.x ORDER BY b.index, b.piece) AS x,
           list(b.own ORDER BY b.index, b.piece) AS own, list(b.loose ORDER BY b.index, b.piece) AS loose
    FROM bounded b SEMI JOIN shown USING (family, attempt, step, micro, delivered) GROUP BY ALL
),
members AS (
    SELECT p.family, p.attempt, p.step, p.micro, s.delivered, list(p.rank ORDER BY p.rank, p.index) AS part_ranks,
           list(p.index ORDER BY p.rank, p.index) AS part_indices,
           list(p.a ORDER BY p.rank, p.index) AS a, list(p.b ORDER BY p.rank, p.index) AS b
    FROM part p JOIN shown s USING (family, attempt, step, micro) GROUP BY ALL
)
SELECT j.family, j.attempt, j.step, j.micro, j.delivered, j.declared, j.reduction, j.peers, j.rescaled, j.off, j.low,
       j.high, j.loose_low, j.loose_high, d.numbers, d.names, d.x, d.own, d.loose,
       m.part_ranks, m.part_indices, m.a, m.b
FROM judged j LEFT JOIN detail d USING (family, attempt, step, micro, delivered)
LEFT JOIN members m USING (family, attempt, step, micro, delivered)
ORDER BY j.attempt, j.family, j.delivered, j.step, j.micro
"""


class Row(NamedTuple):
    """One reduction that all ranks agree on; the lists only of the first that do not fit, see `shown`."""

    family: int  # ranks with one and the same tensor catalogue
    attempt: int
    step: int
    micro: int
    delivered: bool  # as DDP left it; else as the optimizer gets it
    declared: bool  # DDP itself reduced: the mean is what it promises
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


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per model and way of reduction, then what could not be judged."""
    if run.world_size < 2:
        yield Abstention("NOT_APPLICABLE", "a single rank reduces nothing")
        return
    together: dict[tuple[int, int, bool, str], list[Row]] = defaultdict(list)
    for row in rows:
        together[row.attempt, row.family, row.delivered, row.reduction].append(row)
    for several in together.values():
        yield from _declared(several) if several[0].declared else _by_law(several)
    if not rows:
        why = "no step at which the own and the reduced gradients of all replicas were recorded and the latter agree"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    yield from unheard(run)


def _declared(rows: Sequence[Row]) -> Iterator[Finding | Abstention]:
    """DDP promises the mean: every step counts."""
    off = [r for r in rows if r.off]
    if not off:
        return
    first = off[0]
    cause = explain(_cells(first, first.own), 1 / first.peers)
    if cause.kind == "none" and len(rows) - len(off) < LAW_STEPS:
        why = f"at step {first.step} the reduced gradient is not the mean of what was seen as the ranks' own, as at " \
              "most other steps: something may have changed it in between"  # fmt: skip
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
        return
    yield _finding(rows, off, cause, "critical")


def _by_law(rows: Sequence[Row]) -> Iterator[Finding | Abstention]:
    """A hook's or the program's own reduction: held against the law that the run itself kept before."""
    for loose in (False, True):
        kept = [r for r in rows if _fits(r, loose)]
        if len(kept) >= LAW_STEPS:
            yield from _against(rows, kept, loose)
            return
    who = f"the communication hook {rows[0].reduction}" if rows[0].reduction else "the program"
    shown = [(r, explain(_cells(r, r.own), None)) for r in rows if r.x]
    never = shown[0][1] if shown else Cause("none", ())
    always = len(shown) > 1 and all((c.kind, c.ranks) == ("missing", never.ranks) for _, c in shown)
    if always and rows[0].delivered and _is(never.factor * rows[0].peers, 1):
        yield _finding(rows, [r for r in rows if not _fits(r, False)], never, "warning")
        return
    why = f"{who} reduces, and not by a common factor for all tensors: what it should give is not known"
    yield Abstention("INSUFFICIENT_EVIDENCE", why)


def _against(rows: Sequence[Row], kept: Sequence[Row], loose: bool) -> Iterator[Finding | Abstention]:
    law = kept[LAW_STEPS - 1]
    off = [r for r in rows if not _fits(r, loose) and (r.step, r.micro) > (law.step, law.micro)]
    first = next((r for r in off if r.x), None)
    if first is not None:
        cause = explain(_cells(first, first.loose if loose else first.own), None)
        factor = _middle(law, loose)
        renormalised = cause.kind == "missing" and not _is(cause.factor, factor)
        if cause.kind == "missing":
            severity: Severity = "note" if renormalised else "critical" if first.delivered else "warning"
            yield _finding(rows, off, cause, severity)
        else:
            why = f"from step {first.step} on the reduced gradient is no longer the ranks' own added up and times " \
                  "one factor: whether the program means that is not known"  # fmt: skip
            yield Abstention("INSUFFICIENT_EVIDENCE", why)
    yield from _factor(kept, loose)
    if loose:
        why = "the ranks' own gradients add up only as on a wire of 8 bits of precision: small faults would not show"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)


def _factor(kept: Sequence[Row], loose: bool) -> Iterator[Finding]:
    """The common factor itself, where it is one and the same at all steps and neither clipping nor a scale is in it."""
    if any(r.rescaled for r in kept):
        return
    low, high = (max(_range(r, loose)[k] for r in kept) if k == 0 else min(_range(r, loose)[k] for r in kept)
                 for k in (0, 1))  # fmt: skip
    if low > high:
        yield from _changed(kept, loose)
        return
    first = kept[0]
    mean, backwards = 1 / first.peers, max(r.micro for r in kept) + 1
    fitting = [mean, mean / backwards]
    if any(low <= f <= high for f in fitting):
        return
    if low <= 1 <= high:
        says = "is the sum of the ranks' own, not their mean"
        yield _note(kept, says, 1.0, "note", f"does the learning rate, or the loss, allow for {first.peers} ranks?")
        return
    factor = (low + high) / 2
    divisor = round(1 / factor) if factor > 0 else 0
    fewer = 1 < divisor < first.peers and low <= 1 / divisor <= high
    if fewer or first.delivered:
        says = f"is the sum of the ranks' own times {factor:.6g}, where {first.peers} ranks make {mean:.6g} the mean"
        check = "which number of ranks is the sum divided by?"
        yield _note(kept, says, factor, "warning" if fewer else "note", check)


def _changed(kept: Sequence[Row], loose: bool) -> Iterator[Finding]:
    """The factor was constant, and is another constant from some step on."""
    at = next((k for k in range(1, len(kept)) if not _share(kept[: k + 1], loose)), len(kept))
    before, after = kept[:at], kept[at:]
    if min(len(before), len(after)) < LAW_STEPS or not _share(after, loose):
        return
    old, new = _middle(before[-1], loose), _middle(after[0], loose)
    says = f"is the sum of the ranks' own times {new:.6g}; until then it was times {old:.6g}"
    severity: Severity = "warning" if after[0].delivered else "note"
    yield _note(after, says, new, severity, "what changed the divisor?", before[-1].step)


def _share(rows: Sequence[Row], loose: bool) -> bool:
    return max(_range(r, loose)[0] for r in rows) <= min(_range(r, loose)[1] for r in rows)


def _range(row: Row, loose: bool) -> tuple[float, float]:
    return (row.loose_low, row.loose_high) if loose else (row.low, row.high)


def _fits(row: Row, loose: bool) -> bool:
    low, high = _range(row, loose)
    return 0 < low <= high


def _middle(row: Row, loose: bool) -> float:
    low, high = _range(row, loose)
    return (low + high) / 2 if numpy.isfinite(high) else low


def _is(value: float, wanted: float) -> bool:
    """Equal but for what the wire rounds: factors that differ by one rank differ by more, up to 50 ranks."""
    return abs(value - wanted) <= 0.01 * abs(wanted)


def _cells(row: Row, error: list[float] | None) -> Cells:
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


def _finding(rows: Sequence[Row], off: Sequence[Row], cause: Cause, severity: Severity) -> Finding:
    first = off[0]
    good = [r.step for r in rows if r.step < first.step]
    ranks = cause.ranks or tuple(sorted(set(first.part_ranks or ())))
    made = "DDP's reduced gradient" if first.declared else (
        f"the gradient reduced by {first.reduction}" if first.reduction else "the reduced gradient")  # fmt: skip
    count = len(cause.tensors)
    of = f"of {cause.tensors[0]}" + (f" and {counted(count - 1, 'more tensor')}" if count > 1 else "")
    times = f"at {len(off)} of {counted(sum(r.step >= first.step for r in rows), 'step')} checked from then on"
    if cause.kind == "missing":
        what = f"lacks the part of {listed(cause.ranks)}: it is {cause.factor:.6g} times the sum of the others'"
    elif cause.kind == "scaled":
        what = f"counts the part of {listed(cause.ranks)} {cause.weight:.4g} times"
    elif cause.kind == "factor":
        what = f"is the sum of the ranks' own times {cause.factor:.6g}, not their mean"
    else:
        what = "is not the mean of the ranks' own"
    unknown = () if cause.ranks else ("which rank or link is at fault: no single part accounts for the difference",)
    check = f"what does {listed(cause.ranks)} hand to the all-reduce?" if cause.ranks else \
        "does it come back? a bad link or device does; then take nodes out one by one"  # fmt: skip
    expected = f"{1 / first.peers:.6g} of each rank" if first.declared else "one factor for every rank"
    shown = f"{cause.factor:.6g}, without {listed(cause.ranks)}" if cause.kind == "missing" else (
        f"{cause.factor:.6g}, {listed(cause.ranks)} times {cause.weight:.4g}" if cause.kind == "scaled" else
        f"{cause.factor:.6g}" if cause.kind == "factor" else "no account fits")  # fmt: skip
    evidence = [Evidence(r, first.step, f"part in the reduced gradient {of}", shown, expected)
                for r in (cause.ranks or (None,))]  # fmt: skip
    return Finding(
        ranks=ranks, first_step=first.step, last_good_step=max(good, default=None), last_step=off[-1].step,
        attempt=first.attempt, subject=cause.tensors[0] if cause.tensors else "", severity=severity,
        summary=f"{made} {of}, the same on all ranks, {what} at step {first.step}; {times}",
        evidence=tuple(evidence), cannot_conclude=unknown + interval(max(good, default=None), first.step),
        next_check=check,
    )  # fmt: skip


def _note(rows: Sequence[Row], says: str, factor: float, severity: Severity, check: str,
          last_good: int | None = None) -> Finding:  # fmt: skip
    first = rows[0]
    made = f"the gradient reduced by {first.reduction}" if first.reduction else "the reduced gradient"
    return Finding(
        ranks=tuple(range(first.peers)), first_step=first.step, last_good_step=last_good, last_step=rows[-1].step,
        attempt=first.attempt, severity=severity,
        summary=f"{made} {says}, from step {first.step} on at {counted(len(rows), 'checked step')}",
        evidence=(Evidence(None, first.step, "factor between the sum of the ranks' own and the reduced gradient",
                           f"{factor:.6g}", f"{1 / first.peers:.6g}"),),
        next_check=check,
    )  # fmt: skip
