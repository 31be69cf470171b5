"""RESUME_INCOMPLETE from rows: what tells a resume from other loads, and what came back in other ways."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import resume_incomplete

FILE = {"model": 2, "optimizer": 2, "scheduler": 40, "lr": 0.01, "counters": {"epoch": 3}}


def resumed(ranks: int = 2, held: Any = FILE, apply: tuple[str, ...] = ("optimizer",),
            entries: tuple[int, int] = (2, 2),
            position: int | None = None, attempt: int = 0, path: str = "/a/last.pt", params: int = 2, applied: int = 2,
            steps: int = 3, climb: int = 1, schedule: str = "StepLR", lr_made: float = 0.1) -> Rows:  # fmt: skip
    """Each rank loads a file before its first update, applies the weights and these parts, and goes on."""
    rows = Rows()
    for rank in range(ranks):
        me = {"rank": rank, "attempt": attempt, "step": 1}
        rows.add("checkpoint", **me, event="load", number=1, path=path, parts=json.dumps(held))
        rows.add("checkpoint", **me, event="apply", part="model", source=1, params=2, entries=applied)
        for part in apply:
            rows.add(
                "checkpoint", **me, event="apply", part=part, entries=2, position=40 if part == "scheduler" else -1
            )
        for nth in (1, 2):
            now = me | {"step": nth, "event": "update", "nth": nth}
            rows.add("checkpoint", **now, part="optimizer", params=params, covered=applied, entries=entries[nth - 1],
                     class_name="AdamW")  # fmt: skip
            if position is not None:
                at = position + climb * (nth - 1)
                rows.add("checkpoint", **now, part="scheduler", position=at, lr=lr_made, class_name=schedule)
        for step in range(1, steps + 1):
            rows.add("step", rank=rank, attempt=attempt, step=step)
            rows.add("optim", rank=rank, attempt=attempt, step=step, lr=0.1 / step)
            if position is not None:
                rows.add("schedule", rank=rank, attempt=attempt, step=step, position=position + climb * (step - 1))
    return rows


def judge(rows: Rows, **facts: Any) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(resume_incomplete, **facts)
    return outcomes["RESUME_INCOMPLETE"], [f for _, f in found]


def parts(rows: Rows) -> list[tuple[str, str]]:
    return [(f.subject, f.severity) for f in judge(rows)[1]]


def saved(rows: Rows, path: str = "/a/last.pt", **more: Any) -> Rows:
    row = {"rank": 0, "event": "save", "path": path, "time_ns": 1, "backwards": 40, "position": -1, "parts": "{}"}
    return rows.add("checkpoint", **(row | more))


def test_a_complete_resume_is_clear() -> None:
    assert judge(resumed(apply=("optimizer", "scheduler"), position=40)) == ("CLEAR", [])


def test_the_scheduler_that_begins_again() -> None:
    outcome, (found,) = judge(resumed(position=0))
    assert outcome == "INCIDENT"
    assert (found.subject, found.severity, found.ranks, found.first_step) == ("scheduler", "warning", (0, 1), 1)
    assert any(e.value == "0" and e.expected == "40 (in the file)" for e in found.evidence)


def test_a_schedule_that_the_file_does_not_hold_is_known_by_its_counter() -> None:
    held = {"model": 2, "optimizer": 2, "counters": {"step": 48}}
    (found,) = judge(resumed(held=held, position=0))[1]
    assert found.subject == "scheduler"
    assert "the file holds no state of the scheduler" in found.summary
    assert parts(resumed(held=held | {"counters": {"step": 0}}, position=0)) == []


@pytest.mark.parametrize(
    "more",
    [
        {"position": 40},  # rebuilt with last_epoch, or stepped up to it
        {"position": 0, "climb": 20},  # told by step(epoch)
        {"position": 0, "schedule": "LambdaLR", "lr_made": 0.0101},  # its function begins later
        {"position": 0, "climb": 0},  # never stepped so far
        {"position": None},  # no scheduler
    ],
)
def test_a_schedule_that_came_back_without_load_state_dict(more: dict[str, Any]) -> None:
    assert parts(resumed(**more)) == []


def test_a_scheduler_that_changes_no_rate_is_a_note() -> None:
    rows = resumed(position=0)
    rows.connection.execute("UPDATE optim SET lr = 0.1")
    assert parts(rows) == [("scheduler", "note")]


def test_optimizer_state_that_was_forgotten() -> None:
    (found,) = judge(resumed(apply=("scheduler",), entries=(0, 2), position=40))[1]
    assert (found.subject, found.severity) == ("optimizer", "warning")


@pytest.mark.parametrize("entries", [(0, 0), (2, 2)])
def test_an_optimizer_without_state_or_with_state_that_came_in_another_way(entries: tuple[int, int]) -> None:
    assert parts(resumed(apply=("scheduler",), entries=entries, position=40)) == []


def test_one_update_does_not_show_whether_the_optimizer_keeps_state() -> None:
    rows = resumed(apply=("scheduler",), entries=(0, 2), position=40)
    rows.connection.execute("DELETE FROM checkpoint WHERE nth = 2")
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_weights_alone_are_a_resume_where_an_earlier_attempt_saved_them() -> None:
    weights = {"model": 2}
    assert judge(resumed(held=weights, apply=(), entries=(0, 2), attempt=1)) == ("NOT_APPLICABLE", [])
    (found,) = judge(saved(resumed(held=weights, apply=(), entries=(0, 2), attempt=1)))[1]
    assert (found.subject, found.ranks, found.attempt) == ("optimizer", (0, 1), 1)
    untrained = saved(resumed(held=weights, apply=(), entries=(0, 2), attempt=1), backwards=0)
    assert judge(untrained)[1] == []  # initial weights that every attempt shares


def test_fine_tuning_from_a_whole_checkpoint_is_no_alarm() -> None:
    assert judge(resumed(apply=(), entries=(0, 2), position=0)) == ("INSUFFICIENT_EVIDENCE", [])
    assert judge(resumed(apply=(), entries=(0, 2), held={"model": 2})) == ("NOT_APPLICABLE", [])
    part = resumed(apply=(), entries=(0, 2), params=4)  # a backbone: the head is new
    assert judge(part)[1] == []


@pytest.mark.parametrize(("epoch", "told"), [(4, True), (0, False), (3, False)])
def test_counters_that_go_on_from_the_file_tell_a_resume(epoch: int, told: bool) -> None:
    rows = resumed(apply=(), entries=(0, 2))
    for rank in range(2):
        saved(
            rows, rank=rank, step=3, time_ns=10**12, path="/a/last.pt", parts=json.dumps({"counters": {"epoch": epoch}})
        )
    assert bool(judge(rows)[1]) is told


def test_a_sampler_that_goes_on_at_a_later_epoch_tells_a_resume_and_an_early_one_is_noted() -> None:
    def passes(rows: Rows, epoch: int) -> Rows:
        for rank in range(2):
            rows.add("sampler", rank=rank, step=1, event="iter", epoch=epoch, shuffle=True)
        return rows

    assert parts(passes(resumed(apply=(), entries=(0, 2)), 4)) == [("optimizer", "warning")]
    assert parts(passes(resumed(), 4)) == []
    assert parts(passes(resumed(), 0)) == [("sampler", "note")]


@pytest.mark.parametrize(("held", "outcome"), [
    ({"model": 2}, "NOT_APPLICABLE"),
    ({"model": 2, "counters": {"epoch": 0}}, "NOT_APPLICABLE"),
    ({"model": 2, "counters": {"step": 21}}, "INSUFFICIENT_EVIDENCE"),
    ({"model": 2, "rng": True}, "INSUFFICIENT_EVIDENCE"),
])  # fmt: skip
def test_weights_of_a_training_loaded_alone_are_left_open(held: dict[str, Any], outcome: str) -> None:
    assert judge(resumed(held=held, apply=(), entries=(0, 2))) == (outcome, [])


def test_random_streams_alone_are_a_note() -> None:
    rows = resumed()
    for rank in range(2):
        rows.add("rng", rank=rank, step=2, moved="torch:forward")
    assert parts(rows) == [("rng", "note")]
    rows = resumed(apply=("optimizer", "rng"))
    rows.add("rng", rank=0, step=2, moved="torch:forward")
    assert parts(rows) == []


def test_a_scaler_that_begins_again() -> None:
    def scaled(rows: Rows) -> Rows:
        for rank in range(2):
            rows.add("checkpoint", rank=rank, step=1, event="update", part="scaler", nth=1, class_name="GradScaler")
        return rows

    assert parts(scaled(resumed())) == [("scaler", "warning")]
    assert parts(scaled(resumed(apply=("optimizer", "scaler")))) == []


def test_weights_whose_names_do_not_match_were_not_loaded() -> None:
    assert parts(resumed(applied=0)) == [("model", "warning")]


def test_names_only_the_ranks_that_lack_it() -> None:
    rows = resumed(ranks=3, apply=("optimizer", "scheduler"), position=40)
    rows.connection.execute("DELETE FROM checkpoint WHERE rank = 1 AND event = 'apply' AND part = 'optimizer'")
    rows.connection.execute("UPDATE checkpoint SET entries = 0 WHERE rank = 1 AND part = 'optimizer' AND nth = 1")
    (found,) = judge(rows)[1]
    assert (found.ranks, found.subject) == ((1,), "optimizer")


def test_a_run_without_checkpoints_and_one_of_a_version_that_saw_none() -> None:
    rows = Rows().add("step", rank=0, step=1)
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])
    rows.add("probe", rank=0, name="checkpoints", state="installed")
    assert judge(rows) == ("NOT_APPLICABLE", [])
