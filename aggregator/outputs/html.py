"""A report as one HTML file: no script, no address to fetch, every string of the run escaped and bounded.

Pictures are SVG that matplotlib draws when the page is made, rather than a chart library within it: such a page needs
no script, prints, is read aloud, and weighs a tenth. What is escaped twice over: characters that reorder or hide text
are shown as escapes first (`clean`), then jinja2 escapes the markup.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

from jinja2 import Environment, StrictUndefined

from ..coverage import Pass
from ..diagnose import ModeFound
from ..findings import SEVERITIES, Incident
from ..ranks import RankRow
from ..report import Report
from ..wording import counted, ranks_text, spans
from . import plots
from .clean import clean
from .plots import Drawn
from .text import heading, moment, quality, when
from .units import duration, memory, number

LONGEST = 1000  # characters of one string from the run
EVIDENCE = 24  # lines an incident
INCIDENTS = 40
RANKS = 64
KEYS = 200


@dataclass(frozen=True)
class Shown:
    """One incident in the words of the page."""

    id: str
    anchor: str
    code: str
    severity: str
    state: str
    summary: str
    who: str
    when: str
    subject: str
    plots: tuple[Drawn, ...]
    evidence: tuple[tuple[str, ...], ...]
    evidence_left_out: int
    cannot_conclude: tuple[str, ...]
    next_check: str


def page(r: Report, version: str) -> str:
    """The whole file. Cost: a picture takes about 0.1 s to draw; nothing is asked of the run."""
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=False)
    env.filters["short"] = short
    folder = files(__package__)
    template = env.from_string((folder / "report.html.jinja").read_text("utf-8"))
    return template.render(page=SimpleNamespace(**_page(r, version)), css=(folder / "report.css").read_text("utf-8"))


def short(value: object) -> str:
    """Cleaned, and cut in its middle where it is very long."""
    text = str(value)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 200]} ... {text[-60:]} ({len(text)} characters)"
    return clean(text)


def _page(r: Report, version: str) -> dict[str, Any]:
    v = r.verdict
    worst = min((SEVERITIES.index(i.finding.severity) for i in v.incidents), default=len(SEVERITIES))
    tone = ("critical", "warning")[worst] if worst < 2 else "" if v.data_quality.complete else "incomplete"
    by = {o: [c for c in v.verdicts if c.outcome == o] for o in ("CLEAR", "INSUFFICIENT_EVIDENCE", "NOT_APPLICABLE")}
    drawn = plots.timeline(r.overview, r.events, r.attempt, "timeline") if r.overview or r.events else None
    incidents = [_shown(r, i, n) for n, i in enumerate(v.incidents[:INCIDENTS])]
    sections = (("incidents", "Incidents"), ("modes", "Failure modes"), ("timeline", "What happened"),
                ("time", "Time and memory"), ("ranks", "Ranks"), ("identity", "What it ran with"),
                ("data", "Data coverage"), ("open", "Not recorded, not judged"))  # fmt: skip
    return {
        "run": v.run, "headline": heading(v), "tone": tone, "say": f"{r.diagnosis.outcome}: {r.diagnosis.why}",
        "about": ", ".join(filter(None, (r.about.script, f"began {moment(r.about.start_ns)}", r.about.host))),
        "quality": quality(v.data_quality)[:4], "incidents": incidents,
        "incidents_left_out": max(0, len(v.incidents) - INCIDENTS),
        "sections": sections if incidents else sections[1:], "modes": [_mode(m) for m in r.diagnosis.modes],
        "timeline": drawn, "events": [_event(e, v.world_size) for e in r.events], "events_left_out": r.events_left_out,
        "resources": _resources(r), "ranks": [_rank(row) for row in _few(r.ranks)],
        "ranks_caption": _ranks_caption(r), "command": shlex.join(r.about.command),
        "differing": [(k.key, value, spans(ranks)) for k in r.differing[:KEYS] for value, ranks in k.values],
        "common": [(k.key, k.values[0][0]) for k in r.common[:KEYS]], "no_difference": _no_difference(r),
        "coverage": [_pass(p) for p in r.coverage], "warnings": v.data_quality.warnings,
        "unsure": [(c.reason_code, c.why) for c in by["INSUFFICIENT_EVIDENCE"]],
        "clear": [(c.reason_code, c.checked.steps, c.checked.ranks) for c in by["CLEAR"]],
        "not_applicable": [(c.reason_code, c.why) for c in by["NOT_APPLICABLE"]],
        "footer": f"tdbg {version}, run {v.run}, {v.path}. OBSERVED: bits that must be equal are not, or an event was "
                  "recorded. INFERRED: a statistical rule, at most a warning. The order of incidents is one of gravity "
                  "and time; no cause is claimed.",
    }  # fmt: skip


def _shown(r: Report, i: Incident, n: int) -> Shown:
    f = i.finding
    drawn = tuple(plots.picture(p, f"i{n}p{k}", f.ranks, f.first_step, f.last_step)
                  for k, p in enumerate(r.pictures.get(i.id, ())))  # fmt: skip
    evidence = tuple(("all" if e.rank is None else str(e.rank), "" if e.step is None else str(e.step), e.metric,
                      e.value, e.expected) for e in f.evidence[:EVIDENCE])  # fmt: skip
    return Shown(
        i.id, f"incident-{n}", i.reason_code, f.severity, f.evidence_state, f.summary, ranks_text(f.ranks), when(f),
        f.subject, drawn, evidence, max(0, len(f.evidence) - EVIDENCE), f.cannot_conclude, f.next_check,
    )  # fmt: skip


def _mode(m: ModeFound) -> tuple[str, str, str]:
    said = {"FOUND": "found", "ADVICE": "notes only", "EXCLUDED": "nothing found", "UNKNOWN": "not decided",
            "NOT_APPLICABLE": "does not apply"}[m.state]  # fmt: skip
    parts = []
    if m.incidents or m.notes:
        parts.append(", ".join(dict.fromkeys(i.reason_code for i in (*m.incidents, *m.notes))))
    if m.excluded:
        parts.append(f"clear: {', '.join(c.reason_code for c in m.excluded)}")
    if m.unknown:
        parts.append(f"not enough evidence: {', '.join(c.reason_code for c in m.unknown)}")
    return m.mode.name, said, "; ".join(parts)


def _event(e: Any, world_size: int) -> tuple[str, ...]:
    steps = str(e.step) if e.last_step == e.step else f"{e.step} to {e.last_step}"
    attempt = f" (attempt {e.attempt})" if e.attempt else ""
    ranks = "all" if len(e.ranks) == world_size > 1 else spans(e.ranks) or "-"
    return steps + attempt, moment(e.time_ns), ranks, e.kind, e.words


def _resources(r: Report) -> list[Drawn]:
    found = [plots.phases(r.phases, "phases")] if r.phases else []
    culprits = {k for i in r.verdict.incidents if i.finding.severity != "note" for k in i.finding.ranks}
    for n, s in enumerate(r.memory):
        limits = [x for x in r.limits if (x.name == "device") == s.metric.startswith("cuda")]
        found.append(plots.overlay(s, f"memory{n}", culprits, limits=limits))
    return found


def _few(rows: tuple[RankRow, ...]) -> list[RankRow]:
    """All ranks, or those that something sets apart and the first of the others."""
    if len(rows) <= RANKS:
        return list(rows)
    kept = {row.rank for row in [*(x for x in rows if x.apart), *rows][:RANKS]}
    return [row for row in rows if row.rank in kept]


def _ranks_caption(r: Report) -> str:
    shown = min(len(r.ranks), RANKS)
    left = f", {len(r.ranks) - shown} more that are much alike are left out" if len(r.ranks) > shown else ""
    return f"{counted(shown, 'rank')}, as of each one's last step{left}"


def _rank(row: RankRow) -> tuple[str, ...]:
    held = memory(row.rss_bytes) + (f", device {memory(row.cuda_bytes)}" if row.cuda_bytes is not None else "")
    return (str(row.rank), row.host or "-", str(row.steps), number(row.loss), number(row.grad_norm),
            duration(row.step_ns), held, row.apart)  # fmt: skip


def _no_difference(r: Report) -> str:
    known: set[int] = {k for key in r.common for _, ranks in key.values for k in ranks}
    if not known:
        return "Nothing was recorded of it."
    return f"No difference between {ranks_text(known)} in what was recorded."


def _pass(p: Pass) -> tuple[str, ...]:
    name = f"{p.nth}" + (f" of loader {p.loader}" if p.loader > 1 else "") + ("" if p.whole else ", not to its end")
    numbers = (p.ranks, p.batches, p.samples, p.length or None, p.different, p.shared, p.repeated, p.missing)
    return (
        name + (f" (attempt {p.attempt})" if p.attempt else ""),
        *("unknown" if n is None else str(n) for n in numbers),
    )
