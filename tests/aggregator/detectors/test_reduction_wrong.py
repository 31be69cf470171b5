"""REDUCTION_WRONG: reduced gradients that all ranks agree on, held against the ranks' own."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kit.replicas import catalogue
from kit.rows import Rows
from tdbg.aggregator.detectors import reduction_wrong
from tdbg.aggregator.findings import Finding

NAMES = ("a", "b", "c", "d", "e")
Weights = Callable[[int, int, str], float]  # (rank, step, tensor) -> factor with which the rank's part counts


def _run(weight: Weights, ranks: int = 4, steps: int = 8, hook: str = "mean", by_hand: bool = False,
         error: float = 0.0, dtype: str = "float32") -> Rows:  # fmt: skip
    rows = catalogue(Rows(), ranks, *NAMES, sharing="plain" if by_hand else "ddp", dtype=dtype)
    for step in range(1, steps + 1):
        parts = {}
        for rank in range(ranks):
            drawn = random.Random(100 * rank + step)
            parts[rank] = [drawn.gauss(0, 1) for _ in range(2 * len(NAMES))]
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1)
            rows.add("grad", rank=rank, step=step, stage="local", generation=1, valid=True, scale=1.0, synced=1,
                     l2=[2.0] * len(NAMES), sketch=parts[rank])  # fmt: skip
        noise = random.Random(step)
        made = [sum(weight(r, step, NAMES[m // 2]) * parts[r][m] for r in range(ranks)) + noise.gauss(0, error)
                for m in range(2 * len(NAMES))]  # fmt: skip
        for rank in range(ranks):
            row = {"rank": rank, "step": step, "generation": 1, "digest": [step] * len(NAMES), "sketch": made}
            if by_hand:
                rows.add("grad", stage="reduced", valid=True, scale=1.0, micro=1, l2=[-2.0] * len(NAMES), **row)
            else:
                rows.add("delivered", reduction=hook, **row)
    return rows


def _found(rows: Rows, outcome: str = "INCIDENT", world_size: int = 4) -> list[Finding]:
    outcomes, found = rows.judge(reduction_wrong, world_size=world_size)
    assert outcomes == {"REDUCTION_WRONG": outcome}
    return [f for _, f in found]


def _without(gone: set[int], since: int, tensors: str = "abcde", divisor: float = 4.0) -> Weights:
    return lambda r, step, t: 0.0 if r in gone and step >= since and t in tensors else 1 / divisor


def _mean(r: int, step: int, tensor: str) -> float:
    return 0.25


@pytest.mark.parametrize("hook", ["mean", "averaged"])
def test_the_mean_is_clear(hook: str) -> None:
    assert _found(_run(_mean, hook=hook), "CLEAR") == []
    assert _found(_run(_mean, by_hand=True), "CLEAR") == []


@pytest.mark.parametrize("hook", ["mean", "averaged"])
def test_names_the_rank_whose_part_is_missing_and_the_step(hook: str) -> None:
    (found,) = _found(_run(_without({2}, 5), hook=hook))
    assert (found.ranks, found.first_step, found.last_good_step, found.subject) == ((2,), 5, 4, "a")
    assert found.severity == "critical"


def test_a_missing_part_of_a_reduction_by_hand_is_a_warning() -> None:
    (found,) = _found(_run(_without({2}, 5), by_hand=True))
    assert (found.ranks, found.first_step, found.severity) == ((2,), 5, "warning")


def test_a_missing_part_among_gradients_that_are_clipped_is_a_warning() -> None:
    clip = lambda step: 1 if step % 3 == 0 else 1 / (1 + step)  # noqa: E731
    (found,) = _found(_run(lambda r, step, t: (r != 3 or step < 5) * clip(step) / 4, by_hand=True))
    assert (found.ranks, found.first_step, found.severity) == ((3,), 5, "warning")


def test_a_mean_of_the_others_is_meant_even_where_clipping_makes_it_look_like_the_mean_of_all() -> None:
    clip = lambda step: 0.75 if step == 6 else 1.0  # noqa: E731
    (found,) = _found(_run(lambda r, step, t: 0.25 if step < 5 else (r != 3) * clip(step) / 3, by_hand=True))
    assert (found.ranks, found.severity) == ((3,), "note")


def test_names_the_tensors_of_the_bucket_that_a_part_is_missing_from() -> None:
    (found,) = _found(_run(_without({1}, 6, "de"), hook="averaged"))
    assert (found.ranks, found.first_step, found.subject) == ((1,), 6, "d")
    assert "1 more tensor" in found.summary


def test_names_several_ranks_whose_parts_are_missing() -> None:
    (found,) = _found(_run(_without({1, 3}, 4)))
    assert (found.ranks, found.first_step) == ((1, 3), 4)


def test_of_two_ranks_the_missing_one_is_named() -> None:
    (found,) = _found(_run(_without({0}, 3, divisor=2.0), ranks=2), world_size=2)
    assert (found.ranks, found.first_step) == ((0,), 3)


def test_what_ddp_promises_holds_from_the_first_step_on() -> None:
    (found,) = _found(_run(_without({2}, 1)))
    assert (found.ranks, found.first_step, found.last_good_step) == ((2,), 1, None)


@pytest.mark.parametrize("hook", ["mean", "averaged"])
def test_a_part_that_counts_three_times_is_named(hook: str) -> None:
    weights = lambda r, step, t: 0.75 if (r, step >= 5) == (3, True) else 0.25  # noqa: E731
    (found,) = _found(_run(weights, hook=hook))
    assert (found.ranks, found.first_step, found.severity) == ((3,), 5, "critical")
    assert "3 times" in found.summary


@pytest.mark.parametrize("last", [(0.5, 1 / 6), (0.1, 0.3), (0.125, 0.25)])
def test_a_mean_weighted_by_sample_counts_is_left_open(last: tuple[float, float]) -> None:
    weights = lambda r, step, t: last[r != 3] if step == 6 else 0.25  # noqa: E731
    assert _found(_run(weights, hook="weighted"), "INSUFFICIENT_EVIDENCE") == []
    assert _found(_run(weights, by_hand=True), "INSUFFICIENT_EVIDENCE") == []


def test_a_part_that_a_hook_never_took_in_is_a_warning() -> None:
    (found,) = _found(_run(_without({1}, 1), hook="averaged"))
    assert (found.ranks, found.first_step, found.severity) == ((1,), 1, "warning")


def test_a_corrupted_transfer_names_no_rank() -> None:
    rows = _run(_mean)
    rows.connection.execute("UPDATE delivered SET sketch = list_concat([CAST(7 AS FLOAT)], sketch[2:]) WHERE step = 6")
    (found,) = _found(rows)
    assert (found.ranks, found.first_step, found.last_step, found.subject) == ((0, 1, 2, 3), 6, 6, "a")
    assert found.cannot_conclude


def test_a_plain_sum_is_a_note_and_a_divisor_below_the_number_of_ranks_a_warning() -> None:
    for by_hand in (False, True):
        (found,) = _found(_run(lambda r, step, t: 1.0, hook="added", by_hand=by_hand))
        assert (found.severity, found.ranks) == ("note", (0, 1, 2, 3))
        (found,) = _found(_run(lambda r, step, t: 0.5, hook="added", by_hand=by_hand))
        assert found.severity == "warning"


def test_a_divisor_that_changes_for_good_under_a_hook_is_a_warning() -> None:
    (found,) = _found(_run(lambda r, step, t: 0.25 if step < 5 else 1.0, hook="averaged"))
    assert (found.severity, found.first_step, found.last_good_step) == ("warning", 5, 4)


def test_a_common_factor_that_varies_is_clipping() -> None:
    assert _found(_run(lambda r, step, t: 0.25 / step, by_hand=True), "CLEAR") == []


def test_a_factor_of_each_tensor_by_hand_is_left_open() -> None:
    weights = lambda r, step, t: 0.25 / (1 + (step > 4) * ord(t))  # noqa: E731
    assert _found(_run(weights, by_hand=True), "INSUFFICIENT_EVIDENCE") == []


def test_a_mean_of_the_ranks_that_take_part_is_a_note() -> None:
    weights = lambda r, step, t: 0.25 if step < 5 else (r != 1) / 3  # noqa: E731
    (found,) = _found(_run(weights, hook="averaged"))
    assert (found.severity, found.ranks) == ("note", (1,))


def test_a_lossy_hook_keeps_no_law() -> None:
    assert _found(_run(_mean, hook="compressed", error=0.3), "INSUFFICIENT_EVIDENCE") == []


@pytest.mark.parametrize(("hook", "dtype", "error"), [("mean", "bfloat16", 4e-3),
                                                      ("fp16_compress_hook", "float32", 5e-4),
                                                      ("bf16_compress_hook", "float32", 4e-3)])  # fmt: skip
def test_the_rounding_of_the_wire_is_no_defect(hook: str, dtype: str, error: float) -> None:
    assert _found(_run(_mean, hook=hook, dtype=dtype, error=error), "CLEAR") == []


def test_ranks_that_disagree_are_another_rule_s_matter() -> None:
    rows = _run(_without({2}, 1))
    rows.connection.execute("UPDATE delivered SET digest = [rank, 1, 1, 1, 1]")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []


def test_a_step_that_some_rank_did_not_record_is_not_judged() -> None:
    rows = _run(_without({2}, 5))
    rows.connection.execute("DELETE FROM grad WHERE rank = 0 AND step >= 5")
    assert _found(rows, "CLEAR") == []


def test_own_gradients_that_may_be_reduced_already_are_not_judged() -> None:
    rows = _run(_without({2}, 1))
    rows.connection.execute("UPDATE grad SET valid = FALSE WHERE stage = 'local'")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []


# -------------------------------------------------------- shards of FSDP's


def _sharded(weight: Weights, ranks: int = 4, replicas: int = 1, steps: int = 8, wire: str = "float32",
             error: float = 0.0, reduction: str = "mean") -> Rows:  # fmt: skip
    """Each rank holds a part of every tensor; with `replicas` the parts are held that many times."""
    everyone, apart = ",".join(map(str, range(ranks))), ranks // replicas
    rows = Rows()
    for rank in range(ranks):
        same = [r for r in range(ranks) if r % apart == rank % apart]
        for index, name in enumerate(NAMES):
            rows.add("tensor", rank=rank, generation=1, index=index, kind="param", name=name, model_type="Net",
                     shape="8", dtype="float32", numel=8 // apart, full_numel=8, sharing="sharded", shards=everyone,
                     peers=",".join(map(str, same)) if replicas > 1 else "", mesh=everyone)  # fmt: skip
    for step in range(1, steps + 1):
        drawn = [random.Random(100 * r + step) for r in range(ranks)]
        parts = [[d.gauss(0, 1) for _ in range(2 * len(NAMES))] for d in drawn]
        noise = random.Random(step)
        made = [sum(weight(r, step, NAMES[m // 2]) * parts[r][m] for r in range(ranks)) + noise.gauss(0, error)
                for m in range(2 * len(NAMES))]  # fmt: skip
        for rank in range(ranks):
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1)
            rows.add("grad", rank=rank, step=step, stage="local", generation=1, valid=True, scale=1.0, synced=1,
                     l2=[2.0] * len(NAMES), sketch=parts[rank])  # fmt: skip
            part = rank % apart
            held = [x / 2 if part == 0 else x / 2 / (apart - 1) for x in made] if apart > 1 else made
            rows.add("delivered", rank=rank, step=step, generation=1, sketch=held, reduction=reduction, wire=wire)
    return rows


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_shards_put_together_are_the_mean(replicas: int) -> None:
    assert _found(_sharded(_mean, replicas=replicas), "CLEAR") == []


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_part_that_is_missing_from_all_shards_names_the_rank(replicas: int) -> None:
    (found,) = _found(_sharded(_without({2}, 5), replicas=replicas))
    assert (found.ranks, found.first_step, found.last_good_step, found.severity) == ((2,), 5, 4, "critical")
    assert "FSDP" in found.summary


@pytest.mark.parametrize(("wire", "error"), [("bfloat16", 4e-3), ("float16", 5e-4)])
def test_the_rounding_of_the_wire_of_shards_is_no_defect(wire: str, error: float) -> None:
    assert _found(_sharded(_mean, wire=wire, error=error), "CLEAR") == []


def test_a_divisor_of_the_program_s_own_is_no_defect_of_shards() -> None:
    (found,) = _found(_sharded(lambda r, step, t: 1.0, reduction="gradient_divide_factor"))
    assert found.severity == "note"


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM delivered WHERE rank = 1",
        "UPDATE delivered SET sketch = list_transform(sketch, lambda x: CAST('nan' AS FLOAT)) WHERE rank = 1",
        "UPDATE tensor SET shards = ''",
        "UPDATE delivered SET wire = 'bfloat16' WHERE rank = 1",
        "DELETE FROM grad WHERE rank = 1",
    ],
)
def test_shards_of_which_something_is_not_known_are_not_judged(change: str) -> None:
    rows = _sharded(_without({2}, 1))
    rows.connection.execute(change)
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []


def test_replicas_of_a_shard_that_differ_are_another_rule_s_matter() -> None:
    rows = _sharded(_without({2}, 1), replicas=2)
    rows.connection.execute("UPDATE delivered SET sketch = list_transform(sketch, lambda x: x + rank)")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []


def _spoilt_from(since: int, hook: str) -> Rows:
    """A hook's mean until `since`; then the numbers of one tensor are no combination of the ranks' own."""
    rows = _run(_mean, hook=hook)
    spoilt = "[sketch[1] * 2, sketch[2] * 3] || sketch[3:]"
    rows.connection.execute(f"UPDATE delivered SET sketch = {spoilt} WHERE step >= {since}")
    return rows


def test_a_hook_that_leaves_its_law_unaccounted_for_is_a_note() -> None:
    (found,) = _found(_spoilt_from(6, "averaged"))
    assert (found.severity, found.first_step, found.last_good_step, found.subject) == ("note", 6, 5, "a")
    assert found.cannot_conclude


def test_a_hook_of_torch_s_that_compresses_after_a_warm_up_is_left_open() -> None:
    assert _found(_spoilt_from(6, "powerSGD_hook"), "INSUFFICIENT_EVIDENCE") == []


def test_where_ranks_run_other_numbers_of_backwards_nothing_is_held_against_the_mean() -> None:
    rows = _run(_mean)
    rows.connection.execute("UPDATE step SET backwards = 2 WHERE rank = 2 AND step >= 6")
    rows.connection.execute("UPDATE delivered SET sketch = [x * 3 FOR x IN sketch] WHERE step >= 6")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []


def test_another_divisor_seen_at_too_few_steps_is_left_open() -> None:
    late = lambda r, step, t: 0.125 if step >= 7 else 0.25  # noqa: E731
    assert _found(_run(late, hook="averaged", steps=8), "INSUFFICIENT_EVIDENCE") == []
