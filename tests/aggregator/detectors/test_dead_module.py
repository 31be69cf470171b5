"""DEAD_MODULE: what makes a constant output a finding, how grave it is, and what it is called after."""

from __future__ import annotations

from typing import Any

from kit.rows import Rows
from tdbg.aggregator.detectors import dead_module
from tdbg.aggregator.findings import Finding

NAMES = ("a.weight", "a.bias", "b.weight", "c.weight")


def _rows(*constant: dict[str, Any], gradients: tuple[float, ...] = (0, 0, 2, 2), steps: int = 40,
          ranks: tuple[int, ...] = (0, 1), looked: range | None = None) -> Rows:  # fmt: skip
    rows = Rows()
    for rank in (0, 1):
        me = {"rank": rank, "generation": 1}
        rows.add("output", **me, step=2, modules=5)
        for index, name in enumerate(NAMES):
            rows.add("tensor", **me, index=index, kind="param", name=name, trainable=True)
        for step in range(1, steps + 1):
            rows.add("step", rank=rank, step=step)
            rows.add("grad", **me, step=step, stage="local", l2=list(gradients if rank in ranks else (1, 1, 2, 2)))
            for one in constant if rank in ranks and step in (looked or range(3, steps + 1)) else ():
                about = {"calls": 1, "same": True, "equal": True, "zero": True, "witness_same": -1, "module": "m.act",
                         "module_type": "ReLU", "op": "relu", "fed_by": "addmm", "tensors": [0]}  # fmt: skip
                rows.add("constant", **me, step=step, **(about | one))
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(dead_module)
    assert outcomes == {"DEAD_MODULE": outcome}
    return [f for _, f in found]


FED = {"module": "m.out", "module_type": "Linear", "op": "addmm", "fed_by": "relu", "fed_same": True, "witness_same": 0,
       "witness": "m.a", "zero": False, "equal": False}  # fmt: skip
AROUND = {"module": "m", "module_type": "Block", "op": "addmm", "tensors": [1], "equal": False, "zero": False}


def test_names_module_ranks_and_steps() -> None:
    (found,) = _found(_rows({}))
    assert (found.ranks, found.first_step, found.last_step, found.subject) == ((0, 1), 1, 40, "m.act")
    assert (found.severity, found.evidence_state) == ("warning", "OBSERVED")
    assert "gives zero at each of 38 looks" in found.summary
    assert [f.ranks for f in _found(_rows({}, ranks=(1,)))] == [(1,)]


def test_what_stands_behind_it_is_part_of_the_same_finding() -> None:
    (found,) = _found(_rows({}, FED, AROUND))
    assert found.subject == "m.act"
    assert any(e.value == "m.out" for e in found.evidence)


def test_a_function_between_two_layers_is_called_after_the_module_around_it_or_the_layer_behind() -> None:
    assert [f.subject for f in _found(_rows(FED, AROUND))] == ["m"]
    (found,) = _found(_rows(FED))
    assert (found.subject, found.severity) == ("m.out", "warning")
    assert "behind the relu between m.a and m.out" in found.summary
    assert _found(_rows(FED | {"witness_same": 1}), "CLEAR") == []
    assert _found(_rows(FED | {"fed_by": "embedding"}), "CLEAR") == []


def test_a_gradient_that_passes_or_one_output_that_varied_makes_it_none() -> None:
    assert _found(_rows({}, gradients=(1e-30, 0, 2, 2)), "CLEAR") == []
    rows = _rows({})
    for rank in (0, 1):
        rows.connection.execute("UPDATE constant SET same = FALSE WHERE step = 30 AND rank = ?", [rank])
    assert _found(rows, "CLEAR") == []


def test_where_nothing_gets_a_gradient_the_module_is_not_to_blame() -> None:
    assert _found(_rows({}, gradients=(0, 0, 0, 0)), "CLEAR") == []


def test_ones_are_what_a_softmax_over_one_choice_gives() -> None:
    assert _found(_rows({"zero": False, "ones": True}), "CLEAR") == []


def test_an_operation_that_may_be_meant_is_a_note() -> None:
    assert [f.severity for f in _found(_rows({"op": "mul"}))] == ["note"]


def test_two_dead_places_are_two_findings() -> None:
    found = _found(_rows({}, {"module": "n.act", "tensors": [1]}))
    assert [f.subject for f in found] == ["m.act", "n.act"]


def test_fewer_looks_than_a_dropped_branch_may_fill_are_no_evidence() -> None:
    assert _found(_rows({}, steps=20), "INSUFFICIENT_EVIDENCE") == []


def test_looks_at_a_small_part_of_the_run_are_said_to_be_that() -> None:
    (found,) = _found(_rows({}, steps=100, looked=range(3, 40)))
    assert "37 of 100 were" in " ".join(found.cannot_conclude)
    (found,) = _found(_rows({}))
    assert found.cannot_conclude == ()


def test_an_output_that_varied_in_an_earlier_search_bounds_the_first_step() -> None:
    (found,) = _found(_rows({"searched": 2}, looked=range(9, 41)))
    assert (found.first_step, found.last_good_step) == (9, 2)
