"""Text from a run made safe to show: names and messages are somebody else's, and a terminal obeys what it is sent."""

from __future__ import annotations

import unicodedata

# Control characters, those that reorder a line or hide in it (Cf), private and unassigned ones, line separators.
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def clean(value: object) -> str:
    """One line without anything that a terminal would act on; what was there is shown as an escape."""
    text = str(value)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(c) if unicodedata.category(c) in _UNSAFE else c for c in text)


def _shown(c: str) -> str:
    return c.encode("unicode_escape").decode("ascii")
