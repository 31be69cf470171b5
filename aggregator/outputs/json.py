"""Values as JSON objects, each with its schema name. Always valid: a number that is not finite becomes a string."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from ..codes import CODES
from ..compare import Comparison
from ..diagnose import Diagnosis
from ..exporting import Exported
from ..findings import Incident, Verdict
from ..merge import Merged
from ..metrics import MetricRow
from ..modes import MODES
from ..ranks import RankRow
from ..rulebook import Rule
from ..scan import Scan
from ..timeline import Event


def dumps(value: Any) -> str:
    """Indented JSON in ASCII, so that no terminal acts on it and no stream's encoding matters."""
    return json.dumps(plain(value), indent=1, allow_nan=False)


def plain(value: Any) -> Any:
    """Only what JSON knows: NaN and infinities as "NaN", "Infinity", "-Infinity", anything foreign as its text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return (
            value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        )
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(v) for v in value]
    return value.hex() if isinstance(value, (bytes, bytearray)) else str(value)


def verdicts(v: Verdict) -> dict[str, Any]:
    """The object of `tdbg verdicts --json`."""
    return {**_head("tdbg.verdicts/1", v), "verdicts": [
        {"reason_code": r.reason_code, "outcome": r.outcome, "why": r.why,
         "checked": {"steps": r.checked.steps, "ranks": r.checked.ranks}} for r in v.verdicts
    ], "incidents": [incident(i) for i in v.incidents]}  # fmt: skip


def incidents(v: Verdict) -> dict[str, Any]:
    """The same object without `verdicts`."""
    return {**_head("tdbg.verdicts/1", v), "incidents": [incident(i) for i in v.incidents]}


def one_incident(v: Verdict, i: Incident) -> dict[str, Any]:
    """The object of `tdbg incident --json`."""
    return {**_head("tdbg.incident/1", v), "incident": incident(i)}


def incident(i: Incident) -> dict[str, Any]:
    """An incident with its evidence."""
    f = i.finding
    return {
        "id": i.id, "reason_code": i.reason_code, "severity": f.severity, "evidence_state": f.evidence_state,
        "ranks": sorted(f.ranks), "first_step": f.first_step, "attempt": f.attempt, "last_good_step": f.last_good_step,
        "last_step": f.last_step, "subject": f.subject, "summary": f.summary,
        "evidence": [asdict(e) for e in f.evidence],
        "cannot_conclude": list(f.cannot_conclude), "next_check": f.next_check,
    }  # fmt: skip


def diagnosis(d: Diagnosis) -> dict[str, Any]:
    """The object of `tdbg diagnose --json`: every mode, in the order in which to read them."""
    return {**_head("tdbg.diagnose/1", d.verdict), "outcome": d.outcome, "why": d.why, "modes": [
        {"mode": m.mode.name, "state": m.state, "incidents": [incident(i) for i in m.incidents],
         "notes": [incident(i) for i in m.notes],
         "excluded": [{"reason_code": r.reason_code, "checked": {"steps": r.checked.steps, "ranks": r.checked.ranks}}
                      for r in m.excluded],
         "unknown": [{"reason_code": r.reason_code, "why": r.why} for r in m.unknown],
         "cannot_conclude": list(m.cannot_conclude), "next_checks": list(m.next_checks)}
        for m in d.modes
    ]}  # fmt: skip


def codes(have: Collection[str]) -> dict[str, Any]:
    """The object of `tdbg explain --json`: every code; `rule` is false where this version has none."""
    return {"schema": "tdbg.explain/1", "codes": [
        {"reason_code": c, "mode": m.name, "says": CODES[c], "rule": c in have} for m in MODES for c in m.codes
    ]}  # fmt: skip


def rule(r: Rule) -> dict[str, Any]:
    """The object of `tdbg explain CODE --json`; `labels` are those of the detector's docstring."""
    return {
        "schema": "tdbg.explain/1", "reason_code": r.code, "says": r.meaning, "rule": r.rule,
        "mode": next(m.name for m in MODES if r.code in m.codes), "file": r.file,
        "labels": {label.lower().replace(" ", "_"): words for label, words in r.labels},
        "needs": dict(r.needs), "settings": [asdict(s) for s in r.settings],
    }  # fmt: skip


