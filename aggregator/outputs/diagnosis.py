"""A diagnosis as plain lines: the outcome, each mode that was found in full, the others in a line or two."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from ..diagnose import Diagnosis, ModeFound
from ..findings import Incident, RuleVerdict
from ..wording import counted, ranks_text
from .clean import clean
from .text import heading, quality, when

WIDTH = 100
SHOWN = 6  # rules or notes that a mode names before it counts
HEADINGS = {
    "UNKNOWN": "Not decided (nothing found, and some rules lacked evidence):",
    "ADVICE": "Notes only:",
    "EXCLUDED": "Nothing found:",
    "NOT_APPLICABLE": "Does not apply to this run:",
}


def diagnosis(d: Diagnosis) -> str:
    """All of it, wrapped for a terminal."""
    blocks = [f"{heading(d.verdict)}\n{d.outcome}: {clean(d.why)}"]
    found = [m for m in d.modes if m.state == "FOUND"]
    blocks += ["\n".join(_found(n, m)) for n, m in enumerate(found, 1)]
    for state, words in HEADINGS.items():
        mine = [m for m in d.modes if m.state == state]
        if mine:
            blocks.append("\n".join([words, *(line for m in mine for line in _other(m))]))
    return "\n\n".join([*blocks, "\n".join(quality(d.verdict.data_quality))])


def _found(n: int, m: ModeFound) -> Iterator[str]:
    yield f"{n}. {m.mode.name}: {m.mode.words}"
    for i in m.incidents:
        yield from _wrapped(_said(i), "   ")
    yield from _notes(m.notes)
    if m.excluded:
        yield from _wrapped(f"excluded: {_rules(m.excluded)}", "   ")
    yield from _unknown(m.unknown)
    for words in m.cannot_conclude:
        yield from _wrapped(f"cannot conclude: {clean(words)}", "   ")
    for words in m.next_checks:
        yield from _wrapped(f"next: {clean(words)}", "   ")


def _other(m: ModeFound) -> Iterator[str]:
    yield f"   {m.mode.name}"
    for i in m.notes:
        yield from _wrapped(_said(i), "      ")
    if m.state == "UNKNOWN":
        yield from _unknown(m.unknown, "      ")
    if m.excluded and m.state in ("EXCLUDED", "UNKNOWN"):
        yield from _wrapped(f"clear: {_rules(m.excluded)}", "      ")


def _said(i: Incident) -> str:
    f = i.finding
    return (f"{f.severity}: {i.reason_code}, {ranks_text(f.ranks)}, {when(f)} [{f.evidence_state}]: {clean(f.summary)} "
            f"({i.id})")  # fmt: skip


def _notes(notes: Sequence[Incident]) -> Iterator[str]:
    for i in notes[:SHOWN]:
        yield from _wrapped(_said(i), "   ")
    if len(notes) > SHOWN:
        yield f"   and {counted(len(notes) - SHOWN, 'note')} more"


def _unknown(rules: Sequence[RuleVerdict], indent: str = "   ") -> Iterator[str]:
    """Rules that say the same are told together."""
    by_why: dict[str, list[str]] = {}
    for r in rules:
        by_why.setdefault(r.why, []).append(r.reason_code)
    for why, codes in list(by_why.items())[:SHOWN]:
        yield from _wrapped(f"not decided: {', '.join(codes)}: {clean(why)}", indent)
    if len(by_why) > SHOWN:
        yield f"{indent}and {counted(len(by_why) - SHOWN, 'reason')} more: tdbg verdicts RUN"


def _rules(rules: Sequence[RuleVerdict]) -> str:
    """Rules by what they stand on: CODE, CODE (32 steps of 2 ranks); CODE (10 steps of 1 rank)."""
    by: dict[tuple[int, int], list[str]] = {}
    for r in rules:
        by.setdefault((r.checked.steps, r.checked.ranks), []).append(r.reason_code)
    return "; ".join(f"{', '.join(codes)} ({counted(steps, 'step')} of {counted(ranks, 'rank')})"
                     for (steps, ranks), codes in by.items())  # fmt: skip


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)
