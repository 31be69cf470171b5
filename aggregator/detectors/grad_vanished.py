"""Gradients of trainable parameters collapsed: all of them are exactly zero, or the first layers get next to nothing.

Reads     grad, tensor, loss, step
Says      the ranks, the first such watched step, the loss there; or the tensors, and how far below the largest they are
Unknown   too few watched steps; gradients that were not measured
Blind to  a slow decay over the run; layers that are registered in another order than they are computed in
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..groups import interval, listed, unheard

CODE = "GRAD_VANISHED"
NEEDS = {"grad": 1, "tensor": 1}
PARAMS: Mapping[str, object] = {
    # Exact zeros in every tensor come of no rounding. A batch may by chance hold nothing to learn from (all labels
    # ignored, every margin kept): five in a row on one rank are not one batch.
    "zeros": 5,
    # Root mean square of a weight's gradient beside the largest of the model's weights. Float32 resolves 6e-8 of a
    # sum: what is a millionth of the largest is within a factor of 16 of being rounding noise of it. Sparse rows of an
    # embedding lower it by the root of the share of rows in use, some thousandths at worst.
    "far_below": 1e-6,
    "steps": 20,  # watched steps on which it must be so, nearly all of them; early steps are unlike later ones
    "most_steps": 200,  # watched steps of one rank that are looked at, so that the work does not grow with the run
}
LEAST_TENSORS = 2  # one weight may lie beside the path of the gradient; the first two in a row do not
ALWAYS = 0.95
SHOWN = 8

SQL = """
WITH each AS (
    SELECT rank, attempt, step, max(list_max(l2)) AS most, min(list_min(l2)) AS least, bool_and(valid) AS valid
    FROM grad WHERE stage = 'local' AND len(l2) > 0 GROUP BY ALL
), known AS (
    SELECT *, most = 0 AND least >= -1 AS zero FROM each WHERE valid AND most >= 0
), rows AS (
    SELECT *, count(*) FILTER (NOT zero) OVER (PARTITION BY rank, attempt ORDER BY step) AS streak FROM known
), run AS (
    SELECT rank, attempt, streak, count(*) AS steps, min(step) AS first, max(step) AS last
    FROM rows WHERE zero GROUP BY ALL
), first_run AS (
    SELECT * FROM run WHERE steps >= $zeros
    QUALIFY row_number() OVER (PARTITION BY rank, attempt ORDER BY first) = 1
), zero AS (
    SELECT f.rank, f.attempt, f.first, f.last, f.steps,
           max(k.step) FILTER (k.step < f.first) AS good, max(abs(l.total)) AS loss
    FROM first_run f LEFT JOIN known k USING (rank, attempt)
    LEFT JOIN loss l ON l.rank = f.rank AND l.attempt = f.attempt AND l.step = f.first
    GROUP BY f.rank, f.attempt, f.first, f.last, f.steps
), speaker AS (SELECT attempt, min(rank) AS rank FROM known GROUP BY attempt),
looked AS (
    SELECT k.rank, k.attempt, k.step FROM known k JOIN speaker USING (rank, attempt)
    QUALIFY row_number() OVER (PARTITION BY k.attempt ORDER BY k.step) <= $most_steps
), cell AS (
    SELECT g.rank, g.attempt, g.pid, g.generation, g.step, unnest(g.l2) AS l2,
           unnest(CASE WHEN len(g.tensors) = 0 THEN range(len(g.l2)) ELSE g.tensors END) AS index
    FROM grad g JOIN looked k USING (rank, attempt, step) WHERE g.stage = 'local'
), weight AS (
    SELECT c.attempt, c.step, t.model, t.name, min(t.index) AS index, max(c.l2) / sqrt(max(t.numel)) AS rms
    FROM cell c JOIN tensor t USING (rank, attempt, pid, generation, index)
    WHERE t.kind = 'param' AND t.optimizer >= 0 AND t.sharing <> 'sharded' AND contains(t.shape, 'x') AND t.numel > 0
      AND c.l2 >= 0 AND isfinite(c.l2)
    GROUP BY ALL
), beside AS (
    SELECT *, rms / max(rms) OVER (PARTITION BY attempt, step, model) AS share,
           max(rms) OVER (PARTITION BY attempt, step, model) AS top
    FROM weight
), low AS (
    SELECT attempt, model, name, min(index) AS index, count(*) AS steps, min(step) AS first, max(step) AS last,
           count(*) FILTER (share < $far_below AND top > 0) AS below, median(share) AS share, max(rms) AS rms
    FROM beside GROUP BY ALL
)
SELECT 'zero' AS kind, rank, attempt, first, last, steps, good, loss, '' AS name, 0 AS place, 0.0 AS share, 0 AS model,
       steps AS below FROM zero
