"""Values as plain lines: what the commands print. No colour, no width: made to be read, piped and searched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from ..compare import Comparison
from ..findings import DataQuality, Finding, Incident, RuleVerdict, Verdict
from ..metrics import MetricRow
from ..ranks import RankRow
from ..timeline import Event
from ..wording import counted, ranks_text, spans
from .clean import clean
from .units import duration, in_unit, memory, number

WARNINGS_SHOWN = 3  # of data quality in the closing summary; `tdbg verdicts` shows all


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns side by side, left-aligned, as wide as their widest cell."""
    lines = [list(head), *([clean(c) for c in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def verdicts(v: Verdict) -> str:
    """Incidents, data quality, then every rule: what was found, what is unsure, what is clear, what does not apply."""
    by: dict[str, list[RuleVerdict]] = {}
    for r in v.verdicts:
        by.setdefault(r.outcome, []).append(r)
    asked = [*by.get("INCIDENT", []), *by.get("INSUFFICIENT_EVIDENCE", []), *by.get("CLEAR", []),
             *by.get("NOT_APPLICABLE", [])]  # fmt: skip
    rules = table(("rule", "outcome", "why"), ((r.reason_code, r.outcome, r.why) for r in asked))
    return "\n\n".join([heading(v), "\n".join(found(v)), "\n".join(quality(v.data_quality)), rules])


def incidents(v: Verdict) -> str:
    """Every incident with the first lines of its evidence."""
    blocks = [heading(v), *(incident(i, most=4) for i in v.incidents)]
    if not v.incidents:
        blocks.append("\n".join(found(v)))
    return "\n\n".join([*blocks, "\n".join(quality(v.data_quality))])


def incident(i: Incident, most: int = 1000) -> str:
    """One incident in full, or with its first `most` lines of evidence."""
    f = i.finding
    lines = [f"{i.reason_code}  {f.severity}  {f.evidence_state}  [{i.id}]", f"  {clean(f.summary)}",
             f"  {ranks_text(f.ranks)}, {when(f)}" + (f", {clean(f.subject)}" if f.subject else "")]  # fmt: skip
    for e in f.evidence[:most]:
        who = "" if e.rank is None else f"rank {e.rank} "
        at = "" if e.step is None else f"step {e.step} "
        expected = f" (expected {clean(e.expected)})" if e.expected else ""
        lines.append(f"  {who}{at}{clean(e.metric)} = {clean(e.value)}{expected}")
    if len(f.evidence) > most:
        lines.append(f"  ... {len(f.evidence) - most} more: tdbg incident RUN {i.id}")
    lines += [f"  not known: {clean(c)}" for c in f.cannot_conclude]
    if f.next_check:
        lines.append(f"  next: {clean(f.next_check)}")
    return "\n".join(lines)


def summary(v: Verdict, read_more: str) -> str:
    """What tdbg-run says at its end."""
    lines = [f"tdbg: {heading(v)}", f"tdbg: stored in {clean(v.path)}"]
    lines += [f"tdbg: {line}" for line in found(v)]
    q = quality(v.data_quality)
    lines += [f"tdbg: {line}" for line in q[: 1 + WARNINGS_SHOWN]]
    if len(q) > 1 + WARNINGS_SHOWN:
        lines.append(f"tdbg:   and {len(q) - 1 - WARNINGS_SHOWN} more")
    return "\n".join([*lines, f"tdbg: read more: {clean(read_more)}"])


def heading(v: Verdict) -> str:
    """One line about the run."""
    several = f", {v.attempts} attempts" if v.attempts > 1 else ""
    return f"run {clean(v.run)}: {v.status}, {counted(v.world_size, 'rank')}, {counted(v.steps, 'step')}{several}"


def found(v: Verdict) -> list[str]:
    """A line per incident, the gravest first, or what stands behind there being none."""
    if v.incidents:
        return [f"{i.finding.severity}: {i.reason_code}, {ranks_text(i.finding.ranks)}, {when(i.finding)}: "
                f"{clean(i.finding.summary)}" for i in v.incidents]  # fmt: skip
    clear = sum(r.outcome == "CLEAR" for r in v.verdicts)
    unsure = sum(r.outcome == "INSUFFICIENT_EVIDENCE" for r in v.verdicts)
    return [f"no incident; {counted(clear, 'rule')} clear, {unsure} without enough evidence"]


def quality(q: DataQuality) -> list[str]:
    """Whether the recording is whole, and a line per warning."""
    if q.complete:
        return [f"data quality: complete ({ranks_text(q.ranks_seen)}, nothing dropped)"]
    dropped = f", {counted(q.dropped_events, 'row')} lost" if q.dropped_events else ""
    return [f"data quality: {counted(len(q.warnings), 'warning')}{dropped}", *(f"  {clean(w)}" for w in q.warnings)]


def timeline(v: Verdict, events: Sequence[Event]) -> str:
    """A line an event, steps downwards; wall clock where it is known."""
    several = len({e.attempt for e in events}) > 1
    head = (*(("attempt",) if several else ()), "step", "when", "ranks", "kind", "what")
    lines = ((*((e.attempt,) if several else ()), _steps(e), moment(e.time_ns), _who(v, e.ranks), e.kind, e.words)
             for e in events)  # fmt: skip
    return f"{heading(v)}\n\n{table(head, lines)}"


def _steps(e: Event) -> str:
    return str(e.step) if e.last_step == e.step else f"{e.step}-{e.last_step}"


def _who(v: Verdict, ranks: Sequence[int]) -> str:
    return "all" if len(ranks) == v.world_size > 1 else spans(ranks) or "-"


def comparison(c: Comparison) -> str:
    """The outcome in a sentence, then what the two runs were started with that is not the same."""
    lines = [f"{c.outcome}: {clean(c.why)}"]
    if c.subject:
        lines.append(f"  {c.metric}: {clean(c.subject)}")
    if c.identity_differences:
        rows = ((d.key, d.a or "-", d.b or "-") for d in c.identity_differences)
        lines += ["", table(("differs before the first step", clean(c.a), clean(c.b)), rows)]
    return "\n".join(lines)


def runs(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a run, the newest last."""
    head = ("run", "when", "script", "ranks", "status", "steps", "incidents")
    return table(head, ((r["run"], moment(r["start_ns"]), r["script"] or "-", r["world_size"], r["status"], r["steps"],
                         r["incidents"]) for r in rows))  # fmt: skip


def ranks(rows: Sequence[RankRow]) -> str:
    """One line a rank."""
    head = ("rank", "host", "steps", "loss", "grad norm", "step time", "memory", "what sets it apart")
    return table(head, ((r.rank, r.host or "-", r.steps, number(r.loss), number(r.grad_norm), duration(r.step_ns),
                         memory(r.rss_bytes), r.apart) for r in rows))  # fmt: skip


def metrics(rows: Sequence[MetricRow], units: Mapping[str, str]) -> str:
    """Steps downwards, ranks side by side, one block a metric."""
    blocks = []
    for name in dict.fromkeys(r.metric for r in rows):
        mine = [r for r in rows if r.metric == name]
        columns = sorted({r.rank for r in mine})
        cells = {(r.attempt, r.step, r.rank): in_unit(r.value, units[name]) for r in mine}
        places = sorted({(r.attempt, r.step) for r in mine})
        attempts = len({a for a, _ in places}) > 1
        head = (*(("attempt",) if attempts else ()), "step", *(f"rank {r}" for r in columns))
        lines = ((*((a,) if attempts else ()), s, *(cells.get((a, s, r), "-") for r in columns)) for a, s in places)
        blocks.append(f"{name}\n{table(head, lines)}")
    return "\n\n".join(blocks) or "nothing recorded"


def sql(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A query's result."""
    return table([clean(c) for c in columns], rows) + f"\n({counted(len(rows), 'row')})"


def moment(ns: int | None) -> str:
    """Local wall clock."""
    try:
        return "-" if ns is None else datetime.fromtimestamp(ns / 1e9).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "-"


def when(f: Finding) -> str:
    """From which step on, and since when it may have been so."""
    attempt = f" of attempt {f.attempt}" if f.attempt else ""
    if f.first_step is None:
        return f"from the start{attempt}"
    good = f.last_good_step
    # checks that ran at some steps only: the fault may be older than the step that showed it
    gap = f" (last good {good})" if good is not None and good < f.first_step - 1 else ""
    return f"from step {f.first_step}{attempt}{gap}"
