"""EVAL_MODE_TRAINING: which ranks and steps, and the models that are in eval mode on purpose."""

from __future__ import annotations

from typing import Any

from kit.rows import Rows
from tdbg.aggregator.detectors import eval_mode_training
from tdbg.aggregator.findings import Finding


def _rows(*changes: dict[str, Any], ranks: tuple[int, ...] = (0, 1)) -> Rows:
    rows = Rows()
    for rank in (0, 1):
        for step in range(1, 21):
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1)
        rows.add("mode", rank=rank, step=1, backwards=1, model_type="Net")
    for change in changes:
        for rank in ranks:
            rows.add("mode", **{"rank": rank, "backwards": 1, "in_eval": 1, "sensitive": 2, "names": "a,b",
                                "model_type": "Net", "before": change["step"] - 1} | change)  # fmt: skip
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(eval_mode_training)
    assert outcomes == {"EVAL_MODE_TRAINING": outcome}
    return [f for _, f in found]


def test_names_model_ranks_and_steps() -> None:
    (found,) = _found(_rows({"step": 9}))
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((0, 1), 9, 8, 20)
    assert (found.subject, found.severity, found.evidence_state) == ("Net", "warning", "OBSERVED")
    assert [f.ranks for f in _found(_rows({"step": 9}, ranks=(1,)))] == [(1,)]


def test_ends_where_it_is_in_train_mode_again() -> None:
    (found,) = _found(_rows({"step": 9}, {"step": 12, "in_eval": 0}))
    assert (found.first_step, found.last_step) == (9, 11)


def test_a_backward_in_train_mode_or_a_part_in_train_mode_makes_it_none() -> None:
    assert _found(_rows({"step": 9, "backwards": 2}), "CLEAR") == []
    assert _found(_rows({"step": 9, "training": 1}), "CLEAR") == []


def test_from_the_start_it_is_a_warning_unless_layers_are_frozen() -> None:
    for frozen, severity in ((0, "warning"), (4, "note")):
        rows = _rows({"step": 1, "before": 0, "model": 1, "frozen": frozen})
        assert [(f.severity, f.first_step, f.last_good_step) for f in _found(rows)] == [(severity, 1, None)]
    assert [f.severity for f in _found(_rows({"step": 9, "frozen": 4}))] == ["warning"]


def test_without_dropout_or_normalisation_it_is_a_note() -> None:
    assert [f.severity for f in _found(_rows({"step": 9, "sensitive": 0, "names": ""}))] == ["note"]


def test_a_silent_rank_keeps_it_from_being_clear() -> None:
    outcomes, _ = _rows().judge(eval_mode_training, world_size=3, missing_ranks=(2,))
    assert outcomes == {"EVAL_MODE_TRAINING": "INSUFFICIENT_EVIDENCE"}
