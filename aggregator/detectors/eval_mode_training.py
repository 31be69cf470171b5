"""A model or a part of it was in eval mode in every backward of steps that updated it: no dropout, fixed statistics.

Reads     mode, step, batch
Says      the model or the part, the ranks, and from which step on; that it was in train mode before where it was
Unknown   no rank recorded the mode of a model
Blind to  parts in eval mode from the first update on, or that no evaluation read from a loader found so while the model
          itself was in train mode: they may be meant; a model in eval mode with a part in train mode
Do        call model.train() after each evaluation and after loading; keep only the parts in eval mode that are meant
          (frozen batch norm)
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
# A part that is in eval mode may be frozen on purpose, from the start or from some epoch on. It is told where it was
# trained in train mode before, then an evaluation (a pass in which no backward ran) found it in eval mode below a model
# in train mode, and the next update found it so still: who freezes a part does that to train, not to evaluate.
SQL = """
WITH still AS (
    SELECT rank, attempt, pid, loader AS eval_loader, iterator AS eval_iterator
    FROM batch GROUP BY ALL HAVING max(backwards) = min(backwards)
), rows AS (
    SELECT *, in_eval = backwards AND backwards > 0 AND training = 0 AS bad,
           in_eval = 0 AND turned <> '' AND before > 0 AND sensitive > 0 AS part,
           lead(step) OVER mine AS next_step, lag(in_eval < backwards) OVER mine AS trained
    FROM mode WINDOW mine AS (PARTITION BY rank, attempt, pid, model ORDER BY step, seq)
)
SELECT rank, attempt, model, model_type, step AS first, coalesce(next_step - 1, last) AS last,
       CASE WHEN trained OR part THEN before END AS last_good, coalesce(trained, FALSE) OR part AS trained, sensitive,
       frozen, names, backwards, CASE WHEN part THEN turned ELSE '' END AS turned
FROM rows JOIN (SELECT rank, attempt, max(step) AS last FROM step GROUP BY ALL) USING (rank, attempt)
LEFT JOIN still USING (rank, attempt, pid, eval_loader, eval_iterator)
WHERE bad OR part AND still.rank IS NOT NULL ORDER BY attempt, model, first, rank
"""


class Row(NamedTuple):
    """A stretch of steps that updated a model while it, or parts of it, were in eval mode, on one rank."""

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
    backwards: int
    turned: str  # the parts, comma separated; empty where it is the whole model


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per attempt and model, another one for its parts: the ranks of the earliest step."""
    for attempt, model, parts in sorted({(r.attempt, r.model, r.turned != "") for r in rows}):
        mine = [r for r in rows if (r.attempt, r.model, r.turned != "") == (attempt, model, parts)]
        born = min(r.first for r in mine)
        yield _finding([r for r in mine if r.first == born], max(r.last for r in mine))
    yield from unheard(run)


def _finding(born: Sequence[Row], last: int) -> Finding:
    first = born[0]
    ranks = tuple(r.rank for r in born)
    parts = first.turned.split(",") if first.turned else []
    # Features of frozen layers are taken in eval mode on purpose (a linear probe): from the start that is advice.
    meant = first.frozen > 0 and not first.trained
    what = "no module is known to act otherwise in train mode"
    if first.sensitive:
        names = first.names.split(",")[:3]
        several = f"{first.sensitive} modules act" if first.sensitive > 1 else "1 module acts"
        what = f"{several} otherwise in train mode, as {', '.join(names)}"
    since = f"; at step {first.last_good} it was in train mode" if first.last_good else ""
    if parts:
        since += ", and the evaluation after it found it in eval mode"
    subject = parts[0] if parts else first.model_type
    others = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
    where = f"{subject}{others} in {first.model_type}" if parts else subject
    return Finding(
        ranks=ranks,
        first_step=first.first,
        last_good_step=first.last_good,
        last_step=last,
        attempt=first.attempt,
        subject=subject,
        severity="warning" if first.sensitive and not meant else "note",
        summary=f"{where} was trained in eval mode on {listed(ranks)} from step {first.first} on: " + what + since,
        evidence=tuple(
            Evidence(r.rank, r.first, "backwards of the step in eval mode", str(r.backwards), "0") for r in born[:SHOWN]
        ),
        cannot_conclude=("whether it is meant, as in fine-tuning with fixed statistics",),
        next_check="call model.train() after each evaluation and before the first training step",
    )
