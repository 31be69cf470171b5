"""NONFINITE_PARAM: the earliest sweep, its ranks and the first tensor."""

from __future__ import annotations

from kit.replicas import catalogue
from kit.rows import Rows
from tdbg.aggregator.detectors import nonfinite_param
from tdbg.aggregator.findings import Finding


def _rows(bad: dict[tuple[int, int], list[int]], stage: str = "end") -> Rows:
    """Two ranks, steps 1 to 4; `bad` gives the tensors that are not finite by (rank, step)."""
    rows = catalogue(catalogue(Rows(), 2, "a", "b"), 2, "mask", trainable=False, optimizer=-1)
    for rank in range(2):
        for step in range(1, 5):
            rows.add("param", rank=rank, step=step, stage=stage if bad.get((rank, step)) else "end", generation=1,
                     l2=[1.0] * 3, digest=[1, 2, 3], nonfinite=bad.get((rank, step), []))  # fmt: skip
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(nonfinite_param, world_size=2)
    assert outcomes == {"NONFINITE_PARAM": outcome}
    return [f for _, f in found]


def test_names_the_first_tensor_of_the_earliest_step_and_its_ranks() -> None:
    (found,) = _found(_rows({(0, 3): [1], (1, 3): [1, 0], (0, 4): [0, 1]}))
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((0, 1), 3, 2, 4)
    assert [(e.rank, e.value) for e in found.evidence] == [(0, "b"), (1, "a, b")]


def test_a_rank_that_follows_later_is_not_named() -> None:
    assert [(f.ranks, f.subject) for f in _found(_rows({(1, 2): [1], (0, 3): [0]}))] == [((1,), "b")]


def test_says_so_when_it_was_there_before_the_first_update() -> None:
    (found,) = _found(_rows({(0, 1): [0]}, stage="start"))
    assert (found.first_step, found.last_good_step) == (1, None)
    assert "before the first update" in found.summary


def test_a_frozen_mask_of_infinities_and_finite_weights_are_clear() -> None:
    assert _found(_rows({(r, s): [2] for r in range(2) for s in range(1, 5)}), "CLEAR") == []
    assert _found(_rows({}), "CLEAR") == []
