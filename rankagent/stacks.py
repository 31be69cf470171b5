"""The Python stack of training, on demand: the launcher sends a signal, and faulthandler writes the stack to our file.

That needs neither the GIL nor any Python code of the rank, so it works in whatever the rank is stuck. The signal is one
that nobody uses: real-time, without a handler, not ignored and not blocked when the agent starts. Below faulthandler's
handler it is ignored, so that it ends no process whose interpreter closes. A program that the rank becomes by exec has
no handler, which the launcher sees before it sends. A program that wants this very signal for itself gets it, and no
stacks are had from then on.

Only the thread that gets the signal writes its own stack. To let it write those of all threads would kill ranks: they
change while it reads them (python 3.11.7, three busy threads: SIGSEGV at the 4,266th signal; alone: none in 32,334).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

from . import contract, guard
from .patch import Undo, replace, undo_all

if TYPE_CHECKING:
    from .agent import Agent

# In the middle of the real-time signals: programs count theirs up from SIGRTMIN or down from SIGRTMAX.
CANDIDATES = range(getattr(signal, "SIGRTMIN", 0) + 8, getattr(signal, "SIGRTMAX", 0) - 8)


def install(agent: Agent) -> Undo:
    """Make this process answer; the undo leaves the signal as it was. Where no signal is free it says so."""
    from .probes.failure import PROBE

    number = next(iter(free_signals()), 0)
    if not number:
        agent.recorder.write(PROBE, 0, (), ("stacks", "unavailable", "no real-time signal is free"))
        return lambda: None
    main = threading.current_thread() is threading.main_thread()
    fd = os.open(
        os.path.join(agent.recorder.folder, contract.STACKS),
        os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
        0o600,
    )
    if main:  # Python sets signals in the main thread only
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(number, file=fd, all_threads=False, chain=False)
    agent.recorder.answers_to(number, fd, threading.get_native_id())

    registered = [fd]

    def withdraw() -> None:
        if registered:
            faulthandler.unregister(number)
            agent.recorder.answers_to(0, -1, 0)
            os.close(registered.pop())

    def undo() -> None:
        withdraw()
        if main and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)

    def give_way(original: Any) -> Any:
        def set_signal(signalnum: Any, handler: Any) -> Any:
            if signalnum == number and agent.live:
                guard.attempt(agent.switch_off("stacks"), withdraw)
            return original(signalnum, handler)

        return set_signal

    return undo_all([undo, replace(signal, "signal", give_way)])


def free_signals() -> list[int]:
    """Real-time signals that nothing in this process catches, ignores or blocks."""
    taken = 0
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith(("SigCgt:", "SigIgn:", "SigBlk:", "ShdPnd:")):
                taken |= int(line.split()[1], 16)
    return [n for n in CANDIDATES if not taken >> (n - 1) & 1 and signal.getsignal(n) is signal.SIG_DFL]
