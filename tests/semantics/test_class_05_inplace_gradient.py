"""Class 5: inplace_grad=True, the gradient written over the logits."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from checks import assert_close, assert_logits_grad, assert_logprobs, leaf, same_bits
from oracle import LossSpec

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
N, V = 5, 33


def problem(dtype=torch.float32):
    logits = torch.randn(N, V, dtype=dtype)
    tokens = torch.randint(V, (N,))
    old = logprobs_from_logits(logits, tokens) + torch.linspace(-0.5, 0.5, N)
    return logits, tokens, old, torch.randn(N)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("kind", ["leaf", "non_leaf", "strided"])
def test_inplace_gradient_is_right(kind, scale, dtype):
    base, tokens, old, adv = problem(dtype)
    x = leaf(torch.cat([base, base], -1)) if kind == "strided" else leaf(base)
    z = {"leaf": lambda: x, "non_leaf": lambda: x * 1, "strided": lambda: (x * 1)[:, :V]}[kind]()
    config = PPOLossConfig(entropy_coef=0.1)
    out = fused_ppo_loss(z, tokens, old, adv, config=config, inplace_grad=True)
    want = oracle.fused(base, tokens, old, adv, spec=LossSpec(entropy_coef=0.1))
    assert_logprobs(out.logprobs, want.scores.logprobs)
    (out.loss * scale).backward()
    grad = x.grad[:, :V] if kind == "strided" else x.grad
    if scale == 1.0 or dtype == torch.float32:
        assert_logits_grad(grad, want.d_logits * scale)
    else:
        eps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        bound = 2.5 * eps * np.abs(want.d_logits * scale) + 1e-6
        assert (np.abs(oracle.to_numpy(grad) - want.d_logits * scale) <= bound).all()


def test_inplace_gradient_reuses_the_memory_of_the_logits():
    base, tokens, old, adv = problem()
    x = leaf(base)
    z = x * 1
    version = z._version
    out = fused_ppo_loss(z, tokens, old, adv, inplace_grad=True)
    out.loss.backward()
    assert z._version > version
    assert_logits_grad(z.detach(), oracle.fused(base, tokens, old, adv, spec=LossSpec()).d_logits)


@pytest.mark.parametrize("order", ["before", "after"])
def test_inplace_gradient_turns_another_consumer_into_an_error(order):
    base, tokens, old, adv = problem()
    x = leaf(base)
    z = x * 1
    if order == "before":
        other = (z**2).sum()  # saves z for its backward
        loss = fused_ppo_loss(z, tokens, old, adv, inplace_grad=True).loss
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (loss + other).backward()
    else:
        lp = logprobs_from_logits(z, tokens).sum()
        fused_ppo_loss(z, tokens, old, adv, inplace_grad=True).loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError):
            lp.backward()


def test_inplace_gradient_refuses_a_second_backward():
    base, tokens, old, adv = problem()
    z = leaf(base) * 1
    loss = fused_ppo_loss(z, tokens, old, adv, inplace_grad=True).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()


def test_inplace_gradient_leaves_logits_alone_when_no_gradient_is_wanted():
    base, tokens, old, adv = problem()
    kept = base.clone()
    fused_ppo_loss(base, tokens, old, adv, inplace_grad=True)
    assert same_bits(base, kept)
    x = leaf(base)
    with torch.no_grad():
        fused_ppo_loss(x, tokens, old, adv, inplace_grad=True)
    assert same_bits(x.detach(), kept)


def test_inplace_gradient_refuses_logits_whose_rows_share_memory():
    x = torch.randn(1, V, requires_grad=True)
    with pytest.raises((ValueError, RuntimeError)):
        fused_ppo_loss(
            x.expand(N, V), torch.zeros(N, dtype=torch.long), torch.zeros(N), torch.ones(N), inplace_grad=True
        ).loss.backward()


@pytest.mark.parametrize("dtype", FLOATS)
def test_inplace_gradient_with_values_and_a_mask(dtype):
    base, tokens, old, adv = problem(dtype)
    x, values, mask = leaf(base), torch.randn(N, requires_grad=True), torch.tensor([1, 0, 1, 1, 0])
    out = fused_ppo_loss(x * 1, tokens, old, adv, mask, values=values, returns=torch.zeros(N), inplace_grad=True)
    out.loss.backward()
    want = oracle.fused(base, tokens, old, adv, mask, spec=LossSpec(), values=values, returns=torch.zeros(N))
    assert_logits_grad(x.grad, want.d_logits)
    assert (x.grad[mask == 0] == 0).all()
    assert_close(values.grad, want.result.d_values, 5e-7)


def test_inplace_gradient_when_only_the_values_want_one():
    base, tokens, old, adv = problem()
    kept, values = base.clone(), torch.randn(N, requires_grad=True)
    fused_ppo_loss(base, tokens, old, adv, values=values, returns=torch.zeros(N), inplace_grad=True).loss.backward()
    assert same_bits(base, kept)
    assert values.grad is not None


def test_inplace_gradient_is_an_ordinary_gradient_to_what_follows():
    """The logits' producer receives it like any other: a matmul's weight gradient comes out right."""
    base, tokens, old, adv = problem()
    grads = []
    for inplace in (False, True):
        hidden, weight = torch.eye(N, 7), torch.randn(7, V, generator=torch.Generator(base.device).manual_seed(1))
        weight.requires_grad_()
        fused_ppo_loss(hidden @ weight, tokens, old, adv, inplace_grad=inplace).loss.backward()
        grads.append(weight.grad)
    assert same_bits(grads[0], grads[1])


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_leading_axes_that_no_two_strides_describe(dtype, shift):
    """[:, :2] of [2, 3, S, V]: the gradient once went to rows that the slice leaves out."""
    whole = torch.randn(2, 3, 5, 70).to(dtype)
    tokens, advantages = torch.randint(70, (2, 2, 5)), torch.randn(2, 2, 5 - shift)
    expected = whole[:, :2].clone().requires_grad_()
    fused_ppo_loss(expected, tokens, None, advantages, shift=shift).loss.backward()
    parent = whole.clone().requires_grad_()
    fused_ppo_loss((parent * 1)[:, :2], tokens, None, advantages, shift=shift, inplace_grad=True).loss.backward()
    assert torch.equal(parent.grad[:, :2], expected.grad)
    assert (parent.grad[:, 2] == 0).all()


def test_rows_that_overlap_are_refused():
    """Row 1 begins inside row 0: its gradient would overwrite logits still to be read."""
    overlapping = torch.randn(20).as_strided((3, 8), (4, 1)).requires_grad_()
    with pytest.raises(ValueError, match="no overlap"):
        fused_ppo_loss(overlapping, torch.zeros(3, dtype=torch.long), None, torch.ones(3), inplace_grad=True)


def test_log_probs_alone_write_their_gradient_over_the_logits_once_and_in_backward():
    base, tokens, _, upstream = problem()
    z = leaf(base) * 1
    logprobs, entropy = logprobs_from_logits(z, tokens, return_entropy=True, inplace_grad=True)
    assert same_bits(z.detach(), base)
    (logprobs * upstream + 0.1 * entropy).sum().backward(retain_graph=True)
    other = leaf(base)
    logprobs_, entropy_ = logprobs_from_logits(other, tokens, return_entropy=True)
    (logprobs_ * upstream + 0.1 * entropy_).sum().backward()
    assert same_bits(z.detach(), other.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_log_probs_refuse_to_write_over_logits_that_overlap():
    with pytest.raises(ValueError, match="strides"):
        logprobs_from_logits(torch.randn(1, V).expand(N, V), torch.zeros(N, dtype=torch.int64), inplace_grad=True)
