"""How each rank of an attempt ended, and which of those that failed did so first. Pure functions beside the query.

`RANK_FAILED` says it, `RESTARTED` repeats it of the attempt before.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Final, NamedTuple

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
# And what it reports only when a peer's process or socket is gone: that peer went before.
GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|remote process (has )?(exited|terminated)|"
    r"peer.{0,20}(closed|unreachable|exited)",
    re.IGNORECASE,
)
COMMUNICATION_TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError",
                                 "ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError"})  # fmt: skip
INTERRUPTS = (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM)
INTERRUPT_TYPES = frozenset({"KeyboardInterrupt", "SignalException"})

# `ending`: one row per rank and attempt, with the columns of `Ending`.
ENDING: Final = """
ended AS (
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
), ending AS (
    SELECT w.attempt, w.rank, coalesce(e.exit_code, -1000) AS exit_code, coalesce(r.time_ns, e.ended_ns, 0) AS time_ns,
           coalesce(e.stopped, FALSE) AS stopped, coalesce(e.oom_kills, -1) AS oom_kills,
           greatest(coalesce(e.step, 0), coalesce(p.step, 0)) AS completed, coalesce(r.kind, '') AS kind,
           coalesce(r.type, '') AS type, coalesce(r.message, '') AS message, coalesce(r.frames, '') AS frames,
           coalesce(r.during, '') AS during, coalesce(r.step, 0) AS failed_step, o.rank IS NOT NULL AS orderly
    FROM everyone w
    LEFT JOIN ended e USING (rank, attempt) LEFT JOIN raised r USING (rank, attempt)
    LEFT JOIN progress p USING (rank, attempt) LEFT JOIN orderly o USING (rank, attempt)
)"""


class Ending(NamedTuple):
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
    def left_alone(self) -> bool:
        """Its own exception says that a peer had gone before."""
        return self.weak and bool(GONE.search(self.message))

    @property
    def step(self) -> int:
        return max(1, self.failed_step or self.completed + 1)

    @property
    def subject(self) -> str:
        if self.kind == "exception":
            return self.type
        return f"exit code {self.type}" if self.kind == "exit" else cause_of(self.exit_code)


def failed_first(failed: Sequence[Ending]) -> list[Ending]:
    """Of ranks that failed, in order of time: the first that did so of itself, and those that failed like it."""
    # an exception of its own counts even while torchrun stops the group; an exit in a SIGTERM handler doesn't
    own = [r for r in failed if (r.kind == "exception" and not r.interrupted) or not r.stopped]
    # a peer's abort may be stamped after the exceptions of those that it left alone
    strong = [r for r in own if not r.weak] or [r for r in own if not r.left_alone] or own
    return [r for r in strong if r.subject == strong[0].subject and r.step == strong[0].step]


def cause_of(exit_code: int) -> str:
    """SIGKILL for -9, exit code 3 for 3."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    if exit_code == NOT_SEEN:
        return "exit code unknown"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a signal that this platform does not know
        return f"signal {-exit_code}"
