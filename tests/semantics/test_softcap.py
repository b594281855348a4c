"""Logit softcap (Gemma 2) and logit scale (Cohere): softcap * tanh(scale * x / softcap) / temperature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from checks import (
    assert_close,
    assert_entropy,
    assert_logits_grad,
    assert_logprobs,
    assert_within,
    examples,
    leaf,
    same_bits,
)

from ppo_kernels import logprobs_from_logits, ops

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
INF = math.inf


def score(logits: torch.Tensor, tokens: torch.Tensor, mask: Any = None, bar: float = 1e-6, **options: Any) -> Any:
    """Scores and gradients, checked against the oracle; the gradient is returned."""
    x = leaf(logits)
    lp, h = logprobs_from_logits(x, tokens, mask, return_entropy=True, **options)
    up_lp, up_h = torch.randn(2, *lp.shape)
    torch.autograd.backward([lp, h], [up_lp, up_h])
    names = {"logit_softcap": "softcap", "logit_scale": "scale"}
    want = oracle.score(logits, tokens, mask, **{names.get(name, name): x for name, x in options.items()})
    assert_logprobs(lp, want.logprobs)
    assert_entropy(h, want.entropy)
    assert_logits_grad(x.grad, want.d_logits(*map(oracle.to_numpy, (up_lp, up_h))), bar)
    return lp.detach(), h.detach(), x.grad


def test_by_hand():
    logits = torch.tensor([[3.0, 0.0, -3.0]], requires_grad=True)
    lp, h = logprobs_from_logits(logits, torch.tensor([1]), logit_softcap=2.0, return_entropy=True)
    top = 2 * math.tanh(1.5)
    total = math.exp(top) + 1 + math.exp(-top)
    assert lp.item() == pytest.approx(-math.log(total), rel=2e-7)
    assert h.item() == pytest.approx(math.log(total) - 2 * top * math.sinh(top) / total, rel=5e-7)
    lp.backward()
    slope = 1 - math.tanh(1.5) ** 2
    assert_close(logits.grad, [[-math.exp(top) / total * slope, 1 - 1 / total, -math.exp(-top) / total * slope]], 1e-6)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("width", [1, 5, 63, 64, 65, 1031, 4096, 4097])
@pytest.mark.parametrize(("softcap", "spread"), [(30.0, 8.0), (3.0, 2.0)])
def test_every_output_and_gradient(softcap, spread, width, dtype):
    logits = (torch.randn(4, width) * spread).to(dtype)
    tokens = torch.randint(width, (4,))
    tokens[0] = logits[0].argmax()
    score(logits, tokens, logit_softcap=softcap, temperature=0.8)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("width", [9, 70])
def test_shift_mask_padding_columns_and_temperatures(width, shift, dtype):
    logits, tokens = (torch.randn(2, 4, width) * 3).to(dtype), torch.randint(width - 2, (2, 4))
    mask = torch.rand(2, 4 - shift) < 0.7
    logits[:, :3][~mask[:, :3]] = torch.nan
    temperature = torch.rand(2, 4 - shift) + 0.5
    _, _, grad = score(
        logits, tokens, mask, shift=shift, vocab_size=width - 2, temperature=temperature, logit_softcap=4.0
    )
    assert (grad[..., width - 2 :] == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [6, 70, 5000])
def test_minus_infinity_is_a_column_that_does_not_exist(width, dtype):
    """tanh would make it -softcap, with a probability."""
    logits, tokens = torch.randn(5, width).to(dtype), torch.full((5,), width - 1)
    logits[:, : width // 2] = -INF
    logits[3] = -20.0  # all at the lower end of the cap, where a masked one would be equal
    logits[3, : width // 2] = -INF
    lp, _, grad = score(logits, tokens, logit_softcap=2.0)
    assert (grad[:, : width // 2] == 0).all()
    assert_close(lp[3:4], [-math.log(width - width // 2)], 5e-7)


@pytest.mark.parametrize("width", [6, 70])
def test_a_row_of_minus_infinity_only_is_nan_alone(width):
    logits, tokens = torch.randn(3, width), torch.randint(width, (3,))
    logits[1] = -INF
    lp, h = logprobs_from_logits(logits, tokens, logit_softcap=2.0, return_entropy=True)
    assert lp.isnan().tolist() == h.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("width", [6, 70])
def test_nan_reaches_its_own_row_only(width):
    logits, tokens = torch.randn(3, width), torch.randint(width, (3,))
    logits[1, 2] = torch.nan
    lp = logprobs_from_logits(logits, tokens, logit_softcap=2.0)
    assert lp.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [8, 300])
@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_extreme_logits_saturate(softcap, width, dtype):
    """Logits of +-1e4, and infinite ones, are at the caps: their slope is 0, as far as fp32 can tell."""
    logits = (torch.where(torch.rand(4, width) < 0.5, 1.0, -1.0) * 1e4 * (1 + torch.rand(4, width))).to(dtype)
    logits[1, 1] = INF
    logits[2, :4] = torch.tensor([-3.0, -0.5, 0.7, 2.0]).to(dtype)  # these alone have a gradient
    x, tokens = leaf(logits), torch.tensor([0, 1, 2, 3])
    lp, h = logprobs_from_logits(x, tokens, logit_softcap=softcap, return_entropy=True)
    torch.autograd.backward([lp, h], [torch.ones(4)] * 2)
    finite = logits.float().clamp(max=1e6)
    want = oracle.score(finite, tokens, softcap=softcap)
    assert_logprobs(lp, want.logprobs)
    assert_entropy(h, want.entropy)
    assert x.grad.isfinite().all()
    assert_logits_grad(x.grad[2:3], want.d_logits(np.ones(4), np.ones(4))[2:3])
    assert_within(x.grad, want.d_logits(np.ones(4), np.ones(4)), 2.0**-8 * np.abs(oracle.to_numpy(x.grad)) + 1e-6)


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize("width", [40, 700])
def test_slopes_of_nearly_saturated_logits_keep_their_digits(width, side):
    """1 - tanh^2 in fp32 has none left where all logits are 5 to 8 caps away from 0."""
    logits = side * (5 + 3 * torch.rand(4, width)) * 30
    score(logits, torch.randint(width, (4,)), logit_softcap=30.0)
    score(logits, torch.randint(width, (4,)), logit_softcap=30.0, temperature=1e-4)


@pytest.mark.parametrize("width", [40, 700])
@pytest.mark.parametrize("top", [20.0, 29.0])
def test_logprobs_next_to_a_large_logit_keep_their_digits(top, width):
    """An ulp of a capped logit near 20 or 30 is 2e-6: a difference of two would be off by as much."""
    for _ in range(examples(16)):
        logits = top + torch.rand(4, width)
        lp, _, _ = score(logits, torch.randint(width, (4,)), logit_softcap=30.0, temperature=0.1)
        assert (lp < 0).all()


@pytest.mark.parametrize("width", [40, 700])
def test_logits_far_below_the_cap_are_as_without_it(width):
    logits, tokens = torch.randn(4, width) * 1e-3, torch.randint(width, (4,))
    score(logits, tokens, logit_softcap=1000.0, temperature=1e-4)
    capped = logprobs_from_logits(logits, tokens, logit_softcap=1e9, return_entropy=True)
    for got, want in zip(capped, logprobs_from_logits(logits, tokens, return_entropy=True), strict=True):
        assert_close(got, want, 5e-7)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("width", [7, 90])
def test_logit_scale(width, dtype):
    logits, tokens = torch.randn(2, 3, width).to(dtype) * 5, torch.randint(width, (2, 3))
    score(logits, tokens, logit_scale=0.0625)
    score(logits, tokens, logit_scale=0.3, logit_softcap=2.0, temperature=0.7)
    score(logits, tokens, logit_scale=3.0, logit_softcap=5.0, temperature=torch.rand(2, 3) + 0.5)


def test_logit_scale_is_a_division_of_the_temperature():
    logits, tokens = torch.randn(3, 90), torch.randint(90, (3,))
    scaled = logprobs_from_logits(logits, tokens, logit_scale=0.3, temperature=0.7)
    assert same_bits(scaled, logprobs_from_logits(logits, tokens, temperature=0.7 / 0.3))
    given = torch.full((3,), 0.7, dtype=torch.float64)
    assert same_bits(scaled, logprobs_from_logits(logits, tokens, logit_scale=0.3, temperature=given))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [5, 129, 4097, 12001])
def test_a_row_alone_equals_the_row_in_a_batch(width, dtype, same_bits_promised):
    logits, tokens = (torch.randn(9, width) * 6).to(dtype), torch.randint(width, (9,))
    want, entropy = logprobs_from_logits(logits, tokens, logit_softcap=10.0, return_entropy=True)
    assert same_bits(logprobs_from_logits(logits, tokens, logit_softcap=10.0), want)
    for rows in (slice(0, 1), slice(3, 5)):
        part = logprobs_from_logits(logits[rows], tokens[rows], logit_softcap=10.0, return_entropy=True)
        assert same_bits(part[0], want[rows].clone())
        assert same_bits(part[1], entropy[rows].clone())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [20, 1031])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_in_place_is_the_gradient(with_entropy, width, dtype):
    logits, tokens = (torch.randn(4, width) * 3).to(dtype), torch.randint(width, (4,))
    options = (1.0, torch.rand(4) + 0.5, 3.0, width, False)
    logprobs, _, *stats = ops.row_stats(logits, tokens, None, *options, True)
    up = torch.randn(4), torch.randn(4) if with_entropy else None
    grad = ops.row_grad(logits, tokens, None, *options, logprobs, *stats, *up)
    ops.row_grad_(logits, tokens, None, *options, logprobs, *stats, *up)
    assert same_bits(logits, grad)


def test_nothing_of_the_vocabularys_size_is_allocated(fused_kernels):
    logits, tokens = leaf(torch.randn(3, 20000)), torch.randint(20000, (3,))
    options = {"temperature": torch.ones(3), "logit_softcap": 3.0}
    activities = [torch.profiler.ProfilerActivity.CPU]
    logprobs_from_logits(logits, tokens, **options)
    with torch.profiler.profile(profile_memory=True, activities=activities) as profile:
        lp = logprobs_from_logits(logits, tokens, **options)
    assert sum(abs(event.self_cpu_memory_usage) for event in profile.events()) < 8192
    with torch.profiler.profile(profile_memory=True, activities=activities) as profile:
        lp.sum().backward()
    assert sum(max(event.self_cpu_memory_usage, 0) for event in profile.events()) <= logits.nbytes + 8192
