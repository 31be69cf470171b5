"""PARAM_DESYNC in sharded models: replicas of shards, and what a wrapper leaves out."""

from __future__ import annotations

import pytest

from kit.replicas import catalogue, sweep
from kit.rows import Rows
from tdbg.aggregator.detectors import param_desync
from tdbg.aggregator.findings import Finding


def _found(rows: Rows, outcome: str = "INCIDENT", **facts: object) -> list[Finding]:
    outcomes, found = rows.judge(param_desync, **({"world_size": 3} | facts))
    assert outcomes == {"PARAM_DESYNC": outcome}
    return [f for _, f in found]


def _left_out(ranks: int, sharing: str, *names: str) -> Rows:
    """A model of which FSDP shards one tensor and leaves `names` out, or that DDP was told to ignore them."""
    rows = catalogue(Rows(), ranks, *names, sharing=sharing)
    shared = {"sharing": "sharded", "peers": ""} if sharing == "outside" else {"sharing": "ddp"}
    return catalogue(rows, ranks, "body", shards=",".join(map(str, range(ranks))), **shared)


@pytest.mark.parametrize("sharing", ["outside", "ignored"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_what_a_wrapper_leaves_out_and_each_rank_trains_on_its_own_has_come_apart(sharing: str, ranks: int) -> None:
    rows = _left_out(ranks, sharing, "embed", "norm")
    body = (lambda r: 50 + r) if sharing == "outside" else (lambda r: 50)
    sweep(rows, "param", 0, {r: [1, 2, body(r)] for r in range(ranks)}, "start")
    for step in (1, 2, 3):
        sweep(rows, "param", step, {r: [10 * step + r, 90 * step + r, body(r)] for r in range(ranks)}, "end")
    (found,) = _found(rows, world_size=ranks)
    assert (found.ranks, found.first_step, found.subject) == (tuple(range(ranks)), 1, "embed")
    assert (found.severity, found.evidence_state) == ("warning", "OBSERVED")
    assert "and 1 more tensor" in found.summary
    assert "equal before" in found.summary


@pytest.mark.parametrize(("sharing", "outcome"), [("outside", "INSUFFICIENT_EVIDENCE"), ("ignored", "CLEAR")])
def test_what_each_rank_has_of_its_own_from_the_start_is_no_fault(sharing: str, outcome: str) -> None:
    rows = _left_out(4, sharing, "expert")
    for step in (0, 1, 2, 3):
        sweep(rows, "param", step, {r: [10 * step + r, 5] for r in range(4)}, "end" if step else "start")
    assert _found(rows, outcome, world_size=4) == []


def test_zeros_beside_what_each_rank_has_of_its_own_may_be_its_own_too() -> None:
    rows = _left_out(2, "outside", "adapter.a", "adapter.b")
    for step in (0, 1, 2, 3):
        values = {r: [10 * step + r, step * (70 + r), 5] for r in range(2)}
        sweep(rows, "param", step, values, "end" if step else "start")
    (found,) = _found(rows, world_size=2)
    assert (found.subject, found.severity) == ("adapter.b", "note")


def test_what_a_wrapper_leaves_out_and_is_averaged_by_hand_is_no_fault() -> None:
    rows = _left_out(2, "outside", "norm")
    for step in (1, 2, 3):
        sweep(rows, "param", step, {r: [step, 5] for r in range(2)}, "start")
        sweep(rows, "param", step, {r: [10 * step + r, 5] for r in range(2)}, "end")
    assert _found(rows, "CLEAR", world_size=2) == []


def test_one_rank_apart_in_what_a_wrapper_leaves_out_is_named() -> None:
    rows = _left_out(3, "outside", "norm")
    for step in (1, 2, 3):
        sweep(rows, "param", step, {r: [step + 70 * (r == 1 and step > 1), 5] for r in range(3)}, "end")
    (found,) = _found(rows)
    assert (found.ranks, found.first_step, found.severity) == ((1,), 2, "warning")


def _hybrid(shards: str = "0,1,2,3") -> Rows:
    """Two replicas of two shards each: ranks 0 and 2, and 1 and 3, hold the same part."""
    rows = catalogue(Rows(), 4, "a", "b", sharing="sharded", peers="0,2", shards=shards)
    rows.connection.execute("UPDATE tensor SET peers = '1,3' WHERE rank IN (1, 3)")
    return rows


def test_replicas_of_a_shard_are_compared_and_their_pair_is_named() -> None:
    rows = _hybrid()
    for step in (1, 2, 3, 4):
        sweep(rows, "param", step, {r: [step, r % 2 + 10 * (r == 3 and step > 2)] for r in range(4)}, "end")
    (found,) = _found(rows, world_size=4)
    assert (found.ranks, found.first_step, found.last_good_step, found.subject) == ((1, 3), 3, 2, "b")
    assert found.severity == "critical"


def test_equal_replicas_of_shards_are_clear_and_without_the_other_replica_nothing_is_known() -> None:
    rows = _hybrid()
    sweep(rows, "param", 1, {r: [1, r % 2] for r in range(4)}, "end")
    assert _found(rows, "CLEAR", world_size=4) == []
    rows.connection.execute("DELETE FROM tensor WHERE rank > 1")
    rows.connection.execute("DELETE FROM param WHERE rank > 1")
    assert _found(rows, "INSUFFICIENT_EVIDENCE", world_size=4, missing_ranks=(2, 3)) == []


def test_what_tensor_parallel_ranks_each_compute_may_drift_by_their_kernels() -> None:
    rows = catalogue(Rows(), 2, "norm", sharing="sharded", shards="")
    sweep(rows, "param", 1, {0: [1], 1: [2]}, "end")
    (found,) = _found(rows, world_size=2)
    assert found.severity == "warning"
    assert any("kernels" in c for c in found.cannot_conclude)
