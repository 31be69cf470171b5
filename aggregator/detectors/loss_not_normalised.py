"""The losses of the micro-batches that make up one step are summed, and none was divided by their number.

Reads     loss (whether anything divided it), batch and loader (training passes), step
Says      the ranks, the first such step, how many micro-batches a step has: that many times is the gradient as large
Unknown   no batches are known, so that several losses of one batch look the same; fewer than three such steps looked at
Blind to  losses that are sums, or means that the program takes itself with a weight; unwatched steps
Do        divide each micro-batch's loss by their number, or by the tokens of the whole window; or mean the sum, and
          set the learning rate for it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard
from ..wording import counted

CODE = "LOSS_NOT_NORMALISED"
NEEDS = {"loss": 1, "step": 1}
PARAMS: Mapping[str, object] = {}
LEAST_STEPS = 3  # watched, of several micro-batches: the fewest that show how the program does it, not what it did once
SHOWN = 8

# Micro-batches of a step are the batches that one loader gave for it. A loop that fetches one batch from each of
# several loaders has one micro-batch, and one that runs several backwards on a batch as well.
SQL = """
WITH part AS (
    SELECT rank, attempt, step, loader, count(*) AS n FROM training_batch GROUP BY ALL
), batches AS (
    SELECT rank, attempt, step, max(n) AS n FROM part GROUP BY ALL
), taken AS (
    SELECT rank, attempt, step, max(backwards) AS backwards, bool_or(watched) AS watched
    FROM step WHERE optimizers > 0 GROUP BY ALL
), seen AS (
    SELECT t.rank, t.attempt, t.step, b.n, l.undivided,
           t.watched AND l.undivided IS NOT NULL AND b.n > 1 AND t.backwards >= b.n
               AND l.backwards = t.backwards AS told
    FROM taken t LEFT JOIN batches b USING (rank, attempt, step)
    LEFT JOIN (SELECT rank, attempt, step, bool_and(undivided) AS undivided, max(backwards) AS backwards FROM loss
               GROUP BY ALL) l USING (rank, attempt, step)
)
SELECT rank, attempt, count(n), count(*) FILTER (n > 1), count(*) FILTER (told), count(*) FILTER (told AND undivided),
       min(step) FILTER (told AND undivided), max(step) FILTER (told AND undivided), coalesce(mode(n) FILTER (told), 0)
FROM seen GROUP BY rank, attempt ORDER BY attempt, rank
"""


class Row(NamedTuple):
    """One rank in one attempt."""

    rank: int
    attempt: int
    known: int  # steps whose batches are known
    accumulated: int  # of them, those of several micro-batches
    told: int  # of those, steps whose losses were all looked at
    undivided: int  # of those, steps in which for certain nothing divided any of them
    first: int | None
    last: int | None
    micro_batches: int  # the commonest number


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One note per attempt, where every step that was looked at shows it."""
    judged = [r for r in rows if r.told >= LEAST_STEPS]
    if not any(r.known for r in rows):
        yield Abstention("INSUFFICIENT_EVIDENCE", "no batches of a training pass are known")
    elif not any(2 * r.accumulated > r.known for r in rows):
        yield Abstention("NOT_APPLICABLE", "most steps are made of one batch: nothing is accumulated")
    elif not judged:
        why = f"fewer than {LEAST_STEPS} steps of several micro-batches were looked at"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    hit = [r for r in judged if r.undivided == r.told and 2 * r.accumulated > r.known]
    for _, members in groupby(hit, key=lambda r: r.attempt):
        yield _finding(list(members))
    yield from unheard(run)


def _finding(rows: Sequence[Row]) -> Finding:
    r = rows[0]
    return Finding(
        ranks=tuple(m.rank for m in rows),
        first_step=min(m.first or 1 for m in rows),
        last_step=max(m.last or 1 for m in rows),
        attempt=r.attempt,
        severity="note",
        subject="loss",
        summary=f"the mean losses of {r.micro_batches} micro-batches a step were summed on "
        f"{listed(m.rank for m in rows)}, none divided: the gradient is {r.micro_batches} times that of their mean",
        evidence=tuple(
            Evidence(m.rank, m.first, f"steps of several micro-batches without a divisor, of {counted(m.told, 'step')}",
                     str(m.undivided), "0")
            for m in rows[:SHOWN]
        ),
        cannot_conclude=("whether the learning rate was chosen for the sum, or the gradients are divided later",),
        next_check="divide each loss by the number of micro-batches before its backward, unless the sum is meant",
    )  # fmt: skip
