"""An elastic restart took place: the launcher began the job's processes again, and steps count from 1 again.

Reads     step, exit (the node's launcher), failure, checkpoint
Says      the attempt, how far the one before had come, who ended how there, whether a checkpoint was loaded
Unknown   runs of which nothing was recorded, or that lack ranks
Blind to  a job that a scheduler or a person starts anew: that is another run
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..wording import ranks_text

CODE = "RESTARTED"
NEEDS = {"step": 0}  # an attempt may fail before its first step
PARAMS: dict[str, object] = {}

SQL = """
WITH took AS (
    SELECT rank, attempt, max(step) AS step FROM step GROUP BY ALL
), ended AS (
    SELECT rank, attempt, arg_min(exit_code, ended_ns) AS exit_code, bool_and(stopped_by_launcher) AS stopped
    FROM exit WHERE rank >= 0 GROUP BY ALL
), raised AS (
    SELECT rank, attempt, arg_min(type, time_ns) AS type FROM failure WHERE kind <> 'thread_exception' GROUP BY ALL
), loaded AS (
    SELECT rank, attempt, arg_min(path, time_ns) AS path FROM checkpoint WHERE event = 'load' GROUP BY ALL
), everyone AS (
    SELECT rank, attempt FROM took UNION SELECT rank, attempt FROM ended UNION SELECT rank, attempt FROM raised
)
SELECT attempt, rank, coalesce(t.step, 0), e.exit_code, coalesce(e.stopped, FALSE), coalesce(r.type, ''), l.path
FROM everyone LEFT JOIN took t USING (rank, attempt) LEFT JOIN ended e USING (rank, attempt)
LEFT JOIN raised r USING (rank, attempt) LEFT JOIN loaded l USING (rank, attempt)
ORDER BY attempt, rank
"""


class Row(NamedTuple):
    attempt: int
    rank: int
    steps: int  # completed in this attempt
    exit_code: int | None  # None: nobody saw it end
    stopped: bool  # ended when the launcher was stopping the group
    raised: str  # class of its own uncaught exception
    loaded: str | None  # first checkpoint that it loaded; None for none


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One note per attempt after the first."""
    attempts = sorted({r.attempt for r in rows})
    if not attempts or (attempts == [0] and run.missing_ranks):
        yield Abstention("INSUFFICIENT_EVIDENCE", "which attempts there were is not known of all ranks")
    for attempt in attempts:
        if attempt > 0:
            yield _finding([r for r in rows if r.attempt == attempt], [r for r in rows if r.attempt == attempt - 1])


def _finding(now: Sequence[Row], before: Sequence[Row]) -> Finding:
    attempt = now[0].attempt
    ended = [r for r in before if r.raised or (r.exit_code and not r.stopped)]
    came = max((r.steps for r in before), default=0)
    how = f", which came to step {came}" if before else ", of which nothing was recorded"
    who = f"; {ranks_text(r.rank for r in ended)} had ended in it" if ended else ""
    files = sorted({r.loaded for r in now if r.loaded is not None})
    start = "; it loaded a checkpoint" if files else "; no checkpoint was seen to be loaded"
    evidence = [Evidence(r.rank, r.steps, f"end in attempt {attempt - 1}", _end(r)) for r in (ended or before)[:8]]
    evidence += [Evidence(r.rank, 0, "loaded", r.loaded) for r in now if r.loaded][:1]
    return Finding(
        ranks=tuple(sorted(r.rank for r in now)), first_step=1, attempt=attempt, severity="note",
        summary=f"the job was restarted: attempt {attempt} follows attempt {attempt - 1}{how}{who}{start}",
        last_step=max(r.steps for r in now), evidence=tuple(evidence),
        cannot_conclude=("how many of the steps before the restart had been saved",),
        next_check="why the attempt before ended (RANK_FAILED), and whether all state came back (RESUME_INCOMPLETE)",
    )  # fmt: skip


def _end(row: Row) -> str:
    if row.raised:
        return row.raised
    if row.exit_code is None:
        return "not seen"
    return f"exit code {row.exit_code}{', stopped by the launcher' if row.stopped else ''}"
