"""TIE_BROKEN: two names of one tensor that become two tensors, and what only looks like it."""

from __future__ import annotations

from kit.rows import Rows
from tdbg.aggregator.detectors import tie_broken
from tdbg.aggregator.findings import Finding


def _rows(later: dict[str, str], model_type: str = "Net") -> Rows:
    """At first `emb` is also `head`; the second catalogue, of step 5, holds `later`: name -> aliases."""
    rows = Rows()
    for rank in (0, 1):
        for generation, step, names in ((1, 0, {"emb": "head", "body": ""}), (2, 5, later)):
            kind = model_type if generation == 2 else "Net"
            for index, (name, aliases) in enumerate(names.items()):
                rows.add("tensor", rank=rank, step=step, generation=generation, index=index, kind="param", name=name,
                         aliases=aliases, model_type=kind)  # fmt: skip
        for step in range(1, 6):
            rows.add("step", rank=rank, step=step, watched=True)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT") -> list[Finding]:
    outcomes, found = rows.judge(tie_broken)
    assert outcomes == {"TIE_BROKEN": outcome}
    return [f for _, f in found]


def test_two_names_of_one_tensor_that_are_two_tensors_later() -> None:
    (found,) = _found(_rows({"emb": "", "body": "", "head": ""}))
    assert (found.ranks, found.first_step, found.last_good_step, found.subject) == ((0, 1), 5, 4, "head")
    assert found.severity == "warning"


def test_between_two_watched_steps_nobody_looked() -> None:
    rows = _rows({"emb": "", "body": "", "head": ""})
    rows.connection.execute("UPDATE step SET watched = step IN (2, 5)")
    assert (_found(rows)[0].first_step, _found(rows)[0].last_good_step) == (5, 2)
    rows.connection.execute("UPDATE step SET watched = step = 5")
    assert _found(rows)[0].last_good_step is None


def test_a_tie_that_holds_or_whose_part_was_removed_is_clear() -> None:
    assert _found(_rows({"emb": "head", "body": ""}), "CLEAR") == []
    assert _found(_rows({"emb": "", "body": ""}), "CLEAR") == []


def test_another_class_of_model_is_another_model() -> None:
    assert _found(_rows({"emb": "", "body": "", "head": ""}, "Other"), "CLEAR") == []


def test_a_model_with_an_optimizer_of_its_own_is_another_model() -> None:
    rows = _rows({"emb": "", "body": "", "head": ""})
    rows.connection.execute("UPDATE tensor SET optimizer = 1 WHERE generation = 2")
    assert _found(rows, "CLEAR") == []


def test_without_ties_there_is_nothing_to_judge_and_older_runs_did_not_record_them() -> None:
    rows = _rows({"emb": "", "body": "", "head": ""})
    rows.connection.execute("UPDATE tensor SET aliases = ''")
    assert _found(rows, "NOT_APPLICABLE") == []
    rows.connection.execute("UPDATE tensor SET aliases = NULL")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []
