"""The loss of every backward, summed over the step's micro-batches and freed of the loss scale.

Writes    loss
Costs     one scalar read per backward on CPU; on CUDA a copy that is read a step later; at watched steps 5 us to see whether they were divided
Blind to  losses that reach torch.autograd.grad only; roots that are not scalar
"""

from __future__ import annotations

import math
from typing import Any

from ..agent import Emit, StepInfo
from ..lossgraph import undivided
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("loss", (
    Column("backwards", "int32", "", "backward calls with a scalar root in this step"),
    Column("total", "float64", "", "sum of their losses, loss scale removed"),
    Column("last", "float64", "", "the last of them"),
    Column("nonfinite", "int32", "", "how many of them are NaN or Inf"),
    Column("first_nonfinite", "int32", "", "micro-step (from 0) of the first that is; -1 for none"),
    Column("scale", "float64", "", "loss scale in force; 1 without a scaler"),
    Column("undivided", "bool", "", "at a watched step: each of its losses is for certain the mean that a loss function took, divided by nothing since; false: not so, or not known"),
), "one row per step with a backward")  # fmt: skip


def install(emit: Emit) -> Undo:
    agent = emit.agent
    pending: list[tuple[Any, Any]] = []  # (loss, loss scale or None): floats on CPU, detached scalars on a device

    certain: list[bool] = []  # of each loss whose graph was looked at

    def begin(root: Any) -> None:
        if root is None or root.numel() != 1 or root.is_complex():
            return
        scale = agent.scale
        if agent.watching:
            certain.append(undivided(root, scale is not None))
        if root.is_cuda:
            pending.append((root.detach(), scale))  # detached: holding the root would keep the whole graph alive
            return
        loss = root.item()
        if scale is not None:
            loss, scale = loss / scale.item(), scale.item()
        if not math.isfinite(loss):
            agent.alarm()
            agent.fire("loss_nonfinite", root)
        pending.append((loss, scale))

    def closed(info: StepInfo) -> None:
        values, pending[:] = list(pending), []
        whole = bool(certain) and all(certain)
        certain.clear()
        if not values:
            return
        if isinstance(values[0][0], float):
            write(info.step, [v for v, _ in values], values[-1][1], whole)
            return
        torch = agent.torch
        losses = torch.stack([v.double().reshape(()) for v, _ in values])
        scale = values[-1][1]
        device_scale = losses.new_ones(1) if scale is None else scale.double().reshape(1)

        def landed(read: list[Any]) -> None:
            factor = read[1][0]
            numbers = [v / factor if factor else math.nan for v in read[0]]
            if not all(map(math.isfinite, numbers)):
                agent.alarm()
            write(info.step, numbers, factor, whole)

        agent.landing.land([losses, device_scale], landed)

    def write(step: int, losses: list[float], scale: float | None, whole: bool) -> None:
        odd = [i for i, v in enumerate(losses) if not math.isfinite(v)]
        emit(TABLE, (len(losses), math.fsum(losses) if not odd else sum(losses), losses[-1], len(odd),
                     odd[0] if odd else -1, 1.0 if scale is None else scale, whole), step=step)  # fmt: skip

    emit.on("backward_begin", begin)
    emit.on("step_closed", closed)
    return lambda: None
