"""The bar of the design: how far any result may be from float64."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from checks import assert_close, assert_entropy, assert_logits_grad, assert_logprobs, leaf
from oracle import LossSpec

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 5, 8, 127, 128, 129, 1000, 4097, 32000, 50257, 151936]
DISTRIBUTIONS = {
    "plain": lambda n, v: torch.randn(n, v),
    "wide": lambda n, v: torch.randn(n, v) * 30,
    "up": lambda n, v: torch.randn(n, v) + 50,
    "down": lambda n, v: torch.randn(n, v) - 50,
    "peaked": lambda n, v: torch.randn(n, v).index_fill_(-1, torch.tensor([v // 2]), 15.0),
    "rising": lambda n, v: torch.linspace(-40, 40, v).expand(n, v) + torch.randn(n, v),
}


def rows_for(width):
    return 4 if width < 5000 else 2


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_scores_and_their_gradient(distribution, width, dtype):
    n = rows_for(width)
    logits = leaf(DISTRIBUTIONS[distribution](n, width).to(dtype))
    tokens = torch.randint(width, (n,))
    g_lp, g_h = torch.randn(2, n)
    for temperature in (1.0, 0.5, 2.0) if distribution in ("plain", "wide") else (1.0,):
        logits.grad = None
        lp, h = logprobs_from_logits(logits, tokens, temperature=temperature, return_entropy=True)
        torch.autograd.backward([lp, h], [g_lp, g_h])
        want = oracle.score(logits, tokens, temperature=temperature)
        assert lp.dtype == h.dtype == torch.float32
        assert_logprobs(lp, want.logprobs)
        assert_entropy(h, want.entropy, bar=2e-6)
        assert_logits_grad(logits.grad, want.d_logits(g_lp.numpy(force=True), g_h.numpy(force=True)), bar=2e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("inplace_grad", [False, True])
def test_the_fused_loss_and_its_gradient(inplace_grad, width, dtype):
    """Without entropy, then with: the two have different code in a fast kernel."""
    n = rows_for(width)
    base = torch.randn(n, width).to(dtype)
    tokens = torch.randint(width, (n,))
    adv = torch.randn(n)
    for coefficient in (0.0, 0.05):
        old = torch.from_numpy(oracle.score(base, tokens).logprobs).float().to(base.device) - 0.05
        logits = leaf(base)
        out = fused_ppo_loss(
            logits, tokens, old, adv, config=PPOLossConfig(entropy_coef=coefficient), inplace_grad=inplace_grad
        )
        out.loss.backward()
        want = oracle.fused(base, tokens, old, adv, spec=LossSpec(entropy_coef=coefficient))
        assert_logprobs(out.logprobs, want.scores.logprobs)
        assert_close(out.loss, want.result.loss, 3e-6, scale=float(adv.abs().mean()))
        assert_logits_grad(logits.grad, want.d_logits)


@pytest.mark.parametrize("dtype", FLOATS)
def test_probability_that_underflows_gives_a_zero_not_a_denormal_mess(dtype):
    logits = leaf(torch.tensor([[0.0, -200.0, -90.0, -60.0]], dtype=dtype))
    lp, h = logprobs_from_logits(logits, torch.tensor([1]), return_entropy=True)
    want = oracle.score(logits, torch.tensor([1]))
    assert_logprobs(lp, want.logprobs)
    (lp + h).sum().backward()
    assert_logits_grad(logits.grad, want.d_logits(np.ones(1), np.ones(1)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("row", [[0.0, -20.0], [0.0, -20.0, -22.0, -18.0], [5.0, -9.0, -12.0]])
def test_entropy_gradient_of_a_sharp_row(row, dtype):
    """log p of the peak is -2e-9: lost in t - log s as s rounds to 1, kept in log p + H = t - (mean of t)."""
    logits = leaf(torch.tensor([row]).to(dtype))
    _, h = logprobs_from_logits(logits, torch.tensor([1]), return_entropy=True)
    h.backward(torch.ones(1))
    assert_logits_grad(logits.grad, oracle.score(logits, torch.tensor([1])).d_logits(np.zeros(1), np.ones(1)), bar=2e-6)


@pytest.mark.parametrize("spread", [1e30, 3e38])
def test_the_largest_finite_logits(spread):
    logits = leaf(torch.tensor([[spread, -spread, 0.0], [-spread, -spread, -spread]]))
    lp, h = logprobs_from_logits(logits, torch.tensor([0, 2]), return_entropy=True)
    assert_close(lp, [0.0, -np.log(3)], 5e-7)
    assert_close(h, [0.0, np.log(3)], 5e-7)
    (lp + h).sum().backward()
    assert logits.grad.isfinite().all()


def test_float64_logits_are_computed_in_float64():
    logits, tokens = leaf(torch.randn(5, 301, dtype=torch.float64) * 5), torch.randint(301, (5,))
    lp, h = logprobs_from_logits(logits, tokens, temperature=0.7, return_entropy=True)
    assert lp.dtype == h.dtype == torch.float64
    (lp.sum() + 0.3 * h.sum()).backward()
    want = oracle.score(logits, tokens, temperature=0.7)
    assert_close(lp, want.logprobs, 1e-13)
    assert_close(h, want.entropy, 1e-12)
    assert_logits_grad(logits.grad, want.d_logits(np.ones(5), np.full(5, 0.3)))
