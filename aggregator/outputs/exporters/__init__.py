"""One file a tracker: a docstring (what is written, where, how NaN and Inf look there), `EXTRA` and `begin`.

    EXTRA   the library it needs and the extra of this package that brings it: (module, extra), or None
    begin   (Target) -> exporting.Exporter; raises ImportError where the library is absent, OSError, TdbgError

Found by folder. A tracker's own library does the writing: formats change with its versions, ours need not.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType


@dataclass(frozen=True)
class Target:
    """Where to export, and what of. `output` is the path or address of the command line, "" for the usual one."""

    run: str
    output: str
    params: dict[str, str]  # what all ranks were started with
    hosts: dict[int, str]  # rank -> host
    offline: bool = False


def names() -> tuple[str, ...]:
    """The trackers that there are."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__)))


def load(name: str) -> ModuleType:
    """One of them. Imports no tracker's library yet."""
    return import_module(f"{__name__}.{name}")


def series_name(metric: str, rank: int, attempt: int) -> str:
    """loss/rank-00003, or loss/rank-00003/attempt-1 after a restart: what trackers without labels call a series."""
    return f"{metric}/rank-{rank:05d}" + (f"/attempt-{attempt}" if attempt else "")
