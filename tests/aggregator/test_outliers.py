"""Ranks that stand apart by their own past: found where they do, and not in noise of any shape."""

from __future__ import annotations

import numpy
import pytest

from tdbg.aggregator.outliers import apart

ALPHA = 0.002


def _noise(seed: int, kind: str, ranks: int = 4, steps: int = 120, series: int = 8) -> numpy.ndarray:
    rng = numpy.random.default_rng(seed)
    shape = (ranks, steps, series)
    trend = numpy.cumsum(rng.normal(0, 0.1, (1, steps, series)), 1) + rng.normal(0, 0.5, (ranks, 1, series))
    if kind == "normal":
        return trend + rng.normal(0, 0.2, shape)
    if kind == "heavy":
        return trend + 0.3 * rng.standard_t(1.5, shape)
    if kind == "steady":  # neighbours in time are alike
        e = rng.normal(0, 0.1, shape)
        for t in range(1, steps):
            e[:, t] += 0.95 * e[:, t - 1]
        return trend + e
    if kind == "drift":  # ranks whose data are learnt at different speeds
        speed = rng.normal(0, 0.02, (ranks, 1, series))
        return trend + speed * numpy.arange(steps)[None, :, None] + rng.normal(0, 0.1, shape)
    if kind == "sparse":  # a tensor gets no gradient at many steps
        return numpy.where(rng.random(shape) < 0.3, numpy.log(1e-45), trend + rng.normal(0, 0.2, shape))
    if kind == "settling":  # wild at first
        return (
            trend
            + rng.normal(0, 1, shape) * numpy.exp(-numpy.arange(steps) / 15)[None, :, None]
            + rng.normal(0, 0.1, shape)
        )
    if kind == "power":  # norms with a tail so heavy that they have no mean
        return trend + rng.exponential(1.2, shape)
    if kind == "regimes":  # every twenty steps or so the data, and with it how much all ranks vary, is another
        change = rng.random(steps) < 0.05
        width = numpy.exp(rng.normal(0, 1, steps + 1))[numpy.cumsum(change)]
        return trend + width[None, :, None] * rng.normal(0, 0.2, shape)
    return trend + numpy.exp(rng.normal(0, 1, (1, steps, 1))) * rng.normal(0, 0.2, shape)  # "unequal": over time


@pytest.mark.parametrize(
    "kind", ["normal", "heavy", "steady", "drift", "sparse", "settling", "unequal", "power", "regimes"]
)
def test_noise_of_any_shape_is_no_outlier(kind):
    assert [seed for seed in range(12) if list(apart(_noise(seed, kind), ALPHA))] == []


@pytest.mark.parametrize("factor", [16.0, 4.0, 1 / 8])
def test_a_lasting_factor_is_found_at_its_first_step(factor):
    for seed in range(5):
        x = _noise(seed, "normal", steps=70)
        x[2, 24:] += numpy.log(factor)
        (found,) = apart(x, ALPHA)
        assert (found.kind, found.rank) == ("lasting", 2)
        assert 24 <= found.first <= 26
        assert found.chance <= ALPHA


def test_events_that_come_again_on_one_rank_are_found():
    for seed in range(5):
        x = _noise(seed, "normal", ranks=3, steps=80)
        x[1, 30::5, 3] += numpy.log(10)
        (found,) = apart(x, ALPHA)
        assert (found.kind, found.rank, found.series, found.first) == ("repeated", 1, 3, 30)
        assert found.steps == tuple(range(30, 80, 5))


@pytest.mark.parametrize("series", [0, 3])
def test_few_gross_events_are_enough_with_three_ranks_and_a_short_past(series):
    """Norms vary several-fold between ranks and steps; a stuck exponent bit makes them 2^60 times as large."""
    for seed in range(20):
        x = 3 * _noise(seed, "normal", ranks=3, steps=45)
        x[1, [26, 31, 38], series] += 60 * numpy.log(2)
        (found,) = apart(x, ALPHA)
        assert (found.kind, found.rank, found.series, found.steps) == ("gross", 1, series, (26, 31, 38))
        assert found.chance <= ALPHA


def test_a_growth_of_all_ranks_and_a_value_among_zeros_are_not_gross():
    x = _noise(1, "normal", ranks=3, steps=60)
    x[:, 30:] += numpy.log(1e12)
    assert list(apart(x, ALPHA)) == []
    x = _noise(2, "normal", ranks=3, steps=60)
    for step in range(25, 60, 3):  # a batch of padding: no gradient on the other ranks
        x[[0, 2], step] = numpy.log(1e-45)
    assert [a for a in apart(x, ALPHA) if a.kind == "gross"] == []


def test_events_that_fall_on_all_ranks_alike_are_none():
    x = _noise(1, "normal", ranks=4, steps=120)
    for i, step in enumerate(range(30, 120, 5)):
        x[i % 4, step] += numpy.log(50)
    assert list(apart(x, ALPHA)) == []


def test_one_odd_batch_is_none():
    x = _noise(1, "normal")
    x[2, 60] += numpy.log(1000)
    assert list(apart(x, ALPHA)) == []


def test_a_step_at_which_all_but_one_change_together_names_nobody_of_two():
    x = _noise(1, "normal", ranks=2)
    x[0, 60:] += 3
    assert list(apart(x, ALPHA)) == []


def test_steps_without_a_value_neither_hide_nor_make_an_outlier():
    x = _noise(3, "normal", steps=90)
    x[:, ::7] = numpy.nan
    assert list(apart(x, ALPHA)) == []
    x[1, 50:] += numpy.log(16)
    (found,) = apart(x, ALPHA)
    assert (found.rank, found.first) == (1, 50)


def test_noise_that_wanders_makes_no_events_of_its_own() -> None:
    """AR(1) noise of correlation 0.95: what lies far off does so for many steps, and began with no jump."""
    for seed in range(40):
        drawn = numpy.random.default_rng([seed, 95])
        batch, own = drawn.standard_t(3, (8, 300, 1)) * 0.3, drawn.normal(0, 0.2, (8, 300, 6))
        for at in range(1, 300):
            batch[:, at] += 0.95 * batch[:, at - 1]
            own[:, at] += 0.95 * own[:, at - 1]
        x = batch * drawn.uniform(0.3, 1.6, 6) + own
        assert [a.kind for a in apart(x, 0.0012) if a.kind == "repeated"] == []
