"""Gradients differ between replicas when the optimizer gets them: the reduction left them out, or something came after.

Reads     grad, delivered, param, tensor, step, optim
Says      which ranks, from which step on, which tensors; a gradient that some ranks lack counts as different
Unknown   only unwrapped or ignored tensors, or shards of which each rank holds its own; steps that no longer correspond
Blind to  steps between two sweeps; a wrong value that all replicas share
Do        call the DDP module itself in the forward, not model.module; leave no_sync() before the last micro-batch;
          build DDP after the last parameter was added; touch gradients after the reduction the same way on every rank
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from .. import replicas
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed
from ..replicas import SHOWN
from ..settled import settled_sql

CODE = "GRAD_DESYNC"
NEEDS = {"grad": 1, "tensor": 1}
PARAMS: Mapping[str, object] = {}

# What no reduction is declared for is PARAM_DESYNC's: whoever averages parameters has gradients that differ by design.
# A step that the loss scaler left out threw its gradients away.
PARTED: Final = replicas.parted_sql(
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

# Beside each tensor that parts, what was seen of the reduction in the step at which it does.
SQL = f"""
SELECT p, coalesce(l.unsynced, []), coalesce(l.bypassed, []), coalesce(l.kept, []), coalesce(d.handed, FALSE),
       coalesce(b.passed, [])
FROM ({PARTED}) p
LEFT JOIN (
    SELECT l.attempt, l.step, list(DISTINCT l.rank ORDER BY l.rank) FILTER (l.synced = 0) AS unsynced,
           list(DISTINCT l.rank ORDER BY l.rank) FILTER (l.synced = -1) AS bypassed,
           list(DISTINCT l.rank ORDER BY l.rank) FILTER (r.sketch = l.sketch AND list_max(l.l2) > 0) AS kept
    FROM (SELECT * FROM grad WHERE stage = 'local' AND valid
          QUALIFY row_number() OVER (PARTITION BY rank, attempt, step ORDER BY micro DESC) = 1) l
    LEFT JOIN grad r ON r.rank = l.rank AND r.attempt = l.attempt AND r.step = l.step AND r.stage = 'reduced'
                    AND r.micro = l.micro + 1 AND r.tensors = l.tensors AND len(r.sketch) > 0
    GROUP BY l.attempt, l.step
) l ON l.attempt = p.attempt AND l.step = p.first
LEFT JOIN (
    SELECT attempt, step, count(DISTINCT rank) >= 2 AND min(h) = max(h) AS handed FROM (
        SELECT d.rank, d.attempt, d.step, hash(d.tensors, d.digest) AS h FROM delivered d
        SEMI JOIN (SELECT rank, attempt, step, max(backwards) - 1 AS micro FROM step GROUP BY ALL) s
        USING (rank, attempt, step, micro) WHERE d.reduction <> 'by hand')
    GROUP BY attempt, step
) d ON d.attempt = p.attempt AND d.step = p.first
LEFT JOIN (  -- per rank that reduced by hand in this step: how many tensors, where this one was not among them
    SELECT attempt, step, name, model, list((rank, others) ORDER BY rank) AS passed FROM (
        SELECT t.rank, t.attempt, h.step, t.name, t.model, any_value(len(h.tensors)) AS others
        FROM tensor t JOIN (
            SELECT rank, attempt, pid, generation, step, list_distinct(flatten(list(tensors))) AS tensors
            FROM delivered WHERE reduction = 'by hand' GROUP BY ALL
        ) h USING (rank, attempt, pid, generation)
        WHERE t.kind = 'param' AND t.sharing = 'late' AND NOT list_contains(h.tensors, t.index) GROUP BY ALL)
    GROUP BY ALL
) b ON b.attempt = p.attempt AND b.step = p.first AND b.name = p.name AND b.model = p.model
ORDER BY p.attempt, p.first, p.model, p.index
"""


class Row(NamedTuple):
    """One tensor that parts, and what was seen of the reduction at that step."""

    tensor: dict[str, Any]  # the columns of replicas.Row, in order
    unsynced: list[int]  # ranks whose last backward ran under no_sync
    bypassed: list[int]  # ranks whose last backward followed no forward of a DDP module
    kept: list[int]  # ranks whose optimizer gets their own gradients, number for number
    handed: bool  # what DDP delivered was the same on all ranks
    passed: list[tuple[int, int]]  # (rank, how many other tensors the program handed to a reduction), not this one


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per set of ranks and first step."""
    parted = [replicas.Row(*r.tensor.values()) for r in rows]
    abstention = replicas.unjudged(parted[0], run.world_size)
    if abstention:
        yield abstention
        return
    seen = {(p.attempt, p.first): r for p, r in zip(parted, rows, strict=True) if p.name is not None}
    differing = [p for p in parted if p.name is not None]
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
        found = replicas.finding(replace(parting, when=when, next_check=check))
        yield _with_what_was_seen(found, first, seen[first.attempt, first.first])
    yield from replicas.left_open(parted[0], run)


def _with_what_was_seen(found: Finding, first: replicas.Row, seen: Row) -> Finding:
    """The finding, and how the reduction of that step looked on the ranks that it is about."""
    if first.sharing != "ddp":
        return replace(found, evidence=found.evidence + tuple(_passed_over(first, seen)))
    here = set(first.ranks)
    unsynced, bypassed, kept = (sorted(here & set(ranks)) for ranks in (seen.unsynced, seen.bypassed, seen.kept))
    said, shown = [], []
    if seen.handed:
        said.append("what DDP delivered was the same on all ranks, it was changed after that")
    elif unsynced:
        said.append(f"the last backward of the step ran under no_sync on {listed(unsynced)}")
        shown += [Evidence(r, first.first, "DDP told to reduce in the last backward", "no", "yes") for r in unsynced]
    elif bypassed:
        said.append(f"no forward of the DDP module came before the last backward on {listed(bypassed)}")
        shown += [Evidence(r, first.first, "forward of the DDP module before it", "none seen", "one") for r in bypassed]
    if kept and not seen.handed:
        said.append(f"the update got the own gradients of {listed(kept)} as they were")
        shown += [
            Evidence(r, first.first, "sketch of the update's gradients", "that of its own", "the mean's") for r in kept
        ]
    if not said:
        return found
    return replace(
        found, summary=f"{found.summary}; {', and '.join(said)}", evidence=found.evidence + tuple(shown[:SHOWN])
    )


def _passed_over(first: replicas.Row, seen: Row) -> Iterator[Evidence]:
    """Ranks whose program reduced tensors by hand in that step, but not this one."""
    for rank, others in seen.passed[:SHOWN]:
        what = (
            f"the program handed {others} other tensor{'s' * (others != 1)} to a reduction in this step, not this one"
        )
        yield Evidence(rank, first.first, f"{first.name} reduced by hand", what)
