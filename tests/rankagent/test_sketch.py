"""Sketches: they add up as the tensors do, on ranks and on shards, on a device as on the host."""

from __future__ import annotations

import pytest
import torch

from tdbg.rankagent.fingerprint import WINDOW_ELEMENTS, digests_of_runs, runs, sweep_cpu, windowed
from tdbg.rankagent.sketch import PIECES, DeviceSketch, Place, sketch_cpu

SIZES = (1, 2, 5, 64, 2039, WINDOW_ELEMENTS)


def _places(tensors: list[torch.Tensor]) -> list[Place]:
    return [(i, 0, t.numel()) for i, t in enumerate(tensors)]


def _sketch(tensors: list[torch.Tensor], places: list[Place] | None = None) -> list[float]:
    return sketch_cpu(runs(tensors), places or _places(tensors), False)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_sum_of_sketches_is_the_sketch_of_the_sum(dtype):
    torch.manual_seed(1)
    # integers: their sums are exact in every dtype
    ranks = [[torch.randint(-8, 9, (n,)).to(dtype) for n in SIZES] for _ in range(3)]
    added = [sum(parts) for parts in zip(*ranks, strict=True)]
    each = [_sketch(tensors) for tensors in ranks]
    assert [sum(numbers) for numbers in zip(*each, strict=True)] == _sketch(added)


def test_parts_of_a_window_add_up_to_the_whole_wherever_it_is_cut():
    torch.manual_seed(2)
    whole = torch.randint(-8, 9, (101,)).float()
    for cut in (1, 50, 51, 100):
        first = _sketch([whole[:cut]], [(7, 0, 101)])
        second = _sketch([whole[cut:]], [(7, cut, 101)])
        assert [a + b for a, b in zip(first, second, strict=True)] == _sketch([whole], [(7, 0, 101)])


def test_the_device_gives_the_host_numbers():
    torch.manual_seed(3)
    tensors = [torch.randn(n) for n in SIZES] + [torch.randn(9).bfloat16(), torch.randn(4).double()]
    together, places = runs(tensors), _places(tensors)
    host, norms = sketch_cpu(together, places, True)
    sketch, squares = DeviceSketch().sketch(together, places, True, torch.device("cpu"))
    assert sketch.tolist() == pytest.approx(host, rel=1e-12)
    assert squares.view(-1, PIECES).sum(1).sqrt().tolist() == pytest.approx(norms, rel=1e-12)
    assert norms == pytest.approx([t.double().norm().item() for t in tensors], rel=1e-6)


def test_one_changed_element_always_shows():
    for n in SIZES:
        for at in {0, n // 2, n - 1}:
            changed = torch.zeros(n)
            changed[at] = 1.0
            assert sorted(map(abs, _sketch([changed], [(3, 0, n)]))) == [0.0, 1.0]


def test_tensors_of_equal_values_have_sketches_of_their_own():
    same = [torch.ones(500) for _ in range(40)]
    numbers = _sketch(same)
    assert len({tuple(numbers[k : k + PIECES]) for k in range(0, len(numbers), PIECES)}) > 35


def test_rounding_errors_stay_within_the_bound_that_the_rule_assumes():
    torch.manual_seed(4)
    ranks = [torch.randn(WINDOW_ELEMENTS) * 10.0 ** torch.randint(-6, 1, (WINDOW_ELEMENTS,)) for _ in range(8)]
    mean = torch.zeros(WINDOW_ELEMENTS)
    for part in ranks:
        mean += part / 8
    own = [_sketch([part]) for part in ranks]
    bound = 8 * 11 * 2.0**-23 * sum(part.norm().item() for part in ranks) / 8
    for piece, reduced in enumerate(_sketch([mean])):
        assert abs(sum(numbers[piece] for numbers in own) / 8 - reduced) < bound / 20


@pytest.mark.parametrize("step", [1, 5])
def test_tensors_copied_together_have_the_fingerprints_of_a_sweep(step):
    torch.manual_seed(5)
    tensors = [torch.randn(n) for n in (*SIZES, 5_000, 0, 3)]
    tensors += [torch.randn(n).bfloat16() for n in (4, 5, 5_000)] + [
        torch.randn(3_000).double(),
        torch.randn(40, 80).t(),
    ]
    parts = [windowed(t, step) for t in tensors]
    assert digests_of_runs(parts, runs(parts)) == sweep_cpu(tensors, step)[0]
