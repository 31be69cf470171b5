"""PARAM_DESYNC: who is named, from when on, and the layouts in which parameters may differ."""

from __future__ import annotations

import pytest

from kit.replicas import catalogue, losses, sweep
from kit.rows import Rows
from tdbg.aggregator import replicas
from tdbg.aggregator.detectors import param_desync
from tdbg.aggregator.findings import Finding
from tdbg.rankagent.fingerprint import WINDOW_ELEMENTS
from tdbg.rankagent.probes.parameters import WHOLE_ELEMENTS

SAME = {0: [1, 2], 1: [1, 2], 2: [1, 2]}


def _found(rows: Rows, outcome: str = "INCIDENT", **facts: object) -> list[Finding]:
    outcomes, found = rows.judge(param_desync, **({"world_size": 3} | facts))
    assert outcomes == {"PARAM_DESYNC": outcome}
    return [f for _, f in found]


def _ddp(*digests: dict[int, list[int]], sharing: str = "ddp", peers: str | None = None) -> Rows:
    rows = catalogue(Rows(), len(digests[0]), "a.weight", "b.weight", sharing=sharing, peers=peers)
    for step, at in enumerate(digests, start=1):
        sweep(rows, "param", step, at, "end")
    return rows


def test_names_the_odd_rank_the_first_step_and_the_first_tensor() -> None:
    odd = {0: [5, 6], 1: [5, 6], 2: [7, 8]}
    (found,) = _found(_ddp(SAME, SAME, odd, odd))
    assert (found.ranks, found.first_step, found.last_good_step, found.last_step) == ((2,), 3, 2, 4)
    assert (found.subject, found.severity, found.evidence_state) == ("a.weight", "critical", "OBSERVED")
    assert [(e.rank, e.value, e.expected) for e in found.evidence] == [
        (2, f"{7:016x}", f"{5:016x}"),
        (2, f"{8:016x}", f"{6:016x}"),
    ]
    assert "2 of 2 watched steps" in found.summary


@pytest.mark.parametrize("digests", [{0: [1], 1: [2]}, {0: [1], 1: [2], 2: [3]}, {0: [1], 1: [1], 2: [2], 3: [2]}])
def test_names_all_ranks_when_no_majority_agrees(digests: dict[int, list[int]]) -> None:
    rows = sweep(catalogue(Rows(), len(digests), "a"), "param", 1, digests, "end")
    (found,) = _found(rows, world_size=len(digests))
    assert found.ranks == tuple(digests)
    assert found.last_good_step is None
    assert any("which side is right" in c for c in found.cannot_conclude)


def test_tensors_that_part_later_or_on_other_ranks_are_findings_of_their_own() -> None:
    rows = _ddp(SAME, {0: [1, 9], 1: [1, 2], 2: [1, 2]}, {0: [1, 9], 1: [8, 2], 2: [1, 2]})
    assert [(f.ranks, f.first_step, f.subject) for f in _found(rows)] == [((0,), 2, "b.weight"), ((1,), 3, "a.weight")]


def test_says_so_when_they_differ_before_the_first_update() -> None:
    rows = catalogue(Rows(), 3, "a", "b")
    sweep(rows, "param", 0, {0: [1, 2], 1: [3, 2], 2: [1, 2]}, "start")
    sweep(rows, "param", 1, SAME, "end")
    (found,) = _found(rows)
    assert (found.ranks, found.first_step, found.last_good_step) == ((1,), 1, None)
    assert "before the first update" in found.summary


def test_a_gap_between_two_sweeps_is_said() -> None:
    rows = catalogue(Rows(), 3, "a", "b")
    sweep(rows, "param", 8, SAME, "end")
    sweep(rows, "param", 16, {0: [5, 6], 1: [5, 6], 2: [7, 6]}, "end")
    (found,) = _found(rows)
    assert (found.last_good_step, found.first_step) == (8, 16)
    assert any("between 9 and 16" in c for c in found.cannot_conclude)


def test_equal_bits_are_clear_and_a_silent_rank_is_not() -> None:
    assert _found(_ddp(SAME, SAME), "CLEAR") == []
    assert _found(_ddp(SAME, SAME), "INSUFFICIENT_EVIDENCE", world_size=4, missing_ranks=(3,)) == []


def test_a_start_sweep_alone_is_no_evidence() -> None:
    rows = sweep(catalogue(Rows(), 3, "a", "b"), "param", 1, SAME, "start")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []


