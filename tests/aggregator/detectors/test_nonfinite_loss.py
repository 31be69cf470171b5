"""NONFINITE_LOSS: where it began, and the overflow that a loss scaler skips."""

from __future__ import annotations

from kit.rows import Rows
from tdbg.aggregator.detectors import nonfinite_loss
from tdbg.aggregator.findings import Finding


def _rows(bad: dict[int, list[int]], steps: int = 20, scale: float = 1.0, skip: bool = False) -> Rows:
    """Losses of three ranks, not finite at the given steps of each."""
    rows = Rows()
    for rank in range(3):
        for step in range(1, steps + 1):
            hit = step in bad.get(rank, [])
            rows.add("loss", rank=rank, step=step, backwards=2, total=float("inf") if hit else 1.0, nonfinite=int(hit),
                     first_nonfinite=1 if hit else -1, scale=scale)  # fmt: skip
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=2, skipped=hit and skip)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(nonfinite_loss)
    assert outcomes == {"NONFINITE_LOSS": outcome}
    return [f for _, f in found]


def test_names_the_ranks_where_it_began_and_not_those_that_followed() -> None:
    (found,) = _found(_rows({1: [7, 8, 9], 0: [8, 9], 2: [8, 9]}))
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((1,), 7, 6, 9)
    assert "ranks 0, 2 followed at step 8" in found.summary
    assert [(e.rank, e.metric, e.value) for e in found.evidence] == [(1, "loss, micro-step 2 of 2", "inf")]


def test_ranks_that_begin_at_one_step_are_named_together() -> None:
    assert [(f.ranks, f.first_step) for f in _found(_rows({0: [1], 2: [1, 2]}))] == [((0, 2), 1)]


def test_finite_losses_are_clear() -> None:
    assert _found(_rows({}), "CLEAR") == []


def test_steps_that_a_scaler_skips_while_it_settles_are_no_finding() -> None:
    settling = {0: [1, 2, 3], 1: [1, 2, 3], 2: [1, 2, 3]}
    assert _found(_rows(settling, scale=65536.0, skip=True), "CLEAR") == []
    assert [f.first_step for f in _found(_rows(settling, scale=65536.0, skip=False))] == [1]
    assert [f.first_step for f in _found(_rows(settling, scale=1.0, skip=True))] == [1]


def test_a_scaler_that_never_settles_is_a_finding_from_the_first_of_the_row() -> None:
    (found,) = _found(_rows({1: [2, *range(6, 16)]}, scale=2.0, skip=True))
    assert (found.ranks, found.first_step, found.last_good_step) == ((1,), 6, 5)
    assert _found(_rows({1: [2, *range(6, 15)]}, scale=2.0, skip=True), "CLEAR") == []


def test_a_step_in_progress_under_a_scaler_may_still_be_skipped() -> None:
    rows = _rows({1: [20]}, scale=2.0)
    rows.connection.execute("DELETE FROM step WHERE step = 20")
    assert _found(rows, "CLEAR") == []


def test_a_loss_that_the_program_left_out_of_the_update_is_a_note() -> None:
    rows = _rows({1: [7, 15]})
    assert [f.severity for f in _found(rows)] == ["critical"]  # nobody saw what the update got
    for rank in range(3):
        rows.add("grad", rank=rank, step=7, stage="reduced", valid=True)
    (found,) = _found(rows)
    assert (found.ranks, found.first_step, found.severity) == ((1,), 7, "note")
    rows.add("param", rank=1, step=9, stage="end", nonfinite=[0])
    assert [f.severity for f in _found(rows)] == ["critical"]


def test_a_loss_that_stays_non_finite_was_not_left_out() -> None:
    rows = _rows({1: [7, 8]})
    for rank in range(3):
        rows.add("grad", rank=rank, step=7, stage="reduced", valid=True)
    assert [f.severity for f in _found(rows)] == ["critical"]


def test_says_when_nobody_looked_at_the_step_before() -> None:
    rows = _rows({0: [7], 1: [7], 2: [7]})
    assert ["parameter of step 6" in c and "on which rank" in c for c in _found(rows)[0].cannot_conclude] == [True]
    assert "on which rank" not in _found(_rows({0: [], 1: [7], 2: []}))[0].cannot_conclude[0]
    rows.add("param", rank=0, step=6, stage="end", generation=1)
    assert _found(rows)[0].cannot_conclude == ()


def test_a_loss_whose_own_gradients_were_finite_was_used_and_is_a_warning() -> None:
    rows = _rows({1: [7]})
    for rank in range(3):
        rows.add("grad", rank=rank, step=7, stage="reduced", valid=True)
        rows.add("grad", rank=rank, step=7, stage="local", valid=True)
    (found,) = _found(rows)
    assert (found.ranks, found.first_step, found.severity) == ((1,), 7, "warning")
    rows.connection.execute("UPDATE grad SET nonfinite = [0] WHERE stage = 'local' AND rank = 1")
    assert [f.severity for f in _found(rows)] == ["note"]


def test_the_operation_that_gave_it_first_is_evidence() -> None:
    rows = _rows({1: [7]})
    rows.add("birth", rank=1, step=7, op="log", shown="result", near="head.weight")
    rows.add("birth", rank=1, step=7, micro=1, op="exp", shown="result")  # the next loss of the step: not the first
    (found,) = _found(rows)
    assert [(e.metric, e.value) for e in found.evidence[1:]] == [
        ("operation of the forward that gave NaN first", "log, next to head.weight")
    ]


def test_what_gave_it_to_an_operation_is_said() -> None:
    rows = _rows({1: [7]}).add("birth", rank=1, step=7, op="addmm", shown="input", fed_by="div", near="head.weight")
    assert _found(rows)[0].evidence[1].value == "addmm, next to head.weight, given by div"


def test_a_graph_that_could_not_be_read_is_said() -> None:
    rows = _rows({1: [7]}).add("birth", rank=1, step=7, reason="saved tensors lie behind hooks in this step")
    (found,) = _found(rows)
    assert len(found.evidence) == 1
    assert "saved tensors lie behind hooks" in found.cannot_conclude[-1]


def _masked(supervised: int, loader: int = 0) -> Finding:
    """NaN on rank 1 at step 7, whose batch has so many supervised labels."""
    rows = _rows({1: [7]})
    for step in range(1, 21):
        rows.add("batch", rank=1, step=step, index=step - 1, backwards=2 * (step - 1))
    rows.add("labels", rank=1, step=7, loader=loader, index=6, elements=64, supervised=supervised, ignored=-100)
    (found,) = _found(rows)
    return found


def test_a_batch_without_a_supervised_label_is_evidence() -> None:
    found = _masked(0)
    assert found.summary.startswith("the loss is inf on rank 1 at step 7; a batch of this step has no supervised label")
    assert "none of 64 (all are -100, which is ignored)" in [e.value for e in found.evidence]


def test_a_batch_of_an_evaluation_or_with_supervised_labels_is_none() -> None:
    assert "supervised" not in _masked(3).summary + _masked(0, loader=1).summary
