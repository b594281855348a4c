"""One call's tensors: checked against each other, and flattened to [N] for the operators."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_kernels import checks
from ppo_kernels.aggregation import Sequences, token_weights
from ppo_kernels.config import PPOLossConfig
from ppo_kernels.loss_terms import TokenInputs
from ppo_kernels.ops import RowOptions
from ppo_kernels.reference import accumulate_dtype
from ppo_kernels.rollout import importance_weights
from ppo_kernels.row_options import row_options, scored_shape, without_ignored


class Given(NamedTuple):
    """The arguments of one call, named as in fused_ppo_loss."""

    old_logprobs: Tensor | None
    advantages: Tensor
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    rollout_is_weights: Tensor | None
    token_weights: Tensor | None
    values: Tensor | None
    old_values: Tensor | None
    returns: Tensor | None
    value_mask: Tensor | None
    normalizer: float | Tensor | None
    loss_scale: float | Tensor


class Batch:
    """The checked shape of one call, and the way from the caller's tensors to flat [N] ones and back.

    valid [N]: which tokens count; None: all. rollout_is_weights [N]: what the advantages were multiplied by.
    dropped [1]: how many valid tokens nonfinite="mask" took out.
    """

    def __init__(
        self,
        shape: torch.Size,
        like: Tensor,
        config: PPOLossConfig,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        shift: bool,
        also_valid: Tensor | None = None,
    ) -> None:
        if cu_seqlens is not None:
            if len(shape) != 1:
                raise ValueError(f"cu_seqlens needs packed tokens [N], got tokens for shape {list(shape)}")
            cu_seqlens = checks.cu_seqlens(cu_seqlens, like, shape[0] + shift)
        self.shape, self.like, self.config = shape, like, config
        self.sequences = Sequences.of(shape, cu_seqlens, shift)
        self.valid = self._flat_mask("mask", mask)
        inside = None if self.sequences is None else self.sequences.inside
        for also in (inside, also_valid):
            if also is not None:
                self.valid = both(self.valid, also)
        self.rollout_is_weights: Tensor | None = None
        self.dropped: Tensor | None = None

    def _flat_mask(self, name: str, mask: Tensor | None) -> Tensor | None:
        checked = checks.mask(name, mask, self.like, self.shape)
        return None if checked is None else checked.reshape(-1)

    def flat(self, x: Tensor) -> Tensor:
        return x.detach().reshape(-1).to(accumulate_dtype(self.like.dtype))

    def _per_token(self, name: str, x: Tensor | None) -> Tensor | None:
        return None if x is None else self.flat(checks.floating(name, x, self.like, self.shape))

    def _per_token_or_sequence(self, name: str, x: Tensor) -> Tensor:
        x = checks.floating(name, x, self.like)
        if self.sequences is not None:
            per_sequence = [self.sequences.number] if self.sequences.segment is not None else list(self.shape[:-1])
            if list(x.shape) == per_sequence:
                return self.sequences.expand(self.flat(x))
            if x.shape != self.shape:
                raise ValueError(f"{name} has shape {list(x.shape)}, expected {list(self.shape)} or {per_sequence}")
        return self.flat(checks.matching(name, x, self.like, self.shape))

    def temperature(self, given: float | Tensor | None) -> float | Tensor:
        """The configuration's, or what is given; one per packed sequence becomes one per row."""
        if given is None:
            return self.config.temperature
        sequences = self.sequences
        if isinstance(given, Tensor) and sequences is not None and sequences.segment is not None:
            given = checks.floating("temperature", given, self.like)
            if list(given.shape) == [sequences.number]:
                return sequences.expand(given)
        return given

    def check(self, given: Given) -> Given:
        """The same, checked and flat [N] (values keep their gradient)."""
        config = self.config
        for name in ("normalizer", "loss_scale"):
            _check_scalar(name, getattr(given, name), self.like)
        if given.normalizer is not None and config.aggregation in ("token-sum", "none"):
            raise ValueError(f"normalizer is given, but aggregation={config.aggregation!r} divides by nothing")
        if config.kl_coef != 0 and given.ref_logprobs is None:
            raise ValueError(f"ref_logprobs is None, but config.kl_coef={config.kl_coef} needs it")
        if given.rollout_logprobs is not None and given.rollout_is_weights is not None:
            raise ValueError("rollout_logprobs and rollout_is_weights are both given: one gives the weights")
        self._check_sequences(given)
        values, returns, old_values = given.values, given.returns, given.old_values
        if (values is None) != (returns is None):
            raise ValueError(
                f"{'values' if values is None else 'returns'} is None, but values and returns come together"
            )
        if values is None and (old_values is not None or given.value_mask is not None):
            raise ValueError(f"{'value_mask' if old_values is None else 'old_values'} is given, but values is None")
        if values is not None and config.value_clip is not None and old_values is None:
            raise ValueError(f"old_values is None, but config.value_clip={config.value_clip} needs it")
        if values is not None:
            values = checks.floating("values", values, self.like, self.shape)
            values = values.reshape(-1).to(accumulate_dtype(self.like.dtype))
        weights = given.rollout_is_weights
        if weights is not None:
            weights = self._per_token_or_sequence("rollout_is_weights", weights)
            negative = (weights < 0) & weights.isfinite()
            if checks.eager_cpu(weights) and bool(both(self.valid, negative).any()):
                raise ValueError("rollout_is_weights must be >= 0")
        return Given(
            self._per_token("old_logprobs", given.old_logprobs),
            self._per_token_or_sequence("advantages", given.advantages),
            self._per_token("ref_logprobs", given.ref_logprobs),
            self._per_token("rollout_logprobs", given.rollout_logprobs),
            weights,
            self._per_token("token_weights", given.token_weights),
            values,
            self._per_token("old_values", old_values),
            self._per_token("returns", returns),
            self._flat_mask("value_mask", given.value_mask),
            given.normalizer,
            given.loss_scale,
        )

    def _check_sequences(self, given: Given) -> None:
        """ValueError where an option needs sequences and there are none."""
        config = self.config
        needs = {"ratio_level": config.ratio_level} if config.ratio_level != "token" else {}
        if config.aggregation.startswith("seq-"):
            needs["aggregation"] = config.aggregation
        if given.rollout_logprobs is not None and config.rollout_is_level != "token":
            needs["rollout_is_level"] = config.rollout_is_level
        if given.rollout_logprobs is not None and config.rollout_is_mode == "seq_mask":
            needs["rollout_is_mode"] = config.rollout_is_mode
        for name, value in needs.items():
            if self.sequences is None:
                raise ValueError(f"{name}={value!r} needs tokens of shape [B, T], or [N] with cu_seqlens")

    def waits_for_logprobs(self, given: Given) -> bool:
        """Whether the inputs of the loss depend on the log-probs that are still to be computed."""
        on_policy = given.old_logprobs is None and given.rollout_logprobs is not None
        return on_policy or self.config.nonfinite == "mask"

    def inputs(self, given: Given, logprobs: Tensor | None = None) -> TokenInputs:
        """What the loss reads, from checked arguments; logprobs [N]: those of waits_for_logprobs."""
        config, sequences = self.config, self.sequences
        values_counted = counted = self.valid  # in the denominators
        advantages = given.advantages
        weights = given.rollout_is_weights
        if config.nonfinite == "mask":
            read = (logprobs, given.old_logprobs, given.ref_logprobs, given.rollout_logprobs, weights)
            finite = torch.stack([x.isfinite() for x in read if x is not None]).all(0)
            self.dropped = both(counted, ~finite).sum().view(1)
            self.valid = both(counted, finite)
        if given.rollout_logprobs is not None:
            old = logprobs if given.old_logprobs is None else given.old_logprobs
            assert old is not None
            weights = importance_weights(old - given.rollout_logprobs, self.valid, sequences, config)
        if weights is not None:
            # Every policy loss is linear in A for a given sign of A, so a weight >= 0 of the loss is one of A.
            advantages = torch.where(advantages == 0, 0.0, advantages * weights)
            self.rollout_is_weights = weights
            if not config.rollout_mask_in_denominator:
                counted, self.valid = both(counted, weights != 0), both(self.valid, weights != 0)
        shares = (sequences, config, given.normalizer, given.loss_scale)
        weight = token_weights(advantages, counted, *shares)
        value_valid = value_weight = None
        if given.values is not None:
            value_valid = values_counted if given.value_mask is None else given.value_mask
            value_weight = weight if value_valid is counted else token_weights(advantages, value_valid, *shares)
        if given.token_weights is not None:
            weight = torch.where(weight == 0, weight, weight * given.token_weights)
        return TokenInputs(
            old_logprobs=given.old_logprobs,
            advantages=advantages,
            valid=self.valid,
            weight=weight,
            ref_logprobs=given.ref_logprobs,
            values=given.values,
            old_values=given.old_values,
            returns=given.returns,
            value_valid=value_valid,
            value_weight=value_weight,
        )

    def shaped(self, x: Tensor) -> Tensor:
        """[N] -> the caller's shape, 0 where not valid."""
        return (x if self.valid is None else x.masked_fill(~self.valid, 0)).view(self.shape)


