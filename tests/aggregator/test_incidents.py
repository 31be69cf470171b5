"""Findings -> incidents: grading, merging, order in time of non-finite values, stable ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tdbg.aggregator.findings import Evidence, Finding, Incident
from tdbg.aggregator.incidents import EVIDENCE_LIMIT, incident_id, incidents


def _finding(ranks: tuple[int, ...] = (1,), step: int | None = 5, **more: object) -> Finding:
    base = Finding(ranks, step, "summary", subject="w", evidence=(Evidence(ranks[0], step, "m", "1"),))
    return replace(base, **more)  # type: ignore[arg-type]


def _by_code(found: tuple[Incident, ...]) -> dict[str, Finding]:
    return {i.reason_code: i.finding for i in found}


def test_findings_of_one_event_become_one_incident_that_lists_the_subjects() -> None:
    several = [("PARAM_DESYNC", _finding(subject=s, last_step=n, evidence=(Evidence(1, 5, s, "x"),)))
               for n, s in enumerate("abcde")]  # fmt: skip
    (one,) = incidents(several)
    assert one.finding.subject == "a"
    assert [e.metric for e in one.finding.evidence] == list("abcde")
    assert one.finding.last_step == 4
    assert one.finding.summary == "summary (also b, c, d, 1 more)"


@pytest.mark.parametrize("other", [{"first_step": 6}, {"ranks": (2,)}, {"attempt": 1}])
def test_other_ranks_steps_or_attempts_stay_apart(other: dict[str, object]) -> None:
    assert len(incidents([("X", _finding()), ("X", _finding(**other))])) == 2  # type: ignore[arg-type]


def test_the_gravest_of_merged_findings_speaks() -> None:
    (one,) = incidents([("X", _finding(severity="note", summary="small")), ("X", _finding(summary="large"))])
    assert one.finding.severity == "critical"
    assert one.finding.summary.startswith("large")


def test_merged_evidence_is_limited_and_says_how_much_was_left_out() -> None:
    several = [("X", _finding(evidence=(Evidence(1, 5, f"m{n}", "x"),))) for n in range(EVIDENCE_LIMIT + 7)]
    (one,) = incidents(several)
    assert len(one.finding.evidence) == EVIDENCE_LIMIT + 1
    assert one.finding.evidence[-1].value == "7 more of the same kind"


def test_only_what_was_observed_is_critical_and_a_hypothesis_is_no_incident() -> None:
    found = _by_code(incidents([
        ("A", _finding(evidence_state="INFERRED")), ("B", _finding(evidence_state="UNKNOWN")),
        ("C", _finding(evidence_state="HYPOTHESIS")), ("D", _finding()),
        ("E", _finding(evidence_state="INFERRED", severity="note")),
    ]))  # fmt: skip
    assert {c: f.severity for c, f in found.items()} == {"A": "warning", "B": "warning", "D": "critical", "E": "note"}


def test_incidents_come_by_severity_then_by_step() -> None:
    found = incidents([
        ("A", _finding(step=1, severity="note")), ("B", _finding(step=9)), ("C", _finding(step=3)),
        ("D", _finding(step=None, severity="warning")), ("E", _finding(step=2, severity="warning")),
    ])  # fmt: skip
    assert [i.reason_code for i in found] == ["C", "B", "D", "E", "A"]


def test_an_id_is_stable_and_tells_faults_apart() -> None:
    assert incident_id("X", _finding((1, 2))) == incident_id("X", _finding((2, 1), summary="other words"))
    different = [_finding((2,)), _finding(step=6), _finding(subject="v"), _finding(attempt=1)]
    assert len({incident_id("X", f) for f in [_finding(), *different]}) == 5


def test_the_first_non_finite_value_stays_critical_and_the_rest_follow_it() -> None:
    found = _by_code(incidents([
        ("NONFINITE_PARAM", _finding((0, 1), 5)), ("NONFINITE_GRAD", _finding((1,), 5)),
        ("NONFINITE_LOSS", _finding((1,), 5)), ("NONFINITE_INPUT", _finding((1,), 5)),
    ]))  # fmt: skip
    assert found["NONFINITE_INPUT"].severity == "critical"
    for code in ("NONFINITE_LOSS", "NONFINITE_GRAD", "NONFINITE_PARAM"):
        assert found[code].severity == "note"
        assert found[code].summary.startswith("follows NONFINITE_INPUT at step 5: ")


def test_a_non_finite_parameter_makes_the_later_losses_followers() -> None:
    found = _by_code(incidents([("NONFINITE_LOSS", _finding((0, 1), 6)), ("NONFINITE_GRAD", _finding((1,), 5)),
                                ("NONFINITE_PARAM", _finding((0, 1), 5))]))  # fmt: skip
    assert {c: f.severity for c, f in found.items()} == {
        "NONFINITE_GRAD": "critical", "NONFINITE_PARAM": "note", "NONFINITE_LOSS": "note"}  # fmt: skip


def test_within_a_step_the_chain_is_not_followed_backwards_nor_across_ranks() -> None:
    backwards = incidents([("NONFINITE_GRAD", _finding((1,), 5)), ("NONFINITE_LOSS", _finding((2,), 5))])
    assert [i.finding.severity for i in backwards] == ["critical", "critical"]


def test_another_attempt_is_another_event() -> None:
    found = incidents([("NONFINITE_LOSS", _finding(step=5)), ("NONFINITE_GRAD", _finding(step=6, attempt=1))])
    assert [i.finding.severity for i in found] == ["critical", "critical"]


def test_what_began_after_the_first_was_over_does_not_follow_it() -> None:
    early = _finding((1,), 3, last_step=3)
    late = _finding((1,), 50, last_good_step=49)
    assert [i.finding.severity for i in incidents([("NONFINITE_INPUT", early), ("NONFINITE_LOSS", late)])] == [
        "critical", "critical"]  # fmt: skip


def test_a_check_made_at_some_steps_only_may_have_begun_with_the_first() -> None:
    early = _finding((1,), 3, last_step=3)
    late = _finding((0, 1), 16, last_good_step=2)
    found = _by_code(incidents([("NONFINITE_GRAD", early), ("NONFINITE_PARAM", late)]))
    assert found["NONFINITE_PARAM"].severity == "note"


def test_a_difference_that_reaches_further_tensors_of_the_same_ranks_is_one_incident():
    first = Finding((1,), 4, "a differs", subject="a", last_step=9)
    later = Finding((1,), 5, "b differs", subject="b", last_step=9)
    (one,) = incidents([("PARAM_DESYNC", first), ("PARAM_DESYNC", later)])
    assert (one.finding.first_step, one.finding.subject) == (4, "a")
    assert "also b" in one.finding.summary


def test_differences_of_other_ranks_or_after_the_first_was_over_stay_apart():
    first = Finding((1,), 4, "a differs", subject="a", last_step=9)
    others = Finding((2,), 5, "b differs", subject="b", last_step=9)
    after = Finding((1,), 20, "c differs", subject="c", last_step=22)
    assert len(incidents([("PARAM_DESYNC", f) for f in (first, others, after)])) == 3
    assert len(incidents([("HPARAM_DESYNC", f) for f in (first, Finding((1,), 5, "x", last_step=9))])) == 2
