"""Training ended without any evaluation that could have shown what it learnt.

Reads     step, batch, loader, selection
Says      that no pass over a loader without a backward was seen, and how many steps training took; which settings could
          not take effect for it: a best model to be chosen, a training to be stopped, by a metric that never came
Unknown   a run that goes on or failed; loops whose data comes from no loader
Blind to  evaluation on data that reaches the model without a loader, or in another program
Do        evaluate from time to time on data that training does not see; a run that is judged elsewhere needs nothing
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import unheard

CODE = "NO_VALIDATION"
NEEDS = {"step": 1, "batch": 1}
PARAMS: Mapping[str, object] = {}

SQL = """
WITH evaluated AS (
    SELECT b.rank, count(*) AS batches
    FROM batch b ANTI JOIN training_pass p USING (rank, attempt, pid, loader, iterator)
    WHERE b."end" = '' GROUP BY b.rank
), trained AS (
    SELECT rank, count(*) AS passes, bool_or(whole) AS whole FROM training_pass GROUP BY rank
), waited AS (
    SELECT rank, list(DISTINCT setting || ' by ' || metric ORDER BY setting || ' by ' || metric) AS settings,
           coalesce(max(schedule), '') AS schedule
    FROM selection WHERE seen = 0 GROUP BY rank
)
SELECT s.rank, max(s.step), coalesce(max(e.batches), 0), coalesce(max(t.passes), 0), coalesce(bool_or(t.whole), FALSE),
       coalesce(any_value(w.settings), []), coalesce(any_value(w.schedule), '')
FROM step s LEFT JOIN evaluated e USING (rank) LEFT JOIN trained t USING (rank) LEFT JOIN waited w USING (rank)
GROUP BY s.rank ORDER BY s.rank
"""


class Row(NamedTuple):
    rank: int
    steps: int
    batches: int  # of passes that fed no training
    passes: int  # that did
    whole: bool  # one of them ended
    settings: Sequence[str] = ()  # that go by a metric which was never seen
    schedule: str = ""  # what the trainer was told of when to evaluate


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One note at most; an evaluation on any rank is one."""
    if any(r.batches for r in rows):
        return
    if run.status != "finished" or not any(r.passes for r in rows):
        yield Abstention("INSUFFICIENT_EVIDENCE", "training has not ended in order, or its data comes from no loader")
        return
    missing = list(unheard(run))
    if missing:
        yield from missing
        return
    steps = max(r.steps for r in rows)
    first = next((r for r in rows if r.settings), None)
    idle = ", ".join(first.settings) if first else ""
    told = f" ({first.schedule})" if first and first.schedule else ""
    yield Finding(
        ranks=tuple(r.rank for r in rows),
        first_step=None,
        last_step=steps,
        severity="note",
        subject="evaluation",
        summary=f"training ended after {steps} steps and no evaluation was seen: nothing shows what it learnt"
        + (f"; without effect: {idle}" if idle else ""),
        evidence=(
            Evidence(None, steps, "batches of passes without a backward", "0", "some"),
            *(
                [Evidence(first.rank, steps, f"values of the metric for {idle}", f"none{told}", "some")]
                if first
                else []
            ),
        ),
        cannot_conclude=("whether it is evaluated elsewhere, or on data that comes from no loader",),
        next_check="evaluate on data that training does not see",
    )
