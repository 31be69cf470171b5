"""Ranks run with different code, versions, arguments, settings or environment variables.

Reads     identity (as it was at the first step), tensor (the models that DDP was built on)
Says      the keys that differ, each rank's value, the ranks that stand apart
Unknown   which side is meant when two ranks differ
Blind to  keys that the identity probe does not record; settings changed after the first step
Do        start every rank from one image, one commit and one command; set the variables named on all nodes. What may
          differ by design (a node's name, a path) needs nothing
"""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..groups import split
from ..wording import ranks_text

CODE = "IDENTITY_MISMATCH"
NEEDS = {"identity": 1}
PARAMS = {
    "last_step": 2,  # the probe looks when step 1 has closed; its rows at the end tell of changes in time, not ranks
}

# A rank without a row of an environment variable did not have it set. A rank without a row of any other key did not
# have the thing at all (a module not loaded), which is no difference.
SQL = """
WITH last AS (
    SELECT attempt, rank, key, arg_max(value, (step, seq)) AS value, bool_or(rule = 'must') AS must
    FROM identity WHERE step <= $last_step AND rule IN ('must', 'should') GROUP BY ALL
), ranks AS (
    SELECT DISTINCT attempt, rank FROM identity WHERE step <= $last_step
), unset AS (
    SELECT k.attempt, r.rank, k.key, '' AS value, k.must
    FROM (SELECT attempt, key, bool_or(must) AS must FROM last WHERE key LIKE 'env.%' GROUP BY ALL) k
    JOIN ranks r USING (attempt) ANTI JOIN last l ON l.attempt = k.attempt AND l.rank = r.rank AND l.key = k.key
), model AS (  -- what DDP holds on each rank when the first step closes; it compares shapes itself, and no more
    SELECT attempt, rank, model, name, peers,
           concat_ws(' ', shape, dtype, CASE WHEN trainable THEN 'trained' ELSE 'frozen' END) AS value
    FROM tensor WHERE step <= $last_step AND sharing IN ('ddp', 'late') AND peers <> ''
    QUALIFY generation = max(generation) OVER (PARTITION BY attempt, rank)
), holders AS (
    SELECT DISTINCT attempt, rank, model, peers FROM model
), signature AS (
    SELECT h.attempt, h.rank, concat('model', nullif(model, 0), '.', n.name) AS key, coalesce(m.value, '') AS value,
           TRUE AS must
    FROM (SELECT DISTINCT attempt, model, peers, name FROM model) n
    JOIN holders h USING (attempt, model, peers) LEFT JOIN model m USING (attempt, rank, model, peers, name)
), compared AS (
    SELECT attempt, key, bool_or(must) AS must, list(rank ORDER BY rank) AS ranks, list(value ORDER BY rank) AS vals,
           count(*) > 1 AND min(value) <> max(value) AS differs
    FROM (FROM last UNION ALL BY NAME FROM unset UNION ALL BY NAME FROM signature) GROUP BY attempt, key
), extent AS (
    SELECT attempt, count(*) AS seen FROM ranks GROUP BY attempt
)
SELECT e.attempt, e.seen, c.key, c.must, c.ranks, c.vals
FROM extent e LEFT JOIN (SELECT * FROM compared WHERE differs) c USING (attempt) ORDER BY e.attempt, c.key
"""

# Which key of one group of ranks says most: code explains settings, settings explain versions.
FAMILIES = ("code.", "model", "flag.", "precision.", "env.", "argv", "version.")
SHOWN_KEYS, SHOWN_RANKS, SHOWN_TEXT = 8, 4, 120  # enough to see the difference on one screen


