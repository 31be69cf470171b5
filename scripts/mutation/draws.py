"""Which job a seed and a number stand for."""

from __future__ import annotations

import random
from dataclasses import replace

from . import numbers, replicas, samples
from .faults import FAULTS, Drawn
from .recipes import Case, draw, healthy

__all__ = ["FAULTS", "codes", "faulty", "healthy", "numbers", "replicas", "samples"]

BY_HAND = ("PARAM_DESYNC", "GRAD_DESYNC")


def codes() -> list[str]:
    """All codes that have a fault, in the order of this file."""
    return list(dict.fromkeys(f.code for f in FAULTS))


def faulty(seed: int, number: int, only: str = "") -> Case:
    """Every way to commit a fault once, in an order of the seed's, then again; what it strikes is random.

    `only` is a code or the name of one way.
    """
    chance = random.Random(f"faulty {seed} {number} {only}")
    ways = [f for f in FAULTS if only in ("", f.code, f.name)]
    if not ways:
        raise ValueError(f"no fault is called {only}; there are {', '.join(codes())}")
    turn, place = divmod(number, len(ways))
    random.Random(f"order {seed} {turn} {only}").shuffle(ways)
    way = ways[place]
    drawn = Drawn(chance, draw(chance, way.wanted(chance)))
    truth = way.plant(drawn)
    if drawn.recipe["wrap"] == "hand" and truth.codes[0] in BY_HAND:
        # no wrapper declares replicas here: what came apart is told of the parameters, of two ranks mildly
        truth = replace(truth, codes=(*truth.codes, "PARAM_DESYNC"), mild=True)
    if drawn.recipe["wrap"] == "single":
        truth = replace(truth, ranks=(0,) if truth.ranks else None)
    return Case(number, way.code, drawn.recipe, truth)
