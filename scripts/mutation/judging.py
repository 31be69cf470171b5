"""Whether what tdbg said of a job is right: against the recipe's truth, in words."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from .recipes import Case, Truth

FULL, GOVERNED = "full", "governed"


@dataclass
class Said:
    """What tdbg said of one job; `watched`: the steps at which every rank ran the heavy passes."""

    verdict: dict[str, Any]
    watched: list[int]
    last_step: int

    @property
    def alarms(self) -> list[dict[str, Any]]:
        return [i for i in self.verdict["incidents"] if i["severity"] != "note"]


@dataclass
class Result:
    """One job, judged. `wrong` holds words of MISSED, RANKS, STEP, SUBJECT, INTERVAL, ALARM, NOT-RUN, QUALITY."""

    name: str
    kind: str
    mode: str
    about: str
    seconds: float
    wrong: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    true_alarms: int = 0
    false_alarms: int = 0
    exact: bool | None = None  # of the first step; None where the truth has no step
    run: str = ""

    @property
    def word(self) -> str:
        return "+".join(self.wrong) or "RIGHT"


def score(case: Case, mode: str, said: Said, result: Result) -> None:
    truth = case.truth or Truth(())
    known = {*truth.codes, *truth.allow}
    for i in said.alarms:
        right = i["reason_code"] in known
        result.true_alarms += right
        result.false_alarms += not right
        if not right:
            result.wrong.append("ALARM") if "ALARM" not in result.wrong else None
            result.details.append(f"not so: {describe(i)}: {i['summary']}")
    quality = said.verdict["data_quality"]
    if not quality["complete"] and case.kind != "RANK_FAILED":
        result.wrong.append("QUALITY")
        result.details += quality["warnings"]
    for i in said.verdict["incidents"]:
        if i["severity"] == "critical" and i["evidence_state"] != "OBSERVED":
            result.wrong.append("ALARM")
            result.details.append(f"critical on {i['evidence_state']} evidence: {describe(i)}")
    if case.truth is not None:
        find(truth, mode, said, result)


def find(truth: Truth, mode: str, said: Said, result: Result) -> None:
    """The incident that fits the truth best, and what is wrong with it."""
    if mode == GOVERNED and truth.once and truth.step not in said.watched:
        truth = replace(truth, codes=(*truth.codes, *truth.allow), subject="")
    tried = [wrongs(truth, mode, said, i) for i in said.verdict["incidents"] if i["reason_code"] in truth.codes]
    unwatched = truth.step is not None and not any(s >= truth.step for s in said.watched)
    heard = truth.mild or unwatched or any(i["reason_code"] in {*truth.codes, *truth.allow} for i in said.alarms)
    if not tried or not heard:
        result.wrong.append("MISSED")
        result.details.append(f"looked for {truth.codes}, ranks {truth.ranks}, step {truth.step}")
        result.details += [f"{v['reason_code']} says {v['outcome']}: {v['why']}"
                           for v in said.verdict["verdicts"] if v["reason_code"] in truth.codes]  # fmt: skip
        return
    wrong, exact, text = min(tried, key=lambda t: len(t[0]))
    result.wrong += wrong
    result.exact = exact
    if wrong:
        result.details.append(f"looked for ranks {truth.ranks}, step {truth.step}, subject {truth.subject!r}; {text}")


def wrongs(truth: Truth, mode: str, said: Said, i: dict[str, Any]) -> tuple[list[str], bool | None, str]:
    """(what is wrong with it, whether its step is exact, the incident in a line)."""
    wrong: list[str] = []
    # between two watched steps the reduction has spread it: all ranks are named, and that the origin is not known
    open_ranks = mode == GOVERNED and any("on which rank" in c for c in i.get("cannot_conclude", ()))
    if truth.ranks is not None and sorted(i["ranks"]) != sorted(truth.ranks) and not open_ranks:
        wrong.append("RANKS")
    if truth.subject and not re.search(truth.subject, i["subject"] or ""):
        wrong.append("SUBJECT")
    exact = None
    if truth.step is not None:
        first, good = i["first_step"], i["last_good_step"]
        exact = first == truth.step
        if mode == FULL and not exact:
            wrong.append("STEP")
        if first is None or not (good or 0) < truth.step <= first:
            wrong.append("INTERVAL")
        elif mode == GOVERNED:
            due = next((s + truth.after for s in said.watched if s + truth.after >= truth.step), said.last_step)
            if first > max(due, truth.step):
                wrong.append("LATE")
    return wrong, exact, f"{describe(i)} last good {i['last_good_step']}: {i['summary']}"


def describe(i: dict[str, Any]) -> str:
    return f"{i['reason_code']} {i['severity']} ranks {i['ranks']} step {i['first_step']} {i['subject']}"
