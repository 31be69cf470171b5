"""Which attempts train one model on ranks that no wrapper joins."""

from __future__ import annotations

import pytest

from kit.replicas import catalogue, losses, sweep
from kit.rows import Rows
from tdbg.aggregator.tied import TIED


def _apart(ranks: int = 2) -> Rows:
    """Ranks on which nothing agrees."""
    rows = losses(catalogue(Rows(), ranks, "a", "b", sharing="plain"), ranks, 1)
    sweep(rows, "grad", 1, {rank: [1 + rank, 5 + rank] for rank in range(ranks)}, "reduced")
    return sweep(rows, "param", 1, {rank: [11 + rank, 15 + rank] for rank in range(ranks)}, "end")


def _handed(rows: Rows, tensors: dict[int, list[int]], ranks: str = "0,1", reduction: str = "by hand") -> Rows:
    for rank, indices in tensors.items():
        rows.add("delivered", rank=rank, step=1, generation=1, tensors=indices, reduction=reduction, ranks=ranks)
    return rows


def _tied(rows: Rows) -> bool:
    return bool(rows.connection.execute(TIED).fetchall())


def test_ranks_that_reduce_their_gradients_by_hand_train_one_model_though_nothing_agrees() -> None:
    assert not _tied(_apart())
    assert _tied(_handed(_apart(), {0: [0, 1], 1: [0, 1]}))


@pytest.mark.parametrize(
    ("tensors", "ranks", "reduction"),
    [
        ({0: [0, 1]}, "0,1", "by hand"),
        ({0: [0, 1], 1: [0]}, "0,1", "by hand"),
        ({0: [0], 1: [0]}, "0,1", "by hand"),  # an embedding that stages share
        ({0: [0, 1], 1: [0, 1]}, "0", "by hand"),
        ({0: [0, 1], 1: [0, 1]}, "0,1", "mean"),
    ],
)
def test_less_than_that_shows_nothing(tensors: dict[int, list[int]], ranks: str, reduction: str) -> None:
    assert not _tied(_handed(_apart(), tensors, ranks, reduction))


def test_two_trainings_side_by_side_are_not_one() -> None:
    rows = _handed(_handed(_apart(4), {0: [0, 1], 1: [0, 1]}), {2: [0, 1], 3: [0, 1]}, "2,3")
    assert not _tied(rows)


def test_other_tensors_of_the_same_numbers_are_not_the_same() -> None:
    rows = _handed(_apart(), {0: [0, 1], 1: [0, 1]})
    rows.connection.execute("UPDATE tensor SET shape = '7' WHERE rank = 1 AND name = 'b'")
    assert not _tied(rows)


def test_a_tensor_that_the_step_did_not_use_need_not_be_reduced() -> None:
    rows = _handed(_apart(), {0: [0], 1: [0]})
    rows.connection.execute("UPDATE grad SET l2 = [1, -1] WHERE stage = 'reduced'")
    assert _tied(rows)


def test_the_optimizers_of_one_step_may_reduce_one_after_the_other() -> None:
    rows = _handed(_handed(_apart(), {0: [0], 1: [0]}), {0: [1], 1: [1]})
    assert _tied(rows)
