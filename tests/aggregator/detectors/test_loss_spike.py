"""LOSS_SPIKE: a loss beside its own past."""

from __future__ import annotations

import math
import random

from kit.rows import Rows
from tdbg.aggregator.detectors import loss_spike
from tdbg.aggregator.findings import Finding

STEPS, WORLD, BATCH = 70, 4, 4


def _run(ranks: int = WORLD, steps: int = STEPS, level: float = 1.0, spread: float = 0.05) -> Rows:
    rows = Rows()
    for rank in range(ranks):
        drawn = random.Random(rank)
        me = {"rank": rank, "pid": 100 + rank}
        rows.add("loader", **me, batches=steps, samples=steps * BATCH)
        rows.add("optim", **me, step=1, lr=0.1)
        for step in range(1, steps + 1):
            rows.add("loss", **me, step=step, backwards=1, total=level * drawn.gauss(1.0, spread), scale=1.0)
            ids = [1000 * rank + step * BATCH + i for i in range(BATCH)]
            rows.add("batch", **me, step=step, index=step - 1, samples=BATCH, ids=ids, backwards=step - 1)
            rows.add("step", **me, step=step, optimizers=1, backwards=1)
        rows.add("batch", **me, step=steps, index=steps, backwards=steps, end="StopIteration")
        rows.add("rng", **me, step=48, torch_digest=5 + rank)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT", world_size: int = WORLD, **facts: object) -> list[Finding]:
    outcomes, found = rows.judge(loss_spike, world_size=world_size, **facts)
    assert outcomes == {"LOSS_SPIKE": outcome}
    return [f for _, f in found]


def _set(rows: Rows, value: str, where: str) -> Rows:
    rows.connection.execute(f"UPDATE loss SET total = {value} WHERE {where}")
    return rows


def test_ordinary_losses_are_clear() -> None:
    assert _found(_run(), "CLEAR") == []


def test_names_the_rank_whose_batch_stands_out_with_its_samples() -> None:
    (found,) = _found(_set(_run(), "total * 6", "rank = 2 AND step = 50"))
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((2,), 50, 49, 50)
    assert (found.severity, found.evidence_state, found.subject) == ("warning", "INFERRED", "loss")
    said = {e.metric: e for e in found.evidence}
    assert said["ids of the batch's samples"].value == "2200, 2201, 2202, 2203"
    assert (said["random streams after this step, the last seen before"].step, said["learning rate"].value) == (
        48,
        "0.1",
    )
    assert "bad data" not in found.summary


def test_names_all_ranks_when_all_rise() -> None:
    (found,) = _found(_set(_run(), "total * 3", "step = 50"))
    assert (found.ranks, found.first_step, found.severity) == ((0, 1, 2, 3), 50, "warning")
    assert "returns" in found.summary


def test_a_rise_that_stays_is_a_note_unless_the_learning_rate_rose_beyond_all_before() -> None:
    rows = _set(_run(), "total * 3", "step >= 50")
    assert [f.severity for f in _found(rows)] == ["note"]
    for rank in range(WORLD):
        rows.add("optim", rank=rank, step=49, lr=2.0)
    (found,) = _found(rows)
    assert (found.severity, found.first_step) == ("warning", 50)
    assert "learning rate 2, 20 times the highest before" in found.summary


def test_a_warm_restart_of_the_schedule_stays_a_note() -> None:
    rows = _set(_run(), "total * 3", "step >= 50")
    for rank in range(WORLD):
        rows.add("optim", rank=rank, step=20, lr=0.001)
        rows.add("optim", rank=rank, step=49, lr=0.1)
    assert [f.severity for f in _found(rows)] == ["note"]


def test_a_rise_that_stays_far_above_the_untrained_loss_is_a_warning() -> None:
    rows = _set(_set(_run(), "5 + total", "step <= 5"), "total * 100", "step >= 50")
    assert [f.severity for f in _found(rows)] == ["warning"]


def test_what_comes_again_and_again_is_a_note() -> None:
    (found,) = _found(_set(_run(), "total * 4", "step IN (40, 50, 60)"))
    assert (found.severity, found.first_step) == ("note", 40)
    assert "again and again" in found.summary


def test_a_short_last_batch_or_window_is_not_compared() -> None:
    rows = _set(_run(), "total * 5", "step = 50")
    rows.connection.execute("UPDATE batch SET samples = 1 WHERE step = 50")
    assert _found(rows, "CLEAR") == []
    rows = _set(_run(), "total * 5", "step = 50")
    rows.connection.execute("UPDATE loss SET backwards = 2 WHERE step <> 50")
    assert _found(rows, "CLEAR") == []


def test_losses_near_zero_and_skipped_overflow_are_no_spikes() -> None:
    rows = _set(_run(), "exp(-step)", "TRUE")
    assert _found(_set(rows, "0.001", "step = 50"), "CLEAR") == []
    rows = _run()
    rows.connection.execute("UPDATE loss SET total = 'inf', nonfinite = 1 WHERE step = 50")
    assert _found(rows, "CLEAR") == []


def test_heavy_tails_and_tiny_batches_are_clear_or_unknown() -> None:
    rows = _run()
    drawn = random.Random(1)
    for rank in range(WORLD):
        for step in range(1, STEPS + 1):
            value = (drawn.gauss(0, 1) / math.sqrt(drawn.gammavariate(1, 1))) ** 2  # squared, of Student's t with 2
            _set(rows, str(value), f"rank = {rank} AND step = {step}")
    outcomes, found = rows.judge(loss_spike, world_size=WORLD)
    assert (found, outcomes["LOSS_SPIKE"]) == ([], "INSUFFICIENT_EVIDENCE")


def test_losses_below_zero_are_judged_by_their_own_size() -> None:
    rows = _set(_run(), "total - 1.05", "TRUE")
    assert _found(_set(rows, "9", "step = 50"))[0].first_step == 50


def test_a_running_run_waits_to_see_whether_it_stays() -> None:
    rows = _set(_run(), "total * 4", f"step >= {STEPS - 1}")
    assert _found(rows, "CLEAR", status="running") == []
    assert len(_found(rows)) == 1


def test_too_little_is_said() -> None:
    assert _found(_run(steps=15), "INSUFFICIENT_EVIDENCE") == []
    assert _found(_run(), "INSUFFICIENT_EVIDENCE", missing_ranks=(3,)) == []
