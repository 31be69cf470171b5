"""Collectives as rows: what each rank of a process group issued at each position, and where."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .collectives import Issued, Sequences


class Row(NamedTuple):
    """One collective of one rank; of source "steps" the digest of those of a step that have no row of their own, of
    source "recorded" only that torch's recorder was read on this rank."""

    attempt: int
    source: str
    name: str
    team: int
    ranks: list[int]
    rank: int
    position: int
    op: str
    signature: str
    root: int
    site: str
    place: str
    step: int
    differs: int | None  # first position of the group at which what was issued differs
    elsewhere: int | None  # first at which it came from different places


@dataclass(frozen=True)
class Group:
    """One process group of one attempt as one source saw it."""

    attempt: int
    source: str
    name: str
    ranks: tuple[int, ...]
    rows: dict[tuple[int, int], Row]  # (rank, position)

    @property
    def sequences(self) -> Sequences:
        found: dict[int, dict[int, Issued]] = defaultdict(dict)
        for (rank, position), r in self.rows.items():
            found[rank][position] = Issued(r.op, r.signature, r.root, r.place, r.step)
        return found

    def at(self, position: int) -> dict[int, Row]:
        return {rank: r for (rank, p), r in sorted(self.rows.items()) if p == position}


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Those of which at least two ranks have rows; the calls of Python come before torch's recorder."""
    found: dict[tuple[int, str, str, int], list[Row]] = defaultdict(list)
    for r in rows:
        found[r.attempt, r.source, r.name, r.team].append(r)
    return [
        Group(attempt, source, name, tuple(several[0].ranks), {(r.rank, r.position): r for r in several})
        for (attempt, source, name, _), several in sorted(found.items())
        if len({r.rank for r in several}) > 1
    ]
