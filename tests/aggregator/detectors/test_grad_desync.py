"""GRAD_DESYNC: reduced gradients that differ, and those that may."""

from __future__ import annotations

import pytest

from kit.replicas import catalogue, sweep
from kit.rows import Rows
from tdbg.aggregator.detectors import grad_desync
from tdbg.aggregator.findings import Finding

SAME = {0: [1, 2], 1: [1, 2], 2: [1, 2]}
ODD = {0: [1, 2], 1: [1, 2], 2: [1, 3]}


def _found(rows: Rows, outcome: str = "INCIDENT", **facts: object) -> list[Finding]:
    outcomes, found = rows.judge(grad_desync, **({"world_size": 3} | facts))
    assert outcomes == {"GRAD_DESYNC": outcome}
    return [f for _, f in found]


def _rows(*digests: dict[int, list[int]], sharing: str = "ddp") -> Rows:
    rows = catalogue(Rows(), len(digests[0]), "a", "b", sharing=sharing)
    for step, at in enumerate(digests, start=1):
        sweep(rows, "grad", step, at, "reduced")
    return rows


def test_names_the_rank_whose_reduced_gradient_differs() -> None:
    (found,) = _found(_rows(SAME, ODD, ODD))
    assert (found.ranks, found.first_step, found.last_good_step, found.subject) == ((2,), 2, 1, "b")
    assert found.severity == "critical"


def test_two_ranks_that_were_never_reduced_are_both_named() -> None:
    (found,) = _found(_rows({0: [1, 2], 1: [3, 4]}), world_size=2)
    assert (found.ranks, found.first_step, found.subject) == ((0, 1), 1, "a")
    assert "did not reduce" in found.summary


def test_equal_gradients_are_clear() -> None:
    assert _found(_rows(SAME, SAME), "CLEAR") == []


def test_a_gradient_that_one_rank_lacks_counts_as_different() -> None:
    rows = _rows(SAME, SAME)
    rows.connection.execute("UPDATE grad SET l2 = [1, -1], digest = [1, 0] WHERE rank = 1 AND step = 2")
    (found,) = _found(rows)
    assert (found.ranks, found.evidence[0].value) == ((1,), "no gradient")


def test_a_gradient_that_no_rank_has_is_no_difference_whatever_its_digest_says() -> None:
    rows = _rows(SAME, ODD)
    rows.connection.execute("UPDATE grad SET l2 = [1, -1] WHERE step = 2")
    assert _found(rows, "CLEAR") == []


def test_local_gradients_are_not_compared() -> None:
    rows = sweep(_rows(SAME), "grad", 1, {0: [], 1: [], 2: []}, "local", l2=[1.0, 2.0])
    assert _found(rows, "CLEAR") == []


def test_the_gradients_of_a_skipped_step_are_thrown_away() -> None:
    rows = _rows(SAME, ODD)
    rows.connection.execute("UPDATE step SET skipped = TRUE WHERE step = 2")
    assert _found(rows, "CLEAR") == []


def test_a_tensor_added_after_wrapping_is_said_to_be_so() -> None:
    (found,) = _found(_rows({0: [1, 2], 1: [3, 4], 2: [5, 6]}, sharing="late"))
    assert found.ranks == (0, 1, 2)
    assert "after DDP was built" in found.summary


def test_unwrapped_gradients_are_left_to_the_parameters() -> None:
    assert _found(_rows(ODD, sharing="plain"), "INSUFFICIENT_EVIDENCE") == []


def test_gradients_that_differ_while_the_parameters_agree_are_a_note() -> None:
    rows = sweep(_rows(SAME, ODD), "param", 2, SAME, "end")
    assert [f.severity for f in _found(rows)] == ["note"]
    rows = sweep(sweep(_rows(SAME, ODD), "param", 2, SAME, "end"), "param", 3, ODD, "end")
    assert [f.severity for f in _found(rows)] == ["critical"]


def test_parameters_that_a_sharded_optimizer_hands_round_excuse_nothing() -> None:
    rows = sweep(_rows(SAME, ODD), "param", 2, SAME, "end")
    for rank in range(3):
        rows.add("optim", rank=rank, step=1, class_name="ZeroRedundancyOptimizer")
    assert [f.severity for f in _found(rows)] == ["critical"]


def test_gradients_of_local_training_whose_parameters_come_together_again_and_again_are_a_note() -> None:
    rows = catalogue(Rows(), 2, "a")
    for step in range(1, 10):
        sweep(rows, "grad", step, {0: [step], 1: [50 + step]}, "reduced")
        apart = 0 if step % 3 == 1 else 50
        sweep(rows, "param", step, {0: [step], 1: [apart + step]}, "start")
        sweep(rows, "param", step, {0: [100 + step], 1: [200 + step]}, "end")
    assert [f.severity for f in _found(rows, world_size=2)] == ["note"]
    rows.connection.execute("UPDATE param SET digest = [step + rank] WHERE stage = 'start' AND step > 4")
    assert [f.severity for f in _found(rows, world_size=2)] == ["critical"]


