"""What frameworks are told about accumulation is recorded, follows changes, and goes wrong without harm."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.agent import read, record, running

MODULE = "accelerate.accelerator"


class Accelerator:
    """Stands for the framework's: the probe reads its public attribute only."""

    def __init__(self, gradient_accumulation_steps: Any = 1) -> None:
        self.gradient_accumulation_steps = gradient_accumulation_steps


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Accelerator]]:
    """The module as if the program had imported it already."""
    kind = type("Accelerator", (Accelerator,), {"__init__": Accelerator.__init__})
    module = types.ModuleType(MODULE)
    module.Accelerator = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    before = vars(kind)["__init__"]
    yield kind
    assert vars(kind)["__init__"] is before  # the agent left it as it was


def _step() -> None:
    net = torch.nn.Linear(2, 1)
    net(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def _declared(rows: Any) -> list[tuple[int, float, str, str]]:
    return [(r["step"], r["value"], r["source"], r["key"]) for r in rows.get("declared", [])]


def test_a_declaration_and_its_change(tmp_path: Path, framework: type[Accelerator]) -> None:
    def program() -> None:
        told = framework(gradient_accumulation_steps=4)
        _step()
        _step()
        told.gradient_accumulation_steps = 2
        _step()

    source, key = "accelerate.Accelerator", "gradient_accumulation_steps"
    assert _declared(record(tmp_path, program)) == [(1, 4.0, source, key), (3, 2.0, source, key)]


@pytest.mark.parametrize("value", [None, "auto", 0, -1])
def test_what_is_no_number_is_left_out(tmp_path: Path, framework: type[Accelerator], value: Any) -> None:
    assert _declared(record(tmp_path, lambda: framework(value))) == []


def test_an_object_without_the_attribute_does_no_harm(tmp_path: Path, framework: type[Accelerator]) -> None:
    class Odd(framework):  # type: ignore[misc, valid-type]
        @property
        def gradient_accumulation_steps(self) -> int:
            raise AttributeError("renamed")

        @gradient_accumulation_steps.setter
        def gradient_accumulation_steps(self, value: int) -> None: ...

    assert _declared(record(tmp_path, lambda: Odd(3))) == []


def test_an_object_that_was_let_go_is_freed(tmp_path: Path, framework: type[Accelerator]) -> None:
    with running(tmp_path):
        ref = weakref.ref(framework(4))
        gc.collect()
        assert ref() is None
    assert len(_declared(read(tmp_path))) == 1
