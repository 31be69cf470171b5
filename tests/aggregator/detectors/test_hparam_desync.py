"""HPARAM_DESYNC: settings in force at a step, from rows that are written on changes only."""

from __future__ import annotations

from kit.replicas import catalogue, losses, sweep
from kit.rows import Rows
from tdbg.aggregator.detectors import hparam_desync
from tdbg.aggregator.findings import Finding


def _rows(ranks: int = 3, steps: int = 6) -> Rows:
    rows = Rows()
    for rank in range(ranks):
        for step in range(1, steps + 1):
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1)
    return rows


def _set(rows: Rows, rank: int, step: int, lr: float, settings: str = '{"weight_decay": 0.01}', **more: object) -> None:
    rows.add(
        "optim",
        **({"rank": rank, "step": step, "class_name": "SGD", "lr": lr, "settings": settings, "tensors": 2} | more),
    )


def _found(rows: Rows, outcome: str = "INCIDENT", **facts: object) -> list[Finding]:
    outcomes, found = rows.judge(hparam_desync, **facts)
    assert outcomes == {"HPARAM_DESYNC": outcome}
    return [f for _, f in found]


def _same(ranks: int = 3, steps: int = 6) -> Rows:
    rows = _rows(ranks, steps)
    for rank in range(ranks):
        _set(rows, rank, 1, 0.1)
    return rows


def test_names_the_rank_that_alone_lowers_its_rate_and_how_long_it_lasted() -> None:
    rows = _same()
    _set(rows, 2, 4, 0.05)
    _set(rows, 2, 6, 0.1)
    (found,) = _found(rows)
    assert (found.ranks, found.subject, found.first_step, found.last_good_step, found.last_step) == (
        (2,),
        "lr",
        4,
        3,
        5,
    )
    assert [(e.rank, e.value, e.expected) for e in found.evidence] == [(2, "0.05", "0.1")]


def test_a_majority_that_changes_leaves_the_rank_that_did_not() -> None:
    rows = _same()
    for rank in (0, 2):
        _set(rows, rank, 4, 0.05)
    assert [(f.ranks, f.first_step) for f in _found(rows)] == [((1,), 4)]


def test_two_ranks_are_both_named() -> None:
    rows = _same(2)
    _set(rows, 0, 3, 0.2)
    (found,) = _found(rows)
    assert found.ranks == (0, 1)
    assert found.cannot_conclude


def test_a_setting_that_differs_or_is_missing_is_named() -> None:
    rows = _rows()
    _set(rows, 0, 1, 0.1, '{"eps": 1e-08, "weight_decay": 0.01}')
    _set(rows, 1, 1, 0.1, '{"eps": 1e-08, "weight_decay": 0.02}')
    _set(rows, 2, 1, 0.1, '{"weight_decay": 0.01}')
    found = {f.subject: f for f in _found(rows)}
    assert {s: (f.ranks, f.first_step, f.last_good_step) for s, f in found.items()} == {
        "eps": ((2,), 1, None),
        "weight_decay": ((1,), 1, None),
    }
    assert found["eps"].evidence[0].value == hparam_desync.ABSENT


def test_how_an_update_is_computed_is_only_a_note_and_one_number_has_one_value() -> None:
    rows = _rows()
    for rank, settings in enumerate(('{"momentum": 1, "foreach": true}', '{"momentum": 1.0, "foreach": null}')):
        _set(rows, rank, 1, 0.1, settings)
    assert [(f.subject, f.severity) for f in _found(rows)] == [("foreach", "note")]


def test_settings_that_are_no_json_are_compared_as_a_whole() -> None:
    rows = _rows()
    for rank, settings in enumerate(('{"eps": NaN}', '{"eps": NaN}', '{"eps": 1}')):
        _set(rows, rank, 1, 0.1, settings)
    assert {f.ranks for f in _found(rows)} == {(2,)}


def test_a_rank_that_stopped_before_the_change_does_not_differ() -> None:
    rows = _same()
    rows.connection.execute("DELETE FROM step WHERE rank = 2 AND step > 3")
    for rank in (0, 1):
        _set(rows, rank, 4, 0.05)
    assert _found(rows, "CLEAR") == []


def test_optimizers_of_another_class_or_size_are_not_compared() -> None:
    rows = _rows()
    for rank, name in enumerate(("SGD", "SGD", "Adam")):
        _set(rows, rank, 1, 0.1 + rank, class_name=name)
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []


def test_ranks_without_a_process_group_may_train_as_they_like() -> None:
    rows = catalogue(_same(), 3, "a", sharing="plain", peers="")
    _set(rows, 2, 4, 0.05)
    assert _found(rows, "NOT_APPLICABLE") == []


def test_one_recorded_rank_is_no_evidence_and_a_single_process_not_applicable() -> None:
    assert _found(_same(1), "INSUFFICIENT_EVIDENCE", world_size=2) == []
    assert _found(_same(1), "NOT_APPLICABLE", world_size=1) == []


def _clip(rows: Rows, rank: int, thresholds: dict[int, float]) -> None:
    for step, threshold in thresholds.items():
        rows.add("clip", rank=rank, step=step, max_norm=threshold, norm_type=2.0)


def test_a_clip_threshold_that_differs_is_found_at_its_first_step() -> None:
    rows = _same()
    for rank in range(3):
        _clip(rows, rank, {step: 0.5 if (rank, step) == (1, 3) else 1.0 for step in range(1, 7)})
    (found,) = _found(rows)
    assert (found.ranks, found.subject, found.first_step, found.last_step) == ((1,), "clip.max_norm", 3, 3)


