"""NVML: one row per device, one per process on a device. Without NVML one note says so, and nothing is tried again.

Writes    gpu, gpu_proc, gpu_event
Costs     some milliseconds a device in the driver, outside the interpreter lock
Blind to  devices of other makers; processes in a container without the host's pid namespace (their rank stays -1)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

UNKNOWN = -1
MOST_EVENTS = 64  # at once: a device that fails reports the same error again and again


@dataclass(frozen=True)
class GpuSample:
    """The fixed columns of `nodetables.GPU` after `node` (all but uuid and name), in their order; -1 for unknown."""

    device: int
    memory_total_bytes: int
    memory_used_bytes: int
    utilization_ratio: float
    power_watts: float
    temperature_celsius: int
    sm_clock_mhz: int
    memory_clock_mhz: int
    power_limit_watts: float
    performance_state: int
    throttle_reasons: int
    ecc_corrected: int
    ecc_uncorrected: int
    remapped_rows: int
    pcie_replays: int

    def columns(self) -> tuple[Any, ...]:
        return astuple(self)


@dataclass(frozen=True)
class GpuProcess:
    """Memory of one process on one device; -1 when NVML does not say (a partitioned or a Windows device)."""

    device: int
    pid: int
    memory_used_bytes: int


@dataclass(frozen=True)
class GpuEvent:
    """An error that the driver reported: the number that its log gives as Xid."""

    device: int
    xid: int


@dataclass(frozen=True)
class Device:
    index: int
    handle: Any
    uuid: str
    name: str


class Gpus:
    """The devices that NVML showed at the start. Raises the module's NVMLError when there is no NVML to talk to."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        handles = [(i, self._ask(nvml.nvmlDeviceGetHandleByIndex, i)) for i in range(nvml.nvmlDeviceGetCount())]
        self.devices = [
            Device(i, h, _text(self._ask(nvml.nvmlDeviceGetUUID, h)), _text(self._ask(nvml.nvmlDeviceGetName, h)))
            for i, h in handles
            if h is not None
        ]
        self._events = self._ask(nvml.nvmlEventSetCreate)
        followed = [self._follow(d) for d in self.devices]
        self.events_unseen = [d.index for d, f in zip(self.devices, followed, strict=True) if not f]

    def sample(self, device: Device) -> GpuSample:
        n, h = self._nvml, device.handle
        memory = self._ask(n.nvmlDeviceGetMemoryInfo, h)
        busy = self._ask(n.nvmlDeviceGetUtilizationRates, h)
        return GpuSample(
            device=device.index,
            memory_total_bytes=UNKNOWN if memory is None else int(memory.total),
            memory_used_bytes=UNKNOWN if memory is None else int(memory.used),
            utilization_ratio=float(UNKNOWN) if busy is None else busy.gpu / 100,
            power_watts=self._watts(n.nvmlDeviceGetPowerUsage, h),
            temperature_celsius=self._number(n.nvmlDeviceGetTemperature, h, n.NVML_TEMPERATURE_GPU),
            sm_clock_mhz=self._number(n.nvmlDeviceGetClockInfo, h, n.NVML_CLOCK_SM),
            memory_clock_mhz=self._number(n.nvmlDeviceGetClockInfo, h, n.NVML_CLOCK_MEM),
            power_limit_watts=self._watts(n.nvmlDeviceGetEnforcedPowerLimit, h),
            performance_state=self._number(n.nvmlDeviceGetPerformanceState, h),
            throttle_reasons=self._throttle_reasons(h),
            ecc_corrected=self._ecc(h, n.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc(h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            remapped_rows=self._remapped(h),
            pcie_replays=self._number(n.nvmlDeviceGetPcieReplayCounter, h),
        )

    def events(self) -> list[GpuEvent]:
        """Errors reported since the last call. Does not wait."""
        found: list[GpuEvent] = []
        while self._events is not None and len(found) < MOST_EVENTS:
            event = self._ask(self._nvml.nvmlEventSetWait_v2, self._events, 0)
            if event is None:  # "timeout" is how NVML says that there is none
                break
            if event.eventType & self._nvml.nvmlEventTypeXidCriticalError:
                found.append(GpuEvent(self._number(self._nvml.nvmlDeviceGetIndex, event.device), int(event.eventData)))
        return found

    def processes(self, device: Device) -> list[GpuProcess]:
        found = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, device.handle) or []
        return [GpuProcess(device.index, int(p.pid), _memory(p.usedGpuMemory)) for p in found]

    def close(self) -> None:
        if self._events is not None:
            self._ask(self._nvml.nvmlEventSetFree, self._events)
            self._events = None
        self._ask(self._nvml.nvmlShutdown)

    def _follow(self, device: Device) -> bool:
        """Ask for the device's errors; False where it or the driver does not report any."""
        try:
            self._nvml.nvmlDeviceRegisterEvents(device.handle, self._nvml.nvmlEventTypeXidCriticalError, self._events)
        except self._nvml.NVMLError:
            return False
        return self._events is not None

    def _watts(self, call: Callable[..., Any], handle: Any) -> float:
        milliwatts = self._ask(call, handle)
        return float(UNKNOWN) if milliwatts is None else milliwatts / 1000

    def _ecc(self, handle: Any, kind: int) -> int:
        return self._number(self._nvml.nvmlDeviceGetTotalEccErrors, handle, kind, self._nvml.NVML_VOLATILE_ECC)

    def _remapped(self, handle: Any) -> int:
        """Rows of memory that were replaced for uncorrectable errors."""
        rows = self._ask(self._nvml.nvmlDeviceGetRemappedRows, handle)
        return UNKNOWN if rows is None else int(rows[1])

    def _throttle_reasons(self, handle: Any) -> int:
        """The call was renamed with driver 535: the module or the driver may know only one of the two names."""
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            call = getattr(self._nvml, name, None)
            answer = UNKNOWN if call is None else self._number(call, handle)
            if answer != UNKNOWN:
                return answer
        return UNKNOWN

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """The answer, or None where this device, driver or moment has none."""
        try:
            return call(*args)
        except self._nvml.NVMLError:
            return None

    def _number(self, call: Callable[..., Any], *args: Any) -> int:
        value = self._ask(call, *args)
        return UNKNOWN if value is None else int(value)


def connect(load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> tuple[Gpus | None, str]:
    """The devices, or None and the sentence for the run's notes."""
    try:
        nvml = load()
    except ImportError as e:
        return None, f"no GPU rows: the NVML module can't be imported ({e})"
    try:
        gpus = Gpus(nvml)
    except (nvml.NVMLError, OSError) as e:
        return None, f"no GPU rows: {e}"
    if not gpus.devices:
        gpus.close()
        return None, "no GPU rows: NVML shows no device"
    return gpus, ""


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")


def _memory(value: Any) -> int:
    """NVML's "not available" is None in new modules and 2^64 - 1 in old ones."""
    return UNKNOWN if value is None or not 0 <= int(value) < 1 << 63 else int(value)
