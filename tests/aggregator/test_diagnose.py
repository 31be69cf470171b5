"""The diagnosis: every code in one mode, one answer a mode, found ones in order, nothing missing called healthy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tdbg.aggregator.codes import CODES
from tdbg.aggregator.diagnose import Diagnosis, ModeFound, diagnose
from tdbg.aggregator.findings import Checked, DataQuality, Finding, Incident, RuleVerdict, Severity, Verdict
from tdbg.aggregator.modes import MODES
from tdbg.aggregator.outputs import json as as_json
from tdbg.aggregator.outputs.diagnosis import WIDTH, diagnosis

WHOLE = DataQuality(True, (), 0, (0, 1), {0: 9, 1: 9})
CLEAR = tuple(RuleVerdict(c, "CLEAR", "checked", Checked(9, 2)) for c in CODES)


def _incident(
    code: str, step: int | None, severity: Severity = "critical", attempt: int = 0, check: str = ""
) -> Incident:
    found = Finding((1,), step, f"{code} was seen", severity, attempt=attempt, next_check=check,
                    cannot_conclude=(f"why {code}",))  # fmt: skip
    return Incident(f"{code}-1", code, found)


def _verdict(*incidents: Incident, quality: DataQuality = WHOLE, unsure: tuple[str, ...] = ()) -> Verdict:
    said = {i.reason_code for i in incidents}
    rules = tuple(
        replace(r, outcome="INCIDENT") if r.reason_code in said
        else replace(r, outcome="INSUFFICIENT_EVIDENCE", why="too short") if r.reason_code in unsure else r
        for r in CLEAR
    )  # fmt: skip
    return Verdict("r", "/s/r", "finished", 2, 9, 1, quality, rules, incidents)


def _of(d: Diagnosis, name: str) -> ModeFound:
    return next(m for m in d.modes if m.mode.name == name)


def test_every_code_belongs_to_exactly_one_mode() -> None:
    assert Counter(c for m in MODES for c in m.codes) == Counter(list(CODES))


def test_modes_found_come_by_gravity_then_by_attempt_and_step() -> None:
    d = diagnose(_verdict(
        _incident("STRAGGLER", 2, "warning"), _incident("RANK_FAILED", 7), _incident("NONFINITE_LOSS", 5),
        _incident("OOM", 1, attempt=1), _incident("NOT_SEEDED", None, "note"),
    ))  # fmt: skip
    assert [m.mode.name for m in d.modes if m.state == "FOUND"] == [
        "non-finite", "crash", "out of memory", "slow training",
    ]  # fmt: skip
    assert d.outcome == "FAILURE"
    assert d.why.startswith("4 failure modes: non-finite, then crash")


def test_a_mode_with_notes_alone_is_advice_and_no_failure() -> None:
    d = diagnose(_verdict(_incident("NO_VALIDATION", None, "note")))
    assert d.outcome == "NOTHING_FOUND"
    assert _of(d, "metric error").state == "ADVICE"
    assert "Notes only" in diagnosis(d)


def test_a_mode_says_what_is_excluded_open_and_to_be_checked_next() -> None:
    d = diagnose(_verdict(_incident("NONFINITE_LOSS", 5, check="look at the batch"), unsure=("AMP_OVERFLOW",)))
    m = _of(d, "non-finite")
    assert {r.reason_code for r in m.excluded} == {"NONFINITE_INPUT", "NONFINITE_GRAD", "NONFINITE_PARAM"}
    assert [(r.reason_code, r.why) for r in m.unknown] == [("AMP_OVERFLOW", "too short")]
    assert m.cannot_conclude == ("why NONFINITE_LOSS",)
    assert m.next_checks == ("look at the batch",)
    text = diagnosis(d)
    for words in ("excluded: NONFINITE_INPUT", "(9 steps of 2 ranks)", "not decided: AMP_OVERFLOW: too short",
                  "cannot conclude: why NONFINITE_LOSS", "next: look at the batch", "NONFINITE_LOSS-1"):  # fmt: skip
        assert words in text


def test_a_mode_whose_incidents_name_no_check_gives_its_own() -> None:
    m = _of(diagnose(_verdict(_incident("OOM", 3))), "out of memory")
    assert m.next_checks == (m.mode.next_check,)


def test_an_abstention_keeps_a_mode_from_being_excluded() -> None:
    d = diagnose(_verdict(unsure=("STRAGGLER",)))
    assert _of(d, "slow training").state == "UNKNOWN"
    assert _of(d, "slow data").state == "EXCLUDED"
    assert "undecided in part: slow training" in d.why


@pytest.mark.parametrize("incidents", [(), (_incident("OOM", 3),), (_incident("NO_VALIDATION", None, "note"),)])
def test_an_incomplete_recording_is_said_first_and_is_never_nothing_found(incidents: tuple[Incident, ...]) -> None:
    d = diagnose(_verdict(*incidents, quality=DataQuality(False, ("rank 1 has no rows",))))
    assert d.outcome == ("FAILURE" if incidents and incidents[0].reason_code == "OOM" else "INCOMPLETE")
    assert "rank 1 has no rows" in diagnosis(d).splitlines()[1]
    assert "healthy" not in diagnosis(d)


def test_the_json_object_has_every_mode_in_the_order_of_the_text() -> None:
    d = diagnose(_verdict(_incident("OOM", 3)))
    o = as_json.diagnosis(d)
    assert (o["schema"], o["outcome"]) == ("tdbg.diagnose/1", "FAILURE")
    assert [m["mode"] for m in o["modes"]] == [m.mode.name for m in d.modes]
    assert len(o["modes"]) == len(MODES)
    assert o["modes"][0]["incidents"][0]["reason_code"] == "OOM"


def test_names_from_a_run_can_neither_act_on_the_terminal_nor_widen_it() -> None:
    evil = Incident("OOM-1", "OOM", Finding((0,), 1, "a\x1b[2J\u202e\r\n" + "x" * 10_000, next_check="\x9b31m"))
    text = diagnosis(diagnose(_verdict(evil)))
    assert all(line.isprintable() and len(line) <= WIDTH for line in text.splitlines())
