"""Class 12: whitening."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import ranks
import torch
from checks import assert_close, same_bits
from oracle import INF, NAN

from ppo_kernels import masked_whiten


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("shift_mean", [False, True])
@pytest.mark.parametrize("valid", [0, 1, 2])
def test_case_93_none_one_or_two_valid_entries_are_finite(valid, shift_mean, unbiased):
    x, mask = torch.tensor([[3.0, 5.0, 9.0, -4.0]]), (torch.arange(4) < valid)[None]
    out = masked_whiten(x, mask, shift_mean=shift_mean, unbiased=unbiased)
    assert out.isfinite().all()
    assert (out[~mask] == 0).all()
    assert_close(out, oracle.whiten(x, mask, shift_mean=shift_mean, unbiased=unbiased), 5e-7)


@pytest.mark.parametrize("value", [3.0, 1e-3, -1e6, 0.1])
@pytest.mark.parametrize("unbiased", [False, True])
def test_case_93_a_constant_becomes_zero(value, unbiased):
    assert (masked_whiten(torch.full((3, 7), value), unbiased=unbiased) == 0).all()
    assert_close(masked_whiten(torch.full((3, 7), value), shift_mean=False), np.full((3, 7), value), 5e-7)


@pytest.mark.parametrize(("unbiased", "expected"), [(False, [-1.2247449, 0, 1.2247449, 0]), (True, [-1, 0, 1, 0])])
@pytest.mark.parametrize("payload", [99.0, NAN, INF])
def test_case_93_by_hand_with_anything_at_the_masked_slot(unbiased, expected, payload):
    out = masked_whiten(torch.tensor([[1.0, 2, 3, payload]]), torch.tensor([[1, 1, 1, 0]]), unbiased=unbiased)
    assert_close(out, [expected], 5e-7, scale=1.0)


def test_case_93_without_a_mask_everything_counts():
    x = torch.randn(5, 11)
    assert_close(masked_whiten(x), oracle.whiten(x), 5e-7, scale=1.0)
    assert same_bits(masked_whiten(x), masked_whiten(x, torch.ones(5, 11)))


@pytest.mark.parametrize("mean", [1e2, -1e4])
def test_a_large_mean_does_not_cancel_the_variance(mean):
    """E[x^2] - mean^2 in fp32 goes negative at mean 100, deviation 1e-3."""
    x = mean + torch.randn(4, 1024) * abs(mean) * 1e-4
    assert_close(masked_whiten(x), oracle.whiten(x), 2e-4, scale=1.0)


@pytest.mark.parametrize("eps", [1e-8, 1e-2, 1.0])
def test_eps_is_added_to_the_variance(eps):
    x = torch.tensor([1e-3, -1e-3, 2e-3])
    assert_close(masked_whiten(x, eps=eps), oracle.whiten(x, eps=eps), 5e-7)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.5, 30.0])
@pytest.mark.parametrize("eps_on", ["var", "std", "clamp"])
def test_eps_on_the_variance_on_the_deviation_or_as_its_least(eps_on, eps, unbiased):
    x = torch.tensor([1.0, 2.0, 3.0, 7.0])
    variance = x.double().var(correction=int(unbiased)).item()
    deviation = {"var": (variance + eps) ** 0.5, "std": variance**0.5 + eps, "clamp": max(variance, eps) ** 0.5}[eps_on]
    expected = (x.double() - x.double().mean()) / deviation
    assert_close(masked_whiten(x, eps=eps, eps_on=eps_on, unbiased=unbiased), expected, 5e-7)


@pytest.mark.parametrize("eps_on", ["var", "std", "clamp"])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_equal_ones_are_finite_whatever_eps_is_on(eps_on, eps):
    assert (masked_whiten(torch.full((3,), 0.1), eps=eps, eps_on=eps_on) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_counts_in_every_dtype(dtype):
    x = torch.randn(8, 4096).to(dtype)
    mask = (torch.rand(8, 4096) < 0.5).to(dtype)
    out = masked_whiten(x, mask)
    assert_close(out.float(), oracle.whiten(x, mask), 2e-6 if out.dtype == torch.float32 else 4e-3, scale=1.0)


def three_ranks_whiten(rank, world):
    x = [torch.tensor([1.0, 2.0, NAN]), torch.tensor([3.0, 10.0]), torch.tensor([5.0])][rank]
    mask = [torch.tensor([1, 1, 0]), None, torch.tensor([0])][rank]
    return [masked_whiten(x, mask, unbiased=u, process_group=torch.distributed.group.WORLD) for u in (False, True)]


@pytest.mark.cpu_only("gloo")
@ranks.DISTRIBUTED
@ranks.ONCE
def test_case_94_ranks_whiten_by_the_numbers_of_all_even_one_without_any(tmp_path):
    results = ranks.run(three_ranks_whiten, 3, tmp_path)
    for case, unbiased in enumerate((False, True)):
        want = masked_whiten(torch.tensor([1.0, 2.0, 3.0, 10.0]), unbiased=unbiased)
        want = [torch.cat([want[:2], torch.zeros(1)]), want[2:], torch.zeros(1)]
        torch.testing.assert_close([got[case] for got in results], want, rtol=1e-7, atol=0)


def test_an_unmasked_nan_stays_visible():
    assert masked_whiten(torch.tensor([1.0, NAN, 2.0])).isnan().any()
