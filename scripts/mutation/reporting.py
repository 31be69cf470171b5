"""The totals of a mutation run: rates with their bounds, and what was said of each kind of fault."""

from __future__ import annotations

import math
from collections import Counter

from .judging import FULL, GOVERNED, Result


def bound(right: int, of: int) -> float:
    """Clopper-Pearson's one-sided 95 % lower bound for a rate of right / of."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        tail = sum(math.comb(of, k) * p**k * (1 - p) ** (of - k) for k in range(right, of + 1))
        low, high = (p, high) if tail < 0.05 else (low, p)
    return low


def rate(name: str, right: int, of: int) -> str:
    if of == 0:
        return f"{name:<34} none"
    return f"{name:<34} {right:>3} of {of:<3}  {right / of:6.1%}  (at least {bound(right, of):.1%})"


def report(results: list[Result]) -> list[str]:
    lines = []
    for mode in (FULL, GOVERNED):
        some = [r for r in results if r.mode == mode and r.kind != "abstain"]
        if not some:
            continue
        ran = [r for r in some if "NOT-RUN" not in r.wrong]
        faulty, healthy = ([r for r in ran if (r.kind == "healthy") == h] for h in (False, True))
        found = [r for r in faulty if "MISSED" not in r.wrong]
        stepped = [r for r in found if r.exact is not None]
        true, false = sum(r.true_alarms for r in some), sum(r.false_alarms for r in some)
        lines += ["", f"{mode}: {len(faulty)} faulty, {len(healthy)} healthy jobs"]
        lines.append(rate("recall", len(found), len(faulty)))
        lines.append(rate("precision (alarms)", true, true + false))
        lines.append(rate("ranks right, of found", sum("RANKS" not in r.wrong for r in found), len(found)))
        lines.append(rate("subject right, of found", sum("SUBJECT" not in r.wrong for r in found), len(found)))
        lines.append(rate("first step exact, of found", sum(bool(r.exact) for r in stepped), len(stepped)))
        lines.append(rate("interval true, of found", sum("INTERVAL" not in r.wrong for r in stepped), len(stepped)))
        if mode == GOVERNED:
            lines.append(
                rate("within one cadence, of found", sum("LATE" not in r.wrong for r in stepped), len(stepped))
            )
        lines.append(rate("healthy without an alarm", sum("ALARM" not in r.wrong for r in healthy), len(healthy)))
    some = [r for r in results if r.kind == "abstain"]
    if some:
        lines += ["", rate("abstained where evidence is gone", sum(not r.wrong for r in some), len(some))]
    unable = [r for r in results if "NOT-RUN" in r.wrong]
    if unable:
        lines += ["", f"not run as meant: {', '.join(f'{r.name} ({r.mode})' for r in unable)}"]
    by_kind: dict[str, Counter[str]] = {}
    for r in results:
        by_kind.setdefault(r.kind, Counter())[r.word] += 1
    lines += ["", *(f"{k:<24} {', '.join(f'{w} {n}' for w, n in c.most_common())}" for k, c in by_kind.items())]
    return lines
