"""What one run of a drill comes to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One run of a drill: what was done, and everything that is wrong with the outcome."""

    what: str
    misses: list[str]
