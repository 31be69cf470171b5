"""One rank's own gradients keep standing apart from its peers': for good, far off again and again, or grossly.

Reads     grad (stage local), tensor, input, loss, param, delivered
Says      the rank, the first step, whether all its gradients or which tensor, how far, and whether its loss is odd too
Unknown   fewer than 3 ranks: two that differ have no majority; fewer than 20 checked steps before; shards of no FSDP
Blind to  a rank that is odd from the start; differences that lie within twice what its peers' varied by before; in
          runs of more than 2 million norms single tensors; norms that overflow half precision; steps between two passes
Do        look at this rank's samples at the steps listed, then exchange its device: if the rank number stays odd it
          is the data, if the device does it is the device (run its memory test)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import interval, listed, unheard
from ..median import median
from ..outliers import BEFORE, NOTHING, Apart, apart
from ..reductions import CATALOGUE
from ..tied import TIED
from ..wording import counted

CODE = "GRAD_OUTLIER_RANK"
NEEDS = {"grad": 1, "tensor": 1}
PARAMS: Mapping[str, object] = {
    "most_norms": 2_000_000,  # of single tensors that are judged: 2.1 s for 200 ranks by 100 steps by 100 tensors
}
ALPHA = 0.0012  # for each of four kinds of standing apart: all less than half of the 1 % that a run's rules share
SHOWN = 8
# the norm of finite float32 or bfloat16 elements is said to be infinite when its square is: it is at least that large
OVERFLOWN = math.sqrt(3.4028234663852886e38)
USUAL_ROWS_RATIO = 0.8  # a batch size is usual where so many steps have it; without a usual one none is odd

SQL = f"""
WITH catalogue AS ({CATALOGUE}),
joint AS (
    SELECT c.family, t.attempt FROM tensor t
    JOIN catalogue c USING (rank, attempt, pid, generation) WHERE t.kind = 'param'
    GROUP BY c.family, t.attempt
    HAVING NOT bool_or(t.sharing = 'sharded' AND t.shards = '')
       AND (bool_or(t.sharing IN ('ddp', 'hook', 'sharded')) OR t.attempt IN (SELECT attempt FROM ({TIED})))
),
named AS (
    SELECT c.family, t.attempt, t.rank, list(t.name ORDER BY t.index) AS names FROM tensor t
    JOIN catalogue c USING (rank, attempt, pid, generation) WHERE t.kind = 'param' GROUP BY ALL
),
half AS (
    SELECT DISTINCT c.family, t.attempt FROM tensor t
    JOIN catalogue c USING (rank, attempt, pid, generation) WHERE t.kind = 'param' AND t.dtype = 'float16'
),
own AS (
    SELECT g.rank, g.attempt, g.step, c.family, len(g.tensors) = 0 AS whole,
           CASE WHEN len(g.nonfinite) = 0
                     AND NOT EXISTS (FROM half h WHERE (h.family, h.attempt) = (c.family, g.attempt))
                THEN list_transform(g.l2, lambda x: CASE WHEN isinf(x) THEN {OVERFLOWN} / g.scale ELSE x END)
                ELSE g.l2 END AS l2
    FROM grad g JOIN catalogue c USING (rank, attempt, pid, generation) JOIN joint USING (family, attempt)
    WHERE g.stage = 'local' AND g.valid
    QUALIFY row_number() OVER (PARTITION BY g.rank, g.attempt, g.step, c.family ORDER BY g.micro DESC, g.seq DESC) = 1
),
taken AS (
    SELECT rank, attempt, step, max(rows) AS rows FROM (
        SELECT rank, attempt, step, source, sum(rows) AS rows FROM input WHERE rows > 0 GROUP BY ALL) GROUP BY ALL
)
SELECT o.attempt, o.family, o.step, o.rank,
       sqrt(list_sum(list_transform(o.l2, lambda x: CASE WHEN x > 0 OR isnan(x) THEN x * x ELSE 0 END))) AS norm,
       CASE WHEN o.whole AND (SELECT sum(len(l2)) FROM own) <= $most_norms THEN o.l2 END AS l2,
       CASE WHEN row_number() OVER (PARTITION BY o.attempt, o.family ORDER BY o.step, o.rank) = 1
            THEN (SELECT any_value(names) FROM named n WHERE n.family = o.family AND n.attempt = o.attempt)
       END AS names,
       t.rows, CASE WHEN l.backwards > 0 THEN l.total END AS loss
FROM own o LEFT JOIN taken t USING (rank, attempt, step) LEFT JOIN loss l USING (rank, attempt, step)
ORDER BY o.attempt, o.family, o.step, o.rank
"""


class Row(NamedTuple):
    """One rank's own gradient at one step."""

    attempt: int
    family: int  # ranks with one and the same tensor catalogue
    step: int
    rank: int
    norm: float | None
    l2: list[float] | None  # per tensor
    names: list[str] | None  # of the tensors, on the first row of a family
    rows: int | None  # batch rows that went into it
    loss: float | None


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """At most one finding per rank and attempt."""
    if run.world_size < 3:
        yield Abstention("NOT_APPLICABLE", "with fewer than three ranks none stands apart: two differ from each other")
        return
    enough = False
    for together in _families(rows):
        ranks, steps = sorted({r.rank for r in together}), sorted({r.step for r in together})
        if len(ranks) < 3 or len(steps) <= BEFORE:
            continue
        enough = True
        values, losses = _values(together, ranks, steps)
        for odd in apart(values, ALPHA):
            yield _finding(odd, together[0], ranks, steps, losses)
    if not enough:
        why = f"no three ranks of one model with own gradients of more than {BEFORE} checked steps"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    yield from unheard(run)


