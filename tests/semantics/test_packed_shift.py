"""Packed tokens with shift: the row before each boundary would score the next sequence's first token."""

import itertools

import pytest
import torch

from ppo_kernels import PPOLossConfig, fused_ppo_loss


@pytest.mark.parametrize("boundaries", [[0, 3, 5], [0, 0, 3, 5], [0, 3, 3, 5], [0, 3, 5, 5], [0, 1, 2, 5]])
def test_packed_shift_equals_each_sequence_alone(boundaries: list[int]) -> None:
    """Empty sequences anywhere: one at the start once masked row 0."""
    torch.manual_seed(0)
    logits, tokens = torch.randn(5, 7), torch.randint(7, (5,))
    old, advantages = torch.randn(4) - 2, torch.randn(4)
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    config = PPOLossConfig(aggregation="seq-mean-token-sum")
    packed = fused_ppo_loss(logits, tokens, old, advantages, cu_seqlens=cu_seqlens, shift=True, config=config)
    losses = []
    for begin, end in itertools.pairwise(boundaries):
        rows = slice(begin, end - 1)
        if end - begin > 1:
            alone = fused_ppo_loss(logits[rows], tokens[begin + 1 : end], old[rows], advantages[rows])
            losses.append(alone.loss * (end - begin - 1))
            torch.testing.assert_close(packed.logprobs[rows], alone.logprobs, rtol=0, atol=1e-6)
    torch.testing.assert_close(packed.loss, torch.stack(losses).mean(), rtol=1e-6, atol=1e-7)
    assert packed.metrics.compute()["tokens"] == sum(max(e - b - 1, 0) for b, e in itertools.pairwise(boundaries))
