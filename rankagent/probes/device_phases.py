"""Where the time of a watched step went on the rank's CUDA device.

Writes    phase_device
Costs     some eight events on the current stream in a watched step, a few us each; nothing without CUDA
Blind to  work on other streams than the current one; devices that are not CUDA's; captured graphs
"""

from __future__ import annotations

from typing import Any

from ..agent import Emit, StepInfo
from ..devicephases import PHASES, DevicePhases
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("phase_device", (
    Column("gap_ns", "int64", "ns", "between phases, since the end of the step before: other work, or none as the host was late; -1 unknown"),
    Column("forward_ns", "int64", "ns", "in the root module's forward"),
    Column("backward_ns", "int64", "ns", "in backward, reduction wait included"),
    Column("reduce_wait_ns", "int64", "ns", "in backward after this rank's last gradient"),
    Column("optimizer_ns", "int64", "ns", "from the last gradient to the end of the update"),
), "one row per watched step of a rank that uses CUDA: time between events on its current stream")  # fmt: skip


def install(emit: Emit) -> Undo:
    agent, cuda = emit.agent, emit.agent.torch.cuda
    phases = DevicePhases(cuda)

    def at(border: str) -> Any:
        def mark(*args: Any) -> None:
            if agent.watching and cuda.is_initialized():
                phases.mark(border)

        return mark

    def step_end() -> None:
        if agent.watching and cuda.is_initialized():
            phases.end(agent.window.step)
        else:
            phases.forget()

    def arrived(info: StepInfo | None = None) -> None:
        for step, t in phases.landed():
            row = (t["gap"], t["forward"], t["backward"], t["reduce_wait"], t["optimizer"])
            emit(TABLE, row, step=step)
        agent.landing.dropped += phases.dropped
        phases.dropped = 0

    for border in PHASES:
        if border != "step_end":
            emit.on(border, at(border))
    emit.on("step_end", step_end)
    emit.on("step_closed", arrived)
    emit.on("close", arrived)
    return lambda: None
