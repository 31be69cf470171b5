"""The statistics of rising series by themselves."""

from __future__ import annotations

import random

import pytest

from tdbg.aggregator.trends import TREND_Z, mann_kendall_z, steady_rise, theil_sen, trend


def test_the_trend_statistic_knows_a_rise_a_fall_and_nothing() -> None:
    assert mann_kendall_z(range(8)) == pytest.approx(3.34, abs=0.01)
    assert mann_kendall_z(range(8, 0, -1)) == pytest.approx(-3.34, abs=0.01)
    assert mann_kendall_z([5] * 8) == 0
    assert mann_kendall_z([1, 2]) == 0
    assert mann_kendall_z(range(7)) < TREND_Z  # why eight blocks are the fewest


def test_the_slope_withstands_an_outlier_and_its_bound_lies_below() -> None:
    values = [10 * i for i in range(12)]
    values[5] = 10_000
    slope, lower = theil_sen(values, range(0, 24, 2))
    assert slope == pytest.approx(5)
    assert 0 < lower <= slope


def test_the_trend_of_noise_is_none_nearly_always() -> None:
    chance = random.Random(7)
    alarms = sum(
        trend([int(chance.gauss(0, 1000)) for _ in range(8)], range(0, 80, 10)) is not None for _ in range(2000)
    )
    assert alarms <= 6  # 0.1 % of 2,000 is 2; more than 6 has a probability below 0.5 %


def test_a_rise_is_found_where_it_began() -> None:
    late = [100] * 20 + [100 + 10 * i for i in range(1, 13)]
    found = steady_rise(late, range(0, 320, 10))
    assert found is not None
    assert (found.first, found.begin, found.growth) == (190, 100, 120)
    assert found.slope == pytest.approx(1)


def test_arenas_that_grow_in_few_pieces_do_not_rise_steadily() -> None:
    stairs = [100 * (i // 3) + i for i in range(24)]
    assert trend(stairs, range(24)) is not None  # it does rise
    assert steady_rise(stairs, range(24)) is None


def test_a_rise_that_ended_is_none() -> None:
    assert steady_rise([10 * min(i, 12) for i in range(24)], range(24)) is None


def test_random_walks_hardly_ever_rise_steadily() -> None:
    chance = random.Random(3)
    alarms = 0
    for _ in range(2000):
        value, values = 0.0, []
        for _ in range(32):
            value += chance.gauss(0, 1000)
            values.append(int(value))
        alarms += steady_rise(values, range(32)) is not None
    assert alarms <= 20  # the hardest null, no drift at all: 1 in 100; the trend alone takes 16 of 100 for a rise
