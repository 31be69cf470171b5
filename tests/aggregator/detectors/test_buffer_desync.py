"""BUFFER_DESYNC: broadcast buffers right after the broadcast, constant ones at any time, running statistics never."""

from __future__ import annotations

from kit.replicas import catalogue, sweep
from kit.rows import Rows
from tdbg.aggregator.detectors import buffer_desync
from tdbg.aggregator.findings import Finding


def _found(rows: Rows, outcome: str = "INCIDENT", **facts: object) -> list[Finding]:
    outcomes, found = rows.judge(buffer_desync, **({"world_size": 3} | facts))
    assert outcomes == {"BUFFER_DESYNC": outcome}
    return [f for _, f in found]


def _rows(broadcast: int, ranks: int = 3, sharing: str = "ddp") -> Rows:
    return catalogue(catalogue(Rows(), ranks, "w"), ranks, "mean", kind="buffer", sharing=sharing, broadcast=broadcast)


def _ends(rows: Rows, *steps: tuple[int, ...]) -> Rows:
    for step, values in enumerate(steps, start=1):
        sweep(rows, "buffer", step, {rank: [v] for rank, v in enumerate(values)}, "end", tensors=[1])
    return rows


def _syncs(rows: Rows, *steps: tuple[int, ...]) -> Rows:
    for step, values in enumerate(steps, start=1):
        sweep(rows, "buffer", step, {rank: [v] for rank, v in enumerate(values)}, "sync", tensors=[1])
    return rows


def test_a_buffer_that_differs_right_after_the_broadcast_names_the_rank() -> None:
    rows = _ends(_syncs(_rows(1), (1, 1, 1), (2, 2, 3)), (4, 5, 6), (7, 8, 9))
    (found,) = _found(rows)
    assert (found.ranks, found.first_step, found.last_good_step, found.subject) == ((2,), 2, 1, "mean")


def test_statistics_may_differ_at_the_end_of_a_step() -> None:
    assert _found(_ends(_syncs(_rows(1), (1, 1, 1), (2, 2, 2)), (4, 5, 6), (7, 8, 9)), "CLEAR") == []
    assert _found(_ends(_rows(0), (4, 5, 6), (7, 8, 9)), "CLEAR") == []


def test_a_constant_buffer_that_one_rank_holds_otherwise_is_found_without_a_broadcast() -> None:
    (found,) = _found(_ends(_rows(0), (1, 2, 1), (1, 2, 1)))
    assert (found.ranks, found.first_step, found.severity, found.last_step) == ((1,), 1, "critical", 2)


def test_one_sweep_does_not_show_that_a_buffer_is_constant() -> None:
    assert _found(_ends(_rows(0), (1, 2, 1)), "CLEAR") == []


def test_a_buffer_that_moves_on_one_rank_only_is_a_statistic() -> None:
    assert _found(_ends(_rows(0), (1, 2, 1), (1, 3, 1)), "CLEAR") == []


def test_a_value_of_its_own_on_every_rank_is_at_most_a_note() -> None:
    assert [f.severity for f in _found(_ends(_rows(0), (1, 2, 3), (1, 2, 3)))] == ["note"]


def test_two_unwrapped_ranks_with_constants_of_their_own_are_no_finding() -> None:
    rows = _ends(_rows(-1, ranks=2, sharing="plain"), (1, 2), (1, 2))
    assert _found(rows, "CLEAR", world_size=2) == []


def test_broadcast_buffers_without_a_broadcast_seen_are_no_evidence() -> None:
    assert _found(_ends(_rows(1), (1, 1, 1), (1, 1, 1)), "INSUFFICIENT_EVIDENCE") == []


def test_a_model_without_buffers_is_not_judged() -> None:
    assert _found(catalogue(Rows(), 3, "w"), "NOT_APPLICABLE") == []


def test_a_row_that_lists_no_tensors_holds_all_buffers_in_catalogue_order() -> None:
    rows = _rows(1)
    for step in (1, 2):
        sweep(rows, "buffer", step, {0: [1], 1: [1], 2: [step]}, "sync")
        sweep(rows, "buffer", step, {0: [1], 1: [1], 2: [1]}, "end")
    assert [(f.ranks, f.subject, f.first_step) for f in _found(rows)] == [((2,), "mean", 2)]


def test_a_constant_that_one_rank_overwrites_is_a_warning_where_it_happened() -> None:
    rows = _ends(_rows(0), (1, 1, 1), (1, 1, 1), (1, 9, 1), (1, 9, 1))
    (found,) = _found(rows)
    assert (found.ranks, found.first_step, found.last_good_step, found.severity) == ((1,), 3, 2, "warning")
    assert _found(_ends(_rows(0), (1, 1, 1), (1, 1, 1), (1, 9, 1), (1, 8, 1)), "CLEAR") == []


def test_of_two_ranks_the_one_that_changes_once_and_stays_is_seen_a_statistic_is_not() -> None:
    (found,) = _found(_ends(_rows(0, ranks=2), (1, 1), (1, 1), (1, 7), (1, 7)), world_size=2)
    assert (found.ranks, found.first_step, found.last_good_step, found.severity) == ((0, 1), 3, 2, "warning")
    assert _found(_ends(_rows(0, ranks=2), (1, 1), (1, 7), (1, 8), (1, 9)), "CLEAR", world_size=2) == []
    assert _found(_ends(_rows(0, ranks=2), (1, 1), (2, 7), (2, 7)), "CLEAR", world_size=2) == []