def timeline(v: Verdict, events: Sequence[Event]) -> dict[str, Any]:
    """The object of `tdbg timeline --json`."""
    return {**_head("tdbg.timeline/1", v), "events": [
        {"attempt": e.attempt, "step": e.step, "last_step": e.last_step, "time_ns": e.time_ns, "ranks": list(e.ranks),
         "kind": e.kind, "what": e.words} for e in events
    ]}  # fmt: skip


def comparison(c: Comparison) -> dict[str, Any]:
    """The object of `tdbg compare --json`."""
    return {
        "schema": "tdbg.compare/1", "a": c.a, "b": c.b, "outcome": c.outcome, "first_step": c.first_step,
        "metric": c.metric, "subject": c.subject, "ranks": sorted(c.ranks),
        "identity_differences": [asdict(d) for d in c.identity_differences], "why": c.why,
        "last_equal_step": c.last_equal_step, "offset": c.offset, "compared_steps": c.compared_steps,
    }  # fmt: skip


def exported(run: str, to: str, path: str, e: Exported) -> dict[str, Any]:
    """The object of `tdbg export --json`."""
    return {"schema": "tdbg.export/1", "run": run, "to": to, "path": path, "rows": e.points, "status": e.status}


def merged(m: Merged) -> dict[str, Any]:
    """The object of `tdbg merge --json`."""
    return {
        "schema": "tdbg.merge/1", "run": m.run, "path": str(m.path), "sources": [str(s) for s in m.sources],
        "nodes": list(m.nodes), "ranks": list(m.ranks), "world_size": m.world_size, "files": m.files,
        "missing_nodes": m.missing_nodes,
    }  # fmt: skip


def report(run: str, path: str, size_bytes: int) -> dict[str, Any]:
    """The object of `tdbg report --json`."""
    return {"schema": "tdbg.report/1", "run": run, "path": path, "bytes": size_bytes}


def scan(s: Scan) -> dict[str, Any]:
    """The object of `tdbg scan --json`."""
    return {
        "schema": "tdbg.scan/1", "outcome": s.outcome, "run": s.run, "scores": s.scores, "why": s.why,
        "runs": [{"run": r.run, "peers": r.peers, "divergences": r.divergences,
                  "first": comparison(r.first) if r.first else None,
                  "started_otherwise": [asdict(d) for d in r.started_otherwise]} for r in s.runs],
    }  # fmt: skip


def watch(v: Verdict, rows: Sequence[RankRow]) -> dict[str, Any]:
    """The object of `tdbg watch --json`: one look."""
    return {**_head("tdbg.watch/1", v), "ranks": [asdict(r) for r in rows],
            "incidents": [incident(i) for i in v.incidents]}  # fmt: skip


def runs(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The object of `tdbg runs --json`."""
    return {"schema": "tdbg.runs/1", "runs": list(rows)}


def ranks(run: str, rows: Sequence[RankRow]) -> dict[str, Any]:
    """The object of `tdbg ranks --json`."""
    return {"schema": "tdbg.ranks/1", "run": run, "ranks": [asdict(r) for r in rows]}


def metrics(run: str, rows: Sequence[MetricRow], units: Mapping[str, str]) -> dict[str, Any]:
    """The object of `tdbg metrics --json`."""
    return {"schema": "tdbg.metrics/1", "run": run, "units": dict(units), "rows": [asdict(r) for r in rows]}


def sql(run: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The object of `tdbg sql --json`: rows as lists, since a query may name two columns alike."""
    return {"schema": "tdbg.sql/1", "run": run, "columns": list(columns), "rows": [list(r) for r in rows]}


def _head(schema: str, v: Verdict) -> dict[str, Any]:
    q = v.data_quality
    return {
        "schema": schema, "run": v.run, "path": v.path, "status": v.status, "world_size": v.world_size,
        "steps": v.steps, "attempts": v.attempts,
        "data_quality": {
            "complete": q.complete, "warnings": list(q.warnings), "dropped_events": q.dropped_events,
            "ranks_seen": list(q.ranks_seen), "last_step": {str(r): s for r, s in sorted(q.last_step.items())},
        },
    }  # fmt: skip
