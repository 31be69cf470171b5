"""Who has not issued a collective that others of the group have issued: from the last one of each rank and group. Pure.

Ranks of a group issue its collectives in one order, so the position alone says who is behind, whatever the stacks show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from .wording import ranks_text

# The last collective of each rank and group, as a list of `Last`, in the attempts of `look` and `raised`. A rank whose
# probe failed on the way is left out: its positions end there.
ISSUED: Final = """
deaf AS (
    SELECT DISTINCT attempt, rank FROM probe WHERE name = 'collectives' AND state = 'disabled'
), team AS (
    SELECT attempt, rank, source, "group" AS name, arg_max(ranks, len(ranks)) AS ranks FROM collective
    WHERE attempt IN (SELECT attempt FROM look UNION SELECT attempt FROM raised) GROUP BY ALL
), one AS (
    SELECT c.attempt, c.rank, c.source, t.name, CASE WHEN len(c.ranks) > 0 THEN c.ranks ELSE t.ranks END AS ranks,
           c.position, c.op, c.signature, c.site, c.step
    FROM collective c ANTI JOIN deaf USING (attempt, rank) JOIN team t
    ON c.attempt = t.attempt AND c.rank = t.rank AND c.source = t.source AND c."group" = t.name
    UNION ALL
    SELECT c.attempt, c.rank, 'call', t.name, CASE WHEN len(c.ranks) > 0 THEN c.ranks ELSE t.ranks END,
           c.first + c."count" - 1, '', '', '', c.step
    FROM collective_step c ANTI JOIN deaf USING (attempt, rank) JOIN team t
    ON c.attempt = t.attempt AND c.rank = t.rank AND t.source = 'call' AND c."group" = t.name
), latest AS (
    SELECT *, count(*) OVER (PARTITION BY attempt, rank, source, step) AS in_step FROM one
    QUALIFY row_number() OVER (PARTITION BY attempt, rank, source, name, ranks ORDER BY position DESC, op DESC) = 1
), issued AS (
    SELECT attempt, rank, list({source: source, name: name, ranks: ranks, position: position, op: op,
                                signature: signature, site: site, in_step: in_step}) AS lasts
    FROM latest GROUP BY ALL
)"""

# A rank keeps its last 256 calls for an answer: of a step with as many, one group's last may be among the forgotten.
MOST_IN_STEP = 128
SHOWN = 2  # groups that a sentence names


class Last(NamedTuple):
    """The last collective of one rank in one group."""

    source: str  # call or recorder
    name: str
    ranks: list[int]
    position: int
    op: str  # empty: of a step of which only the count is known
    signature: str
    site: str
    in_step: int


@dataclass(frozen=True)
class Lag:
    """A position of one group that some ranks have issued and others have not."""

    last: Last
    issued: tuple[int, ...]
    missing: tuple[int, ...]

    @property
    def decided(self) -> bool:
        """More than half of the group have issued it."""
        return 2 * len(self.issued) > len(self.last.ranks)

    @property
    def what(self) -> str:
        last = self.last
        about = ", ".join(part for part in (_short(last.signature), last.site) if part)
        said = f"{last.op or 'collective'} {last.position} of group {last.name}"
        return f"{said} ({about})" if about else said

    @property
    def text(self) -> str:
        has = "has" if len(self.issued) == 1 else "have"
        hasnt = "has" if len(self.missing) == 1 else "have"
        return f"{ranks_text(self.issued)} {has} issued {self.what}, {ranks_text(self.missing)} {hasnt} not"


def lags(issued: Mapping[int, Sequence[Mapping[str, Any]]], places: Set[str]) -> list[Lag]:
    """Of ranks of which all is known; groups whose call site is one of `places`, where a rank waits, come first."""
    issued = {rank: several for rank, several in issued.items() if several}  # nothing at all: not recorded
    groups: dict[tuple[str, str, tuple[int, ...]], dict[int, Last]] = defaultdict(dict)
    for rank, several in issued.items():
        for last in (Last(**one) for one in several):
            groups[last.source, last.name, tuple(last.ranks)][rank] = last
    found = [lag for key, lasts in groups.items() for lag in _lag(key, lasts, issued.keys())]
    seen = {(g.last.name, *g.last.ranks) for g in found if g.last.source == "call"}  # the recorder has these as well
    found = [g for g in found if g.last.source == "call" or (g.last.name, *g.last.ranks) not in seen]
    return sorted(found, key=lambda g: (g.last.site not in places, -len(g.issued), g.last.source != "call", g.what))


def _lag(key: tuple[str, str, tuple[int, ...]], lasts: Mapping[int, Last], known: Set[int]) -> Iterator[Lag]:
    source, _, ranks = key
    if any(last.in_step > MOST_IN_STEP for last in lasts.values()):
        return
    top = max(lasts.values(), key=lambda last: (last.position, last.op))
    ahead = [r for r, last in lasts.items() if last.position == top.position]
    behind = [r for r, last in lasts.items() if last.position < top.position]
    if source == "call":  # torch's recorder is a ring: a group that it does not hold may have been pushed out
        behind += [r for r in ranks if r in known and r not in lasts]
    if behind:
        yield Lag(top, tuple(sorted(ahead)), tuple(sorted(behind)))


def late(found: Sequence[Lag]) -> set[int]:
    """Ranks that are behind the majority of a group, and with no majority ahead of others in another group."""
    decided = [g for g in found if g.decided]
    return {r for g in decided for r in g.missing} - {r for g in decided for r in g.issued}


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"
