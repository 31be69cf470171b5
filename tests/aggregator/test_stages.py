"""The first point of a step at which replicas part, what agreed before it, and what was not looked at."""

from __future__ import annotations

from typing import Any

import pytest

from kit.healthy import healthy
from kit.plants import sql
from kit.rows import Rows
from tdbg.aggregator.detectors import grad_desync, hparam_desync, optim_state_desync, param_desync
from tdbg.aggregator.findings import Incident
from tdbg.aggregator.incidents import incidents
from tdbg.aggregator.stages import placed

CHANGED = "[digest[1] + 1] || digest[2:]"


def _placed(rows: Rows) -> dict[str, Incident]:
    found: list[Any] = []
    for module in (grad_desync, hparam_desync, optim_state_desync, param_desync):
        found += rows.judge(module)[1]
    ask = rows.connection.execute
    return {i.reason_code: i for i in placed(incidents(found), lambda query, given: ask(query, given).fetchall())}


def _first(incident: Incident) -> str:
    return incident.finding.evidence[0].value


def _rate(step: int, rank: int) -> str:
    """From this step on the rank has another rate."""
    changed = f"SELECT * REPLACE ({step} AS step, 0.5 AS lr, 10000 AS seq) FROM optim WHERE rank = {rank}"
    return f"INSERT INTO optim BY NAME ({changed})"


PARTED = f"UPDATE param SET digest = {CHANGED} WHERE rank = 2 AND step >= 9 AND stage <> 'start'"
FAULTS = {
    "GRAD_DESYNC": (
        [f"UPDATE grad SET digest = {CHANGED} WHERE rank = 2 AND step >= 9 AND stage = 'reduced'"],
        "gradients as the optimizer gets them",
    ),
    "HPARAM_DESYNC": (
        [_rate(9, 2)],
        "the optimizer's settings",
    ),
    "OPTIM_STATE_DESYNC": (
        [f"UPDATE optim_state SET digest = {CHANGED} WHERE rank = 2 AND step >= 9"],
        "optimizer state before the update",
    ),
    "PARAM_DESYNC": ([], "parameters after the update"),
}


@pytest.mark.parametrize("code", FAULTS)
def test_names_the_first_point_and_what_agreed_before_it(code: str) -> None:
    rows = healthy(4)
    statements, point = FAULTS[code]
    sql(*statements, PARTED)(rows)
    found = _placed(rows)
    assert [c for c, i in found.items() if i.finding.severity == "critical"] == [code]
    assert found[code].finding.first_step == 9
    assert _first(found[code]).startswith(point)
    assert found["PARAM_DESYNC"].finding.severity == ("critical" if code == "PARAM_DESYNC" else "note")
    if code == "PARAM_DESYNC":
        assert "gradients as the optimizer gets them, the optimizer's settings" in _first(found[code])


def test_a_gradient_that_was_reduced_and_changed_afterwards_is_told_from_one_that_was_not_reduced() -> None:
    rows = healthy(4)
    sql(*FAULTS["GRAD_DESYNC"][0], PARTED)(rows)
    rows.connection.execute("DELETE FROM delivered")
    for rank in range(4):
        rows.add("delivered", rank=rank, pid=100 + rank, step=9, digest=[1, 2, 3, 4])
    said = _first(_placed(rows)["GRAD_DESYNC"])
    assert said.startswith("gradients as the optimizer gets them; before it agreed: ")
    assert "gradients after the reduction" in said
    rows.connection.execute("UPDATE delivered SET digest = [9] WHERE rank = 2")
    assert _first(_placed(rows)["GRAD_DESYNC"]).startswith("gradients after the reduction")


def test_what_was_not_looked_at_is_said() -> None:
    rows = healthy(4)
    sql("DELETE FROM grad", PARTED)(rows)
    said = _first(_placed(rows)["PARAM_DESYNC"])
    assert "not looked at: parameters before the update, gradients as the optimizer gets them" in said


def test_what_differs_already_is_not_called_equal() -> None:
    rows = healthy(4)
    sql(_rate(3, 1), PARTED)(rows)
    assert "settings" not in _first(_placed(rows)["PARAM_DESYNC"])
