"""Which line of the user's program a call came from: the innermost frames outside torch, Python's library and us."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType, FrameType

FRAMES = 3  # the site and two callers: a helper that all collectives go through tells them apart by who called it
DEPTH = 64  # frames looked at: FSDP's hooks in a backward lie about 20 below the user's own line
MOST_KNOWN = 4096  # a program that makes code at run time must not fill memory
_Place = tuple[CodeType, int]


class CallSites:
    """`of(frame)` is (site, callers); texts are made once per place, so a call costs a walk over its frames."""

    def __init__(self, torch_file: str) -> None:
        here = os.path.dirname(os.path.abspath(__file__))
        self._inside = (os.path.dirname(torch_file) + os.sep, here + os.sep, "<frozen ")
        self._library = sysconfig.get_path("stdlib") + os.sep
        self._skipped: dict[CodeType, bool] = {}
        self._texts: dict[tuple[_Place, ...], tuple[str, str]] = {}

    def of(self, frame: FrameType | None) -> tuple[str, str]:
        """The innermost user frame as "file.py:line function", and its callers joined by " < "; empty for none."""
        key, frames = [], []
        for _ in range(DEPTH):
            if frame is None:
                break
            code = frame.f_code
            skipped = self._skipped.get(code)
            if skipped is None:
                skipped = self._look_at(code)
            if not skipped:
                key.append((code, frame.f_lasti))
                frames.append(frame)
                if len(key) == FRAMES:
                    break
            frame = frame.f_back
        place = tuple(key)
        found = self._texts.get(place)
        if found is None:
            if len(self._texts) >= MOST_KNOWN:
                self._texts.clear()
            texts = [_text(f) for f in frames]
            found = self._texts[place] = (texts[0] if texts else "", " < ".join(texts[1:]))
        return found

    def _look_at(self, code: CodeType) -> bool:
        name = code.co_filename
        library = name.startswith(self._library) and "-packages" not in name
        skipped = library or name.startswith(self._inside)
        if len(self._skipped) >= MOST_KNOWN:
            self._skipped.clear()
        self._skipped[code] = skipped
        return skipped


def _text(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"


def caller() -> FrameType | None:
    """The frame that called the function that asks."""
    return sys._getframe(2)
