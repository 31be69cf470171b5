"""A rank ended with an exception, an exit code or a signal: which one failed first, in which step, and why.

Reads     exit (the node's launcher), failure and event (the rank), step
Says      the rank that failed first, the step in progress, exception or signal, who fell afterwards
Unknown   ranks whose end nobody saw; who sent a signal; who is to blame when all report communication errors
Blind to  a rank that hangs without ending
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..wording import ranks_text

CODE = "RANK_FAILED"
NEEDS = {"step": 0}  # a rank may fail before its first step
PARAMS: dict[str, object] = {}

SQL = """
WITH ended AS (
    SELECT rank, attempt, arg_min(exit_code, ended_ns) AS exit_code, min(ended_ns) AS ended_ns,
           arg_min(stopped_by_launcher, ended_ns) AS stopped, max(oom_kills) AS oom_kills, max(step) AS step
    FROM exit WHERE rank >= 0 GROUP BY ALL
), raised AS (
    SELECT rank, attempt, kind, type, message, frames, during, step, time_ns
    FROM failure WHERE kind <> 'thread_exception'
    QUALIFY row_number() OVER (PARTITION BY rank, attempt ORDER BY time_ns, seq) = 1
), progress AS (
    SELECT rank, attempt, max(step) AS step FROM step GROUP BY ALL
), orderly AS (
    SELECT DISTINCT rank, attempt FROM event WHERE kind = 'end'
), everyone AS (
    SELECT rank, attempt FROM ended UNION SELECT rank, attempt FROM raised UNION SELECT rank, attempt FROM progress
)
SELECT w.attempt, w.rank, coalesce(e.exit_code, -1000), coalesce(r.time_ns, e.ended_ns, 0), coalesce(e.stopped, FALSE),
       coalesce(e.oom_kills, -1), greatest(coalesce(e.step, 0), coalesce(p.step, 0)), coalesce(r.kind, ''),
       coalesce(r.type, ''), coalesce(r.message, ''), coalesce(r.frames, ''), coalesce(r.during, ''),
       coalesce(r.step, 0), o.rank IS NOT NULL
FROM everyone w
LEFT JOIN ended e USING (rank, attempt) LEFT JOIN raised r USING (rank, attempt)
LEFT JOIN progress p USING (rank, attempt) LEFT JOIN orderly o USING (rank, attempt)
ORDER BY w.attempt, 4, w.rank
"""

NOT_SEEN = -1000  # exit code of a process whose end nobody saw

# What a rank reports when its peer is gone: gloo, NCCL, TCP store and sockets, by their own wording.
COMMUNICATION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket ?timeout|timed out (waiting|after)|"
    r"wait timeout|remote process (has )?(exited|terminated)|nccl(remote|system|internal)?error|"
    r"gloo/transport|application timeout|failed to (recv|send)|(recv|send)value failed|"
    r"connectfullmesh|watchdog caught|monitoredbarrier|tcpstore|store->(get|wait)|"
    r"peer.{0,20}(closed|unreachable|exited)",
    re.IGNORECASE,
)
# Of these, what it reports when its peer is late rather than gone.
TIMED_OUT = re.compile(r"timed out|time-?out|watchdog caught", re.IGNORECASE)
COMMUNICATION_TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError",
                                 "ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError"})  # fmt: skip
INTERRUPTS = (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM)
INTERRUPT_TYPES = frozenset({"KeyboardInterrupt", "SignalException"})


class Row(NamedTuple):
    attempt: int
    rank: int
    exit_code: int
    time_ns: int
    stopped: bool  # torchrun had begun to stop the group before this process ended
    oom_kills: int
    completed: int  # last step that it completed
    kind: str  # of its own uncaught exception; empty without one
    type: str
    message: str
    frames: str
    during: str
    failed_step: int
    orderly: bool  # its program had come to its end

    @property
    def failed(self) -> bool:
        return self.exit_code != 0 if self.exit_code != NOT_SEEN else bool(self.kind)

    @property
    def interrupted(self) -> bool:
        return self.exit_code in INTERRUPTS or self.type in INTERRUPT_TYPES

    @property
    def weak(self) -> bool:
        """Ended in the way in which a rank ends when another one is gone."""
        if self.kind == "exception":
            return self.type in COMMUNICATION_TYPES or bool(COMMUNICATION.search(self.message))
        return not self.kind and self.exit_code == -signal.SIGABRT  # the communication library's watchdog aborts

    @property
    def step(self) -> int:
        return max(1, self.failed_step or self.completed + 1)

    @property
    def subject(self) -> str:
        if self.kind == "exception":
            return self.type
        return f"exit code {self.type}" if self.kind == "exit" else _cause(self.exit_code)


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
    # an exception of its own counts even while torchrun stops the group; an exit in a SIGTERM handler doesn't
    own = [r for r in failed if (r.kind == "exception" and not r.interrupted) or not r.stopped]
    strong = [r for r in own if not r.weak] or own
    first = strong[0]  # rows come in order of time
    roots = [r for r in strong if r.subject == first.subject and r.step == first.step]
    return _finding(rows, roots, run, restarted)


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
        yield Evidence(row.rank, row.step, "exit" + when, _cause(row.exit_code) + by, "exit code 0")
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


def _cause(exit_code: int) -> str:
    """SIGKILL for -9, exit code 3 for 3."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    if exit_code == NOT_SEEN:
        return "exit code unknown"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a signal that this platform does not know
        return f"signal {-exit_code}"


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= 200 else flat[:199] + "…"
