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


def _part(step: int = 9, **values: Any) -> Rows:
    """A part is found in eval mode at a step, after an evaluation by loader 1."""
    turned = {"step": step, "in_eval": 0, "parts": "encoder", "turned": "encoder", "eval_loader": 1, "eval_iterator": 0}
    rows = _rows(turned | values)
    for rank in (0, 1):
        for index in range(3):
            rows.add("batch", rank=rank, loader=1, step=step, index=index, backwards=step - 1)
            rows.add("batch", rank=rank, loader=0, step=step, index=index, backwards=step - 1 + index)
    return rows


def test_a_part_left_in_eval_mode_by_an_evaluation_is_named() -> None:
    (found,) = _found(_part())
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((0, 1), 9, 8, 20)
    assert (found.subject, found.severity) == ("encoder", "warning")
    assert found.summary.startswith(
        "encoder in Net was trained in eval mode on ranks 0, 1 from step 9 on: 2 modules act"
    )
    rows = _part(turned="encoder,neck", parts="encoder,neck,stem").add("mode", rank=0, step=15, backwards=1)
    rows.add("mode", rank=1, step=15, backwards=1)
    assert [(f.subject, f.last_step) for f in _found(rows)] == [("encoder", 14)]


def test_a_part_in_eval_mode_is_left_alone_where_it_may_be_meant() -> None:
    for values in (
        {"turned": "", "before": 0},  # from the first update on
        {"turned": ""},  # it was so before, another one is in train mode again
        {"eval_loader": -1},  # no evaluation in between found it so
        {"eval_loader": 0},  # that pass fed training
        {"eval_iterator": 5},  # nothing is known of that pass
        {"sensitive": 0, "names": ""},  # nothing in it depends on the mode
    ):
        assert _found(_part(**values), "CLEAR") == [], values


def test_a_model_and_a_part_of_it_are_two_findings() -> None:
    rows = _part()
    for rank in (0, 1):
        rows.add("mode", rank=rank, step=15, backwards=1, in_eval=1, sensitive=2, before=14, model_type="Net")
    assert [(f.subject, f.first_step, f.last_step) for f in _found(rows)] == [("Net", 15, 20), ("encoder", 9, 14)]
