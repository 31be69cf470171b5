"""`tdbg-run --tdbg-exec -- COMMAND`: any other launcher (srun, accelerate, deepspeed, mpirun) as a child program.

The command keeps our terminal, process group, stdin and output. Signals sent to us go on to it, except those that the
terminal has given to the whole group already.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from tdbg.rankagent.contract import TdbgError

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_FROM_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)
_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


def execute(command: Sequence[str], env: Mapping[str, str], on_stop: Callable[[], None]) -> tuple[int, bool]:
    """(exit code, whether a signal told us to stop). `on_stop` is called before such a signal goes on.

    Raises TdbgError when the command can't be started. A child ended by a signal gives 128 + its number, as shells do.
    """
    told = False
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if number in _STOPS:
            told = True
            on_stop()
        if child is not None and not (number in _FROM_KEYBOARD and _terminal_is_ours()):
            child.send_signal(number)

    before = {s: signal.signal(s, forward) for s in FORWARDED}
    try:
        child = subprocess.Popen(list(command), env=dict(env))
        code = child.wait()
    except OSError as e:
        raise TdbgError(f"{command[0]}: {e.strerror}", "--tdbg-exec needs -- and a launcher's command") from None
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    return (code if code >= 0 else 128 - code), told


def _terminal_is_ours() -> bool:
    """Whether a key pressed on the terminal reaches our whole process group, the command included."""
    try:
        with open("/dev/tty") as tty:
            return os.tcgetpgrp(tty.fileno()) == os.getpgrp()
    except OSError:
        return False
