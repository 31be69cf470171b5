"""Parameters that were one tensor under several names came apart while the model was trained.

Reads     tensor
Says      the two names, the ranks, the first step at which they were seen apart
Unknown   models that no optimizer held until they had come apart
Blind to  ties that were broken before the first catalogue; tensors that FSDP shards
Do        tie weights again after loading or wrapping (model.tie_weights()), and replace modules on both places; an
          optimizer that got both as separate tensors updates them apart
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import interval, listed, unheard

CODE = "TIE_BROKEN"
NEEDS = {"tensor": 1}
PARAMS: Mapping[str, object] = {}
SHOWN = 8

# A model of the same class, in which both names are still there, as two tensors, and which an optimizer of before still
# trains: one that is built anew, with an optimizer of its own, is another model.
SQL = """
WITH param AS (SELECT * FROM tensor WHERE kind = 'param'),
tie AS (
    SELECT rank, attempt, pid, generation, model, model_type, name, unnest(string_split(aliases, ',')) AS alias
    FROM param WHERE coalesce(aliases, '') <> ''
),
apart AS (
    SELECT a.rank, a.attempt, a.pid, a.model_type, a.name, a.alias, x.generation, greatest(x.step, 1) AS step,
           row_number() OVER (PARTITION BY a.rank, a.attempt, a.pid, a.model_type, a.name, a.alias
                              ORDER BY x.generation) AS n
    FROM tie a
    JOIN param x ON x.rank = a.rank AND x.attempt = a.attempt AND x.pid = a.pid AND x.generation > a.generation
         AND x.model_type = a.model_type AND x.name = a.name
    JOIN param y ON y.rank = a.rank AND y.attempt = a.attempt AND y.pid = a.pid AND y.generation = x.generation
         AND y.model = x.model AND y.name = a.alias
    WHERE EXISTS (SELECT 1 FROM param o JOIN param k USING (rank, attempt, pid, optimizer)
                  WHERE o.rank = a.rank AND o.attempt = a.attempt AND o.pid = a.pid AND o.optimizer >= 0
                    AND o.generation = a.generation AND o.model = a.model
                    AND k.generation = x.generation AND k.model = x.model)
)
SELECT t.tied, t.known, p.rank, p.attempt, p.name, p.alias, p.step,
       (SELECT max(s.step) FROM step s
        WHERE s.rank = p.rank AND s.attempt = p.attempt AND s.watched AND s.step < p.step)
FROM (SELECT count(*) FILTER (WHERE aliases <> '') AS tied, count(aliases) AS known FROM param) t
LEFT JOIN (SELECT * FROM apart WHERE n = 1) p ON TRUE
ORDER BY p.attempt, p.step, p.name, p.alias, p.rank
"""


class Row(NamedTuple):
    """Two names that came apart on one rank; only `tied` and `known` are filled where there are none."""

    tied: int  # tensors with several names
    known: int  # tensors of which it is known
    rank: int | None
    attempt: int
    name: str
    alias: str
    step: int
    looked: int | None  # last watched step before: between two of them nobody looks at names


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per attempt and pair of names."""
    together: dict[tuple[int, str, str], list[Row]] = defaultdict(list)
    for r in rows:
        if r.rank is not None:
            together[r.attempt, r.name, r.alias].append(r)
    if not rows or not rows[0].known:
        yield Abstention("INSUFFICIENT_EVIDENCE", "whether parameters share a tensor was not recorded")
    elif not rows[0].tied:
        yield Abstention("NOT_APPLICABLE", "no parameter has two names")
    for several in together.values():
        yield _finding(several)
    yield from unheard(run)


def _finding(rows: Sequence[Row]) -> Finding:
    first = rows[0]
    ranks = tuple(sorted({r.rank for r in rows if r.rank is not None}))
    step = min(r.step for r in rows)
    good = min((r.looked or 0 for r in rows if r.step == step), default=0) or None
    return Finding(
        ranks=ranks, first_step=step, last_good_step=good, attempt=first.attempt,
        severity="warning", subject=first.alias,
        summary=f"{first.alias} and {first.name} were one tensor and are two from step {step} on, on {listed(ranks)}",
        evidence=tuple(Evidence(r.rank, r.step, f"tensors behind {r.name} and {r.alias}", "2", "1")
                       for r in rows[:SHOWN]),
        cannot_conclude=("whether they were untied on purpose", *interval(good, step)),
        next_check="tie them again after the model was changed or loaded (tie_weights()), and build the optimizer "
                   "after that",
    )  # fmt: skip