def test_a_single_rank_is_not_judged() -> None:
    rows = sweep(catalogue(Rows(), 1, "a"), "param", 1, {0: [1]}, "end")
    assert _found(rows, "NOT_APPLICABLE", world_size=1) == []


@pytest.mark.parametrize(("sharing", "peers"), [("sharded", ""), ("hook", None)])
def test_tensors_that_need_not_agree_are_never_compared(sharing: str, peers: str | None) -> None:
    rows = _ddp({0: [1, 2], 1: [3, 4], 2: [5, 6]}, sharing=sharing, peers=peers)
    assert _found(rows, "NOT_APPLICABLE") == []


def test_a_group_is_only_compared_within_its_peers() -> None:
    rows = catalogue(Rows(), 4, "a", peers="0,1")
    rows.connection.execute("UPDATE tensor SET peers = '2,3' WHERE rank >= 2")
    sweep(rows, "param", 1, {0: [1], 1: [1], 2: [2], 3: [2]}, "end")
    assert _found(rows, "CLEAR", world_size=4) == []


def test_catalogues_in_another_order_are_matched_by_name() -> None:
    rows = catalogue(Rows(), 2, "a", "b")
    rows.connection.execute("UPDATE tensor SET index = 1 - index WHERE rank = 1")
    sweep(rows, "param", 1, {0: [1, 2], 1: [2, 1]}, "end")
    assert _found(rows, "CLEAR", world_size=2) == []
    sweep(rows, "param", 2, {0: [1, 2], 1: [1, 2]}, "end")
    assert [f.first_step for f in _found(rows, world_size=2)] == [2]


def test_weights_loaded_after_training_are_a_note_and_nothing_in_a_failed_run() -> None:
    rows = sweep(_ddp(SAME, SAME), "param", 2, {0: [9, 9], 1: [1, 2], 2: [1, 2]}, "final")
    assert [(f.ranks, f.severity) for f in _found(rows)] == [((0,), "note")]
    assert _found(rows, "CLEAR", status="failed") == []


def test_an_average_kept_in_the_model_on_one_rank_is_no_desync_but_a_frozen_weight_is() -> None:
    rows = catalogue(catalogue(Rows(), 3, "a"), 3, "frozen", trainable=False, optimizer=-1)
    for step in (1, 2, 3):
        sweep(rows, "param", step, {0: [step, 10 + step], 1: [step, 7], 2: [step, 7]}, "end")
    assert _found(rows, "CLEAR") == []
    rows.connection.execute("UPDATE param SET digest = [digest[1], 8] WHERE rank = 0")
    assert [(f.ranks, f.subject) for f in _found(rows)] == [((0,), "frozen")]


def test_nothing_is_compared_beyond_the_step_at_which_the_steps_stop_corresponding() -> None:
    rows = _ddp(SAME, SAME, SAME, {0: [5, 6], 1: [5, 6], 2: [7, 8]})
    rows.connection.execute("UPDATE step SET optimizers = 2 WHERE rank = 2 AND step = 3")
    assert _found(rows, "INSUFFICIENT_EVIDENCE") == []


def _plain(*digests: dict[int, list[int]], own: bool = True, peers: str | None = None) -> Rows:
    rows = catalogue(Rows(), len(digests[0]), "a.weight", "b.weight", sharing="plain", peers=peers)
    for step, at in enumerate(digests, start=1):
        sweep(rows, "param", step, at, "end")
    return losses(rows, len(digests[0]), len(digests), own)


APART = [{0: [n, n + 1], 1: [n + 20, n + 21]} for n in (1, 2, 3)]


def test_an_unwrapped_model_whose_copies_go_apart_is_found_on_all_ranks() -> None:
    (found,) = _found(_plain(*APART), world_size=2)
    assert (found.ranks, found.first_step, found.severity) == ((0, 1), 1, "warning")
    assert any("no wrapper" in c for c in found.cannot_conclude)


def test_unwrapped_copies_that_come_together_again_average_by_themselves() -> None:
    assert _found(_plain(*APART, {0: [9, 9], 1: [9, 9]}, *APART), "CLEAR", world_size=2) == []


def test_an_average_that_falls_between_the_compared_steps_may_be_why_unwrapped_copies_differ() -> None:
    rows = losses(catalogue(Rows(), 2, "a.weight", sharing="plain"), 2, 24)
    for step in (8, 16, 24):
        sweep(rows, "param", step, {0: [step], 1: [step + 50]}, "end")
    (found,) = _found(rows, world_size=2)
    assert (found.ranks, found.first_step, found.severity) == ((0, 1), 8, "note")
    assert any("average by themselves" in c for c in found.cannot_conclude)


