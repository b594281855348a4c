"""How per-token losses become one number: the weight of each token, so that loss = sum(weight * token loss).

Every aggregation is a weighting that depends on masks alone, which is why the kernels need not know which one it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ppo_kernels.config import PPOLossConfig


class Sequences(NamedTuple):
    """Which sequence each of the N flat tokens is in: `segment` [N], or None for padded rows of `width` tokens.

    offsets [number + 1]: sequence i is the packed tokens offsets[i]:offsets[i + 1]. inside [N]: the row and the token
    it scores are in the same sequence; None: all are.
    """

    number: int
    width: int
    segment: Tensor | None = None
    offsets: Tensor | None = None
    inside: Tensor | None = None

    @staticmethod
    def of(shape: torch.Size, cu_seqlens: Tensor | None, shift: bool) -> Sequences | None:
        """From the shape of the scored tokens; None when there is no sequence structure (flat, without cu_seqlens)."""
        if cu_seqlens is None:
            return Sequences(shape[:-1].numel(), shape[-1]) if len(shape) > 1 else None
        number = cu_seqlens.shape[0] - 1
        # On a GPU nobody has looked at cu_seqlens: whatever they hold, a segment and its bounds are inside.
        offsets = cu_seqlens.clamp(0, shape[0]).cummax(0).values
        place = torch.arange(shape[0] + shift, device=cu_seqlens.device)
        segment = torch.searchsorted(cu_seqlens[1:].contiguous(), place, right=True).clamp(max=max(number - 1, 0))
        if shift:
            return Sequences(number, 0, segment[:-1], offsets, segment[1:] == segment[:-1])
        return Sequences(number, 0, segment, offsets)

    def expand(self, per_sequence: Tensor) -> Tensor:
        """[count] -> [N]."""
        if self.segment is not None:
            return per_sequence[self.segment]
        return per_sequence.reshape(-1, 1).expand(-1, self.width).reshape(-1)

    def sum(self, per_token: Tensor) -> Tensor:
        """[N] -> [count]; packed ones in fp64, for some devices add them one by one."""
        if self.offsets is not None:
            wide = per_token.double()
            return torch.segment_reduce(wide, "sum", offsets=self.offsets, unsafe=True).to(per_token.dtype)
        return per_token.reshape(self.number, self.width).sum(-1)

    def mean(self, per_token: Tensor, valid: Tensor | None) -> Tensor:
        """[N] -> [N]: the mean over the valid tokens of each token's sequence; 0 for a sequence without any."""
        counted = torch.ones_like(per_token) if valid is None else valid.to(per_token.dtype)
        selected = per_token if valid is None else torch.where(valid, per_token, 0.0)
        return self.expand(self.sum(selected) / self.sum(counted).clamp(min=1))


def token_weights(
    like: Tensor,
    valid: Tensor | None,
    sequences: Sequences | None,
    config: PPOLossConfig,
    normalizer: float | Tensor | None,
    scale: float | Tensor,
) -> Tensor:
    """Weights [N] with the dtype of `like` [N]; 0 for tokens that are not valid.

    `normalizer` replaces the count of valid tokens ("token-mean") or of sequences (the others); a count of 0 divides
    by 1.
    """
    counted = torch.ones_like(like) if valid is None else valid.to(like.dtype)
    if isinstance(normalizer, Tensor):
        normalizer = normalizer.to(like.dtype)  # it may stay on the CPU: moving it would synchronise
    if config.aggregation in ("token-sum", "none"):
        return counted * scale
    if config.aggregation == "token-mean":
        return counted * (scale / _or_one(counted.sum() if normalizer is None else normalizer))
    assert sequences is not None  # or the batch would have been refused
    lengths = sequences.sum(counted)
    if normalizer is None:
        normalizer = sequences.number if config.agg_include_empty else (lengths > 0).sum().to(like.dtype)
    weight = scale / _or_one(normalizer)
    if config.aggregation == "seq-mean-token-mean":
        return counted * sequences.expand(weight / torch.where(lengths > 0, lengths, 1.0))
    if config.aggregation == "seq-mean-token-sum-norm":
        assert config.agg_max_len is not None  # or the configuration would have been refused
        weight = weight / config.agg_max_len
    return counted * weight


def _or_one(count: float | Tensor) -> float | Tensor:
    """A denominator that may be a count of nothing."""
    return torch.where(count > 0, count, 1.0) if isinstance(count, Tensor) else count or 1.0
