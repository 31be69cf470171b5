"""Rounding against a change: simulated pairs of runs, with noise that grows, and one change at a known step."""

from __future__ import annotations

import math
import random

import pytest

from tdbg.aggregator.parting import EPSILON, differences, parting, within_noise

STEPS = 80


def _curve(rng: random.Random) -> dict[int, float]:
    return {s: (0.2 + 2 / s) * math.exp(0.05 * rng.gauss(0, 1)) for s in range(1, STEPS + 1)}


def _noisy(rng: random.Random, curve: dict[int, float], growth: float, begin: int = 1) -> dict[int, float]:
    """The same curve after rounding noise that grows by up to `growth` a step, never beyond what training forgets."""
    size, out = 2 * EPSILON, {}
    for s, v in curve.items():
        out[s] = v if s < begin else v * (1 + size * rng.gauss(0, 1))
        size = min(size * (rng.uniform(1, growth) if s >= begin else 1), 0.02)
    return out


@pytest.mark.parametrize("growth", [1.0, 1.2, 1.5])
@pytest.mark.parametrize("begin", [1, 30])
def test_noise_that_grows_is_no_parting(growth: float, begin: int) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        curve = _curve(rng)
        assert parting(differences(curve, _noisy(rng, curve, growth, begin))) is None


@pytest.mark.parametrize("size", [1e-3, 0.02, 3.0])
def test_a_change_is_dated_exactly_in_runs_without_noise(size: float) -> None:
    for seed in range(100):
        rng = random.Random(seed)
        curve, step = _curve(rng), rng.randint(2, STEPS - 8)
        other = {s: v if s < step else v * (1 + size * (1.2 + rng.random())) for s, v in curve.items()}
        found = parting(differences(curve, other))
        assert found is not None
        assert (found.step, found.before) == (step, 0.0)


def test_a_change_is_dated_exactly_in_runs_with_noise() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        curve, step = _curve(rng), rng.randint(10, STEPS - 8)
        other = {s: v if s < step else v * 1.3 for s, v in _noisy(rng, curve, 1.1).items()}
        found = parting(differences(curve, other))
        assert found is not None
        assert found.step == step


def test_a_difference_that_comes_and_goes_is_no_parting() -> None:
    curve = dict.fromkeys(range(1, 40), 1.0)
    assert parting(differences(curve, curve | {20: 1.5})) is None
    assert parting(differences(curve, curve | dict.fromkeys(range(20, 40), 1.5))) is not None


def test_low_precision_makes_larger_noise() -> None:
    curve = dict.fromkeys(range(1, 40), 1.0)
    other = dict.fromkeys(curve, 1.002)
    assert parting(differences(curve, other)) is not None
    assert parting(differences(curve, other), low_precision=True) is None
    assert within_noise(differences(curve, other), curve, low_precision=True)
    assert not within_noise(differences(curve, other), curve)


def test_nan_on_one_side_is_a_parting_and_on_both_none() -> None:
    curve = dict.fromkeys(range(1, 10), 1.0)
    bad = curve | dict.fromkeys(range(5, 10), math.nan)
    found = parting(differences(curve, bad))
    assert found is not None
    assert (found.step, found.size) == (5, math.inf)
    assert parting(differences(bad, bad)) is None


def test_losses_that_end_no_farther_apart_than_their_own_steps_are_noise() -> None:
    rng = random.Random(1)
    curve = _curve(rng)
    drifted = _noisy(rng, curve, 1.6)
    assert within_noise(differences(curve, drifted), curve)
    assert not within_noise(differences(curve, {s: 3 * v for s, v in curve.items()}), curve)
    assert not within_noise({}, {})
