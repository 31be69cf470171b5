"""Which findings follow others: replicas that come apart, samples that are shared out wrongly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tdbg.aggregator.findings import Finding
from tdbg.aggregator.followers import followers_to_notes


def _f(ranks: tuple[int, ...] = (2,), step: int | None = 5, point: str = "", **more: object) -> Finding:
    good = None if step is None else step - 1 or None
    return replace(Finding(ranks, step, "differs", point=point, last_good_step=good, last_step=30), **more)  # type: ignore[arg-type]


GRAD, PARAM, STATE = _f(point="grad"), _f(point="param_end"), _f(point="state_end")


def _severities(*findings: tuple[str, Finding]) -> dict[str, str]:
    return {code: f.severity for code, f in followers_to_notes(findings)}


def test_an_unreduced_gradient_speaks_for_the_state_and_the_parameters_that_follow_it() -> None:
    found = dict(followers_to_notes([("PARAM_DESYNC", PARAM), ("OPTIM_STATE_DESYNC", STATE), ("GRAD_DESYNC", GRAD)]))
    assert found["GRAD_DESYNC"] == GRAD
    for code in ("PARAM_DESYNC", "OPTIM_STATE_DESYNC"):
        assert found[code].severity == "note"
        assert found[code].summary == "follows GRAD_DESYNC at step 5: differs"


def test_state_changed_before_an_update_speaks_for_the_parameters_after_it() -> None:
    assert _severities(("PARAM_DESYNC", PARAM), ("OPTIM_STATE_DESYNC", _f(point="state_start"))) == {
        "PARAM_DESYNC": "note", "OPTIM_STATE_DESYNC": "critical"}  # fmt: skip


def test_parameters_changed_before_an_update_speak_for_the_state_after_it() -> None:
    assert _severities(("PARAM_DESYNC", _f(point="param_start")), ("OPTIM_STATE_DESYNC", STATE)) == {
        "PARAM_DESYNC": "critical", "OPTIM_STATE_DESYNC": "note"}  # fmt: skip


def test_a_setting_speaks_for_the_parameters_and_a_threshold_for_the_gradients_too() -> None:
    lr, clip = _f(point="setting"), _f(point="clip")
    assert _severities(("PARAM_DESYNC", PARAM), ("HPARAM_DESYNC", lr))["PARAM_DESYNC"] == "note"
    assert _severities(("GRAD_DESYNC", GRAD), ("HPARAM_DESYNC", clip))["GRAD_DESYNC"] == "note"
    assert _severities(("GRAD_DESYNC", GRAD), ("HPARAM_DESYNC", lr))["GRAD_DESYNC"] == "critical"


def test_parameters_never_explain_gradients() -> None:
    found = _severities(("PARAM_DESYNC", _f(point="param_start")), ("GRAD_DESYNC", GRAD))
    assert set(found.values()) == {"critical"}


@pytest.mark.parametrize("other", [{"ranks": (1,)}, {"attempt": 1}, {"first_step": 9, "last_good_step": 8}])
def test_other_ranks_attempts_or_a_later_beginning_are_another_event(other: dict[str, object]) -> None:
    found = _severities(("GRAD_DESYNC", GRAD), ("PARAM_DESYNC", replace(PARAM, **other)))  # type: ignore[arg-type]
    assert set(found.values()) == {"critical"}


def test_what_was_next_looked_at_some_steps_later_may_have_begun_with_it() -> None:
    late = replace(PARAM, first_step=9, last_good_step=4)
    assert _severities(("GRAD_DESYNC", GRAD), ("PARAM_DESYNC", late))["PARAM_DESYNC"] == "note"


def test_between_two_sampled_steps_the_carried_difference_does_not_come_first() -> None:
    start = _f(step=64, point="param_start", last_good_step=32)
    grad = _f(step=64, point="grad", last_good_step=32)
    assert _severities(("PARAM_DESYNC", start), ("GRAD_DESYNC", grad)) == {
        "PARAM_DESYNC": "note", "GRAD_DESYNC": "critical"}  # fmt: skip


def test_state_that_differed_before_the_update_is_not_put_down_to_that_updates_setting() -> None:
    carried = replace(_f(point="state_start"), last_good_step=2)  # both came with what one rank loaded
    assert set(_severities(("HPARAM_DESYNC", _f(point="setting")), ("OPTIM_STATE_DESYNC", carried)).values()) == {
        "critical"}  # fmt: skip
    seen_after = replace(carried, point="state_end")
    assert _severities(("HPARAM_DESYNC", _f(point="setting")), ("OPTIM_STATE_DESYNC", seen_after))[
        "OPTIM_STATE_DESYNC"] == "note"  # fmt: skip


def test_a_note_does_not_make_an_alarm_a_note() -> None:
    foreach = _f(point="setting", severity="note")
    assert _severities(("HPARAM_DESYNC", foreach), ("PARAM_DESYNC", PARAM))["PARAM_DESYNC"] == "critical"


def test_an_update_that_rounds_otherwise_on_another_machine_is_no_fault_of_the_state() -> None:
    machine = ("IDENTITY_MISMATCH", _f((2,), None, subject="env.ATEN_CPU_CAPABILITY", severity="warning"))
    found = _severities(machine, ("OPTIM_STATE_DESYNC", STATE), ("PARAM_DESYNC", replace(PARAM, first_step=6)))
    assert found == {"IDENTITY_MISMATCH": "warning", "OPTIM_STATE_DESYNC": "note", "PARAM_DESYNC": "critical"}
    assert _severities(machine, ("OPTIM_STATE_DESYNC", _f(point="state_start")))["OPTIM_STATE_DESYNC"] == "critical"


def _sampler(subject: str = "sampler.seed", step: int = 1) -> tuple[str, Finding]:
    return ("SAMPLER_SEED_MISMATCH", _f((1,), step, subject=subject))


def _passes(code: str, step: int, subject: str = "DistributedSampler") -> tuple[str, Finding]:
    return (code, _f((0, 1), step, severity="warning", subject=subject))


def test_one_samplers_fault_is_one_alarm() -> None:
    found = _severities(_sampler(), _passes("SHARD_OVERLAP", 1), _passes("SHARD_MISSING", 12))
    assert found == {"SAMPLER_SEED_MISMATCH": "critical", "SHARD_OVERLAP": "note", "SHARD_MISSING": "note"}


def test_an_order_that_repeats_follows_the_epoch_not_the_seed() -> None:
    repeats = _passes("EPOCH_NOT_RESHUFFLED", 13)
    assert _severities(_sampler("sampler.epoch", 13), repeats)["EPOCH_NOT_RESHUFFLED"] == "note"
    assert _severities(_sampler(), repeats)["EPOCH_NOT_RESHUFFLED"] == "warning"


def test_samples_missing_where_others_are_taken_twice_follow_those() -> None:
    overlap = _passes("SHARD_OVERLAP", 1, "SequentialSampler")
    assert _severities(overlap, _passes("SHARD_MISSING", 12, "SequentialSampler"))["SHARD_MISSING"] == "note"
    assert _severities(overlap, _passes("SHARD_MISSING", 12, "RandomSampler"))["SHARD_MISSING"] == "warning"


def test_what_was_there_before_the_mismatch_or_has_another_sampler_stays() -> None:
    assert _severities(_sampler(step=13), _passes("SHARD_OVERLAP", 1))["SHARD_OVERLAP"] == "warning"
    assert _severities(_sampler(), _passes("SHARD_OVERLAP", 1, "RandomSampler"))["SHARD_OVERLAP"] == "warning"


def test_gradients_of_a_replica_that_has_come_apart_stand_apart_for_a_reason() -> None:
    outlier = _f(step=9, severity="warning")
    found = dict(followers_to_notes([("GRAD_OUTLIER_RANK", outlier), ("PARAM_DESYNC", _f(step=7, point="param_end"))]))
    assert found["GRAD_OUTLIER_RANK"].severity == "note"
    assert found["GRAD_OUTLIER_RANK"].summary == "follows PARAM_DESYNC at step 7: differs"
    for other in ({"ranks": (1,)}, {"first_step": 12}, {"attempt": 1}):
        apart = replace(_f(step=7), **other)  # type: ignore[arg-type]
        assert _severities(("GRAD_OUTLIER_RANK", outlier), ("PARAM_DESYNC", apart))["GRAD_OUTLIER_RANK"] == "warning"


def test_growth_is_told_once_by_the_rule_that_says_most() -> None:
    leak, limit = _f((1,), 1, severity="warning"), _f((0, 1), 1, severity="warning")
    more = _f((1,), None, severity="warning")
    assert _severities(("MEMORY_IMBALANCE", more), ("MEMORY_LEAK", leak), ("OOM_PRECURSOR", limit)) == {
        "MEMORY_IMBALANCE": "note", "MEMORY_LEAK": "note", "OOM_PRECURSOR": "warning"}  # fmt: skip
    assert _severities(("MEMORY_IMBALANCE", more), ("MEMORY_LEAK", leak)) == {
        "MEMORY_IMBALANCE": "note", "MEMORY_LEAK": "warning"}  # fmt: skip


def test_growth_of_other_ranks_or_beside_a_note_speaks_for_itself() -> None:
    leak = _f((1,), 1, severity="warning")
    for limit in (_f((2,), 1, severity="warning"), _f((0, 1), 1, severity="note"), _f((1,), 1, attempt=1)):
        assert _severities(("MEMORY_LEAK", leak), ("OOM_PRECURSOR", limit))["MEMORY_LEAK"] == "warning"


# -------------------------------------------------------- ranks that ended for want of memory


@pytest.mark.parametrize("short", [[(0, 1)], [(0,), (1,)]])
def test_ranks_that_ran_out_of_memory_speak_for_their_end(short: list[tuple[int, ...]]) -> None:
    found = followers_to_notes([*(("OOM", _f(r, 9)) for r in short), ("RANK_FAILED", _f((0, 1), 9))])
    assert [(c, f.severity) for c, f in found] == [*(("OOM", "critical") for _ in short), ("RANK_FAILED", "note")]
    assert found[-1][1].summary == "follows OOM at step 9: differs"


@pytest.mark.parametrize(
    "other", [{"ranks": (1, 2)}, {"ranks": (0,)}, {"attempt": 1}, {"severity": "warning", "evidence_state": "INFERRED"}]
)
def test_memory_of_another_rank_or_attempt_or_a_caught_failure_speaks_for_no_end(other: dict[str, object]) -> None:
    short = _f(**({"ranks": (2,), "step": 9} | other))  # type: ignore[arg-type]
    assert _severities(("OOM", short), ("RANK_FAILED", _f((0, 2), 9)))["RANK_FAILED"] == "critical"
