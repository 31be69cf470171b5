"""What is recorded when memory runs out: the kind by type and words, where, what was asked for, what held it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kit.agent import Rows, read, running
from tdbg.rankagent.outofmemory import memory_kind, requested_bytes

TOO_MUCH = 1 << 50


def fail_in(folder: Path, program: Callable[[], Any]) -> Rows:
    """Rows of a program that ends with an exception, as the interpreter ends it."""
    with running(folder):
        try:
            program()
        except Exception as error:
            hook, sys.stderr = sys.stderr, SimpleNamespace(write=lambda _: None, flush=lambda: None)
            try:
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                sys.stderr = hook
    return read(folder)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, greedy: bool = False) -> torch.Tensor:
        if greedy:
            torch.empty(TOO_MUCH)
        return self.line(x)


def train(where: str, steps: int = 3) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    kept = []
    for step in range(1, steps + 1):
        greedy = step == steps
        x = torch.ones(2 * step if step < steps else 2, 4)
        kept.append(torch.zeros(1000, 250))
        if greedy and where == "other":
            torch.empty(TOO_MUCH)
        loss = net(x, greedy and where == "forward").sum()
        if greedy and where == "backward":
            loss.register_hook(lambda g: torch.empty(TOO_MUCH))
        optimizer.zero_grad()
        loss.backward()
        if greedy and where == "optimizer":
            optimizer.register_step_pre_hook(lambda *a: torch.empty(TOO_MUCH) and None)
        optimizer.step()


@pytest.mark.parametrize("where", ["other", "forward", "backward", "optimizer"])
def test_the_phase_is_where_the_allocation_failed(tmp_path: Path, where: str) -> None:
    (row,) = fail_in(tmp_path, lambda: train(where))["oom"]
    assert (row["during"], row["kind"], row["step"], row["caught"]) == (where, "host", 3, False)
    assert row["requested_bytes"] == 4 * TOO_MUCH
    assert row["device"] == -1


def test_what_held_the_memory_is_counted_once(tmp_path: Path) -> None:
    (row,) = fail_in(tmp_path, lambda: train("forward"))["oom"]
    assert row["parameters_bytes"] >= 80
    assert row["optimizer_bytes"] >= 80  # momentum
    assert row["in_use_bytes"] > 3_000_000
    assert "3 x float32[1000, 250] on cpu = 3000000" in row["holders"]


def test_the_batch_in_progress_and_the_largest_before_it(tmp_path: Path) -> None:
    class Batches(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from (torch.ones(2, 4), torch.ones(8, 4), torch.ones(3, 4))

    def program() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x in torch.utils.data.DataLoader(Batches(), batch_size=None):
            if len(x) == 3:
                raise MemoryError
            net(x).sum().backward()
            optimizer.step()

    (row,) = fail_in(tmp_path, program)["oom"]
    assert (row["batch"], row["largest"], row["largest_step"]) == ("float32[3, 4]", "float32[8, 4]", 2)
    assert (row["type"], row["requested_bytes"]) == ("MemoryError", -1)


def test_another_exception_is_no_row(tmp_path: Path) -> None:
    def program() -> None:
        raise ValueError("memory of a goldfish")

    assert "oom" not in fail_in(tmp_path, program)


class OutOfMemoryError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "asked"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB"),
         "device", 5 << 29),
        (RuntimeError("CUDA error: out of memory"), "device", -1),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "device", -1),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                      "tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"), "host", 4096),
        (MemoryError(), "host", -1),
        (MemoryError("Unable to allocate 1.5 MiB for an array with shape (3, 4)"), "host", 3 << 19),
        (RuntimeError("std::bad_alloc"), "host", -1),
        (OSError(12, "Cannot allocate memory"), "host", -1),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "", -1),
        (RuntimeError("NCCL error: unhandled system error"), "", -1),
    ],
)  # fmt: skip
def test_the_kind_and_what_was_asked_for(error: Exception, kind: str, asked: int) -> None:
    assert (memory_kind(error, str(error)), requested_bytes(str(error))) == (kind, asked)


def test_the_device_allocators_refusals_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observers: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    with running(tmp_path) as agent:
        cuda = SimpleNamespace(
            is_initialized=lambda: True, is_current_stream_capturing=lambda: False, current_device=lambda: 1,
            get_device_properties=lambda d: SimpleNamespace(total_memory=1000),
            memory_stats_as_nested_dict=lambda d: {"allocated_bytes": {"all": {"current": 600, "peak": 700}},
                                                   "num_ooms": 1},
        )  # fmt: skip
        agent.torch = SimpleNamespace(**{**vars(torch), "cuda": cuda})
        agent._events["step_closed"] = [s for s in agent._events["step_closed"] if s[0] == "oom"]
        agent.fire("step_closed", None)
        agent.fire("step_closed", None)
        (observer,) = observers
        observer(1, 512, 1000, 100)
    (row,) = read(tmp_path)["oom"]
    assert (row["caught"], row["kind"], row["device"], row["requested_bytes"]) == (True, "device", 1, 512)
    assert (row["total_bytes"], row["free_bytes"]) == (1000, 100)
