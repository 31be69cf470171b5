"""Buffers that replicas must share differ: those DDP broadcasts, and those that nothing ever updates.

Reads     buffer, tensor, step
Says      which ranks stand apart, from which step on, which buffers, and their digests
Unknown   no buffers; no two ranks that share one
Blind to  statistics that each rank keeps for itself (they may differ); steps between two sweeps
Do        look at who writes the buffer named: broadcast_buffers=False, a forward that one rank leaves out (evaluation
          on rank 0 in train mode), or code that sets it on one rank. For batch norm over all ranks use
          torch.nn.SyncBatchNorm
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .. import replicas
from ..detector import RunFacts
from ..findings import Abstention, Finding
from ..groups import UNDECLARED
from ..replicas import Parting, Row

CODE = "BUFFER_DESYNC"
NEEDS = {"buffer": 0, "tensor": 1}  # a model without buffers writes none: that is not a lack of evidence
PARAMS: Mapping[str, object] = {}

# A broadcast happens before a forward, which may then change the buffers: they are equal right after it, not later.
# All others are only held to be equal when their bits never change, which takes two sweeps to see (`CONSTANT_STEPS`).
SQL = replicas.parted_sql(
    """SELECT rank, attempt, pid, generation, greatest(step, 1) AS step, tensors, digest AS marks,
              CASE stage WHEN 'sync' THEN 0 WHEN 'end' THEN 1 ELSE 2 END AS sweep
       FROM buffer WHERE len(digest) > 0 AND (stage = 'sync' OR stage = 'end')""",
    "kind = 'buffer'",
    "(f.broadcast = 1) = (u.sweep = 0)",
)
CONSTANT_STEPS = 2  # the fewest that show a value twice


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """Findings for broadcast buffers, then for constant ones."""
    if not rows[0].kinds:
        yield Abstention("NOT_APPLICABLE", "no model of this run has a buffer")
        return
    abstention = replicas.unjudged(rows[0], run.world_size)
    if abstention:
        yield abstention
        return
    differing = [r for r in rows if r.name is not None]
    for parting in replicas.partings([r for r in differing if r.broadcast == 1], "buffer"):
        when = ", right after DDP's broadcast"
        check = "is the buffer written through a copy that the broadcast does not reach?"
        yield replicas.finding(replace(parting, when=when, next_check=check))
    constant = [r for r in differing if r.broadcast != 1 and not replicas.drifts(r) and r.since >= CONSTANT_STEPS]
    for parting in replicas.partings(constant, "buffer"):
        yield from _constant(parting)
    if rows[0].broadcasts and not rows[0].compared_before:
        yield Abstention("INSUFFICIENT_EVIDENCE", "no broadcast of the buffers by DDP was seen on two ranks")
    yield from replicas.left_open(rows[0], run)


def _constant(parting: Parting) -> Iterator[Finding]:
    """A buffer that no step changes. One value per rank may be meant (a rank's own offset): then at most a note."""
    plain = parting.rows[0].sharing in UNDECLARED
    if plain and not parting.odd.decided:
        return
    each_its_own = len(set(parting.rows[0].marks)) == len(parting.odd.odd) > 2
    changed = bool(parting.rows[0].moving)
    yield replicas.finding(
        replace(
            parting,
            severity="note"
            if each_its_own
            else "warning"
            if plain or changed or not parting.odd.decided
            else "critical",
            when=", though no other rank ever changes it" if changed else ", though no step changes it",
            cannot_conclude=("whether each rank was meant to have a value of its own",),
            next_check="compare where each rank takes this buffer's value from before training",
        )
    )
