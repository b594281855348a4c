"""Batch invariance and determinism: a row's numbers are the same bits wherever and however it is scored."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checks import leaf, same_bits

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits, ppo_loss

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [5, 129, 1000, 4097, 32000]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [*WIDTHS, 50257])
def test_a_row_alone_equals_the_row_in_a_batch(width, dtype, same_bits_promised):
    logits, tokens = torch.randn(37, width, dtype=dtype) * 3, torch.randint(width, (37,))
    whole = logprobs_from_logits(logits, tokens, return_entropy=True)
    for rows in (slice(0, 1), slice(36, 37), slice(5, 8), slice(1, 37)):
        part = logprobs_from_logits(logits[rows], tokens[rows], return_entropy=True)
        assert same_bits(whole[0][rows].clone(), part[0])
        assert same_bits(whole[1][rows].clone(), part[1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_alignment_and_strides_change_no_bit(dtype, same_bits_promised):
    logits, tokens = torch.randn(4, 1003, dtype=dtype), torch.randint(1003, (4,))
    want = logprobs_from_logits(logits, tokens, return_entropy=True)
    for offset in (1, 3, 8):
        wide = torch.randn(4, 1003 + 16, dtype=dtype)
        wide[:, offset : offset + 1003] = logits
        got = logprobs_from_logits(wide[:, offset : offset + 1003], tokens, return_entropy=True)
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_path_gives_the_same_logprobs(width, temperature, dtype):
    logits, tokens = torch.randn(9, width, dtype=dtype) * 3, torch.randint(width, (9,))
    want, entropy = logprobs_from_logits(logits, tokens, temperature=temperature, return_entropy=True)
    assert same_bits(logprobs_from_logits(logits, tokens, temperature=temperature), want)
    assert same_bits(logprobs_from_logits(leaf(logits), tokens, temperature=temperature).detach(), want)
    old, adv = want - 0.1, torch.randn(9)
    losses = set()
    for coefficient in (0.0, 0.01):
        config = PPOLossConfig(temperature=temperature, entropy_coef=coefficient)
        calls = {
            "no gradient": fused_ppo_loss(logits, tokens, old, adv, config=config),
            "gradient": fused_ppo_loss(leaf(logits), tokens, old, adv, config=config),
            "in place": fused_ppo_loss(leaf(logits), tokens, old, adv, config=config, inplace_grad=True),
            "all ones mask": fused_ppo_loss(leaf(logits), tokens, old, adv, torch.ones(9), config=config),
        }
        for name, out in calls.items():
            assert same_bits(out.logprobs, want), name
            if coefficient:
                assert same_bits(out.entropy, entropy), name
        losses.add(len({out.loss.item() for out in calls.values()}))
    assert losses == {1}


@pytest.mark.parametrize("dtype", FLOATS)
def test_masks_and_shift_change_no_bit_of_a_valid_row(dtype, same_bits_promised):
    logits, tokens = torch.randn(3, 8, 517, dtype=dtype), torch.randint(517, (3, 8))
    mask = torch.rand(3, 7) < 0.5
    want = logprobs_from_logits(logits[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    shifted = logprobs_from_logits(logits, tokens, shift=True)
    masked = logprobs_from_logits(logits, tokens, mask, shift=True)
    fused = fused_ppo_loss(leaf(logits), tokens, want, torch.randn(3, 7), mask, shift=True)
    assert same_bits(shifted, want)
    assert same_bits(masked, torch.where(mask, want, 0.0))
    assert same_bits(fused.logprobs, masked)
    assert fused.metrics.compute()["ratio_min"] == fused.metrics.compute()["ratio_max"] == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_zero_advantage_and_clipped_rows_keep_their_logprobs(dtype):
    logits, tokens = torch.randn(6, 999, dtype=dtype), torch.randint(999, (6,))
    want = logprobs_from_logits(logits, tokens)
    old = want - torch.tensor([0.0, 1, 1, -1, -1, 0])
    adv = torch.tensor([0.0, 1, -1, 1, -1, 2])
    for inplace in (False, True):
        out = fused_ppo_loss(leaf(logits), tokens, old, adv, inplace_grad=inplace)
        out.loss.backward()
        assert same_bits(out.logprobs, want)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_number_of_threads_changes_no_bit(dtype, threads):
    logits, tokens = torch.randn(65, 3001, dtype=dtype), torch.randint(3001, (65,))
    old, adv, mask = torch.full((65,), -8.0), torch.randn(65), torch.rand(65) < 0.7
    results = []
    for n in (1, 2, 3):
        threads(n)
        x = leaf(logits)
        out = fused_ppo_loss(x, tokens, old, adv, mask, config=PPOLossConfig(entropy_coef=0.01))
        out.loss.backward()
        results.append((out.loss.detach(), out.logprobs, out.entropy, x.grad))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_concurrent_calls_from_python_threads_do_not_share_scratch(dtype, not_interpreted):
    problems = [
        (torch.randn(9, w, dtype=dtype), torch.randint(w, (9,)), torch.randn(9)) for w in (50, 3001, 4097, 700) * 3
    ]

    def solve(problem):
        logits, tokens, adv = problem
        x = leaf(logits)
        out = fused_ppo_loss(x, tokens, None, adv, config=PPOLossConfig(entropy_coef=0.01))
        out.loss.backward()
        return out.loss.detach(), out.logprobs, x.grad

    serial = [solve(p) for p in problems]
    with ThreadPoolExecutor(4) as pool:
        concurrent = list(pool.map(solve, problems))
    for one, other in zip(serial, concurrent, strict=True):
        for a, b in zip(one, other, strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_visit_and_two_visit_gradients_agree(dtype):
    """The gradient written with the forward, and that of the same loss through logprobs_from_logits."""
    logits, tokens = torch.randn(7, 2000, dtype=dtype), torch.randint(2000, (7,))
    adv = torch.randn(7)
    a, b = leaf(logits), leaf(logits)
    config = PPOLossConfig(entropy_coef=0.05)
    fused = fused_ppo_loss(a, tokens, None, adv, config=config)
    lp, h = logprobs_from_logits(b, tokens, return_entropy=True)
    split = ppo_loss(lp, None, adv, entropy=h, config=config)
    assert abs(fused.loss.item() - split.loss.item()) <= 1e-6
    fused.loss.backward()
    split.loss.backward()
    row = b.grad.float().abs().amax(-1, keepdim=True)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    assert ((a.grad.float() - b.grad.float()).abs() <= tolerance * b.grad.float().abs() + 1e-6 * row).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_repeating_a_call_repeats_its_bits(dtype):
    logits, tokens = torch.randn(33, 2049, dtype=dtype), torch.randint(2049, (33,))
    old, adv = torch.full((33,), -8.0), torch.randn(33)

    def once():
        x = leaf(logits)
        out = fused_ppo_loss(x, tokens, old, adv, config=PPOLossConfig(entropy_coef=0.01))
        out.loss.backward()
        return out.loss.detach(), out.logprobs, x.grad

    first = once()
    for _ in range(3):
        for a, b in zip(first, once(), strict=True):
            assert same_bits(a, b)
