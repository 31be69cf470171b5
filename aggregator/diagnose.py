"""What kind of failure a run shows: its verdict sorted by failure mode. `tdbg diagnose RUN`.

Deterministic: a function of the verdict alone. Every mode gets one answer, and no two answers are mixed up:

    FOUND           an incident of severity warning or critical speaks for it
    ADVICE          notes alone: follow-ups of another mode, or advice that a healthy run may carry
    EXCLUDED        each of its rules that applies was clear on what was recorded
    UNKNOWN         nothing was found, and at least one of its rules lacked evidence
    NOT_APPLICABLE  none of its rules applies to this run

Modes found come by gravity, then by the step at which they begin. That order is one in time, not of cause and effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .findings import SEVERITIES, DataQuality, Incident, RuleVerdict, Verdict
from .modes import MODES, Mode
from .wording import counted

State = Literal["FOUND", "ADVICE", "EXCLUDED", "UNKNOWN", "NOT_APPLICABLE"]
Outcome = Literal["FAILURE", "NOTHING_FOUND", "INCOMPLETE"]


@dataclass(frozen=True)
class ModeFound:
    """What the verdict says of one mode."""

    mode: Mode
    state: State
    incidents: tuple[Incident, ...]  # warning or critical, the gravest and earliest first
    notes: tuple[Incident, ...]
    excluded: tuple[RuleVerdict, ...]  # clear, with how much was checked
    unknown: tuple[RuleVerdict, ...]  # without enough evidence, with why
    cannot_conclude: tuple[str, ...]
    next_checks: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The modes in the order in which to read them. The best `outcome` is NOTHING_FOUND, never "healthy"."""

    verdict: Verdict
    outcome: Outcome
    why: str
    modes: tuple[ModeFound, ...]


def diagnose(v: Verdict) -> Diagnosis:
    """Sort a verdict by failure mode. Pure and cheap: nothing is asked of the run again."""
    modes = sorted((_mode(m, v) for m in MODES), key=_order)
    found = [m for m in modes if m.state == "FOUND"]
    return Diagnosis(v, *_outcome(v, found, modes), tuple(modes))


def _outcome(v: Verdict, found: list[ModeFound], modes: list[ModeFound]) -> tuple[Outcome, str]:
    quality = _lacking(v.data_quality)
    if found:
        names = ", then ".join(m.mode.name for m in found)
        return "FAILURE", f"{counted(len(found), 'failure mode')}: {names}" + (f"; {quality}" if quality else "")
    if quality:
        return "INCOMPLETE", f"nothing was found in what was recorded, but {quality}: this is no sign of health"
    clear, unsure = (sum(r.outcome == o for r in v.verdicts) for o in ("CLEAR", "INSUFFICIENT_EVIDENCE"))
    open_ = [m.mode.name for m in modes if m.state == "UNKNOWN"]
    undecided = f"; undecided in part: {', '.join(open_)}" if open_ else ""
    return "NOTHING_FOUND", f"{counted(clear, 'rule')} clear, {unsure} without enough evidence{undecided}"


def _lacking(q: DataQuality) -> str:
    return "" if q.complete else f"the recording is incomplete ({q.warnings[0] if q.warnings else 'rows were lost'})"


def _mode(mode: Mode, v: Verdict) -> ModeFound:
    mine = [i for i in v.incidents if i.reason_code in mode.codes]
    graver = tuple(sorted((i for i in mine if i.finding.severity != "note"), key=_rank))
    notes = tuple(sorted((i for i in mine if i.finding.severity == "note"), key=_rank))
    rules = [r for r in v.verdicts if r.reason_code in mode.codes]
    clear = tuple(r for r in rules if r.outcome == "CLEAR")
    unsure = tuple(r for r in rules if r.outcome == "INSUFFICIENT_EVIDENCE")
    state: State = (
        "FOUND" if graver else "ADVICE" if notes else "UNKNOWN" if unsure else "EXCLUDED" if clear else "NOT_APPLICABLE"
    )
    shown = graver or notes
    checks = tuple(dict.fromkeys(i.finding.next_check for i in shown if i.finding.next_check))
    return ModeFound(
        mode, state, graver, notes, clear, unsure,
        cannot_conclude=tuple(dict.fromkeys(c for i in shown for c in i.finding.cannot_conclude)),
        next_checks=checks or ((mode.next_check,) if graver else ()),
    )  # fmt: skip


def _rank(i: Incident) -> tuple[int, int, int, str]:
    f = i.finding
    return SEVERITIES.index(f.severity), f.attempt, -1 if f.first_step is None else f.first_step, i.id


def _order(m: ModeFound) -> tuple[int, tuple[int, int, int, str]]:
    """Found, then undecided ones, notes, what is excluded and what does not apply; found ones by gravity and time."""
    states: tuple[State, ...] = ("FOUND", "UNKNOWN", "ADVICE", "EXCLUDED", "NOT_APPLICABLE")
    first = _rank(m.incidents[0]) if m.incidents else (0, 0, MODES.index(m.mode), "")
    return states.index(m.state), first