def test_ranks_without_a_process_group_are_not_compared() -> None:
    assert _found(_plain(*APART, peers=""), "NOT_APPLICABLE", world_size=2) == []


def test_a_tensor_that_only_some_ranks_hold_is_not_compared() -> None:
    rows = _plain(*APART, peers="0,1,2")
    assert _found(rows, "NOT_APPLICABLE") == []


def test_an_unwrapped_model_that_is_not_the_same_on_all_ranks_is_no_replica_in_the_tensors_that_are_alike() -> None:
    rows = _plain(*APART)
    rows.connection.execute("UPDATE tensor SET shape = '8', numel = 8 WHERE rank = 1 AND name = 'a.weight'")
    assert _found(rows, "NOT_APPLICABLE", world_size=2) == []


def test_one_loss_on_all_ranks_speaks_for_a_model_split_by_hand() -> None:
    assert _found(_plain(*APART, own=False), "INSUFFICIENT_EVIDENCE", world_size=2) == []


def test_replicated_norms_beside_weights_that_never_agreed_speak_for_a_model_split_by_hand() -> None:
    split = [{0: [n, 5 + n], 1: [n, 50 + n]} for n in (1, 2, 3)]
    assert _found(_plain(*split), "INSUFFICIENT_EVIDENCE", world_size=2) == []


def test_a_reduction_by_hand_that_forgot_a_tensor_is_a_note() -> None:
    rows = _plain({0: [1, 2], 1: [1, 2]}, {0: [3, 4], 1: [3, 5]}, {0: [6, 7], 1: [6, 8]})
    assert [(f.ranks, f.first_step, f.severity, f.subject) for f in _found(rows, world_size=2)] == [
        ((0, 1), 2, "note", "b.weight")
    ]


def test_one_unwrapped_rank_against_a_majority_is_a_warning() -> None:
    rows = _plain(SAME, {0: [3, 4], 1: [3, 5], 2: [3, 4]})
    assert [(f.ranks, f.first_step, f.severity) for f in _found(rows)] == [((1,), 2, "warning")]


def test_local_training_under_ddp_with_a_periodic_average_is_a_note() -> None:
    rows = _ddp(*([{0: [1, 2], 1: [3, 4], 2: [5, 6]}, SAME] * 2))
    assert {f.severity for f in _found(rows)} == {"note"}


def _entered(rows: Rows, *steps: int) -> Rows:
    for rank, step in enumerate(steps):
        rows.add("event", rank=rank, step=step, kind="join")
    return rows


def test_passes_under_join_after_which_the_ranks_have_unequal_step_numbers_are_not_compared() -> None:
    uneven = [SAME, SAME, {0: [3, 4], 1: [5, 6], 2: [5, 6]}, {0: [5, 6], 1: [7, 8], 2: [7, 8]}]
    joined = _entered(_ddp(*uneven), 1, 1, 1)
    assert [f.first_step for f in _found(joined)] == [3]
    assert _found(_entered(joined, 3, 4, 4), "INSUFFICIENT_EVIDENCE") == []


def test_a_rank_that_differs_before_the_second_pass_under_join_is_found() -> None:
    rows = _entered(_entered(_ddp(SAME, {0: [1, 2], 1: [1, 2], 2: [1, 3]}, SAME), 1, 1, 1), 3, 4, 4)
    assert [(f.ranks, f.first_step) for f in _found(rows)] == [((2,), 2)]


def test_unwrapped_copies_that_begin_with_settings_of_their_own_may_be_trainings_of_their_own() -> None:
    rows = _plain(*APART)
    for rank, lr in enumerate((0.1, 0.01)):
        rows.add("optim", rank=rank, step=1, lr=lr, settings="{}", tensors=2)
    assert _found(rows, "INSUFFICIENT_EVIDENCE", world_size=2) == []
    rows.connection.execute("UPDATE optim SET lr = 0.1")
    assert [f.ranks for f in _found(rows, world_size=2)] == [(0, 1)]


def _large(steps: int, bad: dict[int, int], trainable: bool = True) -> Rows:
    """A model too large for whole sweeps, a in 5 windows; `bad`: what rank 2 has instead at a step."""
    rows = catalogue(catalogue(Rows(), 3, "a", numel=4 * 2040), 3, "b", numel=4_000_000, trainable=False, optimizer=-1)
    if not trainable:
        rows.connection.execute("UPDATE tensor SET trainable = FALSE, optimizer = -1")
    sweep(rows, "param", 1, {r: [1, 2] for r in range(3)}, "start")
    for step in range(1, steps + 1):
        own = 100 * (step % 5) + (step if trainable else 0)
        sweep(rows, "param", step, {r: [bad.get(step, own) if r == 2 else own, 7000 + step] for r in range(3)}, "end")
    return rows


