"""Norms of every gradient before the reduction spreads it, norms and fingerprints of what the optimizer gets.

Writes    grad
Costs     one fused norm over all gradients per pass and stage, one exact fingerprint per tensor at the reduced stage
Blind to  local gradients under gradient_as_bucket_view=True (`valid` is false); earlier micro-steps that were reduced
          already are part of a local gradient; of shards only this rank's part is seen, after the reduction
"""

from __future__ import annotations

import math
from typing import Any

from .. import fingerprint, torchprivate
from ..agent import Emit
from ..catalogue import Entry, due
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("grad", (
    Column("stage", "text", "", "local: this rank's own, before any reduction; reduced: as the optimizer gets it"),
    Column("generation", "int32", "", "tensor catalogue that the tensors refer to"),
    Column("micro", "int32", "", "backward calls of this step before this one"),
    Column("tensors", "int64[]", "", "catalogue index per entry; empty: all from 0 on"),
    Column("l2", "float64[]", "", "L2 norm per tensor, loss scale removed; -1 no gradient, -2 not measured"),
    Column("digest", "int64[]", "", "exact fingerprint per tensor of the reduced stage; empty at the local stage"),
    Column("nonfinite", "int64[]", "", "catalogue indices of tensors that hold NaN or Inf"),
    Column("valid", "bool", "", "local stage: the values are this rank's alone, before the reduction"),
    Column("scale", "float64", "", "loss scale that was divided out; 1 without a scaler"),
), "one row per watched step and stage (and micro-step when something is not finite)")  # fmt: skip

NO_GRADIENT, UNMEASURED = -1.0, -2.0


def install(emit: Emit) -> Undo:
    agent = emit.agent
    device_weights: dict[Any, Any] = {}

    def local() -> None:
        agent.catalogue.refresh()
        if not agent.catalogue.params:
            return
        entries = due(agent.catalogue.params, agent.window.step)
        valid = not any(d.gradient_as_bucket_view for _, d, _ in agent.catalogue.ddps())
        measure("local", entries, valid, False)

    def reduced(optimizer: Any, number: int) -> None:
        if not agent.watching:
            return
        agent.catalogue.refresh()
        held = [e for e in agent.catalogue.params if e.optimizer == number]
        if held:
            measure("reduced", due(held, agent.window.step), True, True)

    def measure(stage: str, entries: list[Entry], valid: bool, exact: bool) -> None:
        chosen, grads = [], []
        l2 = [NO_GRADIENT] * len(entries)
        for at, entry in enumerate(entries):
            p = entry.tensor
            grad = p.grad if p is not None else None
            if grad is None:
                continue
            grad = torchprivate.local_shard(grad)
            if grad.is_sparse or not grad.is_floating_point() or grad.numel() == 0:
                l2[at] = UNMEASURED
                continue
            chosen.append(at)
            grads.append(grad)
        step, micro, generation, scale = agent.window.step, agent.backwards, agent.catalogue.generation, agent.scale
        whole = entries is agent.catalogue.params
        indices = [] if whole else [e.index for e in entries]
        if not grads:
            emit(TABLE, (generation, micro, valid, 1.0),
                 (stage, indices, l2, [0] * len(entries) if exact else [], []), step=step)  # fmt: skip
            return
        on_host = not any(g.is_cuda for g in grads)
        wanted = [fingerprint.norms(grads)]
        if scale is not None:
            wanted.append(scale.double().reshape(1))
        if exact and not on_host:
            wanted.append(agent.torch.stack([fingerprint.digest_device(g, on_device(g.device)) for g in grads]))
        host_digests = [fingerprint.digest_cpu(g) for g in grads] if exact and on_host else []

        def landed(read: list[Any]) -> None:
            factor = read[1][0] if scale is not None else 1.0
            # the reduced stage may be seen before or after unscaling: its values are reported as they are
            divisor = factor if stage == "local" and factor else 1.0
            found = host_digests or (read[-1] if exact else [])
            digests = [0] * len(entries) if exact else []
            odd = []
            for k, at in enumerate(chosen):
                l2[at] = read[0][k] / divisor
                if not math.isfinite(read[0][k]) and (not on_host or fingerprint.has_nonfinite(grads[k])):
                    odd.append(entries[at].index)
                if exact:
                    digests[at] = found[k]
            if odd:
                agent.alarm()
            emit(TABLE, (generation, micro, valid, factor), (stage, indices, l2, digests, odd), step=step)

        agent.landing.land(wanted, landed)

    def on_device(device: Any) -> Any:
        if device not in device_weights:
            device_weights[device] = fingerprint.device_weights(device)
        return device_weights[device]

    emit.on("gradients_local", local)
    emit.on("before_update", reduced)
    return device_weights.clear
