"""The PPO loss: from logits (`fused_ppo_loss`) or from given log-probs (`ppo_loss`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ppo_kernels import checks
from ppo_kernels.autograd import FusedLoss, RowOptions, RowStats, TokenLoss
from ppo_kernels.batch import Batch
from ppo_kernels.config import PPOLossConfig
from ppo_kernels.logprobs import scored_shape
from ppo_kernels.metrics import PPOMetrics
from ppo_kernels.reference import TokenInputs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEFAULT = PPOLossConfig()


class PPOLossOutput(NamedTuple):
    """loss = policy_loss - entropy_coef * entropy + kl_coef * kl + vf_coef * value_loss, each aggregated and scaled.

    loss: differentiable scalar, fp32 (fp64 for fp64 inputs). logprobs, entropy: per token, detached, 0 where masked;
    entropy is None when it was not computed. policy_loss, value_loss, kl: detached scalars (0 without values, without
    ref_logprobs).
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    policy_loss: Tensor
    value_loss: Tensor
    kl: Tensor
    metrics: PPOMetrics


def fused_ppo_loss(
    logits: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    config: PPOLossConfig = DEFAULT,
    values: Tensor | None = None,
    old_values: Tensor | None = None,
    returns: Tensor | None = None,
    value_mask: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    token_weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    loss_scale: float | Tensor = 1.0,
    shift: bool = False,
    inplace_grad: bool = False,
    process_group: ProcessGroup | None = None,
) -> PPOLossOutput:
    """The PPO loss of a batch straight from logits; the softmax is never stored.

    Let [...] be the shape of the scored tokens: tokens.shape, or [..., S - 1] with shift. Then

    Args:
        logits: [..., V] bf16, fp16, fp32 or fp64; row t scores tokens[t]. Any strides.
        tokens: integers in [0, V).
        old_logprobs: [...], log-probs (nats) under the policy that made the tokens; None: the current ones (ratio 1,
            with gradient).
        advantages: [...], or one per sequence: [B] for [B, T], or for packed tokens with cu_seqlens [B + 1].
        mask: [...] bool, integer or float 0/1. Masked slots may hold anything, NaN included: they are not read.
        config: what to compute, see PPOLossConfig.
        values, old_values, returns: [...], new and old value of the state before each token, and its target. values and
            returns come together; config.value_clip needs old_values.
        value_mask: [...]; default: mask.
        ref_logprobs: [...], log-probs under the reference policy; config.kl_coef needs them.
        token_weights: [...], multiplies each token's policy, KL and entropy loss, not the denominator.
        cu_seqlens: [B + 1] int32, for packed tokens [N]: sequence i is [cu_seqlens[i], cu_seqlens[i+1]).
        normalizer: the count to divide by instead of this batch's: valid tokens for "token-mean", sequences for the
            others. Give the count over all micro-batches and ranks, and the sum of the losses is exact. Also used for
            the values.
        loss_scale: multiplies every term and gradient, e.g. the number of data-parallel ranks.
        shift: logits and tokens cover the whole sequence; row t scores tokens[t + 1]; by addressing, no copy. With
            cu_seqlens (which then cover the whole sequences) the row before each boundary is masked.
        inplace_grad: write the gradient over the logits: no memory for it. Another use of the logits in the same graph
            raises autograd's error; so does a second backward. Under torch.compile an ordinary gradient is made
            instead.

    Gradients reach logits and values only, once differentiable; all else is constant. No token valid: loss 0, zero
    gradients. bf16 and fp32 gradients are computed in forward; fp16 ones in backward, after the loss scaler's factor
    is known.

    Raises:
        TypeError, ValueError, IndexError (a token outside the vocabulary, on a CPU) before any computation.
        NotImplementedError for options of the signature that are not supported yet: rollout_logprobs, process_group.
    """
    checks.not_yet(process_group=process_group, rollout_logprobs=rollout_logprobs)
    config = _config(config)
    logits, tokens, columns = checks.logits_and_tokens(logits, tokens, shift, config.vocab_size)
    if inplace_grad:
        _check_inplace(logits)
    shape = scored_shape(tokens, shift)
    batch = Batch(shape, logits, config, mask, cu_seqlens, shift)
    inputs = batch.inputs(
        old_logprobs,
        advantages,
        ref_logprobs,
        token_weights,
        values,
        old_values,
        returns,
        value_mask,
        normalizer,
        loss_scale,
    )
    options = RowOptions(config.temperature, columns, bool(shift), config.return_entropy)
    params = list(config.params())
    compiling = torch.compiler.is_compiling()
    if logits.requires_grad and torch.is_grad_enabled() and not compiling and logits.dtype != torch.float16:
        loss, terms, metrics, logprobs, entropy = FusedLoss.apply(
            logits, inputs.values, tokens, inputs, params, options, inplace_grad
        )
    else:
        logprobs, entropy = RowStats.apply(logits, tokens, inputs.valid, options, inplace_grad and not compiling)
        given = entropy if config.return_entropy else None
        loss, terms, metrics = TokenLoss.apply(logprobs, given, inputs.values, inputs, params)
    return _output(batch, inputs, loss, terms, metrics, logprobs, entropy if config.return_entropy else None)


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    entropy: Tensor | None = None,
    config: PPOLossConfig = DEFAULT,
    values: Tensor | None = None,
    old_values: Tensor | None = None,
    returns: Tensor | None = None,
    value_mask: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    token_weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    loss_scale: float | Tensor = 1.0,
    process_group: ProcessGroup | None = None,
) -> PPOLossOutput:
    """The same loss from log-probs [...] (and entropy [...], nats) that the caller has, in any floating dtype.

    Differentiable in logprobs, entropy and values. All other arguments as in fused_ppo_loss. config.temperature and
    config.vocab_size concern logits and are not used; config.entropy_coef needs entropy.
    """
    checks.not_yet(process_group=process_group, rollout_logprobs=rollout_logprobs)
    config = _config(config)
    logprobs = checks.floating("logprobs", logprobs)
    shape = logprobs.shape
    if entropy is not None:
        entropy = checks.floating("entropy", entropy, logprobs, shape)
    elif config.entropy_coef != 0:
        raise ValueError(f"entropy is None, but config.entropy_coef={config.entropy_coef} needs it")
    batch = Batch(shape, logprobs, config, mask, cu_seqlens, shift=False)
    inputs = batch.inputs(
        old_logprobs,
        advantages,
        ref_logprobs,
        token_weights,
        values,
        old_values,
        returns,
        value_mask,
        normalizer,
        loss_scale,
    )
    flat, flat_entropy = batch.flat(logprobs), None if entropy is None else batch.flat(entropy)
    loss, terms, metrics = TokenLoss.apply(flat, flat_entropy, inputs.values, inputs, list(config.params()))
    detached = batch.masked(flat), None if flat_entropy is None else batch.masked(flat_entropy)
    return _output(batch, inputs, loss, terms, metrics, *detached)


