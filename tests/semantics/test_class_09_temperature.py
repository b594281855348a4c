"""Class 9: temperature."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
from checks import assert_close, assert_entropy, assert_logits_grad, assert_logprobs, leaf, same_bits
from oracle import LossSpec

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits


@pytest.mark.parametrize(
    ("temperature", "logprob", "entropy"),
    [(0.5, -0.035976, 0.177324), (1, -0.239545, 0.665573), (2, -0.551445, 0.975328)],
)
def test_cases_74_75_logprob_and_entropy_by_hand(temperature, logprob, entropy):
    logits = torch.tensor([[2.0, 0.0, 0.0]])
    before = logits.clone()
    lp, h = logprobs_from_logits(logits, torch.tensor([0]), temperature=temperature, return_entropy=True)
    assert lp.item() == pytest.approx(logprob, abs=6e-7)
    assert h.item() == pytest.approx(entropy, abs=6e-7)
    assert same_bits(logits, before)


def test_case_74_gradient_carries_one_over_the_temperature():
    logits = torch.tensor([[2.0, 0.0, 0.0]], requires_grad=True)
    logprobs_from_logits(logits, torch.tensor([0]), temperature=2.0).sum().backward()
    assert_close(logits.grad, [[0.2119, -0.1060, -0.1060]], 5e-4)
    assert_logits_grad(logits.grad, oracle.score(logits, torch.tensor([0]), temperature=2.0).d_logits(np.ones(1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.01, 0.3, 0.7, 1.0, 1.3, 5.0, 100.0])
def test_case_74_every_output_and_gradient(temperature, dtype):
    logits, tokens = leaf(torch.randn(5, 301, dtype=dtype)), torch.randint(301, (5,))
    lp, h = logprobs_from_logits(logits, tokens, temperature=temperature, return_entropy=True)
    g_lp, g_h = torch.randn(2, 5)
    torch.autograd.backward([lp, h], [g_lp, g_h])
    want = oracle.score(logits, tokens, temperature=temperature)
    assert_logprobs(lp, want.logprobs)
    assert_entropy(h, want.entropy)
    assert_logits_grad(logits.grad, want.d_logits(g_lp.numpy(force=True), g_h.numpy(force=True)))


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_case_74_the_ratio_is_one_when_both_sides_are_tempered(temperature):
    logits, tokens = torch.randn(6, 77), torch.randint(77, (6,))
    old = logprobs_from_logits(logits, tokens, temperature=temperature)
    x = leaf(logits)
    config = PPOLossConfig(temperature=temperature, entropy_coef=0.1)
    out = fused_ppo_loss(x, tokens, old, torch.ones(6), config=config)
    metrics = out.metrics.compute()
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1
    out.loss.backward()
    want = oracle.fused(logits, tokens, old, torch.ones(6), spec=LossSpec(temperature=temperature, entropy_coef=0.1))
    assert_close(out.entropy, want.scores.entropy, 5e-7)
    assert_logits_grad(x.grad, want.d_logits)
    assert same_bits(x.detach(), logits)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf, -0.0])
def test_case_76_temperatures_that_are_not_positive_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        logprobs_from_logits(torch.zeros(1, 3), torch.tensor([0]), temperature=temperature)
    with pytest.raises(ValueError, match="temperature"):
        PPOLossConfig(temperature=temperature)


def test_case_76_an_integer_temperature_is_a_number():
    assert logprobs_from_logits(torch.tensor([[2.0, 0, 0]]), torch.tensor([0]), temperature=2).item() == pytest.approx(
        -0.551445, abs=6e-7
    )


def test_case_76_a_tensor_temperature_is_used():
    logits, tokens = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0])
    lp = logprobs_from_logits(logits, tokens, temperature=torch.tensor(2.0))
    assert lp.item() == pytest.approx(-0.551445, abs=6e-7)


@pytest.mark.parametrize("temperature", ["1.0", None, [1.0]])
def test_case_76_other_types_are_refused(temperature):
    with pytest.raises(TypeError, match="temperature"):
        logprobs_from_logits(torch.zeros(1, 3), torch.tensor([0]), temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_temperature_does_not_overflow_before_the_maximum_is_subtracted(dtype):
    """60000 / 0.01 overflows fp16, 3e38 / 0.01 overflows fp32."""
    top = 60000.0 if dtype == torch.float16 else 3e38
    logits = torch.tensor([[top, top, -top]], dtype=dtype)
    lp, h = logprobs_from_logits(logits, torch.tensor([0]), temperature=0.01, return_entropy=True)
    assert_close(lp, [-math.log(2)], 5e-7)
    assert_close(h, [math.log(2)], 5e-7)