UNION ALL
SELECT 'layer', s.rank, l.attempt, l.first, l.last, l.steps, NULL, NULL, l.name,
       row_number() OVER (PARTITION BY l.attempt, l.model ORDER BY l.index), l.share, l.model,
       CASE WHEN l.rms > 0 THEN l.below ELSE 0 END
FROM low l JOIN speaker s USING (attempt)
WHERE l.attempt IN (SELECT attempt FROM low WHERE below > 0 AND rms > 0)
UNION ALL
SELECT 'seen', rank, attempt, min(step), max(step), count(*), NULL, NULL, '', 0, 0.0, 0, 0 FROM known GROUP BY ALL
ORDER BY 1, 3, 12, 10, 2
"""


class Row(NamedTuple):
    """`zero`: a row of steps of a rank whose gradients are all zero; `layer`: a weight; `seen`: what was looked at."""

    kind: str
    rank: int
    attempt: int
    first: int
    last: int
    steps: int
    good: int | None
    loss: float | None
    name: str
    place: int  # among the model's weights, in the order of registration
    share: float  # of the largest root mean square of a gradient, in the middle
    model: int
    below: int  # steps on which it was far below


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """At most one finding of each kind and attempt."""
    least = PARAMS["zeros"]
    assert isinstance(least, int)
    if not any(r.kind == "seen" and r.steps >= least for r in rows):
        yield Abstention("INSUFFICIENT_EVIDENCE", f"own gradients were seen at fewer than {least} steps")
    for attempt in sorted({r.attempt for r in rows}):
        zero = [r for r in rows if r.kind == "zero" and r.attempt == attempt]
        begun = {r.rank: r.first for r in rows if r.kind == "seen" and r.attempt == attempt}
        if zero:
            yield _zero(zero, begun)
            continue
        for model in sorted({r.model for r in rows if r.kind == "layer" and r.attempt == attempt}):
            found = _layers([r for r in rows if r.kind == "layer" and (r.attempt, r.model) == (attempt, model)], begun)
            if found is not None:
                yield found
    yield from unheard(run)


def _zero(hit: Sequence[Row], begun: Mapping[int, int]) -> Finding:
    first = min(r.first for r in hit)
    at_once = [r for r in hit if r.first == first]
    r = at_once[0]
    from_start = r.first == begun.get(r.rank)
    # A loss that has come down to nothing leaves nothing to learn: hinge and triplet losses end so.
    done = not from_start and r.loss == 0
    severity: Severity = "note" if done else "warning"
    loss = "unknown" if r.loss is None else f"{r.loss:g}"
    return Finding(
        ranks=tuple(r.rank for r in at_once),
        first_step=first,
        last_good_step=r.good,
        last_step=max(r.last for r in hit),
        attempt=r.attempt,
        severity=severity,
        subject="all gradients",
        summary=f"{listed(r.rank for r in at_once)}: the gradient of every parameter is exactly zero from step {first} "
        f"on, at {r.steps} watched steps in a row; the loss is {loss}",
        evidence=tuple(
            Evidence(h.rank, h.first, "gradients that are not zero", "none", "some") for h in at_once[:SHOWN]
        ),
        cannot_conclude=interval(r.good, first) + (("whether there was nothing left to learn",) if done else ()),
        next_check="look at the labels (all masked?), and for a part of the forward that lets nothing through",
    )


def _layers(weights: Sequence[Row], begun: Mapping[int, int]) -> Finding | None:
    least = PARAMS["steps"]
    assert isinstance(least, int)
    first_ones = []
    for r in weights:
        if r.steps < least or r.below < ALWAYS * r.steps:
            break
        first_ones.append(r)
    if len(first_ones) < LEAST_TENSORS or len(first_ones) == len(weights):
        return None
    r = first_ones[0]
    return Finding(
        ranks=tuple(sorted(begun)),
        first_step=r.first,
        last_step=r.last,
        attempt=r.attempt,
        severity="warning",
        subject=r.name,
        summary=f"the first {len(first_ones)} weights of the model, from {r.name} on, get gradients of "
        f"{r.share:.1g} of the largest, at {r.below} of {r.steps} watched steps",
        evidence=tuple(
            Evidence(w.rank, w.first, f"root mean square of the gradient of {w.name} beside the largest",
                     f"{w.share:.1g}", f"above {PARAMS['far_below']:g}")
            for w in first_ones[:SHOWN]
        ),
        cannot_conclude=("the other ranks' figures: those of one rank were looked at",) if len(begun) > 1 else (),
        next_check="saturating activations, a deep stack without residuals or normalisation, a small initialisation",
    )  # fmt: skip
