"""Reason codes and their rules as plain lines."""

from __future__ import annotations

import textwrap
from collections.abc import Collection

from ..codes import CODES
from ..modes import MODES
from ..rulebook import Rule
from ..wording import counted
from .text import table

WIDTH = 100
# What the labels of a docstring are called here, in the order in which a reader wants them.
HEADINGS = {
    "Says": "It says", "Reads": "It reads", "Unknown": "It abstains on", "Blind to": "It is blind to",
    "Do": "What to do",
}  # fmt: skip


def listed(have: Collection[str]) -> str:
    """Every code by failure mode, a line each."""
    blocks = []
    for mode in MODES:
        rows = ((c, CODES[c] + ("" if c in have else " (no rule in this version)")) for c in mode.codes)
        blocks.append(f"{mode.name}: {mode.words}\n" + textwrap.indent(table(("code", "says"), rows), "  "))
    return "\n\n".join([*blocks, "tdbg explain CODE tells more of one."])


def explained(rule: Rule) -> str:
    """One code: meaning, rule, what to do first, then how far it may be trusted."""
    mode = next(m for m in MODES if rule.code in m.codes)
    lines = [f"{rule.code}: {rule.meaning}", f"  failure mode: {mode.name}"]
    if not rule.file:
        return "\n".join(
            [*lines, "", "No rule for it in this version: it is listed as not applicable, never as clear."]
        )
    lines += ["", *textwrap.wrap(rule.rule, WIDTH)]
    labels = dict(rule.labels)
    for label in ("Do", "Says", "Reads", "Unknown", "Blind to"):
        lines += [
            "",
            f"{HEADINGS[label]}:",
            *textwrap.wrap(labels[label], WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False),
        ]
    needs = ", ".join(f"{t} from {counted(n, 'rank')}" for t, n in rule.needs if n)
    lines += [
        "",
        *textwrap.wrap(f"Needs rows in: {needs or 'no table'}. Defined in aggregator/detectors/{rule.file}.", WIDTH),
    ]
    if rule.settings:
        lines += ["", "Numbers it goes by:"]
        for s in rule.settings:
            lines += textwrap.wrap(
                f"{s.name} = {s.value}" + (f": {s.reason}" if s.reason else ""),
                WIDTH,
                initial_indent="  ",
                subsequent_indent="      ",
                break_on_hyphens=False,
            )
    return "\n".join(lines)
