"""The norm of a sharded gradient from the ranks' parts."""

from __future__ import annotations

from typing import Any

import pytest

from kit.replicas import catalogue
from kit.rows import Rows
from tdbg.aggregator.gradnorm import is_sharded, sharded_norms


class Tables:
    """What the norm needs of a store."""

    def __init__(self, rows: Rows) -> None:
        self._connection = rows.connection

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql).fetchall()


def _norms(rows: Rows, **more: Any) -> dict[tuple[int, int], float]:
    tables: Any = Tables(rows)
    return {(rank, step): norm for rank, _, step, norm in sharded_norms(tables, **more)}


def _shards(ranks: int = 2, peers: str = "") -> Rows:
    everyone = ",".join(map(str, range(ranks)))
    return catalogue(Rows(), ranks, "w", "b", sharing="sharded", peers=peers, shards=everyone, mesh=everyone)


def _reduced(rows: Rows, step: int, parts: dict[int, list[float]]) -> Rows:
    for rank, l2 in parts.items():
        rows.add("grad", rank=rank, step=step, stage="reduced", generation=1, l2=l2, digest=[1] * len(l2))
    return rows


def test_the_squares_of_all_parts_add_up_on_every_rank() -> None:
    rows = _reduced(_reduced(_shards(), 1, {0: [3.0, 0.0], 1: [4.0, 0.0]}), 2, {0: [1.0, 1.0], 1: [1.0, 1.0]})
    assert _norms(rows) == {(0, 1): 5.0, (1, 1): 5.0, (0, 2): 2.0, (1, 2): 2.0}
    assert _norms(rows, back=0) == {(0, 2): 2.0, (1, 2): 2.0}


def test_replicas_of_a_part_count_once() -> None:
    rows = _shards(4, "0,2")
    rows.connection.execute("UPDATE tensor SET peers = '1,3' WHERE rank IN (1, 3)")
    _reduced(rows, 1, {r: [3.0 + r % 2, 0.0] for r in range(4)})
    assert _norms(rows) == {(r, 1): 5.0 for r in range(4)}


def test_a_tensor_that_is_whole_on_each_rank_is_the_rank_s_own() -> None:
    rows = catalogue(_shards(), 2, "out", sharing="outside")
    _reduced(rows, 1, {0: [3.0, 0.0, 12.0], 1: [4.0, 0.0, 0.0]})
    assert _norms(rows) == {(0, 1): 13.0, (1, 1): 5.0}


@pytest.mark.parametrize("missing", [{0: [3.0, 0.0]}, {0: [3.0, 0.0], 1: [4.0, -2.0]}])
def test_without_every_part_there_is_no_norm(missing: dict[int, list[float]]) -> None:
    assert _norms(_reduced(_shards(), 1, missing)) == {}


def test_no_gradient_and_no_elements_are_nothing_to_add() -> None:
    rows = _shards()
    rows.connection.execute("UPDATE tensor SET numel = 0 WHERE rank = 1 AND name = 'w'")
    assert _norms(_reduced(rows, 1, {0: [3.0, -1.0], 1: [-2.0, -1.0]})) == {(0, 1): 3.0, (1, 1): 3.0}


def test_whole_models_have_none() -> None:
    rows = _reduced(catalogue(Rows(), 2, "w"), 1, {0: [1.0], 1: [1.0]})
    tables: Any = Tables(rows)
    assert not is_sharded(tables)
    assert _norms(rows) == {}
