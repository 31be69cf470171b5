"""Where the wall time of a step went.

Writes    phase
Costs     a dozen clock reads a step
Blind to  work on an accelerator that the host does not wait for
"""

from __future__ import annotations

from ..agent import Emit, StepInfo
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("phase", (
    Column("data_ns", "int64", "ns", "waiting for a loader's batch"),
    Column("forward_ns", "int64", "ns", "in the root module's forward; 0 when it was not seen"),
    Column("backward_ns", "int64", "ns", "in backward, reduction wait included"),
    Column("reduce_wait_ns", "int64", "ns", "in backward after this rank's last gradient: waiting for the reduction; -1 not measured"),
    Column("optimizer_ns", "int64", "ns", "in optimizer.step"),
    Column("other_ns", "int64", "ns", "the rest of the step"),
), "one row per step")  # fmt: skip


def install(emit: Emit) -> Undo:
    def closed(info: StepInfo) -> None:
        get = info.phases.get
        data, forward, backward, optimizer = (get(k, 0) for k in ("data", "forward", "backward", "optimizer"))
        other = max(info.step_ns - data - forward - backward - optimizer, 0) if info.step_ns else 0
        emit(TABLE, (data, forward, backward, get("reduce_wait", -1), optimizer, other), step=info.step)

    emit.on("step_closed", closed)
    return lambda: None
