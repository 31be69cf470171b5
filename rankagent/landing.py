"""Values of device tensors, read without making the host wait.

CPU tensors are read on the spot. For CUDA tensors a non-blocking copy into pinned memory and an event are queued on the
current stream; `poll` hands over what has arrived, normally one step later. More than `RING` copies in flight: the new
one is dropped and counted, never waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

RING = 8

Then = Callable[[list[Any]], None]


class Landing:
    """`land(tensors, then)` calls `then([t.tolist() for t in tensors])` now or at a later `poll`, in order."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._flying: deque[tuple[Any, list[Any], Then]] = deque()
        self.dropped = 0

    def land(self, tensors: list[Any], then: Then) -> None:
        if not any(t.is_cuda for t in tensors):
            then([t.tolist() for t in tensors])
            return
        if len(self._flying) >= RING:
            self.dropped += 1
            return
        slots = [
            self._torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors
        ]
        event = self._torch.cuda.Event()
        event.record()
        self._flying.append((event, slots, then))

    def poll(self, wait: bool = False) -> None:
        """Hand over what has arrived. `wait` only at the end of the program, when nothing is left to slow down."""
        while self._flying:
            event, slots, then = self._flying[0]
            if wait:
                event.synchronize()
            elif not event.query():
                return
            self._flying.popleft()
            then([s.tolist() for s in slots])
