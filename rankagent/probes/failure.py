"""An exception that ended the program, a signal's arrival, and an orderly end.

Writes    failure, event, probe
Costs     nothing until it happens
Blind to  SIGKILL and crashes in native code (the node's launcher sees those)
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from .. import guard
from ..agent import Emit
from ..patch import Undo, replace, undo_all
from ..tables import Column, Table

FAILURE = Table("failure", (
    Column("kind", "text", "", "exception, thread_exception"),
    Column("type", "text", "", "class of the exception"),
    Column("message", "text", "", "its text, cut at 4 KiB"),
    Column("frames", "text", "", "innermost user frames, one 'file:line function' a line"),
    Column("during", "text", "", "phase in which it was raised: data, forward, backward, optimizer, checkpoint, load, other"),
), "one row per uncaught exception; `step` is the step in progress, the last completed one plus 1")  # fmt: skip

EVENT = Table("event", (
    Column("kind", "text", "", "start, end, join"),
    Column("detail", "text", "", "plain words or JSON"),
), "things that happened")  # fmt: skip

PROBE = Table("probe", (
    Column("name", "text", "", "probe"),
    Column("state", "text", "", "installed, disabled (an error of ours), unavailable (torch lacks what it needs)"),
    Column("reason", "text", "", "why"),
), "one row per probe and change of state")  # fmt: skip

TABLES = (FAILURE, EVENT, PROBE)


MESSAGE_LIMIT = 4096
FRAMES = 12


def install(emit: Emit) -> Undo:
    agent = emit.agent
    noted: list[BaseException] = []

    def note(kind: str, error: BaseException) -> None:
        if any(e is error for e in noted):
            return
        noted.append(error)
        emit(FAILURE, (), (kind, type(error).__name__, text(error), frames(error), agent.phase))
        agent.fire("failed", error)

    def chain(original: Any) -> Any:
        def excepthook(kind: Any, error: Any, traceback: Any) -> Any:
            if isinstance(error, BaseException) and not isinstance(error, KeyboardInterrupt):
                emit.guarded(note, "exception", error)
            return original(kind, error, traceback)

        return excepthook

    def chain_thread(original: Any) -> Any:
        def excepthook(args: Any) -> Any:
            if args.exc_value is not None:
                emit.guarded(note, "thread_exception", args.exc_value)
            return original(args)

        return excepthook

    def close() -> None:
        # a program that replaced sys.excepthook after us: the interpreter has left the exception here all the same
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and not isinstance(error, KeyboardInterrupt):
            note("exception", error)
        noted.clear()
        emit(EVENT, (), ("end", ""), step=agent.window.step - 1)

    emit(EVENT, (), ("start", f"pid {os.getpid()}"), step=0)
    emit.on("close", close)
    undos = [replace(sys, "excepthook", chain), replace(threading, "excepthook", chain_thread)]
    join = agent.torch.distributed.algorithms.join.Join

    def joined(original: Any) -> Any:
        def __enter__(context: Any) -> Any:
            emit(EVENT, (), ("join", "uneven inputs are handled by torch.distributed's Join"))
            return original(context)

        return __enter__

    undos.append(replace(join, "__enter__", joined))
    return undo_all(undos)


def text(error: BaseException) -> str:
    """The exception's message; a user's __str__ that fails is said, not raised."""
    failed: list[Exception] = []
    message = guard.attempt(failed.append, str, error)
    return f"(its __str__ raised {type(failed[0]).__name__})" if failed else str(message)[:MESSAGE_LIMIT]


def frames(error: BaseException) -> str:
    """The innermost frames, outermost first, without those of this agent."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    lines, tb = [], error.__traceback__
    while tb is not None:
        code = tb.tb_frame.f_code
        if not code.co_filename.startswith(here):
            lines.append(f"{code.co_filename}:{tb.tb_lineno} {code.co_name}")
        tb = tb.tb_next
    return "\n".join(lines[-FRAMES:])
