"""Tensors that keep leaving their share of the gradient on one rank: found behind batches that move everything."""

from __future__ import annotations

import math

import numpy
import pytest

from tdbg.aggregator.outliers import Apart, apart
from tdbg.aggregator.shares import shares

ALPHA = 0.0012
NOTHING = math.log(1e-45)
STEPS = numpy.array([27, 35, 42, 51, 64, 70, 83, 97])
SLOPES = numpy.array([0.4, 0.7, 0.9, 1.0, 1.1, 1.3, 1.5, 0.6])


def _norms(seed: int, ranks: int = 4, steps: int = 120, spread: float = 0.7) -> numpy.ndarray:
    """Batches that move all tensors of a rank several-fold, each tensor by a slope of its own; levels of their own."""
    rng = numpy.random.default_rng(seed)
    batch = spread * rng.standard_t(3, (ranks, steps, 1))
    level = rng.normal(0, 0.5, (ranks, 1, 8)) + numpy.cumsum(rng.normal(0, 0.1, (1, steps, 8)), 1)
    return level + SLOPES * batch + rng.normal(0, 0.05, (ranks, steps, 8))


def _with_whole(x: numpy.ndarray) -> numpy.ndarray:
    return numpy.concatenate([numpy.log(numpy.exp(2 * x).sum(2, keepdims=True)) / 2, x], 2)


def _found(x: numpy.ndarray) -> list[Apart]:
    return list(apart(_with_whole(x), ALPHA))


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_one_tensor_that_is_odd_again_and_again_is_found_behind_batches_that_move_all(ranks):
    for seed in range(4):
        x = _norms(seed, ranks)
        assert _found(x) == []
        x[1, STEPS, 5] += numpy.log(numpy.random.default_rng(seed).uniform(2, 60, len(STEPS)))
        (found,) = _found(x)
        assert (found.kind, found.rank, found.series) == ("share", 1, 6)
        assert len(set(found.steps) - set(STEPS.tolist())) <= 1
        assert found.chance <= ALPHA


@pytest.mark.parametrize("ranks", [3, 8])
def test_few_events_are_enough_where_each_lies_many_times_as_far_off_as_any_rank_did(ranks):
    for seed in range(10):
        x = _norms(seed, ranks, spread=0.2)
        x[2, STEPS[1:6], 5] += numpy.log([30, 60, 20, 45, 25])
        (found,) = shares(_with_whole(x), NOTHING, ALPHA)
        assert (found.rank, found.series) == (2, 6)
        assert set(found.steps) <= set(STEPS[1:6].tolist())


@pytest.mark.parametrize("share", [0.01, 0.03])
def test_rare_jumps_far_out_that_any_rank_may_have_name_nobody(share):
    for seed in range(20):
        x = _norms(seed, 3)
        x[:, :, 5] += numpy.log(30) * (numpy.random.default_rng([seed, 2]).random((3, 120)) < share)
        assert [found for found in _found(x) if found.kind == "share"] == []


def test_several_tensors_that_move_together_are_experts_or_rare_layers_and_name_nobody():
    x = _norms(0)
    x[1, STEPS, 4:6] += numpy.log(8)
    assert _found(x) == []


def test_jumps_that_fall_on_all_ranks_alike_name_nobody_whatever_their_places():
    for seed in range(8):
        x = _norms(seed, 3)
        x[:, :, 5] += numpy.log(8) * (numpy.random.default_rng([seed, 1]).random((3, 120)) < 0.1)
        assert _found(x) == []


def test_steps_in_a_row_are_one_event():
    x = _norms(0)
    x[1, 40:48, 5] += numpy.log(8) * numpy.tile([1, 0.4], 4)
    assert [found for found in _found(x) if found.kind == "share"] == []


def test_a_tensor_without_gradient_at_most_steps_and_too_few_tensors_are_not_judged():
    x = _norms(0)
    x[:, :, 5] = numpy.where(numpy.random.default_rng(2).random((4, 120)) < 0.9, numpy.log(1e-45), x[:, :, 5])
    assert _found(x) == []
    x = _norms(0)[:, :, :3]
    x[1, STEPS, 2] += numpy.log(8)
    assert [found for found in _found(x) if found.kind == "share"] == []
