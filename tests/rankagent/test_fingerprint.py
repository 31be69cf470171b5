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
