"""Everything of torchelastic's inside that tdbg touches, and nothing else does. Tried with torch 2.13.

Two public methods are wrapped: `PContext.start` (the ranks of an attempt have begun) and `PContext.close` (the group is
being stopped: on a failure, on a restart, on a signal, and at the end of a success). The wrappers call the original
with the same arguments, return what it returns and let every exception through. A name that is missing in some other
release makes `observe` say so; the ranks are then known by the folders they make, their exit codes by `waitid`.

With `--run-path` torch's own multiprocessing ends the other ranks after a failure, before `close`: they count as having
ended by themselves, with SIGTERM's code and after the one that failed.

Names: PContext.start, close, pids, envs; SubprocessContext.subprocess_handlers[].proc (a Popen); for `--run-path`
MultiprocessContext._pc.processes (private; exit codes only) and start_method; ChildFailedError.failures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

UNKNOWN_EXIT = -1000  # no exit code and no signal has this number (nodetables.EXIT)
OLDEST_TORCH = (2, 4)

# What reading the attributes above raises when a release has changed them. Never `Exception`: torchelastic's
# SignalException is one, may be raised at any line of the main thread, and must reach torchrun.
_CHANGED = (AttributeError, KeyError, TypeError, ValueError, IndexError)


@dataclass(frozen=True)
class Group:
    """The ranks that this node started together. `pids`: global rank -> process id."""

    attempt: int
    world_size: int
    pids: Mapping[int, int]
    started_ns: int


class Listener(Protocol):
    """Called on torchrun's main thread: must be quick and must not raise."""

    def started(self, group: Group) -> None: ...

    def stopping(self, ended: Mapping[int, int]) -> None:
        """The group is about to be stopped; `ended`: pid -> exit code of those that had ended by themselves."""

    def stopped(self, codes: Mapping[int, int]) -> None:
        """The group has been stopped; pid -> exit code."""

    def still(self) -> AbstractContextManager[object]:
        """While it is held, no other thread of ours is in the middle of anything: for a fork without exec."""


def observe(listener: Listener) -> tuple[Callable[[], None], str]:
    """Wrap the two methods. Gives the undo, and a sentence when this torch has them not ("" when all is well)."""
    from torch.distributed.elastic.multiprocessing import PContext

    start, close = getattr(PContext, "start", None), getattr(PContext, "close", None)
    if start is None or close is None or not hasattr(PContext, "pids"):
        return (lambda: None), "this torch has no PContext.start, close and pids: exit codes may be unknown"

    @wraps(start)
    def observed_start(self: Any, *args: Any, **kwargs: Any) -> Any:
        forks = getattr(self, "start_method", "") == "fork"
        try:
            with listener.still() if forks else nullcontext():
                return start(self, *args, **kwargs)
        finally:
            group = group_of(self)
            if group is not None:
                listener.started(group)

    @wraps(close)
    def observed_close(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            listener.stopping(exit_codes(self))
        finally:  # a signal that arrives in there is an exception: the ranks are stopped all the same
            try:
                result = close(self, *args, **kwargs)
            finally:
                listener.stopped(exit_codes(self))
        return result

    PContext.start, PContext.close = observed_start, observed_close  # type: ignore[method-assign]

    def undo() -> None:
        PContext.start, PContext.close = start, close  # type: ignore[method-assign]

    return undo, ""


def group_of(context: Any) -> Group | None:
    """Ranks, attempt and world size of a context that has started; None when they can't be read."""
    try:
        local = context.pids()
        envs = {pid: context.envs[local_rank] for local_rank, pid in local.items() if pid}
        if not envs:
            return None
        one = next(iter(envs.values()))
        return Group(
            attempt=int(one["TORCHELASTIC_RESTART_COUNT"]),
            world_size=int(one["WORLD_SIZE"]),
            pids={int(env["RANK"]): pid for pid, env in envs.items()},
            started_ns=time.time_ns(),
        )
    except _CHANGED:
        return None


def exit_codes(context: Any) -> dict[int, int]:
    """pid -> exit code of the processes that have ended, without taking the exit status away from torchelastic."""
    try:
        codes = {}
        for pid, known in _processes(context).items():
            code = known if known is not None else peek_exit_code(pid)
            if code is not None:
                codes[pid] = code
        return codes
    except _CHANGED:
        return {}


def _processes(context: Any) -> dict[int, int | None]:
    """pid -> the exit code that torchelastic has noted already, None for none."""
    handlers = getattr(context, "subprocess_handlers", None)
    if handlers is not None:
        return {h.proc.pid: h.proc.returncode for h in handlers.values()}
    # multiprocessing's `exitcode` would reap the process; `_popen.returncode` only tells what was noted
    processes = context._pc.processes if getattr(context, "_pc", None) is not None else []
    return {p.pid: getattr(getattr(p, "_popen", None), "returncode", None) for p in processes}


def peek_exit_code(pid: int) -> int | None:
    """Exit code of an ended child that stays to be waited for (minus the signal's number); None while it runs.

    None as well when it is no child of ours, or somebody has waited for it already.
    """
    try:
        seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return None
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


def failures(error: BaseException) -> dict[int, int]:
    """pid -> exit code from torchrun's own failure report; empty for any other error."""
    try:
        return {f.pid: f.exitcode for f in getattr(error, "failures", {}).values()}
    except _CHANGED:
        return {}


def was_signal(error: BaseException) -> bool:
    """Whether torchrun ended because it was told to: Ctrl-C, SIGTERM and the other signals it handles."""
    return isinstance(error, KeyboardInterrupt) or type(error).__name__ == "SignalException"