def prepare(
    like: Tensor,
    tokens: Tensor,
    columns: int,
    given: Given,
    *,
    config: PPOLossConfig,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    shift: bool,
    temperature: float | Tensor | None,
) -> tuple[Batch, Given, RowOptions]:
    """Of checked logits or hidden states `like` and tokens: the batch, its checked arguments, and how rows are read."""
    shape = scored_shape(tokens, shift)
    kept = without_ignored(None, tokens, config.ignore_index, shift)
    batch = Batch(shape, like, config, mask, cu_seqlens, shift, None if kept is None else kept.reshape(-1))
    given = batch.check(given)
    options = row_options(
        batch.temperature(temperature),
        config.logit_scale,
        config.logit_softcap,
        shape=shape,
        valid=None if batch.valid is None else batch.valid.view(shape),
        like=like,
        vocab_size=columns,
        shift=shift,
        want_entropy=config.return_entropy,
    )
    return batch, given, options


def both(valid: Tensor | None, also: Tensor) -> Tensor:
    return also if valid is None else valid & also


def _check_scalar(name: str, x: Any, like: Tensor) -> None:
    """A number, or a 0-dim tensor on the CPU or on the device of `like`: both combine with it without moving."""
    if isinstance(x, Tensor):
        checks.matching(name, x, None if x.device.type == "cpu" else like, ())
    elif x is not None and (isinstance(x, bool) or not isinstance(x, (int, float))):
        raise TypeError(f"{name} must be a number or a 0-dim tensor, got {type(x).__name__}")
    elif name == "normalizer" and x is not None and not x >= 0:
        raise ValueError(f"normalizer is {x}, expected a count >= 0")
