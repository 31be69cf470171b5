"""An allocation that failed and ended the rank, or that torch's device allocator refused: what was asked, what held it.

Writes    oom
Costs     the shapes of each batch, 3 us hot; at a failure one walk over all Python objects
Blind to  failed allocations on the host that the program caught; SIGKILL by the kernel (the node's launcher sees that);
          tensors that only an autograd graph holds: they are in what is in use and in no category
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from .. import guard, torchprivate
from ..agent import Emit, StepInfo
from ..devicememory import NONE, Device, DeviceMemory
from ..holders import Group, Holders
from ..leaves import leaves
from ..outofmemory import memory_kind, place, requested_bytes
from ..patch import Undo
from ..tables import Column, Table
from .failure import text
from .memory import STATUS_BYTES, size_bytes

TABLE = Table("oom", (
    Column("caught", "bool", "", "the device allocator refused an allocation; whether the program went on shows later"),
    Column("requested_bytes", "int64", "B", "what was asked for; -1 unknown"),
    Column("in_use_bytes", "int64", "B", "host: anonymous and shared memory; device: allocated by tensors; -1 unknown"),
    Column("reserved_bytes", "int64", "B", "host: address space; device: by the caching allocator; -1 unknown"),
    Column("free_bytes", "int64", "B", "device: free for all processes; -1 unknown"),
    Column("total_bytes", "int64", "B", "memory of the device; -1 on the host"),
    Column("parameters_bytes", "int64", "B", "parameters and buffers; -1 not measured, as for the next four"),
    Column("gradients_bytes", "int64", "B", "gradients"),
    Column("optimizer_bytes", "int64", "B", "optimizer state"),
    Column("others_bytes", "int64", "B", "all other tensors that Python knows"),
    Column("largest_step", "int64", "", "step of the largest batch before; 0 for none"),
    Column("device", "int32", "", "index of the device; -1 on the host"),
    Column("kind", "text", "", "host or device"),
    Column("during", "text", "", "data, forward, backward, optimizer, communication, checkpoint, other: by the exception's frames"),
    Column("type", "text", "", "class of the exception"),
    Column("message", "text", "", "its text, cut"),
    Column("batch", "text", "", "shapes and dtypes of the last batch that was given"),
    Column("largest", "text", "", "those of the largest batch before it"),
    Column("holders", "text", "", "largest groups of other tensors, one 'count x what = bytes' a line"),
), "one row per out-of-memory error; `step` is the step in progress")  # fmt: skip

TENSORS = 16  # of a batch that are told
MESSAGE = 1024
MOST_ROWS = 32  # a program that catches and goes on may do so at every step


class Batch(NamedTuple):
    """Forms only: a reference to a tensor would keep the batch alive."""

    elements: int = 0
    forms: tuple[tuple[Any, Any], ...] = ()  # (dtype, shape) of each tensor
    step: int = 0


def install(emit: Emit) -> Undo:
    agent = emit.agent
    device = Device(agent.torch)
    last, largest = [Batch()], [Batch()]
    attached: list[bool] = []
    written: list[bool] = []

    def scan(data: Any) -> Batch:
        tensors = [t for _, t in leaves(data)]
        return Batch(sum(t.numel() for t in tensors), tuple((t.dtype, t.shape) for t in tensors))

    def given(batch: Batch | None) -> None:
        """Of what one step is given the largest counts."""
        step = agent.window.step
        if batch is None or (last[0].step == step and batch.elements <= last[0].elements):
            return
        if last[0].step != step and last[0].elements > largest[0].elements:
            largest[0] = last[0]
        last[0] = batch._replace(step=step)

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        if last[0].step != agent.window.step:  # else a loader gave it, and the arguments are the batch again
            given(scan((args, kwargs)))

    def attach(info: StepInfo) -> None:
        """Once CUDA is in use: before that the allocator has no device to be told of. It takes no observer back, so
        ours looks whether it is off."""
        register = torchprivate.out_of_memory_observer(agent.torch)
        if not attached and (register is None or agent.torch.cuda.is_initialized()):
            attached.append(True)
            if register is not None:
                register(refused)

    def failed(error: BaseException) -> None:
        message = text(error)
        kind = memory_kind(error, message)
        if not kind:
            return
        during = place(error.__traceback__, agent.phase)
        counters = device.read() if kind == "device" else NONE
        write(kind, False, requested_bytes(message), counters, -1, during, type(error).__name__, message)

    def refused(index: int, asked: int, total: int, free: int) -> None:
        """Called by the allocator itself, before it raises; nothing may be allocated on the device here."""
        if len(written) < MOST_ROWS:
            emit.guarded(write, "device", True, asked, device.read()._replace(device=index, total_bytes=total), free,
                         agent.phase, "", "")  # fmt: skip

    def write(kind: str, caught: bool, asked: int, on: DeviceMemory, free: int, during: str, name: str,
              message: str) -> None:  # fmt: skip
        used, reserved = (on.allocated_bytes, on.reserved_bytes) if kind == "device" else host_bytes()
        written.append(caught)
        # a walk over the heap is for the end of a rank; a program that catches may do so at every step
        held = [-1, -1, -1, -1]
        groups: list[Group] = []
        if not caught:
            guard.attempt(lambda e: None, measure, kind, held, groups)
        emit(TABLE, (caught, asked, used, reserved, free, on.total_bytes, *held, largest[0].step, on.device),
             (kind, during, name, message[:MESSAGE], said(last[0]), said(largest[0]),
              "\n".join(f"{g.tensors} x {g.what} = {g.size_bytes}" for g in groups)))  # fmt: skip

    def measure(kind: str, held: list[int], groups: list[Group]) -> None:
        kind_of_device = "cpu" if kind == "host" else "cuda"
        found = Holders(agent.torch, agent.catalogue.optimizers().values(), agent.catalogue.tops(), kind_of_device)
        held[:3] = found.parameters, found.gradients, found.optimizer_state
        held[3], several = found.others()
        groups.extend(several)

    agent.look_at_batches(emit, scan, lambda batch, at: given(batch))
    emit.on("forward_begin", forward)
    emit.on("step_closed", attach)
    emit.on("failed", failed)
    return lambda: None


def said(batch: Batch) -> str:
    """float32[8, 16], int64[8]"""
    forms = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in batch.forms[:TENSORS]]
    more = len(batch.forms) - TENSORS
    return ", ".join(forms) + (f" and {more} more" if more > 0 else "")


def host_bytes() -> tuple[int, int]:
    """(anonymous and shared memory, address space) of this process; -1 unknown."""
    try:
        fd = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1, -1
    try:
        status = os.pread(fd, STATUS_BYTES, 0)
    finally:
        os.close(fd)
    anon = size_bytes(status, b"RssAnon:")
    return anon + max(0, size_bytes(status, b"RssShmem:")) if anon >= 0 else -1, size_bytes(status, b"VmSize:")