def _output(
    batch: Batch,
    inputs: TokenInputs,
    loss: Tensor,
    terms: Tensor,
    metrics: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
) -> PPOLossOutput:
    _, policy, value, kl = terms.unbind()
    absent: tuple[str, ...] = ()
    absent += ("entropy",) if entropy is None else ()
    absent += ("ref_kl",) if inputs.ref_logprobs is None else ()
    absent += ("value_tokens", "value_clip_fraction") if inputs.values is None else ()
    return PPOLossOutput(
        loss=loss,
        logprobs=logprobs.detach().view(batch.shape),
        entropy=None if entropy is None else entropy.detach().view(batch.shape),
        policy_loss=policy,
        value_loss=value,
        kl=kl,
        metrics=PPOMetrics(metrics, absent),
    )


def _config(config: object) -> PPOLossConfig:
    if not isinstance(config, PPOLossConfig):
        raise TypeError(f"config must be a PPOLossConfig, got {type(config).__name__}")
    return config


def _check_inplace(logits: Tensor) -> None:
    extent, overlap = 1, False
    for stride, size in sorted((stride, size) for size, stride in zip(logits.shape, logits.stride(), strict=True)):
        if size > 1:
            overlap |= stride < extent
            extent += stride * (size - 1)
    if overlap or (logits.shape[-1] > 1 and logits.stride(-1) != 1):
        raise ValueError(
            f"logits has strides {logits.stride()}, expected a dense last axis and no overlap for inplace_grad"
        )
