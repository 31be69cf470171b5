"""What several launcher tests need: the fake NVML module, loaded by its path since this folder is no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tdbg.rankagent import seal
from tdbg.rankagent.readback import Damage, segments


@pytest.fixture
def fake_nvml() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_nvml", Path(__file__).with_name("fake_nvml.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rows_of() -> Any:
    """`rows_of(folder, table)`: the rows that a process has recorded and nobody sealed yet."""

    def read(folder: Path, table: str) -> list[dict[str, Any]]:
        found = []
        for segment in segments(Path(folder)):
            found += seal.rows_by_table(segment, Damage()).get(table, (None, []))[1]
        return found

    return read
