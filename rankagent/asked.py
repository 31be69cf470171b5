"""A thread that waits to be asked: the launcher writes a byte into a FIFO of the process's folder, the thread answers.

For a rank whose main thread is stuck in a collective: that has released the interpreter, so another thread can still
tell what torch knows. Until it is asked the thread sleeps in one `read`: no wake-up, no interpreter time. It is started
below `threading`, so that a program that counts or joins its threads does not meet it, and only once a process group
exists, whose own threads are there anyway. It ends with the process; a forked child has the descriptor and no thread.
"""

from __future__ import annotations

import _thread
import contextlib
import os
from collections.abc import Callable

from . import guard
from .patch import Undo

FIFO = "ask"
_STOP = b"q"


def listen(folder: str, answer: Callable[[], None]) -> Undo:
    """Call `answer` in a thread of its own for each byte that comes; the undo ends it. OSError where no FIFO can be."""
    path = os.path.join(folder, FIFO)
    os.mkfifo(path, 0o600)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # for writing too: so it opens at once and never sees an end
    pid = os.getpid()

    def wait() -> None:
        try:
            while os.read(fd, 1) != _STOP:
                guard.attempt(lambda error: None, answer)
        except OSError:
            return

    _thread.start_new_thread(wait, ())

    def undo() -> None:
        if os.getpid() == pid:
            forget(folder)
            os.write(fd, _STOP)

    return undo


def forget(folder: str) -> None:
    """Take the FIFO away; nobody can ask from then on. The thread sleeps on: waking it would gain nothing."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, FIFO))
