"""When a value leaves its own past: what is found, and the kinds of noise that must stay silent."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest

from tdbg.aggregator.departures import BEFORE, STAYS, departures

ALPHA, LEAST, STEPS = 1e-3, math.log(1.5), 120


def _noise(seed: int = 0, steps: int = STEPS, series: int = 1, scale: float = 0.05) -> Any:
    return scale * numpy.random.default_rng(seed).standard_normal((steps, series))


def test_one_step_is_found_with_its_size() -> None:
    y = _noise()
    y[70] += 2.0
    (found,) = departures(y, ALPHA, LEAST)
    assert (found.first, found.last, found.peak, found.before) == (70, 70, 70, 69)
    assert (found.lasting, found.returned) == (False, True)
    assert found.off == pytest.approx(2.0, abs=0.2)
    assert found.chance < ALPHA


def test_what_stays_is_told_apart() -> None:
    y = _noise()
    y[70:] += 1.0
    (found,) = departures(y, ALPHA, LEAST)
    assert (found.first, found.last, found.lasting, found.returned) == (70, STEPS - 1, True, False)


def test_steps_in_a_row_are_found_in_noise_that_hides_a_single_one() -> None:
    y = _noise(scale=0.25)
    one = y.copy()
    one[70] += 1.7
    assert list(departures(one, ALPHA, LEAST)) == []
    y[70:] += 2.2
    assert [d.first for d in departures(y, ALPHA, LEAST)] == [70]


def test_a_departure_begins_where_the_range_was_left() -> None:
    y = _noise()
    y[70], y[71] = 0.4, 2.5
    (found,) = departures(y, ALPHA, LEAST)
    assert (found.first, found.peak) == (70, 71)


def test_falls_are_none() -> None:
    y = _noise()
    y[70] -= 3.0
    y[90:] -= 3.0
    assert list(departures(y, ALPHA, LEAST)) == []


def test_the_range_is_that_of_all_series_together() -> None:
    y = _noise(series=8)
    y[:, 5] *= 12
    y[70, 2] += 2.0
    assert list(departures(y, ALPHA, LEAST)) == []
    y[70, 2] += 8.0
    assert [d.series for d in departures(y, ALPHA, LEAST)] == [2]


def test_steps_without_a_value_are_left_out() -> None:
    y = _noise()
    y[40:60] = math.nan
    y[70] += 2.0
    assert [(d.first, d.before) for d in departures(y, ALPHA, LEAST)] == [(70, 69)]


def test_too_short_a_past_finds_nothing() -> None:
    y = _noise(steps=BEFORE)
    y[-1] += 9.0
    assert list(departures(y, ALPHA, LEAST)) == []


def test_a_run_that_does_the_like_elsewhere_says_so() -> None:
    y = _noise()
    y[60] += 2.0
    assert next(iter(departures(y, ALPHA, LEAST))).alike == 0
    y[[80, 100]] += 1.5
    assert next(iter(departures(y, ALPHA, LEAST))).alike == 2


def _ar(rng: Any, correlation: float, steps: int) -> Any:
    y = numpy.zeros(steps)
    for t in range(1, steps):
        y[t] = correlation * y[t - 1] + math.sqrt(1 - correlation**2) * rng.standard_normal()
    return y


HEALTHY = {
    "heavy tails": lambda rng, t: numpy.log(rng.standard_t(2, len(t)) ** 2),
    "log-normal": lambda rng, t: rng.standard_normal(len(t)),
    "wandering": lambda rng, t: numpy.cumsum(0.1 * rng.standard_normal(len(t))),
    "correlated": lambda rng, t: 0.3 * _ar(rng, 0.95, len(t)),
    "decay that ends": lambda rng, t: numpy.log(0.05 + numpy.exp(-t / 4)) + 0.05 * rng.standard_normal(len(t)),
    "steps down": lambda rng, t: -2.0 * (t > 60) + 0.1 * rng.standard_normal(len(t)),
    "oscillation": lambda rng, t: numpy.sin(t / 5) + 0.1 * rng.standard_normal(len(t)),
    "period": lambda rng, t: 1.5 * (t % 10 == 9) + 0.05 * rng.standard_normal(len(t)),
    "no noise": lambda rng, t: 1 / (1 + t),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_noise_is_silent(kind: str) -> None:
    rng, t = numpy.random.default_rng(3), numpy.arange(STEPS)
    for _ in range(40):
        found = list(departures(HEALTHY[kind](rng, t)[:, None], ALPHA, LEAST))
        assert [d for d in found if not d.lasting] == []
        assert len(found) == 0 or kind == "wandering"


def test_the_last_step_may_be_one() -> None:
    y = _noise()
    y[-1] += 3.0
    (found,) = departures(y, ALPHA, LEAST)
    assert (found.first, found.returned, found.lasting) == (STEPS - 1, False, False)
    assert STAYS > 1
