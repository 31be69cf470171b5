"""What every detector promises, tried on one healthy run and on one planted fault per reason code."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from kit.healthy import healthy
from kit.plants import PLANTS, Plant
from kit.rows import Rows
from tdbg.aggregator import detector
from tdbg.aggregator.findings import Finding
from tdbg.rankagent.tables import known_tables

RANKS = 4
DETECTORS = {code: module for module in detector.load() for code in detector.codes_of(module)}
PLANTED = sorted(set(PLANTS) & set(DETECTORS))


@pytest.fixture(scope="module")
def runs() -> dict[int, Rows]:
    """The healthy run with one rank, with RANKS of them and with one more; tests change them inside a transaction."""
    return {n: healthy(n) for n in (1, RANKS, RANKS + 1)}


@pytest.fixture
def rows(runs: dict[int, Rows]) -> Iterator[Rows]:
    yield from _borrowed(runs[RANKS])


@pytest.fixture
def larger(runs: dict[int, Rows]) -> Iterator[Rows]:
    yield from _borrowed(runs[RANKS + 1])


def _borrowed(rows: Rows) -> Iterator[Rows]:
    rows.connection.begin()
    yield rows
    rows.connection.rollback()


def _found(rows: Rows, code: str, plant: Plant, world_size: int = RANKS) -> list[Finding]:
    _, found = rows.judge(DETECTORS[code], world_size=world_size, **plant.facts)
    return [f for c, f in found if c == code]


def _core(found: list[Finding]) -> set[tuple[object, ...]]:
    return {(f.ranks, f.first_step, f.last_good_step, f.subject, f.severity, f.evidence_state) for f in found}


def test_every_code_of_a_detector_has_a_planted_fault() -> None:
    assert sorted(set(DETECTORS) - set(PLANTS)) == []


@pytest.mark.parametrize("module", detector.load(), ids=lambda m: m.__name__.rsplit(".", 1)[-1])
def test_is_silent_on_healthy_tables(runs: dict[int, Rows], module: ModuleType) -> None:
    for count in (1, RANKS, RANKS + 1):
        outcomes, found = runs[count].judge(module, world_size=count)
        assert found == []
        assert "INCIDENT" not in outcomes.values()


@pytest.mark.parametrize("module", detector.load(), ids=lambda m: m.__name__.rsplit(".", 1)[-1])
def test_abstains_on_empty_tables(module: ModuleType) -> None:
    outcomes, found = Rows().judge(module, world_size=RANKS)
    assert found == []
    assert set(outcomes.values()) <= {"INSUFFICIENT_EVIDENCE", "NOT_APPLICABLE"}


@pytest.mark.parametrize("code", PLANTED)
def test_finds_the_planted_fault_with_its_ranks_and_step(rows: Rows, code: str) -> None:
    plant = PLANTS[code]
    plant.apply(rows)
    expected = (plant.ranks or tuple(range(RANKS)), plant.first_step)
    assert (expected) in [(f.ranks, f.first_step) for f in _found(rows, code, plant)]


@pytest.mark.parametrize("code", PLANTED)
def test_renaming_ranks_moves_the_finding_and_changes_nothing_else(rows: Rows, code: str) -> None:
    plant = PLANTS[code]
    plant.apply(rows)
    before = _core(_found(rows, code, plant))
    new = {0: 3, 1: 0, 2: 1, 3: 2}
    for table in known_tables():
        rows.connection.execute(
            f'UPDATE "{table}" SET rank = CASE rank WHEN 0 THEN 3 ELSE rank - 1 END WHERE rank >= 0'
        )
    moved = {(tuple(sorted(new[r] for r in ranks)), *rest) for ranks, *rest in before}
    assert _core(_found(rows, code, plant)) == moved


@pytest.mark.parametrize("code", PLANTED)
def test_a_further_healthy_rank_adds_nothing(rows: Rows, larger: Rows, code: str) -> None:
    plant = PLANTS[code]
    plant.apply(rows)
    plant.apply(larger)
    few = _found(rows, code, plant)
    many = _found(larger, code, plant, RANKS + 1)
    assert len(few) == len(many)
    if plant.ranks is None:
        assert {f.ranks for f in many} == {tuple(range(RANKS + 1))}
    else:
        assert _core(few) == _core(many)


@pytest.mark.parametrize("gone", range(RANKS))
@pytest.mark.parametrize("code", PLANTED)
def test_removing_a_rank_never_turns_an_incident_into_clear(rows: Rows, code: str, gone: int) -> None:
    plant = PLANTS[code]
    plant.apply(rows)
    for table in known_tables():
        rows.connection.execute(f'DELETE FROM "{table}" WHERE rank = ?', [gone])
    seen = tuple(r for r in range(RANKS) if r != gone)
    facts = {"world_size": RANKS, "missing_ranks": (gone,), "ranks_seen": seen} | dict(plant.facts)
    outcomes, _ = rows.judge(DETECTORS[code], **facts)
    assert outcomes[code] != "CLEAR"