def test_a_rank_that_never_clips_is_found_unless_its_probe_could_not_look() -> None:
    rows = _same()
    for rank in (0, 1):
        _clip(rows, rank, dict.fromkeys(range(1, 7), 1.0))
    assert {(f.ranks, f.evidence[0].value) for f in _found(rows)} == {((2,), hparam_desync.ABSENT)}
    rows.add("probe", rank=2, name="optimizer", state="disabled", reason="a test")
    assert _found(rows, "CLEAR") == []


def _unwrapped(own: bool = True) -> Rows:
    rows = catalogue(_same(3, 4), 3, "a", sharing="plain")
    _set(rows, 1, 3, 0.5)
    return losses(rows, 3, 4, own)


def test_unwrapped_ranks_that_share_nothing_may_have_settings_of_their_own() -> None:
    rows = _unwrapped()
    sweep(rows, "param", 1, {0: [1], 1: [2], 2: [3]}, "end")
    sweep(rows, "grad", 1, {0: [4], 1: [5], 2: [6]}, "reduced")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []


def test_unwrapped_ranks_whose_gradients_agree_though_their_losses_differ_train_one_model() -> None:
    rows = sweep(_unwrapped(), "grad", 1, {0: [4], 1: [4], 2: [4]}, "reduced")
    assert [(f.ranks, f.first_step) for f in _found(rows)] == [((1,), 3)]
    alike = sweep(_unwrapped(own=False), "grad", 1, {0: [4], 1: [4], 2: [4]}, "reduced")
    assert _found(alike, "INSUFFICIENT_EVIDENCE") == []  # the same batches from the same seed agree as well


def test_a_schedule_by_epochs_does_not_differ_when_join_has_made_the_epochs_unequal() -> None:
    rows = _same()
    for rank, step in enumerate((3, 4, 4)):
        _set(rows, rank, step, 0.05)
        rows.add("event", rank=rank, step=1, kind="join")
    assert [(f.ranks, f.first_step) for f in _found(rows)] == [((0,), 3)]
    for rank, step in enumerate((3, 4, 4)):
        rows.add("event", rank=rank, step=step, kind="join")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []


def _standing(rows: Rows, rank: int, step: int, position: int, class_name: str = "StepLR") -> None:
    rows.add("schedule", rank=rank, step=step, position=position, class_name=class_name, bad_epochs=-1, cooldown=-1)


def test_a_scheduler_that_only_one_rank_steps_is_a_note_until_the_rates_differ() -> None:
    rows = _same()
    for step in range(1, 6):
        for rank in range(3):
            _standing(rows, rank, step, step if rank == 1 else 1)
    (found,) = _found(rows)
    assert (found.ranks, found.subject, found.first_step) == ((1,), "scheduler.last_epoch", 2)
    assert (found.severity, found.last_good_step) == ("note", 1)
    _set(rows, 1, 5, 0.05)
    severities = {f.subject: f.severity for f in _found(rows)}
    assert severities == {"scheduler.last_epoch": "note", "lr": "critical"}


def test_schedulers_of_other_classes_and_equal_ones_are_silent() -> None:
    rows = _same()
    for step in range(1, 6):
        for rank in range(3):
            _standing(rows, rank, step, step)
            rows.add("schedule", rank=rank, scheduler=1, step=step, position=rank, class_name=f"Own{rank}")
    assert _found(rows, "CLEAR") == []


def _groups(rows: Rows, rank: int, *groups: tuple[int, float, int]) -> None:
    """(members, weight decay, parameters) of each group."""
    for number, (members, decay, count) in enumerate(groups):
        rows.add("optim", rank=rank, step=1, group=number, class_name="SGD", lr=0.1, tensors=count, members=members,
                 settings=f'{{"weight_decay": {decay}}}')  # fmt: skip


def test_parameters_that_are_in_other_groups_on_one_rank() -> None:
    rows = _rows()
    for rank in range(3):
        _groups(rows, rank, (5 if rank < 2 else 7, 0.1, 2 + rank // 2), (6 if rank < 2 else 4, 0.0, 2 - rank // 2))
    (found,) = _found(rows)
    assert (found.ranks, found.subject, found.first_step, found.severity) == ((2,), "param_groups", 1, "critical")


def test_groups_in_another_order_or_of_other_parameters_altogether_are_no_difference() -> None:
    rows = _rows()
    for rank in range(3):
        one, two = (5, 0.1, 2), (6, 0.0, 2)
        _groups(rows, rank, *((two, one) if rank == 1 else (one, two)))
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []
    stages = _rows()
    for rank in range(3):
        _groups(stages, rank, (5 + rank, 0.1, 2 + rank))
    assert _found(stages, "INSUFFICIENT_EVIDENCE") == []


def test_unwrapped_ranks_that_reduced_their_gradients_by_hand_train_one_model_whatever_became_of_it() -> None:
    rows = _unwrapped()
    sweep(rows, "grad", 1, {0: [4], 1: [5], 2: [6]}, "reduced")
    for rank in range(3):
        rows.add("delivered", rank=rank, step=1, generation=1, tensors=[0], reduction="by hand", ranks="0,1,2")
    assert [(f.ranks, f.first_step) for f in _found(rows)] == [((1,), 3)]
