"""Findings -> incidents: graded by how they are known, merged where they are one event, ordered, with stable ids.

Pure functions of values. Nothing here says what caused what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from .findings import SEVERITIES, Evidence, Finding, Incident
from .followers import Coded, followers_to_notes

# Tensors that differ make others differ: the same ranks, while it lasts, are one event.
SPREADING = ("PARAM_DESYNC", "BUFFER_DESYNC", "GRAD_DESYNC", "OPTIM_STATE_DESYNC")

EVIDENCE_LIMIT = 64  # a merged incident stays readable; how many were left out is said in its last line
NAMED_SUBJECTS = 3  # further subjects that a summary names before it counts


def incidents(findings: Iterable[Coded]) -> tuple[Incident, ...]:
    """All incidents of a run. Hypotheses are none."""
    known = [(code, graded(f)) for code, f in findings if f.evidence_state != "HYPOTHESIS"]
    linked = followers_to_notes(spread(merged(known)))
    found = [Incident(incident_id(code, f), code, f) for code, f in linked]
    return tuple(sorted(found, key=_order))


def graded(finding: Finding) -> Finding:
    """Only what was observed may be critical."""
    if finding.severity == "critical" and finding.evidence_state != "OBSERVED":
        return replace(finding, severity="warning")
    return finding


def merged(findings: Sequence[Coded]) -> list[Coded]:
    """One incident per code, ranks, first step and attempt; its evidence lists the subjects."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for code, f in findings:
        groups.setdefault((code, tuple(sorted(f.ranks)), f.first_step, f.attempt), []).append(f)
    return [(str(key[0]), _one(several)) for key, several in groups.items()]


def spread(findings: Sequence[Coded]) -> list[Coded]:
    """A replica difference that reaches further tensors of the same ranks while it lasts stays one incident."""
    kept: list[Coded] = []
    for code, f in sorted(findings, key=lambda cf: -1 if cf[1].first_step is None else cf[1].first_step):
        at = next((i for i, k in enumerate(kept) if code == k[0] and code in SPREADING and _reaches(k[1], f)), None)
        if at is None:
            kept.append((code, f))
        else:
            kept[at] = (code, _one([kept[at][1], f]))
    return kept


def _reaches(earlier: Finding, later: Finding) -> bool:
    if earlier.first_step is None or later.first_step is None or earlier.attempt != later.attempt:
        return False
    lasts = later.first_step <= (earlier.last_step or earlier.first_step) + 1
    return lasts and set(earlier.ranks) == set(later.ranks) and earlier.severity == later.severity


def _one(findings: list[Finding]) -> Finding:
    """The gravest of them speaks (the first of equals), the others add their evidence."""
    base = min(findings, key=lambda f: SEVERITIES.index(f.severity))
    if len(findings) == 1:
        return base
    others = [f for f in findings if f is not base]
    names = list(dict.fromkeys(f.subject for f in others if f.subject and f.subject != base.subject))
    rest = f", {len(names) - NAMED_SUBJECTS} more" if len(names) > NAMED_SUBJECTS else ""
    also = f" (also {', '.join(names[:NAMED_SUBJECTS])}{rest})" if names else ""
    last = [f.last_step for f in findings if f.last_step is not None]
    return replace(
        base, summary=base.summary + also, evidence=_limited([e for f in [base, *others] for e in f.evidence]),
        last_step=max(last, default=None),
        cannot_conclude=tuple(dict.fromkeys(c for f in [base, *others] for c in f.cannot_conclude)),
    )  # fmt: skip


def _limited(evidence: list[Evidence]) -> tuple[Evidence, ...]:
    distinct = list(dict.fromkeys(evidence))
    if len(distinct) <= EVIDENCE_LIMIT:
        return tuple(distinct)
    left = len(distinct) - EVIDENCE_LIMIT
    return (*distinct[:EVIDENCE_LIMIT], Evidence(None, None, "further evidence", f"{left} more of the same kind"))


def incident_id(code: str, f: Finding) -> str:
    """The same fault of the same run has the same id at every reading."""
    said = json.dumps([sorted(f.ranks), f.first_step, f.attempt, f.subject])
    return f"{code}-{hashlib.sha256(said.encode()).hexdigest()[:8]}"


def _order(incident: Incident) -> tuple[int, int, int, str, str]:
    f = incident.finding
    first = -1 if f.first_step is None else f.first_step  # without a step: there from the start
    return (SEVERITIES.index(f.severity), f.attempt, first, incident.reason_code, incident.id)
