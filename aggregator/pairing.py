"""Whether two runs can be laid side by side, and which step of one stands beside which of the other.

Both usually begin alike. A run that resumed begins with the parameters that the other had after some step, or loaded a
file that the other saved there: its first step then stands beside the next one. Of unequal world sizes only steps over
the same samples can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .side import Place, Side
from .wording import counted


@dataclass(frozen=True)
class Pair:
    """Two runs with their steps aligned: step s of A stands beside step s - offset of B."""

    a: Side
    b: Side
    offset: int
    how: str  # in words, how they were aligned; empty where both begin alike
    steps: range

    def both(self, kind: str) -> Iterator[tuple[Place, Any, Any]]:
        """(rank and step of A, value of A, value of B) where both have one."""
        other = self.b.series[kind]
        for (rank, step), value in sorted(self.a.series[kind].items(), key=lambda i: (i[0][1], i[0][0])):
            if step in self.steps and (rank, step - self.offset) in other:
                yield (rank, step), value, other[rank, step - self.offset]

    def numbers(self, kind: str) -> dict[int, tuple[dict[int, float], dict[int, float]]]:
        """By rank its series in A and in B, by A's steps; ranks that both have."""
        found: dict[int, tuple[dict[int, float], dict[int, float]]] = {}
        for side, (series, offset) in enumerate(((self.a.series[kind], 0), (self.b.series[kind], self.offset))):
            for (rank, step), value in series.items():
                if step + offset in self.steps:
                    found.setdefault(rank, ({}, {}))[side][step + offset] = value
        return {rank: both for rank, both in sorted(found.items()) if all(both)}

    @property
    def windows_agree(self) -> bool:
        """Whether fingerprints of gradients and of very large models cover the same elements in both."""
        return self.offset == 0


def other_model(a: Side, b: Side) -> str:
    odd = [n for n in sorted(a.model.keys() | b.model.keys()) if a.model.get(n) != b.model.get(n)]
    if not odd:
        return ""
    n = odd[0]
    rest = f" and {counted(len(odd) - 1, 'more parameter')}" if len(odd) > 1 else ""
    return f"{n} is {a.model.get(n, 'absent')} and {b.model.get(n, 'absent')}{rest}"


def aligned(a: Side, b: Side) -> Pair:
    offset, how = 0, ""
    alike = any(b.start.get(rank) == value for rank, value in a.start.items())
    if not alike:
        for x, y, sign in ((a, b, 1), (b, a, -1)):
            if (found := _resumed(x, y)) is not None:
                offset, how = sign * found, f"; {y.run} goes on from step {found} of {x.run}"
                break
    return Pair(a, b, offset, how, range(max(1, 1 + offset), min(a.steps, b.steps + offset) + 1))


def _resumed(a: Side, b: Side) -> int | None:
    """The step of A that B went on from: by B's first parameters, else by the checkpoint file that it loaded."""
    begins = next(((r, v) for r, v in sorted(b.start.items())), None)
    if begins is not None:
        for (rank, step), value in a.series["parameter"].items():
            if rank == begins[0] and value == begins[1]:
                return step
    both = [a.saved[key][0] for key in b.loaded if key in a.saved]
    return both[0] if both else None


def no_common_start(pair: Pair, ranks: set[int]) -> str:
    """Why no step is shared, or empty. Other first parameters or seeds make every number of the two runs another."""
    a, b = pair.a, pair.b
    seeded = sorted(r for r in ranks if a.seeds.get(r) != b.seeds.get(r))
    seeds = f" (seeds differ: {_seeds(a, seeded[0])} and {_seeds(b, seeded[0])})" if seeded else ""
    if pair.offset == 0:
        known = [r for r in ranks if r in a.start and r in b.start]
        if known and all(a.start[r] != b.start[r] for r in known):
            return f"they begin from different parameters, so no step is shared{seeds}"
        first = [x != y for (_, step), x, y in pair.both("loss") if step == pair.steps.start]
        if seeded and first and all(first):
            return f"they are different from the first step on{seeds}"
    return ""


def other_batches(pair: Pair) -> str:
    """Why steps of unequal numbers of ranks can't be compared, or empty."""
    sizes = f"{counted(pair.a.world_size, 'rank')} and {pair.b.world_size}"
    together = list(pair.both("samples"))
    if not together:
        return f"with {sizes} only steps over the same samples are alike, and which they were is not known"
    (_, step), x, y = together[0]
    return f"with {sizes} the steps hold other samples, from step {step} on" if x != y else ""


def _seeds(side: Side, rank: int) -> str:
    torch_seed, seeded, numpy_seed, python_seed = side.seeds.get(rank, (None, False, "", ""))
    given = [f"torch {torch_seed}"] * bool(seeded) + [f"numpy {numpy_seed}"] * bool(numpy_seed)
    return ", ".join(given + [f"random {python_seed}"] * bool(python_seed)) or "none given"
