"""Several runs as plain lines: a scanned batch, a merged run."""

from __future__ import annotations

from ..merge import Merged
from ..scan import Scan
from ..wording import counted, ranks_text, spans
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


def merged(m: Merged) -> str:
    """What was made, and what it lacks."""
    lines = [f"{clean(m.path)}: run {clean(m.run)}, nodes {spans(m.nodes)}, {ranks_text(m.ranks)}, "
             f"{counted(m.files, 'file')} of {counted(len(m.sources), 'folder')}"]  # fmt: skip
    if m.missing_nodes:
        lines.append(f"  {counted(m.missing_nodes, 'node')} of the job missing: what it recorded stays unknown")
    return "\n".join(lines)