def test_a_change_inside_one_window_is_no_periodic_average_and_says_how_far_back_it_may_reach() -> None:
    (found,) = _found(_large(16, {6: 1, 11: 2, 16: 3}))
    assert (found.ranks, found.first_step, found.last_good_step, found.severity) == ((2,), 6, 1, "critical")
    assert any("between 2 and 6" in c for c in found.cannot_conclude)


def test_windows_that_come_together_again_are_a_periodic_average() -> None:
    rows = _large(30, {1: 1, 11: 1, 21: 1, 2: 2, 12: 2, 22: 2})
    assert [f.severity for f in _found(rows)] == ["note"]


def test_a_frozen_tensor_seen_through_moving_windows_does_not_move() -> None:
    (found,) = _found(_large(8, {3: 1, 8: 1}, trainable=False))
    assert (found.ranks, found.first_step, found.severity) == ((2,), 3, "critical")


def test_the_windows_are_those_of_the_agent() -> None:
    assert (replicas.WINDOW_ELEMENTS, replicas.WHOLE_ELEMENTS) == (WINDOW_ELEMENTS, WHOLE_ELEMENTS)


def test_an_average_made_between_two_updates_is_seen_before_the_next_one() -> None:
    for sharing, severities in (("ddp", {"note"}), ("plain", set())):
        rows = losses(catalogue(Rows(), 2, "a", "b", sharing=sharing), 2, 9)
        for step in range(1, 10):
            sweep(rows, "param", step, {0: [step], 1: [step + 50 * (step % 3 != 1)]}, "start", tensors=[1])
            sweep(rows, "param", step, {0: [step, 2], 1: [60 + step, 90]}, "end")
        assert {f.severity for f in _found(rows, "INCIDENT" if severities else "CLEAR", world_size=2)} == severities


def test_a_change_between_two_updates_is_one_finding_though_some_tensors_were_seen_before_the_update() -> None:
    rows = catalogue(Rows(), 3, "a", "b")
    for step in (1, 2, 3):
        changed = {r: [5 if r == 2 and step == 3 else 1] for r in range(3)}
        sweep(rows, "param", step, changed, "start", tensors=[1])
        sweep(rows, "param", step, {r: changed[r] * 2 for r in range(3)}, "end")
    (found,) = _found(rows)
    assert (found.ranks, found.first_step, found.last_good_step, found.subject) == ((2,), 3, 2, "a")
    assert "before the first update" not in found.summary


def test_a_frozen_weight_that_one_rank_overwrites_is_found_where_it_happened() -> None:
    rows = catalogue(Rows(), 3, "frozen", trainable=False, optimizer=-1)
    for step in range(1, 7):
        sweep(rows, "param", step, {0: [7], 1: [8 if step >= 4 else 7], 2: [7]}, "end")
    assert [(f.ranks, f.first_step, f.last_good_step) for f in _found(rows)] == [((1,), 4, 3)]
    rows.connection.execute("UPDATE param SET digest = [step] WHERE rank = 1 AND step >= 4")  # an average of its own
    assert _found(rows, "CLEAR") == []


def test_a_window_that_was_never_looked_at_before_says_so() -> None:
    (found,) = _found(_large(3, {3: 1}))
    assert (found.first_step, found.last_good_step) == (3, None)
    assert any("up to 3" in c for c in found.cannot_conclude)


def test_unwrapped_copies_on_ranks_that_took_other_numbers_of_steps_may_be_trainings_of_their_own() -> None:
    rows = _plain(*APART)
    rows.add("step", rank=1, step=4, optimizers=1, backwards=1)
    assert _found(rows, "INSUFFICIENT_EVIDENCE", world_size=2) == []
    assert [f.ranks for f in _found(rows, world_size=2, status="failed")] == [(0, 1)]


def test_equal_before_an_update_says_nothing_of_what_that_update_did() -> None:
    rows = catalogue(Rows(), 3, "a")
    for step, odd in ((1, 1), (8, 2), (16, 2)):
        sweep(rows, "param", step, {0: [1], 1: [odd], 2: [1]}, "start")
    sweep(rows, "param", 16, {0: [1], 1: [2], 2: [1]}, "end")
    (found,) = _found(rows)
    assert (found.first_step, found.last_good_step) == (8, None)
