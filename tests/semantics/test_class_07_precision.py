"""Class 7: precision of log-probabilities and of the ratio."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
from checks import assert_close, assert_logprobs, leaf, same_bits
from oracle import INF, LossSpec

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits, ppo_loss


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_58_half_logits_give_fp32_logprobs(dtype):
    lp, h = logprobs_from_logits(torch.zeros(1, 32768, dtype=dtype), torch.tensor([7]), return_entropy=True)
    assert lp.dtype == h.dtype == torch.float32
    assert_close(lp, [-10.397208], 1e-7)
    assert_close(h, [10.397208], 1e-7)
    out = fused_ppo_loss(torch.zeros(1, 32768, dtype=dtype), torch.tensor([7]), None, torch.ones(1))
    assert out.logprobs.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_case_59_autocast_changes_no_bit(cast, dtype):
    logits, tokens = torch.randn(4, 500, dtype=dtype), torch.randint(500, (4,))
    outside = logprobs_from_logits(logits, tokens, return_entropy=True)
    with torch.autocast("cpu", dtype=cast):
        inside = logprobs_from_logits(logits, tokens, return_entropy=True)
        loss = fused_ppo_loss(logits, tokens, outside[0], torch.ones(4))
    for a, b in zip(outside, inside, strict=True):
        assert same_bits(a, b)
    assert loss.loss == -1  # the ratio before any update is exactly 1
    metrics = loss.metrics.compute()
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        (100, 1, -1.2, 0),
        (100, -1, INF, None),
        (-200, 1, 0, 0),
        (-200, -1, 0.8, 0),
        (100, 0, 0, 0),
        (1000, 1, -1.2, 0),
        (-1000, 1, 0, 0),
        (1000, 0, 0, 0),
    ],
)
def test_case_61_huge_log_ratios_by_hand(log_ratio, advantage, loss, gradient):
    lp = torch.tensor([float(log_ratio)], requires_grad=True)
    out = ppo_loss(lp, torch.zeros(1), torch.tensor([float(advantage)]))
    out.loss.backward()
    assert_close(out.loss, float(loss), 5e-7)
    if gradient is not None:
        assert lp.grad.tolist() == [gradient]


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_case_61_huge_log_ratio_through_the_logits_leaves_no_nan(advantage):
    logits = torch.zeros(1, 4, requires_grad=True)
    out = fused_ppo_loss(logits, torch.tensor([0]), torch.tensor([-200.0]), torch.tensor([advantage]))
    out.loss.backward()
    assert_close(out.loss, -1.2 * advantage, 5e-7)
    assert (logits.grad == 0).all()


@pytest.mark.parametrize(
    ("log_ratio", "advantage"), [(100.0, -1.0), (-30.0, 1.0), (100.0, 1.0), (-30.0, -1.0), (19.0, -1.0), (-19.0, 1.0)]
)
def test_case_61_log_ratio_clamp_is_an_option_and_counted(log_ratio, advantage):
    lp = torch.tensor([log_ratio], requires_grad=True)
    out = ppo_loss(lp, torch.zeros(1), torch.tensor([advantage]), config=PPOLossConfig(log_ratio_clamp=20.0))
    want = oracle.ppo([log_ratio], [0.0], [advantage], spec=LossSpec(log_ratio_clamp=20.0))
    out.loss.backward()
    assert_close(out.loss, want.loss, 5e-7)
    assert_close(lp.grad, want.d_logprobs, 5e-7)
    metrics = out.metrics.compute()
    assert metrics["log_ratio_clamp_fraction"] == (1.0 if abs(log_ratio) > 20 else 0.0)
    assert PPOLossConfig().log_ratio_clamp is None


def test_case_61_one_overflowing_token_does_not_touch_the_others():
    lp = torch.tensor([100.0, -0.5, -200.0], requires_grad=True)
    old, adv = torch.tensor([0.0, -0.6, 0.0]), torch.ones(3)
    ppo_loss(lp, old, adv).loss.backward()
    assert_close(lp.grad, [0, -math.exp(0.1) / 3, 0], 5e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_62_half_old_logprobs_give_a_ratio_in_fp32(dtype):
    lp = torch.tensor([-10.397208])
    old = lp.to(dtype)
    metrics = ppo_loss(lp, old, torch.ones(1)).metrics.compute()
    if dtype == torch.bfloat16:
        assert metrics["ratio_mean"] == pytest.approx(0.9780, abs=5e-5)
    assert metrics["ratio_mean"] == pytest.approx(math.exp(lp.double().item() - old.double().item()), rel=3e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ratio_before_any_update_is_exactly_one(dtype):
    logits = torch.randn(64, 1003, dtype=dtype) * 4
    tokens = torch.randint(1003, (64,))
    old = logprobs_from_logits(logits, tokens)
    out = fused_ppo_loss(leaf(logits), tokens, old, torch.randn(64))
    metrics = out.metrics.compute()
    assert metrics["ratio_min"] == metrics["ratio_max"] == metrics["ratio_mean"] == 1
    assert metrics["approx_kl_k1"] == metrics["approx_kl_k2"] == metrics["approx_kl_k3"] == 0
    assert metrics["clip_fraction"] == 0


@pytest.mark.parametrize("delta", [1e-3, 1e-4, 3e-5, -1e-4])
def test_k3_does_not_cancel_near_zero(delta):
    """exp(-d) - 1 + d loses every digit below |d| = 3e-4 in fp32, and can come out negative."""
    ref = torch.tensor([-2.0])
    lp = (ref + delta).requires_grad_()
    exact = oracle.to_numpy(lp)[0] - oracle.to_numpy(ref)[0]
    out = ppo_loss(lp, lp.detach(), torch.zeros(1), ref_logprobs=ref, config=PPOLossConfig(kl_coef=1.0))
    out.loss.backward()
    value, slope, _ = oracle.kl_term(exact, 0.0, LossSpec())
    assert out.kl >= 0
    # expm1(-d) + d still cancels to one part in 1/|d| of an ulp of d; a series would not
    assert abs(out.kl.item() - value) <= 1e-7 * abs(exact)
    assert_close(lp.grad, [slope], 5e-7)


@pytest.mark.parametrize(("width", "top"), [(50000, 22.0), (50000, 30.0), (50000, 60.0), (1000, 12.0)])
def test_small_entropies_keep_their_digits(width, top):
    """lse - sum(p z) cancels two numbers of the size of the logits: 0.25 % off at top = 22."""
    logits = torch.zeros(1, width)
    logits[0, 17] = top
    _, h = logprobs_from_logits(logits, torch.tensor([17]), return_entropy=True)
    want = oracle.score(logits, torch.tensor([17])).entropy
    assert h.item() >= 0
    assert abs(h.item() - want[0]) <= 3e-7


def test_logprob_of_a_likely_token_is_never_positive():
    for width in (2, 129, 4097, 50257):
        logits = torch.randn(16, width)
        logits[:, 0] = torch.linspace(5, 80, 16)
        lp = logprobs_from_logits(logits, torch.zeros(16, dtype=torch.long))
        assert (lp <= 0).all()
        assert_logprobs(lp, oracle.score(logits, np.zeros(16, dtype=np.int64)).logprobs)