def _families(rows: Sequence[Row]) -> Iterator[list[Row]]:
    together: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        together.setdefault((row.attempt, row.family), []).append(row)
    yield from together.values()


def _values(rows: Sequence[Row], ranks: Sequence[int], steps: Sequence[int]) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Logarithms of norms (of all tensors together, then of each) and losses; NaN where a batch has an unusual size."""
    line, column = {r: i for i, r in enumerate(ranks)}, {s: i for i, s in enumerate(steps)}
    width = 1 + min(len(r.l2) if r.l2 is not None else 0 for r in rows)
    values = numpy.full((len(ranks), len(steps), width), numpy.nan)
    losses = numpy.full((len(ranks), len(steps), 1), numpy.nan)
    usual = _usual(rows)
    for r in rows:
        if usual is not None and r.rows is not None and r.rows != usual:
            continue
        at = line[r.rank], column[r.step]
        values[at] = [r.norm if r.norm is not None else math.nan, *(r.l2 or ())[: width - 1]]
        losses[at] = r.loss if r.loss is not None and r.loss > 0 else math.nan
    with numpy.errstate(all="ignore"):
        values = numpy.log(numpy.maximum(values, NOTHING))
        values[~numpy.isfinite(values)] = numpy.nan
        return values, numpy.log(losses)


def _usual(rows: Sequence[Row]) -> int | None:
    """The batch size of nearly all steps and ranks; None when there is no such."""
    sizes = [r.rows for r in rows if r.rows is not None]
    if not sizes:
        return None
    most = max(set(sizes), key=sizes.count)
    return most if sizes.count(most) >= USUAL_ROWS_RATIO * len(sizes) else None


def _finding(odd: Apart, row: Row, ranks: Sequence[int], steps: Sequence[int], losses: numpy.ndarray) -> Finding:
    rank, first, last = ranks[odd.rank], steps[odd.first], steps[odd.last]
    name = (row.names or [])[odd.series - 1] if odd.series and row.names else ""
    middle = float(numpy.median(odd.factors))
    what = f"own gradient of {name}" if name else "own gradient"
    how = f"{middle:.3g} times its usual size beside its peers'"
    where = "steps are exchangeable"
    if odd.kind == "lasting":
        when = f"from step {first} on, at {counted(len(odd.steps), 'checked step')} in a row"
    elif odd.kind == "gross":
        when = (
            f"at {counted(len(odd.steps), 'step')} from {first} to {last}, far beyond all that any rank had until then"
        )
        where += " and tails of logarithms no heavier than power 1.5"
    elif odd.kind == "share":
        how = f"{middle:.3g} times its usual share beside the rank's other tensors and its peers'"
        when = f"at {counted(len(odd.steps), 'separate step')} from {first} to {last}, on no other rank as often"
        where = "ranks are alike and steps apart independent"
    else:
        when = f"at {counted(len(odd.steps), 'step')} from {first} to {last}, on no other rank as often"
    loss = _loss(odd, losses)
    said = {True: "; its loss is odd there too", False: "; its loss is ordinary there", None: ""}[loss]
    shown = zip(odd.steps[:SHOWN], odd.factors[:SHOWN], strict=True)
    before = steps[odd.first - 1] if odd.first else None
    return Finding(
        ranks=(rank,), first_step=first, last_good_step=before, last_step=last, attempt=row.attempt, subject=name,
        severity="note" if odd.kind == "gross" and loss else "warning",  # few odd batches may all fall on one rank
        evidence_state="INFERRED",
        summary=f"{listed((rank,))}'s {what} stands apart from its peers' {when}: {how}{said}; chance of this in a "
                f"healthy run at most {max(odd.chance, 1e-9):.1g} where {where}",
        evidence=tuple(Evidence(rank, steps[s], f"{what}, beside its peers' and its own past", f"times {f:.4g}",
                                "within what the ranks varied by before") for s, f in shown),
        cannot_conclude=("why: its data, its code or its device", *interval(before, first)),
        next_check="look at this rank's batches and loss weights at these steps" if loss else
                   "look at this rank's batches, then at hooks on its gradients; run its steps again on another device",
    )  # fmt: skip


def _loss(odd: Apart, losses: numpy.ndarray) -> bool | None:
    """Whether the rank's loss, too, lies beyond what losses varied by before; None when that is not known."""
    own = losses[:, :, 0] - median(losses[:, :, 0], 0)
    past = own[:, : odd.first]
    # gross gradients spoil the update and with it the losses after: only the first step's can tell
    here = own[odd.rank, list(odd.steps[: 1 if odd.kind == "gross" else None])]
    if not numpy.isfinite(here).any() or not numpy.isfinite(past[odd.rank]).any():
        return None
    usual = median(past, 1)
    reach = float(numpy.nanmax(numpy.abs(past - usual[:, None])))
    return bool(abs(float(median(here, 0)) - usual[odd.rank]) > reach)
