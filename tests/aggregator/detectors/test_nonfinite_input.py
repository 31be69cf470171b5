"""NONFINITE_INPUT: which rank and samples, and missing values that a model expects."""

from __future__ import annotations

from kit.rows import Rows
from tdbg.aggregator.detectors import nonfinite_input
from tdbg.aggregator.findings import Finding

NAN_LOSS, FINITE = 1, 0


def _rows(bad: dict[tuple[int, int], int | None], steps: int = 8) -> Rows:
    """Two ranks; `bad` gives the hit (rank, step) and whether the loss of it is NaN (None: no loss known)."""
    rows = Rows()
    for rank in range(2):
        for step in range(1, steps + 1):
            _step(rows, rank, step, (rank, step) in bad, bad.get((rank, step), FINITE))
    return rows


def _step(rows: Rows, rank: int, step: int, hit: bool, loss: int | None) -> None:
    ids = [rank * 1000 + step * 10 + i for i in range(4)]
    rows.add("batch", rank=rank, step=step, samples=4, ids=ids)
    about = {"nonfinite": 2, "path": "['price']", "dtype": "float32", "positions": [1, 3]} if hit else {}
    rows.add("input", rank=rank, step=step, source="batch", tensors=2, rows=4, **about)
    if loss is not None:
        rows.add("loss", rank=rank, step=step, backwards=1, nonfinite=loss)


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(nonfinite_input, world_size=2)
    assert outcomes == {"NONFINITE_INPUT": outcome}
    return [f for _, f in found]


def test_names_the_rank_the_step_the_place_and_the_samples() -> None:
    (found,) = _found(_rows({(1, 5): NAN_LOSS, (0, 7): NAN_LOSS}))
    assert (found.ranks, found.first_step, found.last_good_step, found.subject) == ((1,), 5, 4, "['price']")
    assert (found.severity, found.evidence_state) == ("critical", "OBSERVED")
    assert ("sample ids", "1051, 1053") in [(e.metric, e.value) for e in found.evidence]


def test_finite_batches_are_clear() -> None:
    assert _found(_rows({}), "CLEAR") == []


def test_values_that_leave_the_loss_finite_are_a_note() -> None:
    assert [(f.severity, f.first_step) for f in _found(_rows({(0, 2): FINITE}))] == [("note", 2)]


def test_a_batch_whose_loss_is_unknown_is_a_warning() -> None:
    assert [f.severity for f in _found(_rows({(0, 8): None}))] == ["warning"]


def test_a_harmful_batch_comes_before_an_earlier_harmless_one() -> None:
    assert [(f.ranks, f.first_step) for f in _found(_rows({(0, 2): FINITE, (1, 6): NAN_LOSS}))] == [((1,), 6)]


def test_a_mask_that_is_always_there_is_not_to_blame_for_a_later_loss() -> None:
    always = {(rank, step): FINITE for rank in range(2) for step in range(1, 8)}
    assert [f.severity for f in _found(_rows(always | {(0, 8): NAN_LOSS, (1, 8): NAN_LOSS}))] == ["note"]


def test_several_batches_in_a_step_leave_open_which_it_was() -> None:
    rows = _rows({(1, 5): NAN_LOSS}).add("batch", rank=1, step=5, index=1, samples=4, ids=[1, 2, 3, 4])
    (found,) = _found(rows)
    assert found.cannot_conclude
    assert not [e for e in found.evidence if e.metric == "sample ids"]


def test_what_an_operation_got_speaks_where_the_arguments_are_not_seen() -> None:
    rows = _rows({(1, 5): NAN_LOSS})
    rows.connection.execute("UPDATE input SET nonfinite = 0, positions = [] WHERE rank = 1 AND step = 5")
    rows.add("input", rank=1, step=5, source="graph", tensors=1, rows=4, nonfinite=1, positions=[2],
             path="what addmm got", dtype="float32")  # fmt: skip
    (found,) = _found(rows)
    assert (found.ranks, found.first_step) == ((1,), 5)
    assert "data from outside the graph" in found.summary
    assert "a frozen part" in found.cannot_conclude[0]
    assert ("sample ids", "1052") in [(e.metric, e.value) for e in found.evidence]
