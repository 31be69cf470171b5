"""The values that detectors make and outputs draw. All frozen: nothing flows back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

Severity = Literal["critical", "warning", "note"]
SEVERITIES: Final[tuple[Severity, ...]] = ("critical", "warning", "note")  # gravest first
EvidenceState = Literal["OBSERVED", "INFERRED", "HYPOTHESIS", "UNKNOWN"]
Outcome = Literal["INCIDENT", "CLEAR", "INSUFFICIENT_EVIDENCE", "NOT_APPLICABLE"]


@dataclass(frozen=True)
class Evidence:
    """One number that shows it: who, when, what was measured and what it should have been."""

    rank: int | None
    step: int | None
    metric: str
    value: str
    expected: str = ""


@dataclass(frozen=True)
class Finding:
    """One fact about ranks. A detector yields these; `verdict` turns them into incidents.

    `ranks` are those that the evidence sets apart. `first_step` is None where the fault has no step. `point` says at
    which point of the step it was seen (a key of `stages.POINTS`), where that has a meaning.
    """

    ranks: tuple[int, ...]
    first_step: int | None
    summary: str
    severity: Severity = "critical"
    evidence_state: EvidenceState = "OBSERVED"
    subject: str = ""
    last_good_step: int | None = None
    last_step: int | None = None
    attempt: int = 0
    evidence: tuple[Evidence, ...] = ()
    cannot_conclude: tuple[str, ...] = ()
    next_check: str = ""
    point: str = ""


@dataclass(frozen=True)
class Abstention:
    """A detector's way to say that it could not, or need not, judge. Yielded beside or instead of findings."""

    outcome: Literal["INSUFFICIENT_EVIDENCE", "NOT_APPLICABLE"]
    why: str


@dataclass(frozen=True)
class Checked:
    """How much a detector looked at; what CLEAR stands on."""

    steps: int = 0
    ranks: int = 0
    what: str = ""


@dataclass(frozen=True)
class Incident:
    """A finding with its code and a stable id, as people and programs see it."""

    id: str
    reason_code: str
    finding: Finding


@dataclass(frozen=True)
class RuleVerdict:
    """What one rule says about the run."""

    reason_code: str
    outcome: Outcome
    why: str
    checked: Checked = Checked()


@dataclass(frozen=True)
class DataQuality:
    """Whether the recording is whole. `warnings` are sentences; any of them keeps the run from being called healthy."""

    complete: bool
    warnings: tuple[str, ...] = ()
    dropped_events: int = 0
    ranks_seen: tuple[int, ...] = ()
    last_step: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Everything that tdbg says about a run."""

    run: str
    path: str
    status: Literal["running", "finished", "failed", "killed"]
    world_size: int
    steps: int
    attempts: int
    data_quality: DataQuality
    verdicts: tuple[RuleVerdict, ...]
    incidents: tuple[Incident, ...]
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """No incident above a note in a complete recording."""
        return self.data_quality.complete and all(i.finding.severity == "note" for i in self.incidents)
