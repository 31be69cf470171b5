"""The watch loop: looks, draws, listens to two keys. On anything but a terminal it draws once and ends."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.live import Live

from ..watching import Look
from .tui import Screen, screen

INTERVAL_S = 1.0  # a fault is on the screen within two looks
PAUSE_PER_SECOND = 4.0  # after a look of t seconds at least 4 t: watching takes a fifth of a core at most
PLAIN_LINES = 1000  # without a terminal nothing limits the height


def watch(look: Callable[[], Look], console: Console | None = None, keyboard: TextIO | None = None,
          interval_s: float = INTERVAL_S) -> None:  # fmt: skip
    """Draw on standard output until the run has ended or q is pressed; the last screen stays on the terminal."""
    console, keyboard = console or Console(), keyboard or sys.stdin
    latest = look()
    if console.is_terminal and latest.status == "running":
        with keys_of(keyboard) as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
            latest = _loop(look, latest, live, pressed, console, interval_s)
    height = console.height if console.is_terminal else PLAIN_LINES
    console.print(screen(_screen(latest), console.width, height, keys=False))


def _loop(look: Callable[[], Look], latest: Look, live: Live, pressed: Callable[[float], str], console: Console,
          interval_s: float) -> Look:  # fmt: skip
    paused, wait_s = False, interval_s
    while True:
        live.update(screen(_screen(latest, paused), console.width, console.height), refresh=True)
        if latest.status != "running":
            return latest
        key = pressed(wait_s)
        if key == "q":
            return latest
        paused = paused != (key == "p")
        if not paused:
            began = time.monotonic()
            latest = look()
            wait_s = max(interval_s, PAUSE_PER_SECOND * (time.monotonic() - began))


def _screen(latest: Look, paused: bool = False) -> Screen:
    return Screen(latest.verdict, latest.status, latest.ranks, paused)


@contextmanager
def keys_of(keyboard: TextIO) -> Iterator[Callable[[float], str]]:
    """A function that waits some seconds for one key, "" for none. The terminal is as before at the end."""
    try:
        import termios
        import tty

        number = keyboard.fileno()
        before = termios.tcgetattr(number)
    except (ImportError, OSError, ValueError):  # no terminal to read from, or a platform without termios
        yield _sleep
        return
    except termios.error:
        yield _sleep
        return
    tty.setcbreak(number)
    try:
        yield lambda seconds: _key(number, seconds)
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _key(number: int, seconds: float) -> str:
    ready, _, _ = select.select([number], [], [], seconds)
    return os.read(number, 1).decode(errors="replace").lower() if ready else ""


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""
