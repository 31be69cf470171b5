"""PARAM_NEVER_UPDATED: what shows a cut or a swallowed update, and the many parameters that rest for good reasons."""

from __future__ import annotations

from kit.replicas import catalogue
from kit.rows import Rows
from tdbg.aggregator.detectors import param_never_updated
from tdbg.aggregator.findings import Finding

RANKS, STEPS = 2, 30


def _rows(l2: float = 1.0, still: bool = True, steps: int = STEPS, stops: int = 0, **tensor: object) -> Rows:
    """Three tensors; `side.weight`, the last, has gradients of `l2` and keeps its bits (from step `stops` on)."""
    rows = catalogue(Rows(), RANKS, "body.weight", "body.bias", "side.weight", **tensor)
    for rank in range(RANKS):
        rows.add("optim", rank=rank, step=1, class_name="SGD", lr=0.1, settings="{}", tensors=3)
        for step in range(1, steps + 1):
            rests = still and step >= stops
            digests = [100 * step + t if t < 2 or not rests else 7 for t in range(3)]
            rows.add("param", rank=rank, step=step, stage="end", generation=1, digest=digests)
            rows.add(
                "grad", rank=rank, step=step, stage="local", generation=1, l2=[1.0, 1.0, l2], valid=True, scale=1.0
            )
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1)
    return rows


def _ran(rows: Rows, calls: int, from_data: int) -> Rows:
    for rank in range(RANKS):
        rows.add("unreached", rank=rank, step=4, generation=1, calls=calls, from_data=from_data, backwards=3,
                 module="side", tensors=[2])  # fmt: skip
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(param_never_updated)
    assert outcomes == {"PARAM_NEVER_UPDATED": outcome}
    return [f for _, f in found]


def test_a_branch_that_runs_on_data_and_gets_no_gradient_is_cut_off() -> None:
    (found,) = _found(_ran(_rows(-1), 3, 3))
    assert (found.ranks, found.first_step, found.subject, found.severity) == ((0, 1), 1, "side.weight", "warning")


def test_a_module_that_did_not_run_is_a_note() -> None:
    assert [f.severity for f in _found(_ran(_rows(-1), 0, 0))] == ["note"]
    assert [f.severity for f in _found(_rows(-1))] == ["note"]  # nobody watched


def test_a_module_that_runs_on_what_others_made_and_is_not_used_is_a_note() -> None:
    assert [f.severity for f in _found(_ran(_rows(-1), 3, 0))] == ["note"]


def test_beside_frozen_parts_the_input_says_nothing() -> None:
    rows = _ran(_rows(-1), 3, 3)
    rows.connection.execute("UPDATE tensor SET trainable = FALSE WHERE index = 1")
    assert [f.severity for f in _found(rows)] == ["note"]


def test_a_gradient_that_comes_after_the_update_and_is_zeroed_again_is_none() -> None:
    """The output bias of a discriminator by differences: its own loss cancels it, the generator's does not."""
    rows = _rows(0.0)
    for rank in range(RANKS):
        for step in range(1, STEPS + 1):
            rows.add("grad", rank=rank, step=step, stage="reduced", micro=1, generation=1, l2=[-2.0] * 3, scale=1.0)
            rows.add("grad", rank=rank, step=step, stage="local", micro=1, generation=1, l2=[1.0] * 3, valid=True,
                     scale=1.0)  # fmt: skip
    assert [f.severity for f in _found(rows)] == ["note"]
    rows.connection.execute("UPDATE grad SET l2 = [1.0, 1.0, 1.0] WHERE stage = 'local' AND micro = 0")
    assert [f.severity for f in _found(rows)] == ["warning"]


def test_a_branch_that_was_taken_once_is_left_in_peace() -> None:
    rows = _ran(_rows(-1), 3, 3)
    rows.connection.execute("UPDATE grad SET l2 = [1.0, 1.0, 1.0] WHERE step = 25")
    assert _found(rows, "CLEAR") == []


def test_one_that_something_else_changes_is_left_in_peace() -> None:
    assert _found(_ran(_rows(-1, still=False), 3, 3), "CLEAR") == []


def test_frozen_parameters_are_left_in_peace() -> None:
    rows = _rows(-1)
    rows.connection.execute("UPDATE tensor SET trainable = FALSE WHERE index = 2")
    assert _found(rows, "CLEAR") == []


def test_a_gradient_of_exactly_zero_is_a_note() -> None:
    assert [f.severity for f in _found(_rows(0.0))] == ["note"]


def test_gradients_that_change_no_bit_are_a_warning() -> None:
    assert [(f.severity, f.subject) for f in _found(_rows())] == [("warning", "side.weight")]


def test_a_gradient_that_is_rounding_or_a_rate_of_zero_is_a_note() -> None:
    assert [f.severity for f in _found(_rows(1e-7))] == ["note"]
    rows = _rows()
    rows.connection.execute("UPDATE optim SET lr = 0")
    assert [f.severity for f in _found(rows)] == ["note"]


def test_half_precision_that_swallows_a_few_norms_is_a_note_and_most_weights_a_warning() -> None:
    assert [f.severity for f in _found(_rows(dtype="bfloat16"))] == ["note"]
    most = _rows(dtype="bfloat16")
    most.connection.execute("UPDATE tensor SET numel = 100 WHERE index = 2")
    assert [f.severity for f in _found(most)] == ["warning"]


def test_one_that_stops_while_it_still_gets_gradients() -> None:
    (found,) = _found(_rows(stops=5))
    assert (found.first_step, found.severity) == (6, "note")  # its updates may have become too small to show
    assert found.last_good_step == 5


def test_one_that_stops_with_its_gradients_was_frozen() -> None:
    rows = _rows(stops=5)
    rows.connection.execute("UPDATE grad SET l2 = [1.0, 1.0, -1.0] WHERE step >= 5")
    assert _found(rows, "CLEAR") == []


def test_a_tensor_that_is_in_no_model_is_stale_only_where_another_took_its_place() -> None:
    rows = _rows(-1)
    rows.connection.execute("UPDATE tensor SET name = 'optimizer0.group0.2', model = 1 WHERE index = 2")
    assert [f.severity for f in _found(rows)] == ["note"]
    for rank in range(RANKS):
        rows.add("tensor", rank=rank, generation=1, index=3, kind="param", name="side.weight", trainable=True,
                 optimizer=-1, numel=4)  # fmt: skip
    assert [f.severity for f in _found(rows)] == ["warning"]


def test_too_few_steps_say_nothing() -> None:
    assert _found(_ran(_rows(-1, steps=12), 3, 3), "INSUFFICIENT_EVIDENCE") == []
