"""What every fault has: its code, the jobs it can be planted in, and the planting, which says what must be found.

`replicas.py`, `numbers.py` and `samples.py` hold the faults themselves; a new one is a function there.
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


def fault(code: str, **limits: Any) -> Callable[[Callable[[Drawn], Truth]], Callable[[Drawn], Truth]]:
    """Registers a fault; `limits` are those of Wanted."""

    def register(plant: Callable[[Drawn], Truth]) -> Callable[[Drawn], Truth]:
        FAULTS.append(Fault(code, plant.__name__, lambda _: Wanted(**{"resume": False, **limits}), plant))
        return plant

    return register
