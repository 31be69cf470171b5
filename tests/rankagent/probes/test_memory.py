"""What a rank's memory row says: kinds of pages, caches of data sets, the device's counters without touching CUDA."""

from __future__ import annotations

import functools
import mmap
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from kit.agent import record
from tdbg.rankagent.caches import kept_items
from tdbg.rankagent.devicememory import NONE, Device

MIB = 1 << 20


def train(steps: int, each: Any) -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        each(step)
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def test_own_pages_and_pages_of_files_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"x" * (40 * MIB))
    kept: list[Any] = []

    def each(step: int) -> None:
        if step == 1:
            with file.open("rb") as f:
                kept.append(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
            assert sum(kept[0][i] for i in range(0, 40 * MIB, 4096)) > 0
        if step == 2:
            kept.append(torch.ones(10 * MIB))

    rows = record(tmp_path, lambda: train(3, each))["memory"]
    files, own = ([b[c] - a[c] for a, b in pairwise(rows)] for c in ("rss_bytes", "anon_bytes"))
    assert files[0] > 36 * MIB  # read as a whole
    assert abs(own[0]) < 4 * MIB
    assert own[1] > 38 * MIB  # 10 Mi floats


class Cached(Dataset[Any]):
    """Keeps what it has read."""

    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        if i not in self.cache:
            self.cache[i] = torch.ones(2)
        return self.cache[i]  # type: ignore[no-any-return]


def test_the_cache_of_a_data_set_is_counted_while_it_fills(tmp_path: Path) -> None:
    def program() -> None:
        net, data = nn.Linear(2, 1), Cached()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            for x in DataLoader(data, batch_size=4):
                net(x).sum().backward()
                optimizer.step()

    items = [r["dataset_items"] for r in record(tmp_path, program)["memory"]]
    assert items == [4, 8, 12, 12, 12, 12]


def test_caches_within_objects_and_of_methods_are_counted() -> None:
    class Reader:
        def __init__(self) -> None:
            self.pages = OrderedDict.fromkeys(range(5))

    class Data:
        def __init__(self) -> None:
            self.reader, self.name, self.samples = Reader(), "x" * 100, [1, 2]

        @functools.cache  # noqa: B019
        def load(self, i: int) -> int:
            return i

    data = Data()
    assert kept_items([data]) == 7
    data.load(1), data.load(2)
    assert kept_items([data]) == 9
    assert kept_items([[1, 2, 3], object()]) == 0


class FakeCuda:
    """Fails the test when something is asked that would initialise CUDA or wait for it."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.stats: dict[str, Any] = {
            "allocated_bytes": {"all": {"current": 10, "peak": 20}},
            "reserved_bytes": {"all": {"current": 30, "peak": 40}},
            "active_bytes": {"all": {"current": 11, "peak": 20}},
            "inactive_split_bytes": {"all": {"current": 5, "peak": 6}},
            "num_alloc_retries": 1, "num_ooms": 2, "num_device_alloc": 3, "num_device_free": 4,
        }  # fmt: skip

    def is_initialized(self) -> bool:
        return self.on

    def current_device(self) -> int:
        assert self.on
        return 1

    def get_device_properties(self, device: int) -> Any:
        assert self.on
        return SimpleNamespace(total_memory=1000)

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        assert self.on
        return self.stats


def test_nothing_is_asked_before_cuda_is_in_use() -> None:
    assert Device(SimpleNamespace(cuda=FakeCuda(on=False))).read() == NONE
    assert set(NONE) == {-1}


def test_the_allocators_counters_come_as_they_are() -> None:
    assert tuple(Device(SimpleNamespace(cuda=FakeCuda(on=True))).read()) == (1, 1000, 10, 30, 11, 5, 20, 40, 1, 2, 3, 4)


def test_counters_that_a_backend_lacks_are_unknown() -> None:
    cuda = FakeCuda(on=True)
    cuda.stats = {"allocated_bytes": {"all": {"current": 10}}}
    found = Device(SimpleNamespace(cuda=cuda)).read()
    assert (found.allocated_bytes, found.reserved_bytes, found.retries) == (10, -1, -1)
