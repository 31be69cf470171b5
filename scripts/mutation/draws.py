"""Which job a seed and a number stand for, in each of the families.

`ranks`: what sets ranks apart, numbers that are not finite, data. `silent`: a training that goes on and learns less, or
nothing, with nobody told.
"""

from __future__ import annotations

import random
from dataclasses import replace

from . import numbers, replicas, samples, silent, silent_healthy, silent_loops
from .faults import FAULTS, SILENT, Drawn
from .recipes import Case, draw
from .recipes import healthy as healthy_ranks

__all__ = ["FAULTS", "SILENT", "codes", "faulty", "healthy", "numbers", "replicas", "samples", "silent", "silent_loops"]

FAMILIES = {"ranks": FAULTS, "silent": SILENT}
BY_HAND = ("PARAM_DESYNC", "GRAD_DESYNC")


def codes(family: str = "ranks") -> list[str]:
    """All codes that have a fault, in the order of this file."""
    return list(dict.fromkeys(f.code for f in FAMILIES[family]))


def healthy(seed: int, number: int, family: str = "ranks") -> Case:
    return silent_healthy.healthy(seed, number) if family == "silent" else healthy_ranks(seed, number)


def faulty(seed: int, number: int, only: str = "", family: str = "ranks") -> Case:
    """Every way to commit a fault once, in an order of the seed's, then again; what it strikes is random.

    `only` is a code or the name of one way.
    """
    of = "" if family == "ranks" else f"{family} "
    chance = random.Random(f"{of}faulty {seed} {number} {only}")
    ways = [f for f in FAMILIES[family] if only in ("", f.code, f.name)]
    if not ways:
        raise ValueError(f"no fault is called {only}; there are {', '.join(codes(family))}")
    turn, place = divmod(number, len(ways))
    random.Random(f"{of}order {seed} {turn} {only}").shuffle(ways)
    way = ways[place]
    drawn = Drawn(chance, draw(chance, way.wanted(chance)))
    if family == "silent":
        drawn.recipe["program"] = "job.silent"
    truth = way.plant(drawn)
    if drawn.recipe["wrap"] == "hand" and truth.codes[0] in BY_HAND:
        # no wrapper declares replicas here: what came apart is told of the parameters, of two ranks mildly
        truth = replace(truth, codes=(*truth.codes, "PARAM_DESYNC"), mild=True)
    if drawn.recipe["wrap"] == "single":
        truth = replace(truth, ranks=(0,) if truth.ranks else None)
    return Case(number, way.code, drawn.recipe, truth)
