"""The launcher's one broad `except`: what goes wrong in watching is written down and never reaches torchrun.

On the main thread torchelastic delivers SIGTERM and its like as an exception; code that runs there while the ranks
live must not come through here (see `torchelastic`), or a request to stop would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def guarded(note: Callable[[str], None], call: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
    """The value of `call`, or None after handing its error, in one line, to `note`."""
    try:
        return call(*args, **kwargs)
    except Exception as e:
        note(describe(e))
        return None


def describe(error: BaseException) -> str:
    """One line for an error: system errors by their own words, the rest with the type's name."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
