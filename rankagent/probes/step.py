"""One row per optimizer-step boundary.

Writes    step
Costs     one record a step
Blind to  training loops that never call backward through torch
"""

from __future__ import annotations

from ..agent import Emit, StepInfo
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("step", (
    Column("optimizers", "int32", "", "optimizers that stepped in it"),
    Column("backwards", "int32", "", "outermost backward calls since the last boundary"),
    Column("skipped", "bool", "", "a loss scaler left the update out"),
    Column("inferred", "bool", "", "no torch optimizer stepped: boundary inferred from the next backward"),
    Column("watched", "bool", "", "the heavy passes ran in this step"),
    Column("cadence", "int32", "", "heavy passes run every this many steps; 1 in the close watch"),
    Column("step_ns", "int64", "ns", "wall time since the boundary before; 0 for the first"),
    Column("agent_ns", "int64", "ns", "of it, spent in this agent"),
    Column("discarded", "int32", "", "of the backwards, those whose gradients were all zeroed before an update used them"),
), "one row per step")  # fmt: skip


def install(emit: Emit) -> Undo:
    def closed(info: StepInfo) -> None:
        emit(TABLE, (info.optimizers, info.backwards, info.skipped, info.inferred, info.watched, info.cadence,
                     info.step_ns, info.agent_ns, info.discarded), step=info.step)  # fmt: skip

    emit.on("step_closed", closed)
    return lambda: None
