"""INIT_SUSPECT: which starts are doubtful, on which ranks."""

from __future__ import annotations

from typing import Any

from kit.rows import Rows
from tdbg.aggregator.detectors import init_suspect
from tdbg.aggregator.findings import Finding


def _rows(change: dict[str, Any], *layers: int, ranks: tuple[int, ...] = (0, 1),
          digests: tuple[int, ...] = (5, 6, 7, 8)) -> Rows:  # fmt: skip
    """Four layers of 8 units; `change` is what differs in those named."""
    rows = Rows()
    for rank in (0, 1):
        me = {"rank": rank, "step": 1, "generation": 1}
        rows.add("param", **me, stage="start", digest=list(digests))
        for index in range(4):
            rows.add("tensor", **me, index=index, kind="param", name=f"{index}.weight", shape="8x8", dtype="float32")
            about = {"units": 8, "inputs": 8, "fan_in": 8, "sampled": 64, "different": 64, "rms": 0.35, "trained": True,
                     "module": str(index)}  # fmt: skip
            rows.add("initial", **me, index=index, place=index,
                     **(about | (change if index in layers and rank in ranks else {})))  # fmt: skip
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(init_suspect, world_size=2)
    assert outcomes == {"INIT_SUSPECT": outcome}
    return [f for _, f in found]


FLAT = {"constant": True, "bias_constant": True, "rms": 0.1, "different": 1}
ZERO = FLAT | {"rms": 0.0}


def test_two_constant_layers_in_a_row_are_a_note_with_their_ranks() -> None:
    (found,) = _found(_rows(FLAT, 1, 2, ranks=(1,)))
    assert (found.ranks, found.first_step, found.subject, found.severity) == ((1,), 1, "1.weight", "note")
    assert [f.ranks for f in _found(_rows(FLAT, 1, 2))] == [(0, 1)]


def test_one_such_layer_or_zeros_among_draws_are_meant() -> None:
    assert _found(_rows(FLAT, 1), "CLEAR") == []
    assert _found(_rows(FLAT, 1, 3), "CLEAR") == []
    assert _found(_rows(ZERO, 1, 2, 3), "CLEAR") == []
    assert len(_found(_rows(ZERO, 0, 1, 2, 3))) == 1


def test_layers_that_do_not_follow_each_other_and_biases_that_differ_are_no_symmetry() -> None:
    assert _found(_rows(ZERO | {"inputs": 4}, 0, 1, 2, 3), "CLEAR") == []
    assert _found(_rows(FLAT | {"bias_constant": False}, 1, 2), "CLEAR") == []


def test_copies_are_of_one_draw() -> None:
    (found,) = _found(_rows({}, digests=(5, 6, 5, 8)))
    assert [e.metric for e in found.evidence] == ["0.weight (8x8)", "2.weight (8x8)"]
    for change in ({"different": 2}, {"copied": True}, {"trained": False}, {"sampled": 8, "different": 8}):
        assert _found(_rows(change, 0, digests=(5, 6, 5, 8)), "CLEAR") == []


def test_large_are_half_of_the_layers_and_two_at_least() -> None:
    large = {"rms": 4.0}
    (found,) = _found(_rows(large, 1, 2))
    assert "11.3" in found.summary
    assert _found(_rows(large, 1), "CLEAR") == []


def test_a_rank_that_loaded_its_weights_is_left_out() -> None:
    rows = _rows(FLAT, 1, 2).add("checkpoint", rank=0, event="apply", part="model")
    assert [f.ranks for f in _found(rows)] == [(1,)]
    rows.add("checkpoint", rank=1, event="load")
    assert _found(rows, "NOT_APPLICABLE") == []
