"""Finite differences in float64: torch.autograd.gradcheck over every differentiable input."""

from __future__ import annotations

import math

import pytest
import torch

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits, ppo_loss

MASK = torch.tensor([[1, 0, 1], [1, 1, 1]])


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("vocab_size", [None, 5])
def test_scores(temperature, shift, vocab_size):
    tokens = torch.randint(5, (2, 4 if shift else 3))

    def f(logits):
        return logprobs_from_logits(
            logits, tokens, MASK, temperature=temperature, shift=shift, vocab_size=vocab_size, return_entropy=True
        )

    assert torch.autograd.gradcheck(f, (double(*tokens.shape, 7),))


@pytest.mark.parametrize("shift", [False, True])
def test_scores_with_a_softcap_and_a_temperature_for_each_row(shift):
    tokens, temperature = torch.randint(5, (2, 4 if shift else 3)), torch.rand(2, 3) + 0.5
    options = {"temperature": temperature, "logit_softcap": 0.8, "logit_scale": 1.3, "return_entropy": True}

    def f(logits):
        return logprobs_from_logits(logits, tokens, MASK, shift=shift, **options)

    assert torch.autograd.gradcheck(f, (double(*tokens.shape, 7),))


def constants(new):
    """Constants at which no token sits on a kink: log-ratios and value moves away from every bound."""
    delta = torch.tensor([[0.05, 0.5, -0.1], [-0.5, 0.1, 1.4]], dtype=torch.float64)
    return {
        "old_logprobs": new.detach() - delta,
        "advantages": torch.tensor([[1.0, 1, -1], [-1, 0.5, -2]], dtype=torch.float64),
        "mask": MASK,
        "ref_logprobs": new.detach() - delta.flip(1),
        "returns": torch.tensor([[1.0, -1, 2], [0.3, 4, -3]], dtype=torch.float64),
    }


CONFIGS = [
    {"aggregation": a, "agg_max_len": 7, "kl_estimator": k, "dual_clip": d}
    for a, k, d in [
        ("token-mean", "k1", None),
        ("seq-mean-token-mean", "k2", 3.0),
        ("seq-mean-token-sum", "k3", None),
        ("seq-mean-token-sum-norm", "abs", 1.5),
    ]
]


@pytest.mark.parametrize("options", CONFIGS, ids=lambda o: o["aggregation"])
def test_ppo_loss(options):
    lp, entropy, values = double(2, 3), double(2, 3), double(2, 3)
    fixed = constants(lp)
    old_values = values.detach() + torch.tensor([[0.1, 0.9, -0.1], [-0.7, 0.05, 0.6]], dtype=torch.float64)
    config = PPOLossConfig(entropy_coef=0.1, kl_coef=0.2, value_clip=0.3, **options)

    def f(lp, entropy, values):
        return ppo_loss(
            lp, entropy=entropy, values=values, old_values=old_values, config=config, loss_scale=1.3, **fixed
        ).loss

    assert torch.autograd.gradcheck(f, (lp, entropy, values))


@pytest.mark.parametrize("options", CONFIGS, ids=lambda o: o["aggregation"])
def test_fused_ppo_loss(options):
    tokens = torch.tensor([[0, 1, 2], [3, 4, 5]])
    logits, values = double(2, 3, 7), double(2, 3)
    new = logprobs_from_logits(logits.detach(), tokens, temperature=0.8)
    fixed = constants(new)
    old_values = values.detach() + torch.tensor([[0.1, 0.9, -0.1], [-0.7, 0.05, 0.6]], dtype=torch.float64)
    config = PPOLossConfig(entropy_coef=0.1, kl_coef=0.2, value_clip=0.3, temperature=0.8, **options)

    def f(logits, values):
        return fused_ppo_loss(
            logits, tokens, values=values, old_values=old_values, config=config, loss_scale=1.3, **fixed
        ).loss

    assert torch.autograd.gradcheck(f, (logits, values))


def test_scores_with_neg_inf_columns():
    tokens = torch.tensor([0, 1])

    def f(live):
        return logprobs_from_logits(
            torch.cat([live, torch.full((2, 3), -math.inf, dtype=torch.float64)], -1), tokens, return_entropy=True
        )

    assert torch.autograd.gradcheck(f, (double(2, 4),))
