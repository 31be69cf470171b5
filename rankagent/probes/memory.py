"""Memory of the rank's own process at the end of each step: by kind of page, its limits, and the device's allocator.

Writes    memory
Costs     one read of /proc/self/status, two getrlimit and the lengths of data sets' containers, 25 us hot; with CUDA one
          call for the allocator's counters: between watched steps every 8th step
Blind to  loader workers (the node's launcher samples those); what a library takes from the device past torch's allocator
"""

from __future__ import annotations

import os
import resource

from ..agent import Emit, StepInfo
from ..caches import kept_items
from ..devicememory import Device
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("memory", (
    Column("rss_bytes", "int64", "B", "resident memory"),
    Column("anon_bytes", "int64", "B", "memory of its own: anonymous pages, swapped ones included; -1 unknown"),
    Column("shared_bytes", "int64", "B", "resident shared memory: tensors from loader workers, /dev/shm; -1 unknown"),
    Column("vms_bytes", "int64", "B", "address space"),
    Column("data_bytes", "int64", "B", "private writable memory counted against RLIMIT_DATA; -1 unknown"),
    Column("limit_as_bytes", "int64", "B", "RLIMIT_AS; -1 for none"),
    Column("limit_data_bytes", "int64", "B", "RLIMIT_DATA; -1 for none"),
    Column("dataset_items", "int64", "", "items in the containers of the loaders' data sets in this process: a cache that fills shows here"),
    Column("cuda_device", "int32", "", "torch's index of the device; this and what follows is -1 before CUDA is in use"),
    Column("cuda_total_bytes", "int64", "B", "memory of the device"),
    Column("cuda_allocated_bytes", "int64", "B", "by tensors"),
    Column("cuda_reserved_bytes", "int64", "B", "by the caching allocator"),
    Column("cuda_active_bytes", "int64", "B", "by tensors, and blocks that wait for another stream"),
    Column("cuda_inactive_split_bytes", "int64", "B", "in parts of split blocks that nobody uses: fragmentation"),
    Column("cuda_allocated_peak_bytes", "int64", "B", "most by tensors since the start, or since the program reset it"),
    Column("cuda_reserved_peak_bytes", "int64", "B", "most by the caching allocator, likewise"),
    Column("cuda_retries", "int64", "", "allocations so far for which the allocator had to flush its cache"),
    Column("cuda_ooms", "int64", "", "out-of-memory errors so far, caught ones too"),
    Column("cuda_device_allocs", "int64", "", "cudaMalloc calls of the allocator so far"),
    Column("cuda_device_frees", "int64", "", "cudaFree calls of the allocator so far"),
), "one row per watched step, and every 8th")  # fmt: skip

EVERY_STEPS = 8  # a trend needs no more
STATUS_BYTES = 8192  # of /proc/self/status: 1.5 KB, more on machines with thousands of cores
KIB = 1024


def install(emit: Emit) -> Undo:
    status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    device = Device(emit.agent.torch)

    def closed(info: StepInfo) -> None:
        if not info.watched and info.step % EVERY_STEPS:
            return
        text = os.pread(status, STATUS_BYTES, 0)
        anon = size_bytes(text, b"RssAnon:")
        if anon >= 0:
            anon += max(0, size_bytes(text, b"VmSwap:"))
        emit(TABLE, (size_bytes(text, b"VmRSS:"), anon, size_bytes(text, b"RssShmem:"), size_bytes(text, b"VmSize:"),
                     size_bytes(text, b"VmData:"), limit(resource.RLIMIT_AS), limit(resource.RLIMIT_DATA),
                     kept_items(emit.agent.datasets.alive()), *device.read()),
             step=info.step)  # fmt: skip

    emit.on("step_closed", closed)
    return lambda: os.close(status)


def size_bytes(status: bytes, name: bytes) -> int:
    """One line of /proc/PID/status; -1 when this kernel does not tell it."""
    at = status.find(b"\n" + name)
    return int(status[at + 1 + len(name) : at + 64].split(None, 1)[0]) * KIB if at >= 0 else -1


def limit(what: int) -> int:
    """A soft limit of this process; -1 for none."""
    soft = resource.getrlimit(what)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft
