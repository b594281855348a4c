"""Class 1: -inf logits, masked vocabulary, padded vocabulary columns."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
from checks import assert_close, assert_entropy, assert_logits_grad, assert_logprobs, leaf
from oracle import INF, NAN, LossSpec

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def score(logits, tokens, mask=None, **options):
    return logprobs_from_logits(logits, tokens, mask, return_entropy=True, **options)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("row", "entropy", "logprob"),
    [([0, -INF], 0.0, 0.0), ([0, 0, -INF], math.log(2), -math.log(2)), ([65504, -65504], 0.0, 0.0)],
)
def test_case_01_entropy_is_finite_when_a_token_has_probability_zero(row, entropy, logprob, dtype):
    lp, h = score(torch.tensor([row], dtype=dtype), torch.tensor([0]))
    assert_close(h, [entropy], 5e-7)
    assert_close(lp, [logprob], 5e-7)


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_02_entropy_gradient_is_zero_not_nan_at_neg_inf_columns(dtype):
    logits = torch.zeros(1, 3, 8, dtype=dtype)
    logits[..., 5:] = -INF
    logits = leaf(logits)
    lp, h = score(logits, torch.full((1, 3), 2), torch.ones(1, 3))
    assert_close(h, np.full((1, 3), math.log(5)), 5e-7)
    assert_close(lp, np.full((1, 3), -math.log(5)), 5e-7)
    h.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[..., 5:] == 0).all()
    assert (logits.grad[..., :5].abs() <= 1e-6).all()  # a uniform row is at the maximum of its entropy


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_03_gradient_of_both_outputs_with_neg_inf_columns(dtype):
    logits = torch.randn(4, 8, dtype=dtype) * 3
    logits[:, 5:] = -INF
    logits[1, :3] = -INF
    logits = leaf(logits)
    tokens = torch.tensor([2, 3, 0, 4])
    lp, h = score(logits, tokens)
    torch.autograd.backward([lp, h], [torch.full((4,), 0.5), torch.full((4,), 0.25)])
    want = oracle.score(logits, tokens)
    assert_logprobs(lp, want.logprobs)
    assert_entropy(h, want.entropy)
    assert_logits_grad(logits.grad, want.d_logits(np.full(4, 0.5), np.full(4, 0.25)))
    assert (logits.grad[:, 5:] == 0).all()
    assert (logits.grad[1, :3] == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "width", [2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2048, 2049, 4095, 4096, 4097, 8193, 12289]
)
def test_case_04_only_the_last_column_is_finite(width, dtype):
    """A block that saw nothing but -inf rescales by exp(-inf + inf) in a careless online softmax."""
    logits = torch.full((1, width), -INF, dtype=dtype)
    logits[0, -1] = 0
    logits = leaf(logits)
    lp, h = score(logits, torch.tensor([width - 1]))
    assert lp.item() == 0
    assert h.item() == 0
    (lp + h).sum().backward()
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("position", [0, 1, 511, 4095, 4096, 5000, 8191])
def test_case_04_the_finite_columns_sit_anywhere_among_neg_inf(position, dtype):
    logits = torch.full((1, 8200), -INF, dtype=dtype)
    logits[0, position] = 2.0
    logits[0, position + 1] = 1.0
    lp, h = score(logits, torch.tensor([position]))
    want = oracle.score(logits, torch.tensor([position]))
    assert_logprobs(lp, want.logprobs)
    assert_entropy(h, want.entropy)


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_04_a_vocabulary_of_one_token(dtype):
    logits = leaf(torch.tensor([[3.5], [-70.0]], dtype=dtype))
    lp, h = score(logits, torch.tensor([0, 0]))
    assert (lp == 0).all()
    assert (h == 0).all()
    (lp + h).sum().backward()
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("width", [4, 300, 5000])
def test_case_05_a_row_of_neg_inf_is_nan_for_that_row_only(width):
    logits = torch.randn(2, width)
    logits[0] = -INF
    logits = leaf(logits)
    tokens = torch.tensor([1, 1])
    lp, h = score(logits, tokens)
    assert lp[0].isnan()
    assert h[0].isnan()
    want = oracle.score(logits[1:], tokens[1:])
    assert_logprobs(lp[1:], want.logprobs)
    assert_entropy(h[1:], want.entropy)
    (lp + h).sum().backward()
    assert_logits_grad(logits.grad[1:], want.d_logits(np.ones(1), np.ones(1)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_05_a_masked_row_of_neg_inf_contributes_nothing(dtype):
    logits = torch.zeros(2, 4, dtype=dtype)
    logits[0] = -INF
    logits = leaf(logits)
    mask = torch.tensor([0, 1])
    out = fused_ppo_loss(logits, torch.tensor([1, 1]), torch.zeros(2), torch.ones(2), mask)
    assert out.loss.isfinite()
    assert out.logprobs[0] == 0
    out.loss.backward()
    assert (logits.grad[0] == 0).all()
    assert (logits.grad[1] != 0).all()
    lp, h = score(logits.detach(), torch.tensor([1, 1]), mask)
    assert lp[0] == 0
    assert h[0] == 0


@pytest.mark.parametrize("bad", [NAN, INF])
def test_case_05_nan_or_inf_in_one_row_does_not_leak(bad):
    logits = torch.randn(3, 700)
    logits[1, 300] = bad
    tokens = torch.tensor([5, 6, 7])
    lp, h = score(logits, tokens)
    assert lp[1].isnan()
    assert h[1].isnan()
    want = oracle.score(logits[::2], tokens[::2])
    assert_logprobs(lp[::2], want.logprobs)
    assert_entropy(h[::2], want.entropy)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 5, 127, 129, 1000, 50257, 129920])
@pytest.mark.parametrize("level", [-50.0, -20.0, 0.0, 50.0])
def test_case_06_partial_tile_columns_do_not_enter_the_sum(width, level, dtype):
    """Columns past V that load as 0 add exp(0) to the denominator; it shows when all real logits are negative."""
    lp, h = score(torch.full((1, width), level, dtype=dtype), torch.tensor([0]))
    assert_logprobs(lp, [-math.log(width)])
    assert_entropy(h, [math.log(width)])
    assert lp.item() <= 0
    assert h.item() >= 0


@pytest.mark.parametrize("width", [5, 129, 50257])
def test_case_06_scores_do_not_change_when_logits_shift(width):
    logits = (torch.randn(3, width) * 64).round() / 64  # sums with +-50 are exact in fp32
    tokens = torch.randint(width, (3,))
    _, h = score(logits, tokens)
    for shift in (-50, 50):
        lp_shifted, h_shifted = score(logits + shift, tokens)
        assert_logprobs(lp_shifted, oracle.score(logits, tokens).logprobs)
        assert_entropy(h_shifted, h)


def test_case_07_a_token_in_the_tile_padding_never_matches():
    for token in (5, 6, 7):
        with pytest.raises(IndexError, match="tokens"):
            logprobs_from_logits(torch.zeros(1, 5), torch.tensor([token]))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [8, 4100])
def test_case_08_vocab_size_hides_padded_head_rows(width, dtype):
    logits = torch.zeros(1, width, dtype=dtype)
    logits[:, :5] = -3
    logits = leaf(logits)
    lp, h = score(logits, torch.tensor([1]), vocab_size=5)
    assert_close(lp, [-math.log(5)], 5e-7)
    assert_close(h, [math.log(5)], 5e-7)
    torch.autograd.backward([lp, h], [torch.tensor([0.5]), torch.tensor([0.25])])
    assert (logits.grad[:, 5:] == 0).all()
    assert_logits_grad(
        logits.grad, oracle.score(logits, torch.tensor([1]), vocab_size=5).d_logits(np.array([0.5]), np.array([0.25]))
    )

    full, _ = score(logits.detach(), torch.tensor([1]))
    assert_logprobs(full, oracle.score(logits, torch.tensor([1])).logprobs)


def test_case_08_nan_in_columns_that_do_not_exist_changes_nothing():
    logits = torch.randn(2, 40)
    logits[:, 30:] = NAN
    logits = leaf(logits)
    tokens = torch.tensor([3, 29])
    config = PPOLossConfig(vocab_size=30, entropy_coef=0.1)
    out = fused_ppo_loss(logits, tokens, torch.full((2,), -3.0), torch.ones(2), config=config)
    want = oracle.fused(
        logits, tokens, torch.full((2,), -3.0), torch.ones(2), spec=LossSpec(vocab_size=30, entropy_coef=0.1)
    )
    out.loss.backward()
    assert_logprobs(out.logprobs, want.scores.logprobs)
    assert_close(out.loss, want.result.loss, 5e-7)
    assert_logits_grad(logits.grad, want.d_logits)


def test_case_08_a_token_beyond_vocab_size_is_out_of_range():
    with pytest.raises(IndexError, match=r"\b5\b"):
        logprobs_from_logits(torch.zeros(1, 8), torch.tensor([6]), vocab_size=5)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
@pytest.mark.parametrize("dtype", FLOATS)
def test_case_09_target_of_probability_zero(dtype, entropy_coef):
    logits = torch.zeros(1, 8, dtype=dtype)
    logits[:, 5:] = -INF
    token, old, adv = torch.tensor([5]), torch.tensor([-2.0]), torch.tensor([1.0])
    config = PPOLossConfig(entropy_coef=entropy_coef)

    masked = leaf(logits)
    out = fused_ppo_loss(masked, token, old, adv, torch.tensor([0]), config=config)
    out.loss.backward()
    assert out.loss == 0
    assert out.logprobs == 0
    assert (masked.grad == 0).all()

    live = leaf(logits)
    out = fused_ppo_loss(live, token, old, adv, torch.tensor([1]), config=config)
    out.loss.backward()
    assert out.logprobs == -INF
    assert_close(out.loss, -entropy_coef * math.log(5), 5e-7)
    assert out.policy_loss == 0
    assert torch.isfinite(live.grad).all()
    assert (live.grad.abs() <= 1e-8).all()
    assert out.metrics.compute()["ratio_mean"] == 0


def test_case_09_undefined_ratio_is_nan_for_that_token_and_stays_visible():
    """logprob and old_logprob both -inf: the log-ratio does not exist."""
    logits = torch.zeros(2, 8)
    logits[0, 5:] = -INF
    logits = leaf(logits)
    out = fused_ppo_loss(logits, torch.tensor([5, 1]), torch.tensor([-INF, -2.0]), torch.ones(2))
    assert out.loss.isnan()
    assert out.metrics.compute()["nonfinite"] == 1
    out.loss.backward()
    assert torch.isfinite(logits.grad[1]).all()
