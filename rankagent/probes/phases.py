"""Where the wall time of a step went, and how much of it the training thread got a core.

Writes    phase, cpu_wait
Costs     a dozen clock reads a step, and one read of a file in /proc (3 us), some ten in watched steps
Blind to  work on an accelerator that the host does not wait for; evaluation on data that no torch DataLoader gives;
          checkpoints that are written without torch.save, torch.distributed.checkpoint and safetensors
"""

from __future__ import annotations

import os
import shutil
import threading
from typing import Any

from ..agent import Emit, StepInfo, now_ns
from ..cputime import ThreadClock
from ..patch import Undo, replace, undo_all
from ..pauses import Pauses
from ..tables import Column, Table

TABLE = Table("phase", (
    Column("data_ns", "int64", "ns", "waiting for a loader's batch of training, collectives in it left out"),
    Column("forward_ns", "int64", "ns", "in the root module's forward, collectives in it left out; 0 when it was not seen"),
    Column("backward_ns", "int64", "ns", "in backward, reduction wait included"),
    Column("reduce_wait_ns", "int64", "ns", "in backward after this rank's last gradient: waiting for the reduction; -1 not measured"),
    Column("optimizer_ns", "int64", "ns", "in optimizer.step, collectives in it left out"),
    Column("communication_ns", "int64", "ns", "in collectives that the program or its wrapper calls outside of backward, saves and evaluation, until they returned"),
    Column("checkpoint_ns", "int64", "ns", "saving checkpoints, bringing them to the disk included"),
    Column("evaluation_ns", "int64", "ns", "passes over loaders without a backward, waiting for their batches included"),
    Column("other_ns", "int64", "ns", "the rest of the step"),
    Column("cpu_ns", "int64", "ns", "of the step, the training thread was on a core; -1 unknown"),
    Column("cpu_wait_ns", "int64", "ns", "of the step, it was ready to run and waited for a core; -1 unknown"),
), "one row per step")  # fmt: skip

CPU_WAIT = Table("cpu_wait", (
    Column("data_ns", "int64", "ns", "waited for a core while a loader was asked for a batch, evaluation included"),
    Column("forward_ns", "int64", "ns", "in forward"),
    Column("backward_ns", "int64", "ns", "in backward, up to this rank's last gradient"),
    Column("reduce_wait_ns", "int64", "ns", "in backward after it"),
    Column("optimizer_ns", "int64", "ns", "in optimizer.step"),
    Column("other_ns", "int64", "ns", "in the rest of the step, checkpoints and collectives included"),
), "one row per watched step: time that the training thread was ready to run and got no core, by phase")  # fmt: skip

TABLES = (TABLE, CPU_WAIT)

TIMED = ("data", "forward", "backward", "optimizer", "communication", "checkpoint")
WAITED = ("data", "forward", "backward", "reduce_wait", "optimizer", "other")
SAVING = ((os, "fsync"), (shutil, "copyfile"))  # what comes after a save in the same step belongs to the checkpoint


def install(emit: Emit) -> Undo:
    agent = emit.agent
    clock, pauses = ThreadClock(), Pauses()
    seen = {"data": 0, "communication": 0}  # of the step, what was counted up to the last batch
    waited = dict.fromkeys(WAITED, 0)  # for a core, by phase; of watched steps
    reducing: list[bool] = []

    def given(loader: int, number: int, again: bool, end: str) -> None:
        if threading.get_ident() == agent.thread:
            wait, communication = since("data"), since("communication")
            pauses.given((loader, number), now_ns(), wait, communication, bool(end), agent.torch.is_grad_enabled())

    def since(phase: str) -> int:
        before, seen[phase] = seen[phase], agent.phases.get(phase, 0)
        return max(seen[phase] - before, 0)

    def closed(info: StepInfo) -> None:
        evaluation, data_in_it, communication_in_it = pauses.take()
        left(agent.phase)
        data, forward, backward, optimizer, communication, checkpoint = (
            max(info.phases.get(k, 0) - info.phases.get(f"communication_in_{k}", 0), 0) for k in TIMED
        )
        data, communication = max(data - data_in_it, 0), max(communication - communication_in_it, 0)
        seen.update(data=0, communication=0)
        known = data + forward + backward + optimizer + communication + checkpoint + evaluation
        other = max(info.step_ns - known, 0) if info.step_ns else 0
        on, waiting = clock.lap()
        emit(TABLE, (data, forward, backward, info.phases.get("reduce_wait", -1), optimizer, communication, checkpoint,
                     evaluation, other, on, waiting), step=info.step)  # fmt: skip
        if info.watched and waiting >= 0:
            emit(CPU_WAIT, [waited[name] for name in WAITED], step=info.step)
        waited.update(dict.fromkeys(WAITED, 0))

    def changed(phase: str) -> None:
        if agent.watching:
            emit.guarded(left, phase)

    def left(phase: str) -> None:
        """The training thread goes from one phase to the next."""
        if agent.watching and threading.get_ident() == agent.thread:
            waiting = clock.waited()
            phase = "reduce_wait" if reducing and phase == "backward" else phase
            waited[phase if phase in waited else "other"] += waiting

    def local() -> None:
        left("backward")
        reducing.append(True)

    def backward_over(whole: bool) -> None:
        left("backward")
        reducing.clear()

    def part_of_a_save(original: Any) -> Any:
        def save(*args: Any, **kwargs: Any) -> Any:
            ours = agent.live and "checkpoint" in agent.phases and agent.phase != "checkpoint"
            if not ours or threading.get_ident() != agent.thread:
                return original(*args, **kwargs)
            started = now_ns()
            try:
                return original(*args, **kwargs)
            finally:
                agent.add_phase("checkpoint", now_ns() - started)

        return save

    emit.on("batch_given", given)
    emit.on("backward_begin", lambda root: pauses.backward())
    agent.phase_left = changed
    emit.on("gradients_local", local)
    emit.on("backward_end", backward_over)
    emit.on("step_closed", closed)
    return undo_all([clock.close, *(replace(owner, name, part_of_a_save) for owner, name in SAVING)])
