"""TRAIN_MODE_EVAL: an evaluation in train mode is noted; what may be meant, or is no evaluation, is not."""

from __future__ import annotations

from typing import Any

import pytest

from kit.rows import Rows
from tdbg.aggregator.detectors import train_mode_eval
from tdbg.aggregator.findings import Finding

OWN = '[["Rows", 80, ""], ["Subset", 60, "a"]]'
HELD = '[["Rows", 80, ""], ["Subset", 20, "b"]]'
TRAIN = {"dropout": 1, "norms": 1, "names": "drop,norm", "reacting": 2}
EVAL = {"in_eval": True, "reacting": 2}


def _data(rows: Rows, me: dict[str, int], **about: Any) -> None:
    rows.add(
        "loader", **{**me, "dataset_class": "Rows", "dataset_length": 80, "dataset_digest": "d", "batches": 2} | about
    )


def _evaluated(*passes: dict[str, Any], ranks: tuple[int, ...] = (0, 1), data: dict[str, Any] | None = None,
               batches: int = 2, ended: bool = True) -> Rows:  # fmt: skip
    """Twelve steps; before steps 5 and 9 an evaluation; `passes` say by turns what these ranks saw."""
    rows = Rows()
    for rank in (0, 1):
        me = {"rank": rank, "pid": 100 + rank}
        _data(rows, me, loader=0, levels=OWN, batches=12)
        for step in range(1, 13):
            if step in (5, 9):
                one = {"loader": 1, "iterator": step // 9, "step": step, "backwards": step - 1}
                _data(rows, me, **{"loader": 1, "iterator": step // 9, "levels": HELD} | (data or {}))
                for index in range(batches):
                    rows.add("batch", **me, **one, index=index)
                if ended:
                    rows.add("batch", **me, **one, end="StopIteration")
                seen = passes[step // 9 % len(passes)] if rank in ranks else EVAL
                rows.add("evaluation", **{**me, **one, "forwards": 1, "model_type": "Net"} | seen)
            rows.add("batch", **me, step=step, index=step - 1, backwards=step - 1)
            rows.add("step", **me, step=step, optimizers=1, backwards=1)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT", **facts: Any) -> list[Finding]:
    outcomes, found = rows.judge(train_mode_eval, **facts)
    assert outcomes == {"TRAIN_MODE_EVAL": outcome}
    return [f for _, f in found]


def test_names_model_ranks_steps_and_what_is_in_train_mode() -> None:
    (found,) = _found(_evaluated(TRAIN))
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((0, 1), 5, None, 9)
    assert (found.subject, found.severity, found.evidence_state) == ("Net", "note", "OBSERVED")
    assert "2 modules act otherwise in eval mode, as drop, norm; the statistics" in found.summary
    (found,) = _found(_evaluated(EVAL, TRAIN, ranks=(1,)))
    assert (found.ranks, found.first_step, found.last_good_step) == ((1,), 9, 5)


def test_an_evaluation_in_eval_mode_is_clear() -> None:
    assert _found(_evaluated(EVAL), "CLEAR") == []
    assert _found(_evaluated({**EVAL, "dropout": 3}), "CLEAR") == []  # Monte Carlo dropout below a model in eval mode
    assert _found(_evaluated({}), "CLEAR") == []  # nothing in it depends on the mode


UNKNOWN = "INSUFFICIENT_EVIDENCE"


@pytest.mark.parametrize("data", [
    {"levels": OWN},  # the training data itself
    {"levels": '[["Rows", 80, ""], ["Subset", 60, "a"], ["Subset", 8, "c"]]'},  # a part of it
    {"levels": '[["Rows", 80, ""]]'},  # all of what it was taken from
    {"levels": OWN, "dataset": 1},  # an object of its own that holds the same
    {"levels": OWN, "dataset": 1, "dataset_digest": ""},  # of which nothing is known
    {"dataset": -1},
])  # fmt: skip
def test_data_that_may_be_training_s_own_is_left_alone(data: dict[str, Any]) -> None:
    assert _found(_evaluated(TRAIN, data=data), UNKNOWN) == []


@pytest.mark.parametrize("data", [
    {"dataset": 1, "dataset_digest": "e"}, {"dataset": 1, "dataset_class": "Held"}, {"dataset": 1, "dataset_length": 9},
])  # fmt: skip
def test_an_object_that_differs_is_other_data_whatever_is_chosen_of_it(data: dict[str, Any]) -> None:
    assert len(_found(_evaluated(TRAIN, data={"levels": OWN} | data))) == 1


def test_several_runs_over_the_same_data_may_be_samples() -> None:
    assert _found(_evaluated(TRAIN | {"forwards": 8}), UNKNOWN) == []
    rows = _evaluated(TRAIN)
    for of in ("loader", "batch", "evaluation"):
        rows.connection.execute(f"""INSERT INTO "{of}" SELECT * REPLACE (iterator + 10 AS iterator) FROM "{of}"
            WHERE loader = 1""")
    assert _found(rows, UNKNOWN) == []


def test_one_batch_is_an_evaluation_only_when_it_is_all_of_the_data() -> None:
    assert _found(_evaluated(TRAIN, batches=1, ended=False), UNKNOWN) == []
    assert len(_found(_evaluated(TRAIN, batches=1))) == 1
    assert len(_found(_evaluated(TRAIN, batches=1, ended=False, data={"batches": 1}))) == 1
    assert len(_found(_evaluated(TRAIN, ended=False))) == 1


def test_a_pass_in_which_a_backward_ran_is_no_evaluation() -> None:
    rows = _evaluated(TRAIN)
    rows.connection.execute("UPDATE batch SET backwards = backwards + index WHERE loader = 1")
    assert _found(rows, UNKNOWN) == []


def test_data_begun_anew_for_each_step_is_training_data() -> None:
    rows = _evaluated(TRAIN, data={"levels": OWN})
    rows.connection.execute("UPDATE batch SET iterator = index WHERE loader = 0")
    for rank in (0, 1):
        for iterator in range(1, 12):
            _data(rows, {"rank": rank, "pid": 100 + rank}, loader=0, iterator=iterator, levels=OWN)
    assert _found(rows, UNKNOWN) == []


def test_without_any_evaluation_or_with_a_silent_rank_it_is_unknown() -> None:
    rows = _evaluated(EVAL)
    assert _found(rows, UNKNOWN, world_size=3, missing_ranks=(2,)) == []
    rows.connection.execute("DELETE FROM evaluation")
    assert _found(rows, UNKNOWN) == []
