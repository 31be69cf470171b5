"""What every fault has: its code, the jobs it can be planted in, and the planting, which says what must be found.

`replicas.py`, `numbers.py` and `samples.py` hold the faults of ranks and data, `silent.py` and `silent_loops.py` those
of the silent family; a new one is a function there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .recipes import PARAMETERS, Recipe, Truth, Wanted


@dataclass(frozen=True)
class Drawn:
    """The chance and the healthy job that a fault is put into."""

    chance: random.Random
    recipe: Recipe

    @property
    def ranks(self) -> int:
        return int(self.recipe["ranks"])

    def rank(self) -> int:
        return self.chance.randrange(self.ranks)

    def step(self, first: int = 2, before_end: int = 3) -> int:
        return self.chance.randint(first, self.recipe["steps"] - before_end)

    def tensor(self) -> str:
        return self.chance.choice(PARAMETERS[self.recipe["model"]])

    def apart(self, rank: int) -> tuple[int, ...]:
        """Who is named when one rank differs from all others: it, or both of two."""
        return (rank,) if self.ranks > 2 else tuple(range(self.ranks))

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.ranks))

    def plant(self, kind: str, **more: Any) -> None:
        self.recipe["fault"] = {"kind": kind, **more}


@dataclass(frozen=True)
class Fault:
    """One way to commit a fault: its code, where it may be planted, and the planting, which says the truth."""

    code: str
    name: str
    wanted: Callable[[random.Random], Wanted]
    plant: Callable[[Drawn], Truth]


FAULTS: list[Fault] = []
SILENT: list[Fault] = []


Planting = Callable[[Drawn], Truth]


def fault(code: str, **limits: Any) -> Callable[[Planting], Planting]:
    """Registers a fault; `limits` are those of Wanted."""
    return _registered(FAULTS, code, limits)


def silent(code: str, **limits: Any) -> Callable[[Planting], Planting]:
    """The same in the silent family."""
    return _registered(SILENT, code, {"ranks": (2, 2, 2, 3), **limits})


def _registered(family: list[Fault], code: str, limits: dict[str, Any]) -> Callable[[Planting], Planting]:
    def register(plant: Planting) -> Planting:
        family.append(Fault(code, plant.__name__, lambda _: Wanted(**{"resume": False, **limits}), plant))
        return plant

    return register
