"""A scanned batch of runs as plain lines."""

from __future__ import annotations

from ..scan import Scan
from .clean import clean
from .text import table


def scanned(s: Scan) -> str:
    """The outcome in a sentence, then a row a run: the one that parts most first."""
    rows = []
    for r in sorted(s.runs, key=lambda r: (-r.divergences, r.peers, r.run)):
        first = r.first
        where = "-" if first is None else f"step {first.first_step}, {first.metric}"
        rows.append((r.run, f"{r.divergences} of {r.peers}", where))
    lines = [f"{s.outcome}{': ' + clean(s.run) if s.run else ''}", f"  {clean(s.why)}", "",
             table(("run", "parts from", "first at"), rows)]  # fmt: skip
    for r in s.runs:
        if r.started_otherwise:
            cells = ((d.key, d.a or "-", d.b or "-") for d in r.started_otherwise)
            lines += ["", table((f"{clean(r.run)} alone was started with", "this run", "the others"), cells)]
    return "\n".join(lines)
