"""Behaviour the public record keeps reporting as a bug and that is right: pinned so that nobody "fixes" it."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from checks import assert_close, leaf, same_bits

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits, ppo_loss


def test_value_loss_takes_the_maximum_not_the_minimum():
    args = {"values": torch.tensor([5.0]), "old_values": torch.tensor([1.0]), "returns": torch.tensor([10.0])}
    zero = torch.zeros(1)
    out = ppo_loss(zero, zero, zero, config=PPOLossConfig(value_clip=0.2), **args)
    assert out.value_loss.item() == pytest.approx(0.5 * 8.8**2)  # not 0.5 * 5^2


def test_the_ratio_is_new_over_old():
    out = ppo_loss(torch.tensor([-1.0]), torch.tensor([-1.1]), torch.tensor([1.0]))
    assert out.loss.item() == pytest.approx(-math.exp(0.1))


def test_attention_mask_without_its_first_column_is_the_mask_of_next_token_logprobs():
    """Right-padded sequences of length 4 and 2: tokens 1..3 and 1..1 are predicted."""
    attention = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    tokens = torch.tensor([[1, 2, 3, 4], [1, 2, 0, 0]])
    logits = torch.randn(2, 4, 6)
    lp = logprobs_from_logits(logits, tokens, attention[:, 1:], shift=True)
    assert (lp != 0).tolist() == [[True, True, True], [True, False, False]]
    assert_close(lp, oracle.score(logits, tokens, attention[:, 1:], shift=True).logprobs, 5e-7)


def test_a_ratio_of_one_against_its_own_detached_copy_has_a_gradient():
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    ppo_loss(lp, lp.detach(), torch.tensor([1.0, 1.0])).loss.backward()
    assert lp.grad.tolist() == [-0.5, -0.5]


def test_k1_can_be_negative_but_entropy_cannot():
    out = ppo_loss(
        torch.tensor([-2.0]),
        torch.tensor([-2.0]),
        torch.zeros(1),
        ref_logprobs=torch.tensor([-1.0]),
        config=PPOLossConfig(kl_coef=1.0, kl_estimator="k1"),
    )
    assert out.kl == -1
    for scale in (0.1, 1.0, 30.0, 300.0):
        _, h = logprobs_from_logits(
            torch.randn(50, 200) * scale, torch.zeros(50, dtype=torch.long), return_entropy=True
        )
        assert (h >= 0).all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("clip_low", [0.2, 0.0])
def test_at_ratio_one_the_gradient_is_minus_the_advantage_even_without_a_trust_region(clip_low, advantage):
    lp = torch.tensor([-1.0], requires_grad=True)
    ppo_loss(
        lp, torch.tensor([-1.0]), torch.tensor([advantage]), config=PPOLossConfig(clip_low=clip_low)
    ).loss.backward()
    assert lp.grad.item() == -advantage


@pytest.mark.parametrize("clip_low", [0.2, 0.0])
def test_at_ratio_one_the_gradient_reaches_the_logits_even_without_a_trust_region(clip_low):
    base, tokens = torch.randn(3, 9), torch.tensor([0, 4, 8])
    old = logprobs_from_logits(base, tokens)
    x, y = leaf(base), leaf(base)
    fused_ppo_loss(x, tokens, old, torch.ones(3), config=PPOLossConfig(clip_low=clip_low)).loss.backward()
    fused_ppo_loss(y, tokens, None, torch.ones(3), config=PPOLossConfig(clip_low=clip_low)).loss.backward()
    assert same_bits(x.grad, y.grad)
    assert (x.grad != 0).all()


@pytest.mark.parametrize(("bound", "advantage"), [("upper", 1.0), ("lower", -1.0)])
def test_exactly_on_a_clip_bound_the_gradient_passes(bound, advantage):
    """A ratio of exactly 2 or 1/2 in fp32, where exp returns it."""
    delta = math.log(2) if bound == "upper" else -math.log(2)
    new = torch.tensor([delta], dtype=torch.float64).float()
    ratio = ppo_loss(new, torch.zeros(1), torch.ones(1)).metrics.compute()["ratio_mean"]
    if ratio not in (2.0, 0.5):
        pytest.skip(f"exp(fp32 log 2) is {ratio!r} here, so no token sits exactly on the bound")
    lp = new.clone().requires_grad_()
    config = PPOLossConfig(clip_low=0.5, clip_high=1.0)
    out = ppo_loss(lp, torch.zeros(1), torch.tensor([advantage]), config=config)
    out.loss.backward()
    assert lp.grad.item() == -advantage * ratio
    assert out.metrics.compute()["clip_fraction"] == 0
