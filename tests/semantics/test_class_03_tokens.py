"""Class 3: token ids and labels."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
from checks import assert_close, assert_logits_grad, assert_logprobs, leaf, same_bits

from ppo_kernels import fused_ppo_loss, logprobs_from_logits, ppo_loss

cpu_only = pytest.mark.cpu_only("a GPU cannot raise without a synchronisation")


@cpu_only
@pytest.mark.parametrize("token", [4, -1, 2**31, -(2**40), 1 << 62])
def test_case_22_a_token_out_of_range_names_its_position_and_the_vocabulary(token):
    logits = torch.randn(2, 4)
    with pytest.raises(IndexError, match=r"tokens") as error:
        logprobs_from_logits(logits, torch.tensor([0, token]), torch.tensor([1, 1]))
    assert str(token) in str(error.value)
    assert "1" in str(error.value)  # the position
    assert "4" in str(error.value)  # the vocabulary
    with pytest.raises(IndexError, match=r"tokens"):
        fused_ppo_loss(logits, torch.tensor([0, token]), torch.zeros(2), torch.ones(2))


@cpu_only
def test_case_22_position_counts_rows_in_the_callers_order():
    tokens = torch.zeros(3, 5, dtype=torch.long)
    tokens[2, 3] = 77
    with pytest.raises(IndexError, match=r"2, 3|\b13\b"):
        logprobs_from_logits(torch.randn(3, 5, 8), tokens)


@cpu_only
def test_case_22_gradients_are_refused_too():
    with pytest.raises(IndexError, match="tokens"):
        fused_ppo_loss(
            torch.randn(2, 4, requires_grad=True),
            torch.tensor([4, 0]),
            torch.zeros(2),
            torch.ones(2),
            inplace_grad=False,
        )


@pytest.mark.gpu
def test_case_22_gpu_out_of_range_is_nan_for_that_token_only():
    logits = torch.randn(2, 4, device="cuda")
    lp = logprobs_from_logits(logits, torch.tensor([4, 0], device="cuda"))
    assert lp[0].isnan()
    assert_logprobs(lp[1:], oracle.score(logits[1:], torch.tensor([0])).logprobs)


@pytest.mark.parametrize("ignored", [-100, 10**12, -(2**63)])
def test_case_23_any_id_may_stand_at_a_masked_slot(ignored):
    logits = leaf(torch.randn(1, 2, 4))
    tokens, mask = torch.tensor([[ignored, 2]]), torch.tensor([[0, 1]])
    lp, h = logprobs_from_logits(logits, tokens, mask, return_entropy=True)
    (lp.sum() + h.sum()).backward()
    assert lp[0, 0] == 0
    assert h[0, 0] == 0
    assert (logits.grad[0, 0] == 0).all()
    want = oracle.score(logits, tokens, mask)
    assert_logprobs(lp, want.logprobs)
    assert_logits_grad(logits.grad, want.d_logits(np.ones((1, 2)), np.ones((1, 2))))
    out = fused_ppo_loss(logits, tokens, torch.zeros(1, 2), torch.ones(1, 2), mask)
    assert same_bits(out.logprobs, lp.detach())


@cpu_only
@pytest.mark.parametrize("mask", [None, torch.tensor([[1, 1]])])
def test_case_23_minus_100_without_a_mask_is_an_error(mask):
    with pytest.raises(IndexError, match="-100"):
        logprobs_from_logits(torch.randn(1, 2, 4), torch.tensor([[-100, 2]]), mask)


@pytest.mark.parametrize("pads", [(1.0, 0.0), (0.0, 1.0), (-math.inf, -math.inf), (-math.inf, 0.0)])
def test_case_24_sentinels_in_masked_logprobs_do_not_matter(pads):
    new, old = torch.tensor([[-1.0, pads[0]]]), torch.tensor([[-1.1, pads[1]]])
    loss = ppo_loss(new, old, torch.ones(1, 2), torch.tensor([[1, 0]])).loss
    assert_close(loss, -math.exp(0.1), 5e-7)


def test_case_24_our_own_fill_is_zero():
    lp, h = logprobs_from_logits(
        torch.randn(2, 3, 5),
        torch.ones(2, 3, dtype=torch.long),
        torch.tensor([[1, 0, 1], [0, 0, 1]]),
        return_entropy=True,
    )
    assert (lp[torch.tensor([[False, True, False], [True, True, False]])] == 0).all()
    assert (h[torch.tensor([[False, True, False], [True, True, False]])] == 0).all()


def test_case_25_devices_that_differ_are_named_before_anything_runs():
    logits, tokens = torch.randn(2, 4, device="meta"), torch.zeros(2, dtype=torch.long, device="cpu")
    for call in (
        lambda: logprobs_from_logits(logits, tokens),
        lambda: fused_ppo_loss(logits, tokens, torch.zeros(2, device="cpu"), torch.ones(2, device="cpu")),
        lambda: logprobs_from_logits(torch.randn(2, 4, device="cpu"), tokens.to("meta")),
    ):
        with pytest.raises(ValueError, match=r"tokens") as error:
            call()
        assert "meta" in str(error.value)
        assert "cpu" in str(error.value)


@pytest.mark.parametrize(
    "name", ["old_logprobs", "advantages", "mask", "values", "returns", "old_values", "ref_logprobs", "token_weights"]
)
def test_case_25_every_other_argument_is_checked_as_well(name):
    cpu = {
        "old_logprobs": torch.zeros(2),
        "advantages": torch.ones(2),
        "mask": torch.ones(2),
        "values": torch.zeros(2),
        "old_values": torch.zeros(2),
        "returns": torch.zeros(2),
        "ref_logprobs": torch.zeros(2),
        "token_weights": torch.ones(2),
    }
    cpu[name] = cpu[name].to("meta")
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        ppo_loss(torch.zeros(2), **cpu)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        fused_ppo_loss(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), **cpu)


@pytest.mark.gpu
def test_case_25_gpu_logits_cpu_tokens():
    with pytest.raises(ValueError, match=r"tokens.*cpu|cpu.*tokens"):
        logprobs_from_logits(torch.randn(2, 4, device="cuda"), torch.zeros(2, dtype=torch.long, device="cpu"))


def one_hot_logits(tokens, width=5):
    """logits[t] points at tokens[t+1]; the last row points nowhere."""
    logits = torch.zeros(*tokens.shape, width)
    logits[:, :-1].scatter_(-1, tokens[:, 1:, None], 10.0)
    return logits


def test_case_26_shift_scores_the_next_token():
    tokens = torch.tensor([[0, 1, 2, 3, 4], [4, 4, 0, 1, 0]])
    logits = one_hot_logits(tokens)
    expected = np.full((2, 4), math.log(math.exp(10) / (math.exp(10) + 4)))
    assert_close(expected, np.full((2, 4), -0.000182), 5e-3)
    shifted = logprobs_from_logits(logits, tokens, shift=True)
    by_hand = logprobs_from_logits(logits[:, :-1], tokens[:, 1:])
    assert_logprobs(shifted, expected)
    assert same_bits(shifted, by_hand)
    wrong = logprobs_from_logits(logits[:, 1:], tokens[:, 1:])
    assert (wrong < -2).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_case_26_shift_gradients_equal_the_sliced_form(dtype, masked):
    tokens = torch.randint(40, (3, 6))
    base = torch.randn(3, 6, 40, dtype=dtype)
    mask = (torch.rand(3, 5) < 0.6) if masked else None
    old, adv = torch.full((3, 5), -4.0), torch.randn(3, 5)
    a, b = leaf(base), leaf(base)
    shifted = fused_ppo_loss(a, tokens, old, adv, mask, shift=True)
    sliced = fused_ppo_loss(b[:, :-1], tokens[:, 1:], old, adv, mask)
    shifted.loss.backward()
    sliced.loss.backward()
    assert same_bits(shifted.loss, sliced.loss)
    assert same_bits(shifted.logprobs, sliced.logprobs)
    assert shifted.logprobs.shape == (3, 5)
    assert (a.grad[:, -1] == 0).all()
    assert same_bits(a.grad + 0, b.grad + 0)


def test_case_26_shift_ignores_the_first_token_and_the_last_row():
    tokens = torch.randint(9, (2, 4))
    logits = torch.randn(2, 4, 9)
    expected = logprobs_from_logits(logits, tokens, shift=True)
    tokens[:, 0] = -100
    logits[:, -1] = math.nan
    logits.requires_grad_()
    got = logprobs_from_logits(logits, tokens, shift=True)
    assert same_bits(got.detach(), expected)
    got.sum().backward()
    assert (logits.grad[:, -1] == 0).all()


@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 1, 6)])
def test_case_26_shift_works_for_any_leading_shape(shape):
    logits, tokens = leaf(torch.randn(*shape, 11)), torch.randint(11, shape)
    mask = torch.rand(*shape[:-1], shape[-1] - 1) < 0.7
    lp, h = logprobs_from_logits(logits, tokens, mask, shift=True, return_entropy=True)
    want = oracle.score(logits, tokens, mask, shift=True)
    assert_logprobs(lp, want.logprobs)
    (lp.sum() + 0.5 * h.sum()).backward()
    assert_logits_grad(logits.grad, want.d_logits(np.ones(mask.shape), np.full(mask.shape, 0.5)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint8])
def test_case_27_every_integer_dtype_of_tokens(dtype):
    logits, ids = torch.randn(2, 4, 9), torch.randint(9, (2, 5))
    want = oracle.score(logits, ids[:, 1:]).logprobs
    assert_logprobs(logprobs_from_logits(logits, ids.to(dtype)[:, 1:]), want)  # not contiguous
    assert_logprobs(logprobs_from_logits(logits, ids.to(dtype)[:, 1:].contiguous()), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16])
def test_case_27_other_dtypes_of_tokens_are_a_type_error(dtype):
    with pytest.raises(TypeError, match="tokens"):
        logprobs_from_logits(torch.randn(2, 4), torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("vocab", [8, 100])
def test_tokens_of_any_integer_dtype_have_the_same_gradient(vocab, dtype):
    logits, tokens, adv = torch.randn(4, vocab), torch.randint(vocab, (4,)), torch.randn(4)
    grads = []
    for given in (tokens, tokens.to(dtype)):
        x, z = leaf(logits), leaf(logits)
        logprobs_from_logits(x, given).sum().backward()
        fused_ppo_loss(z, given, None, adv).loss.backward()
        grads.append((x.grad, z.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
