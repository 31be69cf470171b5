"""The verdict: every code has an outcome, holes in the data are no CLEAR, a broken rule breaks nothing else."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kit.healthy import healthy
from kit.rows import Rows
from kit.runs import parts, record_dirs, write_run
from tdbg.aggregator import detector
from tdbg.aggregator.codes import CODES
from tdbg.aggregator.detector import Ruling
from tdbg.aggregator.findings import Finding, RuleVerdict, Verdict
from tdbg.aggregator.presence import Gap
from tdbg.aggregator.store import Store
from tdbg.aggregator.verdict import NO_RULE, judge, sober, tables_read
from tdbg.rankagent.readback import segments

Copy = Callable[[str], Path]


def _judge(run: Path, live: bool = False) -> Verdict:
    with Store(run, live) as store:
        return judge(store)


def _outcomes(v: Verdict) -> dict[str, str]:
    return {r.reason_code: r.outcome for r in v.verdicts}


def test_every_code_has_an_outcome_and_those_without_a_rule_are_not_clear(templates: Path) -> None:
    v = _judge(templates / "healthy")
    assert [r.reason_code for r in v.verdicts] == list(CODES)
    ruled = {c for m in detector.load() for c in detector.codes_of(m)}
    assert {r.reason_code for r in v.verdicts if r.why == NO_RULE} == set(CODES) - ruled
    assert all(r.outcome == "NOT_APPLICABLE" for r in v.verdicts if r.why == NO_RULE)


def test_a_healthy_run_is_healthy(templates: Path) -> None:
    for name in ("healthy", "unsealed"):
        v = _judge(templates / name)
        assert v.incidents == ()
        assert v.healthy
        assert _outcomes(v)["PARAM_DESYNC"] == "CLEAR"


@pytest.mark.parametrize("live", [False, True])
def test_a_fault_is_found_sealed_or_not(templates: Path, live: bool) -> None:
    found = [_judge(templates / name, live).incidents for name in ("faulty", "faulty-unsealed")]
    assert [i.reason_code for i in found[0]] == ["PARAM_DESYNC"]
    assert found[0][0].finding.ranks == (2,)
    assert [i.id for i in found[0]] == [i.id for i in found[1]]


@pytest.mark.parametrize("template", ["faulty", "faulty-unsealed"])
@pytest.mark.parametrize("rank", [0, 2])
def test_removing_a_ranks_files_never_clears_an_incident_nor_shows_health(
    run_of: Copy, template: str, rank: int
) -> None:
    run = run_of(template)
    for folder in [*record_dirs(run, rank), *(run / "tables").glob(f"*/rank={rank:05d}")]:
        shutil.rmtree(folder)
    v = _judge(run)
    assert _outcomes(v)["PARAM_DESYNC"] in ("INCIDENT", "INSUFFICIENT_EVIDENCE")
    assert "CLEAR" not in _outcomes(v).values()
    assert not v.healthy


@pytest.mark.parametrize("table", ["step", "param", "tensor"])
def test_removing_one_part_never_shows_health(run_of: Copy, table: str) -> None:
    run = run_of("faulty")
    for part in parts(run, table, rank=2):
        part.unlink()
    v = _judge(run)
    assert _outcomes(v)["PARAM_DESYNC"] in ("INCIDENT", "INSUFFICIENT_EVIDENCE")
    assert "CLEAR" not in _outcomes(v).values()
    assert not v.healthy


@pytest.mark.parametrize("which", [0, -1])
def test_removing_one_segment_never_shows_health(run_of: Copy, which: int) -> None:
    run = run_of("faulty-unsealed")
    segments(record_dirs(run, 2)[0])[which].unlink()
    v = _judge(run)
    assert _outcomes(v)["PARAM_DESYNC"] in ("INCIDENT", "INSUFFICIENT_EVIDENCE")
    assert not v.healthy


def test_damage_in_one_table_only_weakens_the_rules_that_read_it(run_of: Copy) -> None:
    run = run_of("healthy")
    parts(run, "optim", rank=1)[0].write_bytes(b"PAR1 gone")
    outcomes = _outcomes(_judge(run))
    assert outcomes["HPARAM_DESYNC"] == "INSUFFICIENT_EVIDENCE"
    assert outcomes["NONFINITE_LOSS"] == "CLEAR"


@pytest.fixture
def extra_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Puts one more file beside the detectors, and its code beside the codes, for this test only."""
    from tdbg.aggregator import detectors

    monkeypatch.setitem(CODES, "EXTRA_RULE", "found by the extra rule")
    made: list[str] = []
    detectors.__path__.append(str(tmp_path / "rules"))
    (tmp_path / "rules").mkdir()

    def add(text: str) -> None:
        (tmp_path / "rules" / "zz_extra.py").write_text(text)
        made.append(f"{detectors.__name__}.zz_extra")

    yield add
    detectors.__path__.pop()
    for name in made:
        sys.modules.pop(name, None)


