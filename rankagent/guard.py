"""The one place where an error of ours stops. It switches the probe off and is written down; it never reaches training.

Only `Exception` is caught: KeyboardInterrupt, SystemExit and whatever else is meant for the user's program passes.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # this module is imported by every Python process below the launcher: see afterimport
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def attempt(on_error: Callable[[Exception], None], fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn(*args)`; on an exception call `on_error` with it and return None."""
    try:
        return fn(*args)
    except Exception as e:
        try:
            on_error(e)
        except Exception:
            return None  # not even the note could be written: the recorder has counted the loss
    return None


def describe(error: BaseException) -> str:
    """Type, text and the innermost line of ours, e.g. "KeyError: 'lr' (probes/optimizer.py:40)"."""
    where, tb = "", error.__traceback__
    while tb is not None:
        path = tb.tb_frame.f_code.co_filename
        if path.startswith(_HERE):
            where = f" ({os.path.relpath(path, _HERE)}:{tb.tb_lineno})"
        tb = tb.tb_next
    return f"{type(error).__name__}: {error}{where}"[:500]
