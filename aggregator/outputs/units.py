"""Numbers as people read them. Conversion from ns and bytes happens here and nowhere else."""

from __future__ import annotations

import math


def number(value: float | None) -> str:
    """Six digits are enough to see two ranks differ; "-" for what was not recorded."""
    if value is None:
        return "-"
    return "NaN" if math.isnan(value) else f"{value:.6g}"


def duration(ns: float | None) -> str:
    """850 us, 12.3 ms, 4.56 s."""
    if ns is None:
        return "-"
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if abs(ns) >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"


def memory(size_bytes: float | None) -> str:
    """512 KiB, 1.2 GiB."""
    if size_bytes is None:
        return "-"
    for size, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size_bytes) >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def in_unit(value: float | None, unit: str) -> str:
    """A value in the words of its unit."""
    return {"ns": duration, "B": memory}.get(unit, number)(value)
