"""NONFINITE_GRAD: the rank it was born on, before the reduction spread it, and what can't be said without that."""

from __future__ import annotations

from kit.replicas import catalogue
from kit.rows import Rows
from tdbg.aggregator.detectors import nonfinite_grad
from tdbg.aggregator.findings import Finding

RANKS = 3


def _rows(local: dict[int, list[int]], reduced: list[int], valid: bool = True, scale: float = 1.0) -> Rows:
    """Step 1 is finite; at step 2 `local` (by rank) and `reduced` (on all) list the tensors that are not."""
    rows = catalogue(Rows(), RANKS, "in", "mid", "out")
    for rank in range(RANKS):
        for step in (1, 2):
            own, all_of = (local.get(rank, []), reduced) if step == 2 else ([], [])
            row = {"rank": rank, "step": step, "generation": 1, "l2": [1.0] * 3, "scale": scale}
            rows.add("grad", **row, stage="local", nonfinite=own, valid=valid)
            rows.add("grad", **row, stage="reduced", nonfinite=all_of, valid=True)
            rows.add("loss", rank=rank, step=step, backwards=1)
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(nonfinite_grad)
    assert outcomes == {"NONFINITE_GRAD": outcome}
    return [f for _, f in found]


def test_names_the_rank_before_the_reduction_and_the_tensor_nearest_to_the_loss() -> None:
    (found,) = _found(_rows({1: [0, 1]}, [0, 1]))
    assert (found.ranks, found.first_step, found.last_good_step, found.subject) == ((1,), 2, 1, "mid")
    assert found.evidence[0].value == "mid, in"
    assert found.cannot_conclude == ()
    assert "already" not in found.summary


def test_says_when_the_loss_was_already_non_finite() -> None:
    rows = _rows({1: [2]}, [2])
    rows.connection.execute("UPDATE loss SET nonfinite = 1 WHERE rank = 1 AND step = 2")
    assert "the loss was already non-finite" in _found(rows)[0].summary


def test_without_own_gradients_all_ranks_are_named_and_the_origin_is_unknown() -> None:
    (found,) = _found(_rows({}, [1], valid=False))
    assert found.ranks == (0, 1, 2)
    assert "on which rank it was born" in found.cannot_conclude[0]


def test_finite_own_gradients_and_a_non_finite_reduced_one_point_behind_them() -> None:
    (found,) = _found(_rows({}, [1]))
    assert "every rank's own gradient was finite" in found.cannot_conclude[0]


def test_a_rank_whose_own_gradient_was_not_seen_is_said() -> None:
    rows = _rows({1: [2]}, [2])
    rows.connection.execute("UPDATE grad SET valid = FALSE WHERE rank = 0 AND stage = 'local'")
    (found,) = _found(rows)
    assert found.ranks == (1,)
    assert "1 rank(s) did not show" in found.cannot_conclude[0]


def test_the_first_micro_step_tells_the_origin_when_every_backward_reduces() -> None:
    rows = _rows({0: [2], 1: [2], 2: [2]}, [2])
    rows.connection.execute("UPDATE step SET backwards = 2")
    rows.add("grad", rank=1, step=2, generation=1, l2=[1.0] * 3, stage="local", nonfinite=[2], valid=True, scale=1.0,
             micro=1)  # fmt: skip
    assert [f.ranks for f in _found(rows)] == [(1,)]


def test_steps_that_a_scaler_skipped_or_may_yet_skip_do_not_count() -> None:
    rows = _rows({0: [1]}, [1], scale=1024.0)
    rows.connection.execute("UPDATE step SET skipped = TRUE WHERE step = 2")
    assert _found(rows, "CLEAR") == []
    rows.connection.execute("DELETE FROM step WHERE step = 2")
    assert _found(rows, "CLEAR") == []


def test_steps_between_two_sweeps_are_said_to_be_unknown() -> None:
    rows = _rows({0: [1]}, [1])
    for table in ("grad", "step", "loss"):
        rows.connection.execute(f"UPDATE {table} SET step = 8 WHERE step = 2")
    (found,) = _found(rows)
    assert (found.last_good_step, found.first_step) == (1, 8)
    assert any("between 2 and 8" in c for c in found.cannot_conclude)
    assert not any("on which rank it began" in c for c in found.cannot_conclude)  # on the one that shows it


def test_when_all_ranks_have_it_and_steps_between_were_not_looked_at_the_rank_is_unknown() -> None:
    rows = _rows({r: [1] for r in range(RANKS)}, [1])
    assert not any("on which rank it began" in c for c in _found(rows)[0].cannot_conclude)
    for table in ("grad", "step", "loss"):
        rows.connection.execute(f"UPDATE {table} SET step = 8 WHERE step = 2")
    assert any("on which rank it began" in c for c in _found(rows)[0].cannot_conclude)


def test_finite_gradients_are_clear() -> None:
    assert _found(_rows({}, []), "CLEAR") == []


def test_a_gradient_that_the_program_threw_away_before_the_update_is_a_note() -> None:
    rows = _rows({1: [0]}, [])
    (found,) = _found(rows)
    assert (found.ranks, found.first_step, found.severity) == ((1,), 2, "note")
    rows.add("param", rank=0, step=2, stage="end", nonfinite=[0])
    assert [f.severity for f in _found(rows)] == ["critical"]
    lost = _rows({1: [0]}, [])
    lost.connection.execute("DELETE FROM grad WHERE rank = 2 AND stage = 'reduced'")
    assert [f.severity for f in _found(lost)] == ["critical"]


def test_infinities_that_clipping_by_value_made_finite_went_into_the_update() -> None:
    rows = _rows({1: [1]}, [])
    (left_out,) = _found(rows)
    assert left_out.severity == "note"
    assert "left it out" in left_out.summary
    for rank in range(RANKS):
        rows.add("clip", rank=rank, step=2, max_norm=0.5, norm_type=0.0, calls=1)
    (found,) = _found(rows)
    assert (found.ranks, found.severity) == ((1,), "warning")
    assert "clipping by value" in found.summary


def test_what_was_thrown_away_before_clipping_by_value_went_into_no_update() -> None:
    rows = _rows({1: [1]}, [])
    for rank in range(RANKS):
        rows.add("clip", rank=rank, step=2, max_norm=0.5, norm_type=0.0, calls=1)
    rows.connection.execute("UPDATE step SET discarded = 1, backwards = 2 WHERE step = 2")
    (found,) = _found(rows)
    assert found.severity == "note"
    assert "left it out" in found.summary
