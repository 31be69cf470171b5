"""SEED_MISMATCH and NOT_SEEDED from rows of seeds alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import seeds


def seeded(torch: Sequence[int | None], **others: Sequence[str]) -> Rows:
    """Ranks with these torch seeds (None: never seeded) and texts of other libraries' seeds ("": never seeded)."""
    rows = Rows()
    for rank, seed in enumerate(torch):
        row: dict[str, Any] = {"torch_seeded": seed is not None, "torch_seed": seed or 0}
        for library, texts in others.items():
            row |= {f"{library}_seeded": texts[rank] != "", f"{library}_seed": texts[rank]}
        rows.add("rng", rank=rank, **row)
    return rows


def judge(rows: Rows, world_size: int, **facts: Any) -> tuple[dict[str, str], list[tuple[str, Finding]]]:
    return rows.judge(seeds, world_size=world_size, **facts)


def test_one_seed_on_all_ranks_is_clear() -> None:
    outcomes, found = judge(seeded([5, 5, 5]), 3)
    assert (outcomes["SEED_MISMATCH"], found) == ("CLEAR", [])


def test_base_plus_rank_is_clear_for_any_constant_rise() -> None:
    for rise in (1, -3, 1000):
        assert judge(seeded([7 + rise * r for r in range(4)]), 4)[0]["SEED_MISMATCH"] == "CLEAR"


def test_base_plus_local_rank_is_clear_on_two_nodes_and_a_mismatch_on_one() -> None:
    rows = seeded([7, 8, 7, 8])
    assert judge(rows, 4, local_world_size=2)[0]["SEED_MISMATCH"] == "CLEAR"
    assert judge(rows, 4, local_world_size=4)[0]["SEED_MISMATCH"] == "INCIDENT"


def test_seeds_by_pipeline_stage_are_clear_when_the_ranks_hold_different_replica_groups() -> None:
    rows = seeded([7, 7, 8, 8])
    for rank in range(4):
        rows.add("tensor", rank=rank, kind="param", sharing="ddp", peers="0,1" if rank < 2 else "2,3")
    assert judge(rows, 4, local_world_size=4)[0]["SEED_MISMATCH"] == "CLEAR"


def test_unrelated_seeds_name_every_rank() -> None:
    _, found = judge(seeded([1764400, 1764411, 1764397]), 3)
    assert [(c, f.ranks, f.first_step, f.severity, f.subject) for c, f in found] == [
        ("SEED_MISMATCH", (0, 1, 2), None, "warning", "torch")
    ]


def test_a_unique_majority_names_the_odd_rank() -> None:
    _, found = judge(seeded([7, 7, 9, 7]), 4)
    assert [f.ranks for _, f in found] == [(2,)]


def test_the_one_rank_off_the_line_of_the_others_is_named() -> None:
    _, found = judge(seeded([10, 11, 12, 99, 14]), 5)
    assert [f.ranks for _, f in found] == [(3,)]


def test_two_ranks_with_different_seeds_are_too_few_to_judge() -> None:
    outcomes, found = judge(seeded([7, 123456]), 2)
    assert (outcomes["SEED_MISMATCH"], found) == ("INSUFFICIENT_EVIDENCE", [])


def test_ranks_that_were_never_seeded_are_named_even_with_two_ranks() -> None:
    assert [f.ranks for _, f in judge(seeded([None, 7, 7]), 3)[1]] == [(0,)]
    assert [f.ranks for _, f in judge(seeded([7, None]), 2)[1]] == [(1,)]


def test_a_library_that_nobody_seeds_is_silent() -> None:
    outcomes, found = judge(seeded([7, 7, 7], numpy=["", "", ""], python=["", "", ""]), 3)
    assert (outcomes, found) == ({"SEED_MISMATCH": "CLEAR", "NOT_SEEDED": "CLEAR"}, [])


def test_each_library_is_judged_for_itself() -> None:
    _, found = judge(seeded([7, 7, 7], numpy=["1", "50", "3"], python=["4", "5", "6"]), 3)
    assert [(f.subject, f.ranks) for _, f in found] == [("numpy", (0, 1, 2))]


def test_seeds_that_are_no_numbers_are_compared_as_texts() -> None:
    assert judge(seeded([7, 7, 7], python=["abc"] * 3), 3)[1] == []
    assert [f.ranks for _, f in judge(seeded([7, 7, 7], python=["abc", "abc", "x"]), 3)[1]] == [(2,)]


def test_nobody_seeded_is_a_note_alone() -> None:
    outcomes, found = judge(seeded([None, None]), 2)
    assert [(c, f.severity, f.ranks) for c, f in found] == [("NOT_SEEDED", "note", (0, 1))]
    assert outcomes["SEED_MISMATCH"] == "NOT_APPLICABLE"


def test_a_missing_rank_may_have_been_seeded() -> None:
    outcomes, found = judge(seeded([None, None]), 3)
    assert (outcomes["NOT_SEEDED"], found) == ("INSUFFICIENT_EVIDENCE", [])


def test_a_single_process_can_only_be_unseeded() -> None:
    assert judge(seeded([7]), 1)[0] == {"SEED_MISMATCH": "NOT_APPLICABLE", "NOT_SEEDED": "CLEAR"}
    assert judge(seeded([None]), 1)[0]["NOT_SEEDED"] == "INCIDENT"


def test_what_is_seeded_after_the_first_update_does_not_count() -> None:
    rows = seeded([7, 7, 7])
    for rank in range(3):
        rows.add("rng", rank=rank, step=50, torch_seeded=True, torch_seed=rank * rank)
    assert judge(rows, 3)[1] == []


def test_the_evidence_shows_the_call_site() -> None:
    rows = seeded([7, 7, 9])
    rows.add("seed", rank=2, library="torch", call="manual_seed", seed="9", where="main.py:12")
    ((_, finding),) = judge(rows, 3)[1]
    assert any("9 (main.py:12)" in e.value and e.rank == 2 for e in finding.evidence)
