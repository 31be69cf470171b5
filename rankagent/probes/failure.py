"""An exception that ended the program, a signal's arrival, and an orderly end.

Writes    failure, event, probe
Costs     nothing until it happens
Blind to  SIGKILL and crashes in native code (the node's launcher sees those)
"""

from __future__ import annotations

from ..tables import Column, Table

FAILURE = Table("failure", (
    Column("kind", "text", "", "exception, thread_exception, exit (SystemExit with a code other than 0)"),
    Column("type", "text", "", "class of the exception, or the exit code"),
    Column("message", "text", "", "its text, cut at 4 KiB"),
    Column("frames", "text", "", "innermost user frames, one 'file:line function' a line"),
    Column("during", "text", "", "phase in which it was raised: data, forward, backward, optimizer, other"),
), "one row per uncaught exception; `step` is the step in progress, the last completed one plus 1")  # fmt: skip

EVENT = Table("event", (
    Column("kind", "text", "", "start, end, join, comm_hook, cadence, scaler, fork"),
    Column("detail", "text", "", "plain words or JSON"),
), "things that happened")  # fmt: skip

PROBE = Table("probe", (
    Column("name", "text", "", "probe"),
    Column("state", "text", "", "installed, disabled (an error of ours), unavailable (torch lacks what it needs)"),
    Column("reason", "text", "", "why"),
), "one row per probe and change of state")  # fmt: skip

TABLES = (FAILURE, EVENT, PROBE)
