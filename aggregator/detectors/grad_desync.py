"""Gradients differ between replicas when the optimizer gets them: the reduction left them out, or something came after.

Reads     grad (stage reduced), param, tensor, step, optim
Says      which ranks, from which step on, which tensors; a gradient that some ranks lack counts as different
Unknown   only unwrapped or ignored tensors, or shards of which each rank holds its own; steps that no longer correspond
Blind to  steps between two sweeps; a wrong value that all replicas share
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .. import replicas
from ..detector import RunFacts
from ..findings import Abstention, Finding
from ..replicas import Row
from ..settled import settled_sql

CODE = "GRAD_DESYNC"
NEEDS = {"grad": 1, "tensor": 1}
PARAMS: Mapping[str, object] = {}

# What no reduction is declared for is PARAM_DESYNC's: whoever averages parameters has gradients that differ by design.
# A step that the loss scaler left out threw its gradients away.
SQL = replicas.parted_sql(
    """SELECT g.rank, g.attempt, g.pid, g.generation, greatest(g.step, 1) AS step, g.tensors, 1 AS sweep,
              list_transform(list_zip(g.l2, g.digest), lambda x: CASE WHEN x[1] = -1 THEN -1 ELSE x[2] END) AS marks
       FROM grad g
       LEFT JOIN (SELECT DISTINCT attempt, step FROM step WHERE skipped) s ON s.attempt = g.attempt AND s.step = g.step
       WHERE g.stage = 'reduced' AND len(g.digest) > 0 AND s.step IS NULL""",
    "kind = 'param' AND sharing NOT IN ('plain', 'outside', 'ignored', 'duplicated')",
    whole=0,
    # an optimizer that updates each parameter on one rank and hands it to the others evens out nothing but the symptom
    settled=f"""({settled_sql(">=")}) AND NOT EXISTS (
        SELECT 1 FROM optim o WHERE o.attempt = a.attempt AND o.class_name = 'ZeroRedundancyOptimizer')""",
)


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per set of ranks and first step."""
    abstention = replicas.unjudged(rows[0], run.world_size)
    if abstention:
        yield abstention
        return
    differing = [r for r in rows if r.name is not None]
    for parting in replicas.partings(differing, "reduced gradient"):
        # clipping by the total norm carries one unreduced gradient into all others: a late tensor speaks first
        parting = replace(parting, rows=tuple(sorted(parting.rows, key=lambda r: r.sharing != "late")))
        first = parting.rows[0]
        if first.settled:
            when = ", yet the parameters agree again after it: something evens them out"
            yield replicas.finding(replace(parting, severity="note", when=when))
            continue
        if first.sharing == "late":
            when, check = ": it was added after DDP was built", "build DDP after the last parameter was added"
        elif parting.odd.decided:
            when, check = "", "look for code on this rank that changes gradients after backward"
        else:
            when = (
                ": DDP did not reduce it" if first.sharing == "ddp" else ", though it should have been reduced for both"
            )
            check = "is the wrapper itself called (not .module), and is the last backward of a step outside no_sync?"
        yield replicas.finding(replace(parting, when=when, next_check=check))
    yield from replicas.left_open(rows[0], run)