RULE = '''"""An extra rule.

Reads     step
Says      nothing
Unknown   never
Blind to  all
Do        nothing
"""
from typing import NamedTuple
from tdbg.aggregator.findings import Finding
CODE = "EXTRA_RULE"
NEEDS = {"step": 1}
PARAMS = {}
SQL = "SELECT rank FROM step"
class Row(NamedTuple):
    rank: int
def findings(rows, run):
    yield Finding((0,), 3, "found")
'''


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (("yield Finding((0,), 3, \"found\")", "raise ValueError('no idea')"), "this rule failed: ValueError: no idea"),
        (("SELECT rank FROM step", "SELECT rank FROM nowhere"), "this rule failed: CatalogException: "),
        (("from typing import NamedTuple", "import nothing_of_that_name"), "this rule failed: ModuleNotFoundError: "),
        (("def findings", "def findings(:"), "this rule failed: SyntaxError: "),
        (("Blind to", "Never says"), "this rule failed: TypeError: "),
        (("Do  ", "Don't  "), "this rule failed: TypeError: "),
    ],
)  # fmt: skip
def test_a_rule_that_fails_is_reported_and_breaks_nothing_else(
    templates: Path, extra_rule: Callable[[str], None], harm: tuple[str, str], words: str
) -> None:
    extra_rule(RULE.replace(*harm))
    v = _judge(templates / "faulty")
    verdict = next(r for r in v.verdicts if r.reason_code == "EXTRA_RULE")
    assert verdict.outcome == "INSUFFICIENT_EVIDENCE"
    assert verdict.why.startswith(words)
    assert [w for w in v.data_quality.warnings if w.startswith("rule zz_extra failed: ")]
    assert not v.data_quality.complete
    assert [i.reason_code for i in v.incidents] == ["PARAM_DESYNC"]


def test_an_added_rule_is_asked_without_any_other_change(templates: Path, extra_rule: Callable[[str], None]) -> None:
    extra_rule(RULE)
    v = _judge(templates / "healthy")
    assert [(i.reason_code, i.finding.ranks) for i in v.incidents] == [("EXTRA_RULE", (0,))]


def test_clear_over_a_gap_and_a_hypothesis_are_insufficient_evidence() -> None:
    clear, guess = RuleVerdict("A", "CLEAR", "checked"), RuleVerdict("B", "INCIDENT", "maybe")
    ruling = Ruling((clear, guess), (("B", Finding((0,), 1, "maybe", "warning", "HYPOTHESIS")),))
    found = list(sober(ruling, [Gap("step", "rank 2 is missing")], {}))
    assert [v.outcome for v in found] == ["INSUFFICIENT_EVIDENCE", "INSUFFICIENT_EVIDENCE"]
    assert "rank 2 is missing" in found[0].why
    assert [v.outcome for v in sober(Ruling((clear,), ()), [], {})] == ["CLEAR"]


def test_an_empty_table_whose_probe_was_unavailable_says_why(tmp_path: Path) -> None:
    rows = Rows().add("step", rank=0, pid=100, step=1)
    rows.add("probe", rank=0, pid=100, name="optimizer", state="unavailable", reason="torch lacks a hook")
    v = _judge(write_run(tmp_path, rows))
    verdict = next(r for r in v.verdicts if r.reason_code == "HPARAM_DESYNC")
    assert verdict.outcome == "INSUFFICIENT_EVIDENCE"
    assert verdict.why.endswith("; probe optimizer was unavailable: torch lacks a hook")
    assert not [w for w in v.data_quality.warnings if "optimizer" in w]


def test_the_tables_that_a_rule_reads_through_a_view_are_known() -> None:
    module = ModuleType("m")
    module.SQL, module.NEEDS = "SELECT * FROM replica JOIN training_batch", {"step": 1}  # type: ignore[attr-defined]
    assert {"step", "param", "grad", "buffer", "tensor", "batch"} <= tables_read(module)


def test_a_single_rank_is_judged_without_cross_rank_rules(tmp_path: Path) -> None:
    v = _judge(write_run(tmp_path, healthy(ranks=1)))
    assert v.world_size == 1
    assert v.incidents == ()
    assert _outcomes(v)["PARAM_DESYNC"] == "NOT_APPLICABLE"
