"""Which exceptions say that memory ran out, how much was asked for, and where in the step that was. Pure functions."""

from __future__ import annotations

import os
import re
from types import TracebackType
from typing import Any

# What allocators, libraries and loaders say when memory is out, by their own wording; the type alone need not tell.
DEVICE = re.compile(
    r"(cuda|hip|xpu|mps|npu)( backend)? out of memory|outofmemory|cudaerrormemoryallocation|"
    r"cublas_status_alloc_failed|cudnn_status_alloc_failed|cuda error: out of memory|"
    r"failed to allocate.{0,80}on (cuda|gpu|device)",
    re.IGNORECASE,
)
HOST = re.compile(
    r"defaultcpuallocator: (can't|not enough)|can't allocate memory: you tried|cannot allocate memory|std::bad_alloc|"
    r"unable to allocate .{1,40} for an array|unable to mmap \d+ bytes|\[errno 12\]|out of shared memory|"
    r"no space left on device.{0,80}(/dev/shm|shm_open|torch_)|unable to (open|resize|write to) shared memory",
    re.IGNORECASE,
)
UNITS = {"": 1, "b": 1, "bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
REQUESTED = re.compile(
    r"(?:tried to allocate|unable to allocate|unable to mmap|failed to allocate) ([0-9.]+) ?(bytes|[kmgt]ib|b)?\b", re.I
)
# The outermost of these in the traceback is where the training loop was: part of a file's path, name of the function.
PLACES = (
    ("data", os.path.join("torch", "utils", "data", "dataloader.py"), "__next__"),
    ("backward", os.path.join("torch", "autograd", "__init__.py"), ""),
    ("optimizer", os.path.join("torch", "optim", ""), "step"),
    ("optimizer", os.path.join("torch", "optim", "optimizer.py"), "wrapper"),
    ("forward", os.path.join("torch", "nn", "modules", "module.py"), "_call_impl"),
    ("communication", os.path.join("torch", "distributed", "distributed_c10d.py"), ""),
    ("checkpoint", os.path.join("torch", "serialization.py"), ""),
)


def memory_kind(error: BaseException, message: str) -> str:
    """ "device" or "host" when this exception says that memory ran out; empty for any other."""
    names = {c.__name__ for c in type(error).__mro__}
    if names & {"OutOfMemoryError"} or DEVICE.search(message):
        return "device"
    return "host" if isinstance(error, MemoryError) or HOST.search(message) else ""


def requested_bytes(message: str) -> int:
    """What was asked for; -1 when the message does not say."""
    found = REQUESTED.search(message)
    return int(float(found[1]) * UNITS[(found[2] or "").lower()]) if found else -1


def place(traceback: TracebackType | None, otherwise: str) -> str:
    """data, forward, backward, optimizer, communication or checkpoint, by the frames of the exception itself."""
    while traceback is not None:
        code: Any = traceback.tb_frame.f_code
        for name, path, function in PLACES:
            if path in code.co_filename and function in ("", code.co_name):
                return name
        traceback = traceback.tb_next
    return otherwise