def test_a_late_tensor_is_named_although_clipping_carried_its_difference_into_the_others() -> None:
    rows = _rows({0: [1, 2], 1: [3, 4]})
    rows.connection.execute("UPDATE tensor SET sharing = 'late' WHERE name = 'b'")
    (found,) = _found(rows, world_size=2)
    assert found.subject == "b"
    assert "added after DDP was built" in found.summary


def test_replicas_of_a_shard_must_get_one_gradient() -> None:
    rows = catalogue(Rows(), 4, "a", sharing="sharded", peers="0,2", shards="0,1,2,3")
    rows.connection.execute("UPDATE tensor SET peers = '1,3' WHERE rank IN (1, 3)")
    for step in (1, 2, 3):
        sweep(rows, "grad", step, {r: [10 * step + r % 2 + 5 * (r == 2 and step > 1)] for r in range(4)}, "reduced")
    (found,) = _found(rows, world_size=4)
    assert (found.ranks, found.first_step, found.severity) == ((0, 2), 2, "critical")


@pytest.mark.parametrize("sharing", ["outside", "ignored"])
def test_gradients_that_no_wrapper_reduces_are_left_to_the_parameters(sharing: str) -> None:
    assert _found(_rows({0: [1, 2], 1: [3, 4], 2: [5, 6]}, sharing=sharing), "INSUFFICIENT_EVIDENCE") == []


def test_tensors_that_are_not_compared_shift_no_other() -> None:
    rows = catalogue(catalogue(Rows(), 2, "own", sharing="ignored"), 2, "shared")
    for step in (1, 2):
        sweep(rows, "grad", step, {0: [step, 7], 1: [step + 50, 7]}, "reduced")
    assert _found(rows, "CLEAR", world_size=2) == []


def _seen(synced: int, own: bool) -> Rows:
    rows = _rows({0: [1, 2], 1: [3, 4]})
    for rank in range(2):
        rows.add("grad", rank=rank, step=1, stage="local", generation=1, l2=[1.0, 1.0], valid=True, synced=synced,
                 micro=0, sketch=[1.0 + rank, 2.0, 3.0, 4.0])  # fmt: skip
    sketch = "[1.0 + rank, 2.0, 3.0, 4.0]" if own else "[9.0, 9.0, 9.0, 9.0]"
    rows.connection.execute(f"UPDATE grad SET micro = 1, sketch = {sketch} WHERE stage = 'reduced'")
    return rows


def test_says_that_the_last_backward_was_told_not_to_reduce_and_whose_gradients_the_update_got() -> None:
    (found,) = _found(_seen(0, own=True), world_size=2)
    assert "under no_sync on ranks 0, 1" in found.summary
    assert "own gradients of ranks 0, 1" in found.summary


def test_says_that_no_forward_of_the_wrapper_was_seen() -> None:
    (found,) = _found(_seen(-1, own=False), world_size=2)
    assert "no forward of the DDP module" in found.summary
    assert "own gradients" not in found.summary


def test_says_that_what_ddp_delivered_was_changed_after_it() -> None:
    rows = _seen(1, own=False)
    for rank in range(2):
        rows.add("delivered", rank=rank, step=1, generation=1, digest=[7, 8], reduction="mean", sketch=[0.0] * 4)
    (found,) = _found(rows, world_size=2)
    assert "changed after" in found.summary


def test_says_that_the_program_reduced_other_tensors_by_hand_and_not_this_one() -> None:
    rows = catalogue(catalogue(Rows(), 2, "a", "b", "c", sharing="late"), 2, "d")
    sweep(rows, "grad", 1, {0: [1, 2, 3, 9], 1: [1, 2, 4, 9]}, "reduced")
    for rank in range(2):
        rows.add("delivered", rank=rank, step=1, generation=1, tensors=[0, 1], reduction="by hand", ranks="0,1")
    (found,) = _found(rows, world_size=2)
    said = [e for e in found.evidence if e.metric == "c reduced by hand"]
    assert (found.subject, [e.rank for e in said]) == ("c", [0, 1])
    assert said[0].value == "the program handed 2 other tensors to a reduction in this step, not this one"
    rows.connection.execute("UPDATE delivered SET tensors = [0, 1, 2] WHERE rank = 0")
    assert [e.rank for e in _found(rows, world_size=2)[0].evidence if "by hand" in e.metric] == [1]
    rows.connection.execute("DELETE FROM delivered")
    assert not [e for e in _found(rows, world_size=2)[0].evidence if "by hand" in e.metric]


def test_a_reduction_by_hand_is_not_taken_for_what_ddp_delivered() -> None:
    rows = _seen(0, own=True)
    for rank in range(2):
        rows.add("delivered", rank=rank, step=1, generation=1, tensors=[0], reduction="by hand", ranks="0,1")
    (found,) = _found(rows, world_size=2)
    assert "changed after" not in found.summary
    assert "under no_sync on ranks 0, 1" in found.summary
