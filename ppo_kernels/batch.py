"""One call's tensors: checked against each other, and flattened to [N] for the operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ppo_kernels import checks
from ppo_kernels.aggregation import Sequences, token_weights
from ppo_kernels.config import PPOLossConfig
from ppo_kernels.reference import TokenInputs, accumulate_dtype


class Batch:
    """The checked shape of one call, and the way from the caller's tensors to flat [N] ones and back."""

    def __init__(
        self,
        shape: torch.Size,
        like: Tensor,
        config: PPOLossConfig,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        shift: bool,
    ) -> None:
        if cu_seqlens is not None:
            if len(shape) != 1:
                raise ValueError(f"cu_seqlens needs packed tokens [N], got tokens for shape {list(shape)}")
            cu_seqlens = checks.cu_seqlens(cu_seqlens, like, shape[0] + shift)
        self.shape, self.like, self.config = shape, like, config
        self.sequences = Sequences.of(shape, cu_seqlens, shift)
        self.valid = self._flat_mask("mask", mask)
        if self.sequences is not None and self.sequences.inside is not None:
            self.valid = self.sequences.inside if self.valid is None else self.valid & self.sequences.inside

    def _flat_mask(self, name: str, mask: Tensor | None) -> Tensor | None:
        checked = checks.mask(name, mask, self.like, self.shape)
        return None if checked is None else checked.reshape(-1)

    def flat(self, x: Tensor) -> Tensor:
        return x.reshape(-1).to(accumulate_dtype(self.like.dtype))

    def per_token(self, name: str, x: Tensor | None) -> Tensor | None:
        return None if x is None else self.flat(checks.floating(name, x, self.like, self.shape))

    def _advantages(self, advantages: Tensor) -> Tensor:
        advantages = checks.floating("advantages", advantages, self.like)
        if self.sequences is not None:
            per_sequence = [self.sequences.number] if self.sequences.segment is not None else list(self.shape[:-1])
            if list(advantages.shape) == per_sequence:
                return self.sequences.expand(self.flat(advantages))
            if advantages.shape != self.shape:
                expected = f"{list(self.shape)} or {per_sequence}"
                raise ValueError(f"advantages has shape {list(advantages.shape)}, expected {expected}")
        return self.flat(checks.matching("advantages", advantages, self.like, self.shape))

    def inputs(
        self,
        old_logprobs: Tensor | None,
        advantages: Tensor,
        ref_logprobs: Tensor | None,
        weights: Tensor | None,
        values: Tensor | None,
        old_values: Tensor | None,
        returns: Tensor | None,
        value_mask: Tensor | None,
        normalizer: float | Tensor | None,
        scale: float | Tensor,
    ) -> TokenInputs:
        config = self.config
        for name, number in (("normalizer", normalizer), ("loss_scale", scale)):
            check_scalar(name, number, self.like)
        if config.kl_coef != 0 and ref_logprobs is None:
            raise ValueError(f"ref_logprobs is None, but config.kl_coef={config.kl_coef} needs it")
        if (values is None) != (returns is None):
            raise ValueError(
                f"{'values' if values is None else 'returns'} is None, but values and returns come together"
            )
        if values is None and (old_values is not None or value_mask is not None):
            raise ValueError(f"{'value_mask' if old_values is None else 'old_values'} is given, but values is None")
        if values is not None and config.value_clip is not None and old_values is None:
            raise ValueError(f"old_values is None, but config.value_clip={config.value_clip} needs it")
        flat_advantages = self._advantages(advantages)
        weight = token_weights(flat_advantages, self.valid, self.sequences, config, normalizer, scale)
        value_valid = value_weight = None
        if values is not None:
            value_valid, value_weight = self.valid, weight
            if value_mask is not None:
                value_valid = self._flat_mask("value_mask", value_mask)
                value_weight = token_weights(flat_advantages, value_valid, self.sequences, config, normalizer, scale)
        if weights is not None:
            weighted = self.flat(checks.floating("token_weights", weights, self.like, self.shape))
            weight = torch.where(weight == 0, weight, weight * weighted)
        return TokenInputs(
            old_logprobs=self.per_token("old_logprobs", old_logprobs),
            advantages=flat_advantages,
            valid=self.valid,
            weight=weight,
            ref_logprobs=self.per_token("ref_logprobs", ref_logprobs),
            values=self.per_token("values", values),
            old_values=self.per_token("old_values", old_values),
            returns=self.per_token("returns", returns),
            value_valid=value_valid,
            value_weight=value_weight,
        )

    def masked(self, x: Tensor) -> Tensor:
        return x if self.valid is None else x.masked_fill(~self.valid, 0.0)


def check_scalar(name: str, x: Any, like: Tensor) -> None:
    """A number, or a 0-dim tensor on the CPU or on the device of `like`: both combine with it without moving."""
    if isinstance(x, Tensor):
        checks.matching(name, x, None if x.device.type == "cpu" else like, ())
    elif x is not None and (isinstance(x, bool) or not isinstance(x, (int, float))):
        raise TypeError(f"{name} must be a number or a 0-dim tensor, got {type(x).__name__}")
    elif name == "normalizer" and x is not None and not x >= 0:
        raise ValueError(f"normalizer is {x}, expected a count >= 0")
