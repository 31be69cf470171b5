"""A rank ended with an exception, an exit code or a signal: which one failed first, in which step, and why.

Reads     exit (the node's launcher), failure and event (the rank), step
Says      the rank that failed first, the step in progress, exception or signal, who fell afterwards
Unknown   ranks whose end nobody saw; who sent a signal; who is to blame when all report communication errors
Blind to  a rank that hangs without ending
Do        read the exception and its frames (`tdbg incident RUN ID`); the rank named failed first, errors of its peers
          are what they got for waiting. A signal 9 without an exception: the kernel's or a scheduler's, look at
          memory and at its log
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence

from ..detector import RunFacts
from ..endings import ENDING, NOT_SEEN, Ending, cause_of, failed_first
from ..findings import Abstention, Evidence, Finding
from ..wording import ranks_text

CODE = "RANK_FAILED"
NEEDS = {"step": 0}  # a rank may fail before its first step
PARAMS: dict[str, object] = {}

SQL = f"WITH {ENDING} SELECT * FROM ending ORDER BY attempt, time_ns, rank"

Row = Ending


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    rows = list(rows)
    attempts = sorted({r.attempt for r in rows})
    found = False
    for attempt in attempts:
        said = _attempt([r for r in rows if r.attempt == attempt], run, attempt < attempts[-1])
        found = found or said is not None
        if said is not None:
            yield said
    last = [r for r in rows if attempts and r.attempt == attempts[-1]]
    if not found and not _all_well(last, run):
        yield Abstention("INSUFFICIENT_EVIDENCE", _unseen(last, run))


def _all_well(last: Sequence[Row], run: RunFacts) -> bool:
    well = sum(r.exit_code == 0 for r in last)
    return well >= run.world_size or (
        run.status == "finished" and not run.missing_ranks and len(last) >= run.world_size
    )


def _unseen(last: Sequence[Row], run: RunFacts) -> str:
    if run.status == "running":
        return "no rank has failed so far; the run is not over"
    ended = sum(r.exit_code != NOT_SEEN for r in last)
    return f"how it ended is known of {ended} of {run.world_size} ranks"


def _attempt(rows: Sequence[Row], run: RunFacts, restarted: bool) -> Finding | Abstention | None:
    failed = [r for r in rows if r.failed]
    if not failed:
        return None
    if _from_outside(failed, run):
        return Abstention(
            "NOT_APPLICABLE", "the job was stopped from outside, by a signal to its launcher or to all ranks"
        )
    return _finding(rows, failed_first(failed), run, restarted)


def _from_outside(failed: Sequence[Row], run: RunFacts) -> bool:
    """Nobody failed of itself: torchrun stopped each one, or all were interrupted together."""
    if any(r.kind == "exception" and not r.interrupted and not r.weak for r in failed):
        return False
    if all(r.stopped for r in failed):
        return True
    if run.status == "killed":
        return all(r.stopped or r.interrupted or r.kind == "exception" for r in failed)
    # a single rank that got the signal makes torchrun stop the others: that is a rank that failed
    return sum(r.interrupted and not r.stopped for r in failed) >= run.world_size > 1


def _finding(rows: Sequence[Row], roots: Sequence[Row], run: RunFacts, restarted: bool) -> Finding:
    first = roots[0]
    ranks = tuple(sorted(r.rank for r in roots))
    after = [r for r in rows if r.failed and r.rank not in ranks]
    aborted = first.orderly and first.exit_code == -signal.SIGABRT and not first.kind
    said = f"{ranks_text(ranks)} ended with {first.subject} in step {first.step}"
    if aborted:
        said = f"{ranks_text(ranks)} aborted while its interpreter closed, after its program had ended in order"
    if first.message and first.kind == "exception":
        said += f": {_one_line(first.message)}"
    if after:
        said += f"; {ranks_text(r.rank for r in after)} fell afterwards"
    return Finding(
        ranks=ranks,
        first_step=first.step,
        last_good_step=first.step - 1 or None,
        attempt=first.attempt,
        # a restart went on, an abort at exit lost no step, a communication error points elsewhere
        severity="warning" if restarted or aborted or first.weak else "critical",
        subject=first.subject,
        summary=said,
        evidence=tuple(e for r in [*roots[:4], *after[:4]] for e in _evidence(r, r.rank in ranks)),
        cannot_conclude=tuple(_unknown(first, aborted, _silent(rows, run))),
        next_check=_next(first),
    )


def _silent(rows: Sequence[Row], run: RunFacts) -> int:
    return run.world_size - sum(r.exit_code != NOT_SEEN or bool(r.kind) for r in rows)


def _unknown(first: Row, aborted: bool, silent: int) -> Iterator[str]:
    if first.exit_code == -signal.SIGKILL and not first.kind:
        yield (
            "who sent SIGKILL"
            if first.oom_kills <= 0
            else "whether the kernel's OOM kill in this cgroup hit this process"
        )
    if aborted:
        yield "whether anything is wrong: communication libraries may abort at interpreter exit after a correct run"
    elif first.weak:
        yield "which rank is to blame: each that failed reports only that another was gone or late"
    if silent > 0:
        yield f"whether one of the {silent} rank(s) whose end was not seen failed before it"


def _evidence(row: Row, root: bool) -> Iterator[Evidence]:
    when = "" if root else " (fell afterwards)"
    if row.exit_code != NOT_SEEN:
        by = ", stopped by torchrun" if row.stopped else ""
        yield Evidence(row.rank, row.step, "exit" + when, cause_of(row.exit_code) + by, "exit code 0")
    if row.kind:
        yield Evidence(row.rank, row.step, "exception" + when, f"{row.type}: {_one_line(row.message)}", "none")
    if root:
        if row.frames:
            yield Evidence(row.rank, row.step, "innermost frames", row.frames, "")
        if row.during:
            yield Evidence(row.rank, row.step, "phase", row.during, "")
        if row.oom_kills > 0:
            yield Evidence(row.rank, row.step, "kernel OOM kills in its cgroup", str(row.oom_kills), "0")
        yield Evidence(row.rank, row.step, "last completed step", str(row.completed), "")
        yield Evidence(row.rank, row.step, "time_ns", str(row.time_ns), "")


def _next(first: Row) -> str:
    if first.kind == "exception":
        return "read the innermost frames; they are the user's own code at the failure"
    if first.exit_code == -signal.SIGKILL:
        return "look at this rank's memory before the kill and at the kernel's log of its host"
    return "look at this rank's standard error"


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 200 else flat[:199] + "…"
