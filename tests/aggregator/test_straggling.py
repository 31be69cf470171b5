"""Who straggles, from durations alone: shapes of three production jobs, noise of many kinds, what is no straggler."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy
import pytest

from tdbg.aggregator.straggling import LEAST, WARM_UP, Op, Peers, at_least, heavy_stages, peers, stragglers

TRACES = Path(__file__).parents[3] / "shared" / "data" / "straggler-traces"
MS = 1e6


def group(own, ranks=None, stage=0, cpu_wait=None):
    count, steps = next(iter(own.values())).shape
    return Peers(stage, ranks or tuple(range(count)), numpy.arange(1, steps + 1), own, cpu_wait)


def noisy(seed, ranks=4, steps=60, scatter=0.01, ms=50.0):
    """Forward and backward of a healthy job: log-normal, each rank its own."""
    draw = numpy.random.default_rng(seed)
    return {op: ms * MS * part * numpy.exp(scatter * draw.standard_normal((ranks, steps)))
            for op, part in (("data", 0.1), ("forward", 0.3), ("backward", 0.5), ("optimizer", 0.1))}  # fmt: skip


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
@pytest.mark.parametrize("slow", range(4))
def test_ten_percent_of_own_time_over_thirty_steps_is_named_with_its_phase(phase, slow):
    own = noisy(slow)
    own[phase][slow, 20:50] += 0.1 * 50 * MS
    (found,) = stragglers(group(own))
    assert (found.ranks, found.phase) == ((slow,), phase)
    assert abs(found.first_step - 21) <= 1
    assert abs(found.last_step - 50) <= 1
    assert 0.08 < found.excess < 0.12
    assert not found.doubtful


@pytest.mark.parametrize("scatter", [0.0, 0.01, 0.05, 0.2, 0.6, 1.5])
@pytest.mark.parametrize("ranks", [2, 3, 4, 9, 40])
def test_noise_alone_names_nobody(scatter, ranks):
    for seed in range(40):
        assert not stragglers(group(noisy(seed, ranks, 120, scatter))), seed


def test_a_device_that_is_a_little_slower_is_no_straggler():
    own = noisy(1)
    for x in own.values():
        x[2] *= 1.04
    assert not stragglers(group(own))


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_take_turns_at_being_the_slowest_are_none(seed):
    draw = numpy.random.default_rng(seed)
    own = noisy(seed, steps=100)
    for step in range(100):
        own["forward"][draw.integers(4), step] *= 3
    assert not stragglers(group(own))


@pytest.mark.parametrize("seed", range(20))
def test_pauses_of_one_rank_now_and_then_are_none(seed):
    own = noisy(seed, steps=200)
    own["other"] = numpy.full((4, 200), 0.2 * MS)
    own["other"][0, ::5] += 80 * MS
    assert not stragglers(group(own))


def test_less_than_a_slice_of_the_scheduler_is_none():
    own = noisy(3, ms=3.0)
    own["forward"][1] += 0.6 * MS
    assert not stragglers(group(own))


def test_a_loader_whose_workers_deliver_in_turns_is_judged_by_sums():
    own = noisy(4, steps=120)
    own["data"][3, ::2] += 60 * MS
    (found,) = stragglers(group(own))
    assert (found.ranks, found.phase) == ((3,), "data")
    assert found.size > 1


def test_a_phase_is_seen_below_the_noise_of_the_others():
    draw = numpy.random.default_rng(0)
    own = noisy(5, scatter=0.02)
    own["backward"] *= numpy.exp(1.0 * draw.standard_normal(own["backward"].shape))
    own["forward"][1] += 40 * MS
    (found,) = stragglers(group(own))
    assert (found.ranks, found.phase) == ((1,), "forward")


def test_what_may_be_waiting_for_a_core_is_in_doubt():
    own = noisy(6)
    own["forward"][2] += 20 * MS
    wait = {op: numpy.zeros_like(x) for op, x in own.items()}
    assert [f.doubtful for f in stragglers(group(own, cpu_wait=wait))] == [False]
    wait["forward"][2] += 20 * MS
    assert [f.doubtful for f in stragglers(group(own, cpu_wait=wait))] == [True]


def test_steps_in_which_backward_was_not_told_from_waiting_count_without_it():
    own = noisy(7, steps=300)
    own["backward"][:, 100:] = numpy.nan
    own["data"][1, 150:] += 10 * MS
    (found,) = stragglers(group(own))
    assert (found.ranks, found.phase) == ((1,), "data")
    assert abs(found.first_step - 151) <= 2
    own = noisy(8, steps=300)
    own["backward"][2] += 10 * MS
    own["backward"][:, 100:] = numpy.nan
    (found,) = stragglers(group(own))
    assert (found.ranks, found.phase) == ((2,), "backward")


@pytest.mark.parametrize("ranks", [3, 4, 5])
@pytest.mark.parametrize("factor", [1.5, 3.0, 40.0])
def test_of_few_ranks_the_slow_one_is_no_part_of_its_peers_scatter(ranks, factor):
    own = noisy(13, ranks)
    own["forward"][1] *= factor
    found = stragglers(group(own))
    assert [f.ranks for f in found] == [(1,)]


def test_a_pair_is_named_as_such():
    own = noisy(9, ranks=2)
    own["forward"][1] *= 4
    (found,) = stragglers(group(own))
    assert found.ranks == (1, 0)


def test_half_of_the_ranks_slower_than_the_other_half_are_not_apart():
    own = noisy(10)
    own["forward"][2:] *= 2
    assert not stragglers(group(own))


def test_the_first_steps_and_too_few_steps_say_nothing():
    own = noisy(11, steps=80)
    own["forward"][1, :WARM_UP] *= 100
    assert not stragglers(group(own))
    own = noisy(11, steps=WARM_UP + LEAST - 1)
    own["forward"][1] *= 3
    assert not stragglers(group(own))


def test_renaming_ranks_moves_the_name():
    own = noisy(12)
    own["forward"][0] *= 1.5
    (found,) = stragglers(group({op: x[[2, 1, 0, 3]] for op, x in own.items()}, ranks=(7, 8, 9, 10)))
    assert found.ranks == (9,)


def test_chances_are_those_of_a_coin():
    assert at_least(20, 20) == 2**-20
    assert at_least(0, 20) == 1
    assert abs(at_least(5300, 10_000) / 1.05e-9 - 1) < 0.1


# ---------------------------------------------------------------- rows, and the shapes of three production jobs


def rows_of(ms, waits=0.0):
    """Rows of a job from {stage: [rank, step] times of forward and backward together, in ms}."""
    rank = 0
    for stage, times in ms.items():
        for own in times:
            for step, t in enumerate(own, start=1):
                yield Op(rank, stage, step, "forward", t * 0.35 * MS)
                yield Op(rank, stage, step, "backward", t * 0.65 * MS)
                yield Op(rank, stage, step, "communication", (waits - t) * MS)
            rank += 1


def test_rows_of_a_stage_are_its_peers_and_waits_are_no_own_time():
    (found,) = peers(rows_of({4: numpy.full((3, 8), 10.0)}, waits=100.0))
    assert (found.stage, found.ranks, found.steps.tolist()) == (4, (0, 1, 2), list(range(1, 9)))
    assert {op: x.shape for op, x in found.own.items()} == {"forward": (3, 8), "backward": (3, 8)}


def test_one_slow_worker_of_a_pipeline_is_named_once():
    draw = numpy.random.default_rng(0)
    ms = {stage: 400 * numpy.exp(0.005 * draw.standard_normal((4, 44))) for stage in range(4)}
    ms[0][0] *= 2.35
    found = [f for g in peers(rows_of(ms)) for f in stragglers(g, 4)]
    assert [f.ranks for f in found] == [(0,)]


def test_lengths_of_sequences_that_vary_name_nobody():
    draw = numpy.random.default_rng(1)
    ms = {stage: 400 * numpy.exp(0.3 * draw.standard_normal((32, 43))) for stage in range(2)}
    for times in ms.values():
        times[5] *= 1.04
    assert not [f for g in peers(rows_of(ms)) for f in stragglers(g, 2)]


def test_a_heavier_stage_is_said_of_the_stage():
    draw = numpy.random.default_rng(2)
    ms = {stage: 400 * numpy.exp(0.01 * draw.standard_normal((2, 32))) for stage in range(4)}
    ms[3] *= 1.62
    groups = peers(rows_of(ms))
    assert not [f for g in groups for f in stragglers(g, 4)]
    (heavy,) = heavy_stages(groups)
    assert (heavy.stage, heavy.ranks) == (3, (6, 7))
    assert abs(heavy.ratio - 1.62) < 0.02


def trace(name):
    path = TRACES / f"trace-{name}.parquet"
    if not path.exists():
        pytest.skip(f"{path} is not there: test data that is not part of the product")
    rows = duckdb.execute(
        "SELECT rank, stage, step, optype, sum(duration) FROM read_parquet(?) "
        "WHERE optype IN ('forward-compute', 'backward-compute') GROUP BY ALL", [str(path)]
    ).fetchall()  # fmt: skip
    return peers(Op(rank, stage, step, op, duration * 1e9) for rank, stage, step, op, duration in rows)


def test_the_trace_of_one_slow_worker():
    groups = trace("AR")
    (found,) = [f for g in groups for f in stragglers(g, len(groups))]
    assert found.ranks == (0,)
    assert 1.3 < found.excess < 1.4
    assert found.hits == found.blocks
    assert not heavy_stages(groups)


def test_the_trace_of_varying_lengths():
    groups = trace("SE")
    assert not [f for g in groups for f in stragglers(g, len(groups))]


def test_the_trace_of_a_heavy_last_stage():
    groups = trace("ST")
    assert not [f for g in groups for f in stragglers(g, len(groups))]
    assert [(h.stage, round(h.ratio, 2)) for h in heavy_stages(groups)] == [(3, 1.63)]
