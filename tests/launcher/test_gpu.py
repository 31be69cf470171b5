"""NVML's answers as rows, against a fake of its module."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from tdbg.launcher.node import gpu

GIB = 1 << 30


def connected(nvml: Any) -> gpu.Gpus:
    gpus, why_not = gpu.connect(lambda: nvml)
    assert why_not == ""
    assert gpus is not None
    return gpus


def test_a_device_gives_all_its_numbers_in_base_units(fake_nvml: ModuleType) -> None:
    gpus = connected(fake_nvml.FakeNvml())
    first = gpus.devices[0]
    assert (first.uuid, first.name) == ("GPU-0", "Fake H")
    assert gpus.sample(first).columns() == (
        0, 80 * GIB, GIB, 0.37, 251.5, 41, 1980, 2619, 700.0, 0, 4, 3, 0, 1, 2
    )  # fmt: skip


def test_what_a_device_does_not_support_is_unknown_and_the_rest_is_there(fake_nvml: ModuleType) -> None:
    gpus = connected(fake_nvml.FakeNvml())
    second = gpus.devices[1]
    assert second.uuid == "GPU-1"
    assert gpus.sample(second).columns() == (
        1, 80 * GIB, 2 * GIB, 0.37, -1.0, 41, 1980, 2619, -1.0, 0, -1, -1, -1, -1, -1
    )  # fmt: skip
    assert gpus.processes(second) == []


def test_processes_come_with_their_memory_or_minus_one(fake_nvml: ModuleType) -> None:
    gpus = connected(fake_nvml.FakeNvml(pids=(11, 12)))
    assert gpus.processes(gpus.devices[0]) == [
        gpu.GpuProcess(0, 11, GIB),
        gpu.GpuProcess(0, 12, 2 * GIB),
        gpu.GpuProcess(0, 999_999, -1),
    ]


def test_no_driver_is_one_sentence_and_no_second_try(fake_nvml: ModuleType) -> None:
    nvml = fake_nvml.FakeNvml(init_error=fake_nvml.NVMLError("NVML Shared Library Not Found"))
    assert gpu.connect(lambda: nvml) == (None, "no GPU rows: NVML Shared Library Not Found")
    assert nvml.calls == 1


def test_no_module_and_no_device_are_told_apart(fake_nvml: ModuleType) -> None:
    def absent() -> Any:
        raise ImportError("No module named 'pynvml'")

    assert "can't be imported" in gpu.connect(absent)[1]
    assert "no device" in gpu.connect(lambda: fake_nvml.FakeNvml(devices=0))[1]


def test_the_real_module_has_the_names_that_the_fake_has(fake_nvml: ModuleType) -> None:
    import pynvml

    names = [n for n in vars(fake_nvml.FakeNvml) if n.startswith(("nvml", "NVML"))]
    assert [n for n in names if not hasattr(pynvml, n)] == []


def test_errors_that_the_driver_reports_are_given_once_and_nobody_waits_for_them(fake_nvml: ModuleType) -> None:
    nvml = fake_nvml.FakeNvml()
    gpus = connected(nvml)
    assert gpus.events() == []
    nvml.events = [(0, 8, 79), (0, 4, 1), (0, 8, 48)]  # the one between is a change of P-state
    assert gpus.events() == [gpu.GpuEvent(0, 79), gpu.GpuEvent(0, 48)]
    assert gpus.events() == []
    assert gpus.events_unseen == [1]
    gpus.close()
    assert nvml.event_sets == 0
    assert gpus.events() == []
