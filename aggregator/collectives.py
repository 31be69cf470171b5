"""Sequences of collectives side by side: who issued another one, what was left out, who crossed call sites. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .findings import Finding
from .groups import Split, split

FURTHEST = 8  # collectives that a rank may be ahead: one loop's metrics, not another phase of the program
CONFIRMED = 4  # calls that must fit after a shift before it is called one: an accident fits one or two


class Issued(NamedTuple):
    """One collective of one rank, as far as ranks must agree on it, and where it came from."""

    op: str
    signature: str
    root: int
    place: str  # the call site with its callers
    step: int

    @property
    def what(self) -> tuple[str, str, int]:
        return self.op, self.signature, self.root


Sequences = Mapping[int, Mapping[int, Issued]]  # rank -> position -> what it issued


def stand_apart(values: Mapping[int, object], size: int) -> Split:
    """The odd ranks; a majority must be more than half of the whole group, silent ranks included."""
    found = split({rank: repr(v) for rank, v in values.items()})
    supporters = len(values) - len(found.odd)
    if found.decided and 2 * supporters > size:
        return found
    return Split(tuple(sorted(values)), None, False)


def left_out(own: Mapping[int, Issued], others: Mapping[int, Issued], at: int) -> Issued | None:
    """What this rank seems to have left out at position `at`: what it issued follows the others' in earlier steps."""
    mine, theirs = own[at].what, others[at].what
    for before in range(at - 1, min(others) - 1, -1):
        if before in others and others[before].what == theirs:
            following = [others[p].what for p in range(before + 1, before + 1 + FURTHEST) if p in others and p < at]
            if mine in following and theirs not in following[: following.index(mine)]:
                return others[at]
            return None
    return None


@dataclass(frozen=True)
class Behind:
    """From `position` on a rank issues what the others issued `by` positions later: it left those out."""

    rank: int
    position: int
    by: int
    missing: Issued
    own: Issued


def behind(own: Mapping[int, Issued], others: Mapping[int, Issued], rank: int) -> Behind | None:
    """A rank that left calls out that look like their neighbours: places and steps fit with a shift, and only so."""
    common = sorted(set(own) & set(others))
    start = next((p for p in common if own[p].place != others[p].place), None)
    if start is None or any(own[p].step != others[p].step for p in common if p < start):
        return None
    for by in range(1, FURTHEST + 1):
        pairs = [(own[p], others[p + by]) for p in common if p >= start and p + by in others]
        fits = all((a.place, a.step, a.what) == (b.place, b.step, b.what) for a, b in pairs)
        if fits and len(pairs) >= CONFIRMED:
            return Behind(rank, start, by, others[start], own[start])
    return None


def crossed(places: Mapping[int, Sequence[str]], size: int, alike_before: bool) -> tuple[int, ...]:
    """Ranks that go through the same call sites in another order than the others, within one step.

    Against a majority at each position: where a rank leaves it, it goes through the very places that the majority goes
    through there, in another order. Without one both of two ranks, if they went in one order before: two that always
    cross may take turns.
    """
    if size == 2:
        turned = len(places) == 2 and alike_before and permuted(*places.values())
        return tuple(sorted(places)) if turned else ()
    leaves: dict[int, list[tuple[str, str]]] = {rank: [] for rank in places}  # rank -> (its place, the majority's)
    for at in range(min(map(len, places.values()), default=0)):
        here = {rank: seq[at] for rank, seq in places.items()}
        odd = stand_apart(here, size)
        if odd.decided:
            usual = next(p for rank, p in here.items() if rank not in odd.odd)
            for rank in odd.odd:
                leaves[rank].append((here[rank], usual))
    return tuple(sorted(r for r, pairs in leaves.items() if pairs and permuted(*zip(*pairs, strict=True))))


def permuted(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether the same places come in another order."""
    return tuple(one) != tuple(other) and Counter(one) == Counter(other)


def unread(told: Iterable[tuple[int, str, tuple[int, ...], int]]) -> Iterator[tuple[str, list[int]]]:
    """(group, ranks) of which torch's recorder was read on others of the group only; `told` has attempt, group, its
    ranks, and a rank on which it was. A rank that C++ aborts leaves nothing."""
    seen: dict[tuple[int, str, tuple[int, ...]], set[int]] = {}
    for attempt, name, ranks, rank in told:
        seen.setdefault((attempt, name, ranks), set()).add(rank)
    for (_, name, ranks), read in sorted(seen.items()):
        silent = sorted(set(ranks) - read)
        if silent:
            yield name, silent


def first_of_each(found: Sequence[tuple[tuple[int, ...], Finding]]) -> Iterator[Finding]:
    """One finding for each set of ranks: the gravest, then the earliest; both sources may have seen one mismatch."""
    best: dict[tuple[int, ...], Finding] = {}
    for ranks, f in found:
        key = (f.severity != "critical", f.first_step or 0)
        held = best.get(ranks)
        if held is None or key < (held.severity != "critical", held.first_step or 0):
            best[ranks] = f
    yield from best.values()
