"""What torch's caching allocator says of this process's device: its own counters, read without touching the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

UNKNOWN = -1
TOTALS = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes")
COUNTERS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")


class DeviceMemory(NamedTuple):
    """In the order of the columns of table `memory` that begin with `cuda_`; -1 for what is not known."""

    device: int = UNKNOWN
    total_bytes: int = UNKNOWN
    allocated_bytes: int = UNKNOWN
    reserved_bytes: int = UNKNOWN
    active_bytes: int = UNKNOWN
    inactive_split_bytes: int = UNKNOWN
    allocated_peak_bytes: int = UNKNOWN
    reserved_peak_bytes: int = UNKNOWN
    retries: int = UNKNOWN
    ooms: int = UNKNOWN
    device_allocs: int = UNKNOWN
    device_frees: int = UNKNOWN


NONE = DeviceMemory()


class Device:
    """Reads the counters of the current device. Never initialises CUDA, resets a peak or waits for the device."""

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda
        self._totals: dict[int, int] = {}

    def read(self) -> DeviceMemory:
        """The counters as they are; NONE before the program has used CUDA."""
        cuda = self._cuda
        if not cuda.is_initialized():  # a flag; whatever asks the allocator before that initialises CUDA for the user
            return NONE
        device = cuda.current_device()
        if device not in self._totals:
            self._totals[device] = int(cuda.get_device_properties(device).total_memory)
        stats = cuda.memory_stats_as_nested_dict(device)  # the raw call; memory_stats() flattens and sorts 100 keys
        allocated, reserved, active, split = (_bytes(stats, name, "current") for name in TOTALS)
        peaks = _bytes(stats, "allocated_bytes", "peak"), _bytes(stats, "reserved_bytes", "peak")
        counters = (int(stats.get(name, UNKNOWN)) for name in COUNTERS)
        return DeviceMemory(device, self._totals[device], allocated, reserved, active, split, *peaks, *counters)


def _bytes(stats: Mapping[str, Any], name: str, what: str) -> int:
    """One number of the nested table; other backends than torch's own leave some out."""
    return int(stats.get(name, {}).get("all", {}).get(what, UNKNOWN))
