"""Two runs side by side, as rows: what parts them, where, on which rank; what is noise; what can't be compared."""

from __future__ import annotations

from typing import Any

import pytest

from kit.healthy import STEPS, TENSORS, healthy
from kit.rows import Rows
from tdbg.aggregator.compare import Comparison, compare
from tdbg.aggregator.side import Side, read


def _side(rows: Rows, name: str, whole: bool = True) -> Side:
    ranks = rows.connection.execute("SELECT count(DISTINCT rank) FROM step").fetchall()[0][0]
    return read(_ask(rows), name, ranks, whole)


def _ask(rows: Rows) -> Any:
    return lambda sql: rows.connection.execute(sql).fetchall()


def _compare(a: Rows, b: Rows, whole: bool = True) -> Comparison:
    return compare(_ask(a), _side(a, "a"), _ask(b), _side(b, "b", whole))


def _change(*statements: str, ranks: int = 2) -> Rows:
    rows = healthy(ranks)
    for sql in statements:
        rows.connection.execute(sql)
    return rows


def test_the_same_program_twice_is_identical() -> None:
    said = _compare(healthy(2), healthy(2))
    assert (said.outcome, said.first_step, said.ranks, said.compared_steps) == ("IDENTICAL", None, (), STEPS)


def test_a_loss_of_recording_is_never_identical() -> None:
    assert _compare(healthy(2), healthy(2), whole=False).outcome == "INSUFFICIENT_EVIDENCE"
    silent = _change("DELETE FROM param")
    assert _compare(healthy(2), silent).outcome == "INSUFFICIENT_EVIDENCE"
    assert _compare(healthy(2), _change("DELETE FROM loss")).outcome == "INSUFFICIENT_EVIDENCE"


def test_a_setting_that_changes_parts_them_at_its_step() -> None:
    b = healthy(2)
    for rank in (0, 1):
        b.add("optim", rank=rank, pid=100 + rank, step=15, class_name="AdamW", lr=0.02,
              settings='{"weight_decay": 0.01}', tensors=4, members=77)  # fmt: skip
    said = _compare(healthy(2), b)
    assert (said.outcome, said.first_step, said.metric, said.ranks) == ("DIVERGED", 15, "lr", (0, 1))
    assert said.last_equal_step == 14
    decay = _compare(healthy(2), _change("""UPDATE optim SET settings = '{"weight_decay": 0.5}' WHERE rank = 1"""))
    assert (decay.first_step, decay.metric, decay.ranks) == (1, "weight_decay", (1,))


@pytest.mark.parametrize(("column", "metric"), [("ids", "samples"), ("digests", "content of samples")])
def test_other_data_on_one_rank(column: str, metric: str) -> None:
    b = _change(f"UPDATE batch SET {column} = list_transform({column}, lambda x: x + 1) WHERE rank = 1 AND step >= 9")
    said = _compare(healthy(2), b)
    assert (said.outcome, said.first_step, said.metric, said.ranks) == ("DIVERGED", 9, metric, (1,))


def test_a_loss_that_jumps_and_a_parameter_that_led_to_it() -> None:
    jump = "UPDATE loss SET total = total * 1.1 + 0.1 WHERE step >= 12"
    said = _compare(healthy(2), _change(jump + " AND rank = 1"))
    assert (said.outcome, said.first_step, said.metric, said.ranks) == ("DIVERGED", 12, "loss", (1,))
    before = "UPDATE param SET digest = list_transform(digest, lambda d, i: d + (i = 3)::INT) WHERE step >= 11"
    said = _compare(healthy(2), _change(jump, before))
    assert (said.first_step, said.metric, said.subject, said.ranks) == (11, "parameter", TENSORS[2], (0, 1))


def test_bits_that_differ_without_a_jump_are_noise() -> None:
    said = _compare(healthy(2), _change("UPDATE loss SET total = total * (1 + 1e-7) WHERE step >= 3"))
    assert (said.outcome, said.first_step) == ("WITHIN_NOISE", None)
    drift = _change("UPDATE loss SET total = total * (1 + 1e-7 * pow(1.9, step)) WHERE step >= 3")
    assert _compare(healthy(2), drift).outcome in ("WITHIN_NOISE", "INSUFFICIENT_EVIDENCE")


def test_other_models_seeds_and_beginnings_are_not_compared() -> None:
    model = _compare(healthy(2), _change("UPDATE tensor SET shape = '16x4' WHERE index = 0"))
    assert (model.outcome, model.why) == ("NOT_COMPARABLE", "the models differ: model.in.weight is 8x4 and 16x4")
    other = ("UPDATE param SET digest = list_transform(digest, lambda d: d + 1)", "UPDATE rng SET torch_seed = 8")
    said = _compare(healthy(2), _change(*other))
    assert said.outcome == "NOT_COMPARABLE"
    assert "torch 7 and torch 8" in said.why


