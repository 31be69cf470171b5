"""Fingerprints: equal bits, equal numbers, on any device and layout; any change is seen."""

import pytest
import torch

from tdbg.rankagent import fingerprint
from tdbg.rankagent.fingerprint import COLUMNS, digest_cpu, digest_device

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
]
SIZES = [1, 2, 3, 7, COLUMNS, COLUMNS * 2, COLUMNS * 2 + 1, COLUMNS * 4, 50_001]


def filled(size, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=g) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_the_device_formula_gives_the_host_number(dtype, size):
    t = filled(size, dtype)
    weights = fingerprint.device_weights("cpu")
    assert digest_cpu(t) == int(digest_device(t, weights))


@pytest.mark.parametrize("size", SIZES)
def test_one_changed_bit_anywhere_is_seen(size):
    t = filled(size, torch.float32)
    before = digest_cpu(t)
    for at in {0, size // 2, size - 1}:
        for bit in (0, 22, 31):
            changed = t.clone()
            changed.view(torch.int32)[at] ^= -(2**31) if bit == 31 else 1 << bit
            assert digest_cpu(changed) != before


def test_swaps_double_flips_and_sign_changes_are_seen():
    t = filled(4096, torch.float32)
    swapped = t.clone()
    swapped[[5, 900]] = swapped[[900, 5]]
    flipped = t.clone()
    flipped.view(torch.int32)[[3, 77]] ^= 1 << 20
    rows = t.view(64, 64).flip(0).reshape(-1)
    assert len({digest_cpu(x) for x in (t, swapped, flipped, -t, rows)}) == 5


def test_layout_does_not_matter_but_values_do():
    t = filled(600, torch.float32).view(20, 30)
    assert digest_cpu(t.t().contiguous().t()) == digest_cpu(t)
    assert digest_cpu(t.t()) != digest_cpu(t)


def test_nan_payloads_compare_as_bits():
    a = torch.tensor([float("nan"), 1.0])
    assert digest_cpu(a) == digest_cpu(a.clone())


def test_scalars_and_empty_tensors_have_a_number():
    assert digest_cpu(torch.tensor(3.0)) != digest_cpu(torch.tensor(4.0))
    assert digest_cpu(torch.tensor(3.0, dtype=torch.bfloat16)) != digest_cpu(torch.tensor(4.0, dtype=torch.bfloat16))
    assert isinstance(digest_cpu(torch.empty(0)), int)


def test_zeros_of_different_length_differ():
    assert digest_cpu(torch.zeros(8)) != digest_cpu(torch.zeros(10))


def test_norms_of_mixed_dtypes_keep_their_order():
    tensors = [torch.full((3,), 2.0), torch.full((2,), 1.0, dtype=torch.float64), torch.full((4,), 1.0)]
    assert fingerprint.norms(tensors).tolist() == pytest.approx([12**0.5, 2**0.5, 2.0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_element_shows_in_the_norm(bad):
    t = filled(1000, torch.float32)
    t[123] = bad
    assert not torch.isfinite(fingerprint.norms([t]))[0]
    assert fingerprint.has_nonfinite(t)


def test_a_norm_that_overflows_from_finite_elements_is_told_apart():
    t = torch.full((10,), 1e30)
    assert not torch.isfinite(fingerprint.norms([t]))[0]
    assert not fingerprint.has_nonfinite(t)


MIXED = [(3,), (128,), (1021,), (1022,), (2042,), (2044,), (129, 127), (64, 64), (300, 300), (1,), (5, 7)]


def mixed():
    tensors = [filled(int(torch.tensor(s).prod()), torch.float32, k).view(s) for k, s in enumerate(MIXED)]
    return [*tensors, filled(100, torch.bfloat16), filled(44, torch.int64), filled(64, torch.float64), torch.empty(0)]


def test_a_whole_sweep_gives_each_tensor_its_own_fingerprint():
    tensors = mixed()
    digests, odd = fingerprint.sweep_cpu(tensors, None, finite=True)
    assert digests == [digest_cpu(t) for t in tensors]
    assert odd == []


@pytest.mark.parametrize("step", [None, 1, 2, 77])
def test_the_device_sweep_gives_the_host_numbers_in_order(step):
    tensors = mixed()
    assert fingerprint.DeviceSweep().digests(tensors, step).tolist() == fingerprint.sweep_cpu(tensors, step)[0]


@pytest.mark.parametrize("cadence", [1, 2, 32])
@pytest.mark.parametrize("numel", [2_041, 4_080, 50_001, 2_040 * 16])
def test_windows_cover_a_large_tensor_at_any_cadence(numel, cadence):
    count = -(-numel // fingerprint.WINDOW_ELEMENTS) | 1
    seen = [fingerprint.window(numel, cadence * k) for k in range(1, count + 1)]
    covered = set()
    for start, stop in seen:
        assert 0 <= start < stop <= numel
        covered.update(range(start, stop))
    assert len(covered) == numel


def test_a_window_depends_on_size_and_step_alone_and_small_tensors_are_seen_whole():
    assert fingerprint.window(50_001, 3) == fingerprint.window(50_001, 3 + 25)
    assert fingerprint.window(2_040, 5) == (0, 2_040)
    assert fingerprint.window(50_001, None) == (0, 50_001)


def test_a_change_in_a_large_tensor_is_seen_when_its_window_comes():
    a = filled(50_000, torch.float32)
    b = a.clone()
    b[20_000] += 1
    differs = [s for s in range(1, 40) if fingerprint.sweep_cpu([a], s)[0] != fingerprint.sweep_cpu([b], s)[0]]
    assert differs == [9, 34]  # element 20,000 lies in window 9 of 25


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sweep_names_tensors_that_may_not_be_finite(bad, dtype):
    tensors = [torch.ones(40, dtype=dtype), torch.ones(5000, dtype=dtype), torch.ones(44, dtype=torch.int64)]
    tensors[1][7] = bad
    assert fingerprint.sweep_cpu(tensors, None, finite=True)[1] == [1]
    tensors[0][3] = bad
    suspects = fingerprint.sweep_cpu(tensors, None, finite=True)[1]
    assert [i for i in sorted(suspects) if fingerprint.has_nonfinite(tensors[i])] == [0, 1]


def test_the_sweep_is_silent_where_numpy_was_told_to_raise():
    import numpy

    with numpy.errstate(all="raise"):
        fingerprint.sweep_cpu(
            [torch.tensor([float("inf"), -float("inf"), 1.0, 2.0]), torch.full((5000,), 3e38)], None, True
        )
