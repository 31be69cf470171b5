"""From which step on a run is slower, where it comes from, and which changes of pace are none."""

from __future__ import annotations

import numpy
import pytest

from tdbg.aggregator.slowing import LEAST, USUAL, by_chance, change, fastest, share

MS = 1e6


def steps(seed, n=120, scatter=0.05, ms=50.0):
    return ms * MS * numpy.exp(scatter * numpy.random.default_rng(seed).standard_normal(n))


@pytest.mark.parametrize("factor", [1.4, 2.0, 10.0])
@pytest.mark.parametrize("at", [25, 60, 99])
def test_the_first_slow_step_is_exact(factor, at):
    for seed in range(10):
        x = steps(seed, scatter=0.02)
        x[at:] *= factor
        found = change(x)
        assert found is not None
        assert (found.at, found.until) == (at, 120)
        assert abs(found.after / found.before / factor - 1) < 0.05


def test_an_episode_has_an_end():
    x = steps(1, 200)
    x[80:140] *= 3
    found = change(x)
    assert found is not None
    assert (found.at, found.until) == (80, 140)


@pytest.mark.parametrize("scatter", [0.0, 0.02, 0.1, 0.4, 1.2])
def test_noise_alone_is_no_slowdown(scatter):
    assert not [s for s in range(100) if change(steps(s, 150, scatter)) is not None]


@pytest.mark.parametrize("seed", range(30))
def test_a_drift_like_that_of_a_walk_is_no_slowdown_while_it_is_small(seed):
    walk = numpy.cumsum(numpy.random.default_rng(seed).standard_normal(300)) * 0.01
    assert change(50 * MS * numpy.exp(walk - walk.mean())) is None or walk.max() - walk.min() > 0.26


@pytest.mark.parametrize("seed", range(10))
def test_bursts_that_come_and_go_are_none(seed):
    x = steps(seed, 300)
    for start in range(10, 300, 40):
        x[start : start + 12] *= 4
    assert change(x) is None


def test_long_pauses_now_and_then_are_none():
    x = steps(2, 200)
    x[40::10] *= 50
    assert change(x) is None


def test_a_run_that_becomes_faster_is_none():
    x = steps(3)
    x[60:] /= 3
    assert change(x) is None


def test_a_slow_start_is_none():
    x = steps(4)
    x[:15] *= 4
    assert change(x) is None


def test_small_changes_and_small_steps_are_none():
    x = steps(5, scatter=0.005)
    x[60:] *= 1.2
    assert change(x) is None
    x = steps(5, ms=2.0)
    x[60:] *= 1.8
    assert change(x) is None


def test_too_few_steps_say_nothing():
    x = numpy.concatenate([numpy.full(USUAL, 10 * MS), numpy.full(LEAST - 1, 90 * MS)])
    assert change(x) is None


def test_a_step_is_as_long_as_that_of_the_rank_that_waited_least():
    assert fastest(numpy.array([[6.0, 10.0], [9.0, -20.0]])).tolist() == [6, 0]


def test_short_steps_that_scatter_by_a_factor_are_slow_when_far_more_time_comes_to_each():
    early = numpy.array([2.0, 8.0, 6.0, 2.0, 5.0, 3.0, 4.0, 3.0, 3.0, 7.0] * 4) * MS
    found = change(numpy.concatenate([early, early + 30 * MS]))
    assert found is not None
    assert found.at == len(early)


def test_chances_are_those_of_fisher():
    some = numpy.array([True] * 3 + [False])
    assert abs(by_chance(~some, some) - 17 / 70) < 1e-12


def rising(ranks, phase, by, n=80, at=40):
    phases = {name: numpy.full((4, n), 10 * MS) for name in ("data", "forward", "backward")}
    for r in ranks:
        phases[phase][r, at:] += by * MS
    return phases


def test_ranks_whose_own_time_rose_are_named_with_the_phase():
    waits = {"reduce_wait": numpy.zeros((4, 80))}
    for r in (0, 1, 3):
        waits["reduce_wait"][r, 40:] = 30 * MS
    found = share(rising([2], "data", 30), waits, 40, 80, 30 * MS)
    assert (found.ranks, found.phase) == ((2,), "data")


def test_when_nobodys_own_time_rose_all_wait_for_one_another():
    waits = {"reduce_wait": numpy.repeat([[0.0, 30 * MS]], 40, 1) + numpy.zeros((4, 1))}
    found = share(rising([], "data", 0), waits, 40, 80, 30 * MS)
    assert (found.ranks, found.phase) == ((0, 1, 2, 3), "communication")


def test_a_rise_in_several_phases_is_mixed():
    phases = rising(range(4), "data", 15)
    phases["forward"][:, 40:] += 15 * MS
    assert share(phases, {}, 40, 80, 30 * MS).phase == "mixed"