def _resumed(at: int, **state: str) -> Rows:
    """A run that goes on from a step of the healthy one."""
    rows = _change(*(f"DELETE FROM {t} WHERE step BETWEEN 1 AND {at} AND NOT ({keep})" for t, keep in (
        ("step", "FALSE"), ("loss", "FALSE"), ("batch", "FALSE"), ("grad", "FALSE"), ("param", "stage = 'start'"),
        ("optim_state", "FALSE"), ("buffer", "FALSE"))))  # fmt: skip
    for table in ("step", "loss", "batch", "grad", "param", "optim_state", "buffer"):
        rows.connection.execute(f"UPDATE {table} SET step = step - {at} WHERE step > {at}")
    begin = [1000 * at + t for t in range(len(TENSORS))]
    rows.connection.execute(f"UPDATE param SET digest = {begin} WHERE stage = 'start'")
    return rows


def test_a_resumed_run_is_laid_beside_the_steps_after_its_checkpoint() -> None:
    said = _compare(healthy(2), _resumed(10))
    assert (said.outcome, said.offset, said.compared_steps) == ("IDENTICAL", 10, STEPS - 10)
    swapped = _compare(_resumed(10), healthy(2))
    assert (swapped.outcome, swapped.offset) == ("IDENTICAL", -10)


def test_a_resume_that_lost_the_optimizers_state_parts_at_its_first_step() -> None:
    a, b = healthy(2), _resumed(10)
    for rank in (0, 1):
        for rows, step, keys in ((a, 11, '{"exp_avg": "digest"}'), (b, 1, "")):
            rows.connection.execute(
                "DELETE FROM optim_state WHERE stage = 'start' AND rank = ? AND step = ?", [rank, step]
            )
            rows.add("optim_state", rank=rank, pid=100 + rank, step=step, stage="start", keys=keys)
    said = _compare(a, b)
    assert (said.outcome, said.first_step, said.metric, said.subject) == ("DIVERGED", 11, "optimizer state", "exp_avg")


def test_unequal_world_sizes_are_compared_over_the_same_samples_only() -> None:
    a, b = healthy(2), healthy(4)
    said = _compare(a, b)
    assert said.outcome == "NOT_COMPARABLE"
    assert "other samples" in said.why
    for rows, share in ((a, 4), (b, 2)):
        rows.connection.execute(f"UPDATE batch SET ids = [step * 100 + rank * {share} + i FOR i IN range({share})]")
        rows.connection.execute("UPDATE loss SET total = 1 / step + rank * 0")
    b.connection.execute("UPDATE loss SET total = total * (1 + 1e-7)")
    assert _compare(a, b).outcome == "WITHIN_NOISE"


def test_what_the_runs_were_started_with_is_listed_without_times_and_places() -> None:
    b = _change("UPDATE identity SET value = '-y' WHERE key = 'argv'", "DELETE FROM identity WHERE key = 'code.model'")
    b.add("identity", rank=0, key="host", value="elsewhere", rule="may")
    said = _compare(healthy(2), b)
    assert [(d.key, d.a, d.b) for d in said.identity_differences] == [
        ("argv", "-x", "-y"),
        ("code.model", "c0ffee", None),
    ]


def test_a_checkpoint_that_is_not_what_was_saved_is_said() -> None:
    a, b = healthy(2), _resumed(10)
    a.add("checkpoint", rank=0, pid=100, step=11, event="save", path="/x/last.pt", digest=10, size_bytes=64)
    b.add("checkpoint", rank=0, pid=100, step=1, event="load", path="/x/last.pt", digest=11, size_bytes=64)
    (changed,) = _compare(a, b).identity_differences
    assert changed.key == "checkpoint /x/last.pt"
    assert (changed.a, changed.b) == ("64 bytes, crc32 0000000a", "64 bytes, crc32 0000000b")
    b.connection.execute("UPDATE checkpoint SET digest = 10")
    assert _compare(a, b).identity_differences == ()


def test_a_small_part_of_a_jump_on_another_rank_names_that_rank_too() -> None:
    both = _change("UPDATE loss SET total = total * (1 + 0.1 * rank + 1e-6) WHERE step >= 12")
    said = _compare(healthy(2), both)
    assert (said.outcome, said.first_step, said.ranks) == ("DIVERGED", 12, (0, 1))
    before = "UPDATE loss SET total = total * (1 + 1e-7) WHERE step = 9 AND rank = 0"
    noisy = _change("UPDATE loss SET total = total * (1 + 0.1 * rank + 1e-7) WHERE step >= 12", before)
    assert _compare(healthy(2), noisy).ranks == (1,)  # rank 0 differs by rounding, as it did before
