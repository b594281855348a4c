"""ignore_index: a token that masks its row."""

from __future__ import annotations

import pytest
import torch
from checks import leaf, same_bits

from ppo_kernels import logprobs_from_logits


def outputs(logits, *args, **options):
    x = leaf(logits)
    lp, h = logprobs_from_logits(x, *args, return_entropy=True, **options)
    (lp.sum() + h.square().sum()).backward()
    return lp.detach(), h.detach(), x.grad


@pytest.mark.parametrize("width", [7, 70])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("index", [-100, 0, 1000])
def test_it_is_a_mask(index, shift, width):
    logits, tokens = torch.randn(2, 5, width), torch.randint(1, width, (2, 5))
    tokens[0, 1] = tokens[1, 0] = tokens[1, 4] = index
    mask = (tokens[:, 1:] if shift else tokens) != index
    logits[:, : 5 - shift][~mask] = torch.nan  # rows that are not read
    want = outputs(logits, tokens, mask, shift=shift)
    for a, b in zip(outputs(logits, tokens, shift=shift, ignore_index=index), want, strict=True):
        assert same_bits(a, b)
    also = torch.rand(mask.shape) < 0.5
    want = outputs(logits, tokens, mask & also, shift=shift)
    for a, b in zip(outputs(logits, tokens, also, shift=shift, ignore_index=index), want, strict=True):
        assert same_bits(a, b)


def test_all_rows_ignored():
    lp, h, grad = outputs(torch.full((2, 9), torch.nan), torch.full((2,), -100), ignore_index=-100)
    for x in (lp, h, grad):
        assert (x == 0).all()


def test_a_token_is_compared_as_a_number():
    """-1 as uint8 is 255."""
    logits, tokens = torch.randn(2, 256), torch.tensor([255, 3], dtype=torch.uint8)
    lp = logprobs_from_logits(logits, tokens, ignore_index=-1)
    assert (lp < 0).all()


@pytest.mark.cpu_only("a GPU cannot raise without a synchronisation")
def test_another_token_outside_the_vocabulary_is_still_an_error():
    with pytest.raises(IndexError, match="tokens holds -7"):
        logprobs_from_logits(torch.zeros(2, 3), torch.tensor([-100, -7]), ignore_index=-100)
