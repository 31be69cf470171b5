"""Numbers of ranks, counts and sizes in words, the same wherever a sentence is made."""

from __future__ import annotations

from collections.abc import Iterable


def spans(numbers: Iterable[int]) -> str:
    """0-3, 7 for 0 1 2 3 7: a sentence about a thousand ranks stays a sentence."""
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in parts)


def ranks_text(ranks: Iterable[int]) -> str:
    """rank 2, or ranks 0-3, 7; "no rank" for none."""
    several = sorted(set(ranks))
    if not several:
        return "no rank"
    return f"rank {several[0]}" if len(several) == 1 else f"ranks {spans(several)}"


def counted(n: int, thing: str) -> str:
    """1 step, 2 steps."""
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def mib(size_bytes: float) -> str:
    """12.3 MiB: one unit for all that is compared in a sentence."""
    return f"{size_bytes / 2**20:.4g} MiB"
