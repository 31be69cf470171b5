"""What holds memory at this moment: parameters, gradients, optimizer state, and the largest groups of other tensors.

Storages are counted once, however many tensors look at them. Called when a rank ends, never in a healthy step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

GROUPS = 8  # largest groups of like tensors that are told
OBJECTS = 5_000_000  # a heap with more would take seconds to walk


class Group(NamedTuple):
    """Live tensors of one shape, dtype and device that belong to no model or optimizer."""

    tensors: int
    size_bytes: int
    what: str  # float32[24000, 128] on cpu


class Holders:
    """`sums` by category for one kind of device; asks no tensor for a value and starts nothing on a device."""

    def __init__(self, torch: Any, optimizers: Iterable[Any], models: Iterable[Any], device_type: str) -> None:
        self._torch, self._device_type = torch, device_type
        self._known: set[int] = set()
        optimizers = list(optimizers)
        params = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        params += [p for m in models if m is not None for p in (*m.parameters(), *m.buffers())]
        self.parameters = self._take(params)
        self.gradients = self._take(p.grad for p in params if p.grad is not None)
        self.optimizer_state = self._take(
            v for o in optimizers for state in o.state.values() if isinstance(state, dict) for v in state.values()
        )

    def others(self) -> tuple[int, list[Group]]:
        """(bytes of all other tensors that Python knows, the largest groups of them). Those that only an autograd graph
        holds are unknown to Python."""
        groups: dict[str, list[int]] = {}
        for tensor in self._alive():
            size = self._take([tensor])
            if size:
                what = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device.type}"
                entry = groups.setdefault(what, [0, 0])
                entry[0] += 1
                entry[1] += size
        found = sorted((Group(n, size, what) for what, (n, size) in groups.items()), key=lambda g: -g.size_bytes)
        return sum(g.size_bytes for g in found), found[:GROUPS]

    def _alive(self) -> Iterator[Any]:
        kinds = (self._torch.Tensor, self._torch.nn.Parameter)  # by exact type: proxies and subclasses are left alone
        objects = gc.get_objects()
        return (o for o in objects if type(o) in kinds) if len(objects) <= OBJECTS else iter(())

    def _take(self, tensors: Iterable[Any]) -> int:
        """Bytes of storages not counted so far."""
        total = 0
        for tensor in tensors:
            tensor = getattr(tensor, "_local_tensor", tensor)
            if type(tensor) not in (self._torch.Tensor, self._torch.nn.Parameter):
                continue
            if tensor.device.type != self._device_type or tensor.layout != self._torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._known.add(storage.data_ptr())
                total += storage.nbytes()
        return total
