"""A stand-in for `pynvml` with two devices: the second is an older board that answers fewer questions.

Numbers and errors have the shape that the real module gives them: objects with attributes, milliwatts, percent, a
handle that is opaque, NVMLError subclasses for what a device does not support.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


class NVMLError(Exception):
    """As pynvml's: the base of every error it raises."""


class NotSupported(NVMLError):
    def __str__(self) -> str:
        return "Not Supported"


class Timeout(NVMLError):
    def __str__(self) -> str:
        return "Timeout"


class FakeNvml:
    """`pids` are on device 0; `lacks` are names of functions that this release of the module does not have."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_VOLATILE_ECC = 0, 1, 2, 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, pids: tuple[int, ...] = (), devices: int = 2, init_error: Exception | None = None) -> None:
        self.pids, self.devices, self.init_error, self.calls = pids, devices, init_error, 0
        self.events: list[tuple[int, int, int]] = []  # (device, type, data) that wait to be asked for
        self.event_sets = 0  # that are open

    def nvmlInit(self) -> None:
        self.calls += 1
        if self.init_error is not None:
            raise self.init_error

    def nvmlShutdown(self) -> None:
        self.calls += 1

    def nvmlDeviceGetCount(self) -> int:
        return self.devices

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return SimpleNamespace(index=index)

    def nvmlDeviceGetUUID(self, handle: Any) -> str | bytes:
        return f"GPU-{handle.index}" if handle.index == 0 else b"GPU-1"

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return "Fake H"

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(total=80 * GIB, used=(1 + handle.index) * GIB, free=0)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return SimpleNamespace(gpu=37, memory=5)

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        self._only_first(handle)
        return 251_500

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return 41

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        return 1980 if kind == self.NVML_CLOCK_SM else 2619

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        raise NotSupported  # the driver is older than the module: it knows the call by its old name only

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        self._only_first(handle)
        return 0x4

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int) -> int:
        self._only_first(handle)
        return 3 if kind == self.NVML_MEMORY_ERROR_TYPE_CORRECTED else 0

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> tuple[int, int, int, int]:
        self._only_first(handle)
        return (5, 1, 0, 0)

    def nvmlDeviceGetPcieReplayCounter(self, handle: Any) -> int:
        self._only_first(handle)
        return 2

    def nvmlDeviceGetPerformanceState(self, handle: Any) -> int:
        return 0

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        self._only_first(handle)
        return 700_000

    def nvmlDeviceGetIndex(self, handle: Any) -> int:
        return int(handle.index)

    def nvmlEventSetCreate(self) -> Any:
        self.event_sets += 1
        return SimpleNamespace(followed=[])

    def nvmlDeviceRegisterEvents(self, handle: Any, types: int, events: Any) -> None:
        self._only_first(handle)
        events.followed.append(handle.index)

    def nvmlEventSetWait_v2(self, events: Any, timeout_ms: int) -> Any:
        assert timeout_ms == 0, "the supervisor's thread must not wait"
        if not self.events:
            raise Timeout
        device, kind, data = self.events.pop(0)
        return SimpleNamespace(device=SimpleNamespace(index=device), eventType=kind, eventData=data)

    def nvmlEventSetFree(self, events: Any) -> None:
        self.event_sets -= 1

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        self._only_first(handle)
        known = [SimpleNamespace(pid=p, usedGpuMemory=(i + 1) * GIB) for i, p in enumerate(self.pids)]
        return [*known, SimpleNamespace(pid=999_999, usedGpuMemory=None)]

    def _only_first(self, handle: Any) -> None:
        if handle.index:
            raise NotSupported
