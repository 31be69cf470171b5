"""Who must agree with whom, and who stands apart when they do not. Pure functions; no query, no table.

A tensor's `sharing` says what its ranks promise about it; `peers` lists the ranks that hold a replica. Only a promise
that all replicas are equal is ever held against a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from .detector import RunFacts
from .findings import Abstention

T = TypeVar("T", bound=Hashable)

# What the ranks promise about a tensor, from the tensor catalogue: its `sharing`, a sharded one's told apart by who
# holds the same part: nobody, ranks over which its gradient is reduced (hybrid), ranks that each compute it for
# themselves (duplicated).
PROMISE: Final = """CASE WHEN sharing <> 'sharded' OR peers = '' THEN sharing
    WHEN list_has_all(string_split(shards, ','), string_split(peers, ',')) THEN 'hybrid' ELSE 'duplicated' END"""
# Replicas by declaration: one reduction gives all of them the same gradient.
DECLARED: Final = ("ddp", "late", "hybrid")
# Replicas only if nothing speaks against it: no wrapper reduces them.
UNDECLARED: Final = ("plain", "outside", "ignored")
COMPARED: Final = (*DECLARED, *UNDECLARED, "duplicated")

# promise -> why such tensors are never compared
NEVER_COMPARED: Final = {
    "sharded": "each rank holds its own part of them",
    "hook": "a communication hook of the user's reduces them, perhaps not over all ranks",
}


@dataclass(frozen=True)
class Split:
    """How ranks that should agree fall apart: `odd` are those set apart, `shared` the majority's value or None."""

    odd: tuple[int, ...]
    shared: Hashable | None
    decided: bool


def split(values: Mapping[int, T]) -> Split:
    """Name the odd ranks by majority: more than half of at least three ranks. Without one, all ranks are named."""
    counts = Counter(values.values())
    value, most = counts.most_common(1)[0]
    if len(values) >= 3 and 2 * most > len(values):
        return Split(tuple(sorted(r for r, v in values.items() if v != value)), value, True)
    return Split(tuple(sorted(values)), None, False)


def why_not_compared(kinds: Iterable[str], nameless: bool) -> str:
    """One sentence on why tensors of these promises have no replica to be compared with."""
    known = [f"{kind} ({NEVER_COMPARED[kind]})" for kind in sorted(set(kinds)) if kind in NEVER_COMPARED]
    if known:
        return "no tensor that replicas must share: all are " + ", ".join(known)
    if nameless:
        return "no process group is known to join the ranks' models: nothing says that they are replicas"
    return "no tensor is held by two ranks under the same name, shape and dtype"


def listed(ranks: Iterable[int]) -> str:
    """Ranks as people write them: "rank 2", "ranks 0, 1"; a long list is cut."""
    all_of = sorted(ranks)
    shown = ", ".join(map(str, all_of[:8])) + (f" and {len(all_of) - 8} more" if len(all_of) > 8 else "")
    return f"rank {shown}" if len(all_of) == 1 else f"ranks {shown}"


def unheard(run: RunFacts) -> Iterator[Abstention]:
    """An abstention when some rank recorded nothing: the silent rank may be the odd one."""
    if run.missing_ranks:
        why = f"{listed(run.missing_ranks)} recorded nothing and may be at fault"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)


def interval(last_good: int | None, first: int) -> tuple[str, ...]:
    """What a gap between two checks leaves open; nothing when every step was checked."""
    if last_good is None or last_good >= first - 1:
        return ()
    return (f"at which step between {last_good + 1} and {first} it began: the steps between were not checked",)
