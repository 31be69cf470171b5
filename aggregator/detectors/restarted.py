"""An elastic restart took place: the launcher began the job's processes again, and steps count from 1 again.

Reads     step, exit (the node's launcher), failure, checkpoint
Says      the attempt, how far the one before had come, who ended how there, whether a checkpoint was loaded
Unknown   runs of which nothing was recorded, or that lack ranks
Blind to  a job that a scheduler or a person starts anew: that is another run
Do        `tdbg timeline RUN` shows which rank ended before; see that training went on from a checkpoint and not from
          the start (RESUME_INCOMPLETE)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..detector import RunFacts
from ..endings import ENDING, NOT_SEEN, Ending, cause_of, failed_first
from ..findings import Abstention, Evidence, Finding
from ..wording import ranks_text

CODE = "RESTARTED"
NEEDS = {"step": 0}  # an attempt may fail before its first step
PARAMS: dict[str, object] = {}

SQL = f"""
WITH {ENDING}, loaded AS (
    SELECT rank, attempt, arg_min(path, time_ns) AS path FROM checkpoint WHERE event = 'load' GROUP BY ALL
)
SELECT e.attempt, e.rank, e, l.path FROM ending e LEFT JOIN loaded l USING (rank, attempt)
ORDER BY e.attempt, e.time_ns, e.rank
"""


class Row(NamedTuple):
    attempt: int
    rank: int
    columns: dict[str, Any]  # of its `Ending`
    loaded: str | None  # first checkpoint that it loaded; None for none

    @property
    def end(self) -> Ending:
        return Ending(**self.columns)


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
    failed = [r.end for r in before if r.end.failed]
    own = any(not r.stopped or (r.kind == "exception" and not r.interrupted) for r in failed)
    first = failed_first(failed) if own else []
    came = max((r.end.completed for r in before), default=0)
    how = f", which came to step {came}" if before else ", of which nothing was recorded"
    who = _who(first, [r for r in failed if r not in first])
    files = sorted({r.loaded for r in now if r.loaded is not None})
    start = "; it loaded a checkpoint" if files else "; no checkpoint was seen to be loaded"
    ends = [*first, *(r for r in failed if r not in first)] or [r.end for r in before]
    evidence = [Evidence(r.rank, r.completed, f"end in attempt {attempt - 1}", _end(r)) for r in ends[:8]]
    evidence += [Evidence(r.rank, 0, "loaded", r.loaded) for r in now if r.loaded][:1]
    return Finding(
        ranks=tuple(sorted(r.rank for r in now)), first_step=1, attempt=attempt, severity="note",
        summary=f"the job was restarted: attempt {attempt} follows attempt {attempt - 1}{how}{who}{start}",
        last_step=max(r.end.completed for r in now), evidence=tuple(evidence),
        cannot_conclude=("how many of the steps before the restart had been saved",),
        next_check="why the attempt before ended (RANK_FAILED), and whether all state came back (RESUME_INCOMPLETE)",
    )  # fmt: skip


def _who(first: Sequence[Ending], after: Sequence[Ending]) -> str:
    """Who ended the attempt before; what a rank reports when its peer is gone or late says not who was first."""
    if not first:
        return ""
    if first[0].weak:
        return f"; {ranks_text(r.rank for r in [*first, *after])} had ended in it, and which of them first is not known"
    followed = f", {ranks_text(r.rank for r in after)} fell afterwards" if after else ""
    return f"; {ranks_text(r.rank for r in first)} had failed in it with {first[0].subject}{followed}"


def _end(end: Ending) -> str:
    if end.kind:
        return end.type
    if end.exit_code == NOT_SEEN:
        return "not seen"
    return f"{cause_of(end.exit_code)}{', stopped by the launcher' if end.stopped else ''}"