class Row(NamedTuple):
    attempt: int
    seen: int
    key: str | None  # None when nothing differs in this attempt
    must: bool
    ranks: list[int]
    values: list[str]


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    rows = list(rows)
    if run.world_size < 2:
        yield Abstention("NOT_APPLICABLE", "one rank has nobody to differ from")
        return
    groups: dict[tuple[int, tuple[int, ...]], list[Row]] = defaultdict(list)
    for row in rows:
        values = {} if row.key is None else _differing(row, run)
        if values:
            groups[row.attempt, split(values).odd].append(row)
    for (_, odd), members in groups.items():
        yield _finding(odd, sorted(members, key=_weight))
    seen = min((r.seen for r in rows), default=0)
    if seen < run.world_size:
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", f"{seen} of {run.world_size} ranks said what they run on at the start"
        )


def _differing(row: Row, run: RunFacts) -> Mapping[int, str]:
    """The values by rank; empty when all that differs is each rank's own number in its arguments."""
    values = dict(zip(row.ranks, row.values, strict=True))
    if row.key != "argv":
        return values
    places = [{r: r for r in values}]
    if run.local_world_size > 0:
        places.append({r: r % run.local_world_size for r in values})
    return {} if any(_own_number_only(values, place) for place in places) else values


def _own_number_only(values: Mapping[int, str], place: Mapping[int, int]) -> bool:
    """Whether the argument lists become equal once each rank's own number is taken out of the words that differ."""
    words = {r: _words(v) for r, v in values.items()}
    if len({len(w) for w in words.values()}) != 1:
        return False
    for column in zip(*words.values(), strict=True):
        if len(set(column)) == 1:
            continue
        blanked = {
            re.sub(rf"(?<![0-9])(?<![0-9][.]){place[r]}(?![0-9]|[.][0-9])", "#", word)
            for r, word in zip(words, column, strict=True)
        }
        if len(blanked) != 1 or "#" not in next(iter(blanked)):
            return False
    return True


def _words(argv: str) -> list[str]:
    try:
        listed = json.loads(argv)
    except ValueError:
        listed = None
    if isinstance(listed, list):
        return [str(word) for word in listed]
    try:
        return shlex.split(argv)
    except ValueError:  # an unbalanced quote
        return argv.split()


def _weight(row: Row) -> tuple[bool, int, str]:
    key = row.key or ""
    family = next((i for i, f in enumerate(FAMILIES) if key.startswith(f)), len(FAMILIES))
    return not row.must, family, key


def _severity(members: Sequence[Row]) -> Severity:
    if any(r.must and (r.key or "").startswith(("code.", "model")) for r in members):
        return "critical"  # other code or another model computes something else; a setting may not matter
    return "warning" if any(r.must for r in members) else "note"


def _finding(odd: tuple[int, ...], members: Sequence[Row]) -> Finding:
    first = members[0]
    decided = len(odd) < len(first.ranks)
    more = f" and {len(members) - 1} more" if len(members) > 1 else ""
    verb = "differ" if len(odd) > 1 else "differs"
    return Finding(
        ranks=odd,
        first_step=None,
        attempt=first.attempt,
        severity=_severity(members),
        subject=first.key or "",
        summary=f"{ranks_text(odd)} {verb} from {'the other ranks' if decided else 'each other'} in {first.key}{more}",
        evidence=tuple(e for row in members[:SHOWN_KEYS] for e in _evidence(odd, row)),
        cannot_conclude=("whether the difference changes results",)
        if decided
        else ("which rank is set up as meant", "whether the difference changes results"),
        next_check="start every rank from the same code, arguments and environment, or confirm that this is meant",
    )


def _evidence(odd: tuple[int, ...], row: Row) -> Iterator[Evidence]:
    parts = split(dict(zip(row.ranks, row.values, strict=True)))
    expected = _text(str(parts.shared)) if parts.decided else "the same on all ranks"
    for rank, value in zip(row.ranks, row.values, strict=True):
        if rank in odd[:SHOWN_RANKS]:
            yield Evidence(rank, None, row.key or "", _text(value), expected)


def _text(value: str) -> str:
    if not value:
        return "(not set)"
    return value if len(value) <= SHOWN_TEXT else value[: SHOWN_TEXT - 1] + "…"
