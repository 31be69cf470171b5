"""Norms of every gradient before the reduction spreads it, norms and fingerprints of what the optimizer gets.

Writes    grad
Costs     per watched step one fused norm over the local gradients and one fingerprint per reduced gradient
Blind to  local gradients under gradient_as_bucket_view=True (`valid` is false); earlier micro-steps that were reduced
          already are part of a local gradient; of shards only this rank's part is seen, after the reduction
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .. import fingerprint, torchprivate
from ..agent import Emit
from ..catalogue import REPLICATED, Entry, due
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("grad", (
    Column("stage", "text", "", "local: this rank's own, before any reduction; reduced: as the optimizer gets it"),
    Column("generation", "int32", "", "tensor catalogue that the tensors refer to"),
    Column("micro", "int32", "", "backward calls of this step before this one"),
    Column("tensors", "int64[]", "", "catalogue index per entry; empty: all from 0 on"),
    Column("l2", "float64[]", "", "L2 norm per tensor, loss scale removed; -1 no gradient, -2 not measured (the reduced stage, where the local one was)"),
    Column("digest", "int64[]", "", "exact fingerprint per tensor of the reduced stage (above 2,040 elements: of the step's window); empty at the local stage"),
    Column("nonfinite", "int64[]", "", "catalogue indices of tensors that hold NaN or Inf"),
    Column("valid", "bool", "", "local stage: the values are this rank's alone, before the reduction"),
    Column("scale", "float64", "", "loss scale that was divided out; 1 without a scaler"),
), "one row per watched step and stage (and micro-step when something is not finite)")  # fmt: skip

NO_GRADIENT, UNMEASURED = -1.0, -2.0


def install(emit: Emit) -> Undo:
    agent = emit.agent
    on_device = fingerprint.DeviceSweep()
    local_step = [0]  # last step whose local gradients were seen as this rank's alone

    def local() -> None:
        agent.catalogue.refresh(in_backward=True)
        if not agent.catalogue.params:
            return
        valid = not any(d.gradient_as_bucket_view for _, d, _ in agent.catalogue.ddps())
        if valid:
            local_step[0] = agent.window.step
        measure("local", due(agent.catalogue.params, agent.window.step), valid, True, False)

    def reduced(optimizer: Any, number: int) -> None:
        if not agent.watching:
            return
        agent.catalogue.refresh()
        held = [e for e in agent.catalogue.params if e.optimizer == number]
        if held:
            # norms and finiteness were taken before the reduction; again here only where that was not possible, and
            # after an alarm, to see whether the update gets what was seen
            normed = local_step[0] != agent.window.step or agent.odd or any(e.sharing == "sharded" for e in held)
            if len(held) == len(agent.catalogue.params):
                held = agent.catalogue.params
            measure("reduced", due(held, agent.window.step), True, normed, True)

    def measure(stage: str, entries: list[Entry], valid: bool, normed: bool, exact: bool) -> None:
        chosen: list[int] = []
        grads: list[Any] = []
        l2 = [NO_GRADIENT] * len(entries)
        for at, entry in enumerate(entries):
            p = entry.ref()
            grad = p.grad if p is not None else None
            if grad is None:
                continue
            l2[at] = UNMEASURED
            if entry.sharing == "sharded":
                if stage == "local":
                    continue  # what stands in .grad before a sharded reduction differs by version
                grad = torchprivate.local_shard(grad)
            if (
                not grad.is_sparse
                and grad.is_floating_point()
                and grad.numel()
                and (entry.sharing in REPLICATED or torchprivate.readable(grad))
            ):
                chosen.append(at)
                grads.append(grad)
        indices = [] if entries is agent.catalogue.params else [e.index for e in entries]
        head = (agent.catalogue.generation, agent.backwards, valid)
        if grads:
            row = Pass(stage, indices, entries, chosen, grads, l2, head, agent.window.step, agent.scale)
            read(row, normed, exact)
        else:
            emit(TABLE, (*head, 1.0), (stage, indices, l2, [0] * len(entries) if exact else [], []))

    def read(row: Pass, normed: bool, exact: bool) -> None:
        """Start what has to be computed; the row is written when the values are on the host."""
        on_host = not any(g.is_cuda for g in row.grads)
        digests, _ = fingerprint.sweep_cpu(row.grads, row.step) if exact and on_host else ([], [])
        wanted = [fingerprint.norms(row.grads)] if normed else []
        if row.scale is not None:
            wanted.append(row.scale.double().reshape(1))
        if exact and not on_host:
            wanted.append(on_device.digests(row.grads, row.step))

        def landed(values: list[Any]) -> None:
            norms = values.pop(0) if normed else []
            factor = values.pop(0)[0] if row.scale is not None else 1.0
            odd = write(row, norms, factor, digests or (values[0] if values else []), exact, on_host)
            if odd:
                agent.alarm()

        agent.landing.land(wanted, landed)

    def write(row: Pass, norms: list[float], factor: float, found: list[int], exact: bool, on_host: bool) -> list[int]:
        # the reduced stage may be seen before or after unscaling: its values are reported as they are
        divisor = factor if row.stage == "local" and factor else 1.0
        digests = [0] * len(row.entries) if exact else []
        odd = []
        for k, at in enumerate(row.chosen):
            if exact:
                digests[at] = found[k]
            if norms:
                row.l2[at] = norms[k] / divisor
                if not math.isfinite(norms[k]) and (not on_host or fingerprint.has_nonfinite(row.grads[k])):
                    odd.append(row.entries[at].index)
        emit(TABLE, (*row.head, factor), (row.stage, row.indices, row.l2, digests, odd), step=row.step)
        return odd

    emit.on("gradients_local", local)
    emit.on("before_update", reduced)
    return on_device.clear


@dataclass
class Pass:
    """One look at the gradients: which, and what is filled in later. `chosen` are the positions of `grads` in `entries`."""

    stage: str
    indices: list[int]
    entries: list[Entry]
    chosen: list[int]
    grads: list[Any]
    l2: list[float]
    head: tuple[int, int, bool]
    step: int
    scale: Any
