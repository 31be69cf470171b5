"""Memory of the rank's own process at the end of each step.

Writes    memory
Costs     one read of /proc/self/statm and getrlimit, 2 us hot and 40 us cold: between watched steps every 8th step
Blind to  loader workers (the node's launcher samples those)
"""

from __future__ import annotations

import os
import resource

from ..agent import Emit, StepInfo
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("memory", (
    Column("rss_bytes", "int64", "B", "resident memory"),
    Column("vms_bytes", "int64", "B", "address space"),
    Column("limit_as_bytes", "int64", "B", "RLIMIT_AS; -1 for none"),
    Column("cuda_allocated_bytes", "int64", "B", "by tensors; -1 without CUDA and at steps that are not watched"),
    Column("cuda_reserved_bytes", "int64", "B", "by the caching allocator; -1 without CUDA and at steps that are not watched"),
), "one row per watched step, and every 8th")  # fmt: skip

EVERY_STEPS = 8  # a trend needs no more


def install(emit: Emit) -> Undo:
    statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    page = resource.getpagesize()
    cuda = emit.agent.torch.cuda

    def closed(info: StepInfo) -> None:
        if not info.watched and info.step % EVERY_STEPS:
            return
        size, resident = os.pread(statm, 64, 0).split()[:2]
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        # is_initialized is a flag; asking the allocator before that would initialise CUDA for the user
        on = info.watched and cuda.is_initialized()
        emit(TABLE, (int(resident) * page, int(size) * page, -1 if limit == resource.RLIM_INFINITY else limit,
                     cuda.memory_allocated() if on else -1, cuda.memory_reserved() if on else -1),
             step=info.step)  # fmt: skip

    emit.on("step_closed", closed)
    return lambda: os.close(statm)
