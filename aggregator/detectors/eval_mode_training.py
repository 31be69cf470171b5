"""A model was in eval mode in every backward of steps that updated it: no dropout, fixed normalisation.

Reads     mode, step
Says      the model, the ranks, and from which step on; that it was in train mode before where it was
Unknown   no rank recorded the mode of a model
Blind to  parts in eval mode below a model that is in train mode; a model in eval mode with a part in train mode
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard

CODE = "EVAL_MODE_TRAINING"
NEEDS = {"mode": 1}
PARAMS: Mapping[str, object] = {}
SHOWN = 8

# A model that another one's training sets to eval mode (a discriminator in the generator's turn) is in train mode in
# its own backward; a model whose parts are in train mode was put together on purpose.
SQL = """
WITH rows AS (
    SELECT *, in_eval = backwards AND backwards > 0 AND training = 0 AS bad,
           lead(step) OVER mine AS next_step, lag(in_eval < backwards) OVER mine AS trained
    FROM mode WINDOW mine AS (PARTITION BY rank, attempt, pid, model ORDER BY step, seq)
)
SELECT rank, attempt, model, model_type, step AS first, coalesce(next_step - 1, last) AS last,
       CASE WHEN trained THEN before END AS last_good, coalesce(trained, FALSE) AS trained, sensitive, frozen, names,
       in_eval
FROM rows JOIN (SELECT rank, attempt, max(step) AS last FROM step GROUP BY ALL) USING (rank, attempt)
WHERE bad ORDER BY attempt, model, first, rank
"""


class Row(NamedTuple):
    """A stretch of steps that updated a model in eval mode, on one rank."""

    rank: int
    attempt: int
    model: int
    model_type: str
    first: int
    last: int
    last_good: int | None
    trained: bool  # the update before found it in train mode
    sensitive: int
    frozen: int
    names: str
    in_eval: int


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per attempt and model: the ranks of its earliest step."""
    for attempt, model in sorted({(r.attempt, r.model) for r in rows}):
        mine = [r for r in rows if (r.attempt, r.model) == (attempt, model)]
        born = min(r.first for r in mine)
        yield _finding([r for r in mine if r.first == born], max(r.last for r in mine))
    yield from unheard(run)


def _finding(born: Sequence[Row], last: int) -> Finding:
    first = born[0]
    ranks = tuple(r.rank for r in born)
    # Features of frozen layers are taken in eval mode on purpose (a linear probe): from the start that is advice.
    meant = first.frozen > 0 and not first.trained
    parts = first.names.split(",")[:3]
    what = "no module is known to act otherwise in train mode"
    if first.sensitive:
        what = f"{first.sensitive} modules act otherwise in train mode, as {', '.join(parts)}"
    since = f"; at step {first.last_good} it was in train mode" if first.last_good else ""
    return Finding(
        ranks=ranks,
        first_step=first.first,
        last_good_step=first.last_good,
        last_step=last,
        attempt=first.attempt,
        subject=first.model_type,
        severity="warning" if first.sensitive and not meant else "note",
        summary=f"{first.model_type} was trained in eval mode on {listed(ranks)} from step {first.first} on: "
        + what
        + since,
        evidence=tuple(
            Evidence(r.rank, r.first, "backwards of the step in eval mode", str(r.in_eval), "0") for r in born[:SHOWN]
        ),
        cannot_conclude=("whether it is meant, as in fine-tuning with fixed statistics",),
        next_check="call model.train() after each evaluation and before the first training step",
    )
