"""The PPO loss: from logits (`fused_ppo_loss`) or from given log-probs (`ppo_loss`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppo_kernels import checks, parallel
from ppo_kernels.autograd import FusedLoss, RowStats
from ppo_kernels.batch import Batch, Given, prepare
from ppo_kernels.config import PPOLossConfig
from ppo_kernels.output import DEFAULT, PPOLossOutput, checked_config, decomposes, loss_of_logprobs, output
from ppo_kernels.reference import accumulate_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    rollout_is_weights: Tensor | None = None,
    temperature: float | Tensor | None = None,
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
        rollout_logprobs: [...], log-probs under the engine that sampled the tokens, for config.rollout_is_*.
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
        rollout_is_weights: [...], or one per sequence like advantages: weights >= 0 of the policy loss, instead of
            those that rollout_logprobs give.
        process_group: the vocabulary is spread over its ranks, see logprobs_from_logits.
        temperature: instead of config.temperature, also a tensor: one per scored token [...], or one per sequence.

    Gradients reach logits and values only, once differentiable; all else is constant. No token valid: loss 0, zero
    gradients. bf16 and fp32 gradients are computed in forward; fp16 ones in backward, after the loss scaler's factor
    is known.

    Raises:
        TypeError, ValueError, IndexError (a token outside the vocabulary, on a CPU) before any computation.
    """
    config = checked_config(config)
    logits, shard = parallel.of_logits(logits, process_group)
    logits, tokens, columns = checks.logits_and_tokens(logits, tokens, shift, config.vocab_size, shard)
    if inplace_grad:
        checks.writable(logits)
    batch, given, options = prepare(
        logits,
        tokens,
        columns,
        Given(
            old_logprobs,
            advantages,
            ref_logprobs,
            rollout_logprobs,
            rollout_is_weights,
            token_weights,
            values,
            old_values,
            returns,
            value_mask,
            normalizer,
            loss_scale,
        ),
        config=config,
        mask=mask,
        cu_seqlens=cu_seqlens,
        shift=shift,
        temperature=temperature,
    )
    compiling = torch.compiler.is_compiling()
    one_visit = logits.requires_grad and torch.is_grad_enabled() and not compiling and logits.dtype != torch.float16
    if one_visit and shard is None and decomposes(config) and not batch.waits_for_logprobs(given):
        inputs, params = batch.inputs(given), list(config.params())
        loss, terms, metrics, logprobs, entropy = FusedLoss.apply(
            logits, inputs.values, tokens, inputs, params, options, inplace_grad
        )
        return output(batch, inputs, loss, terms, metrics, logprobs, entropy if config.return_entropy else None)
    logprobs, entropy = RowStats.apply(logits, tokens, batch.valid, options, inplace_grad and not compiling, shard)
    return loss_of_logprobs(batch, given, logprobs, entropy if config.return_entropy else None)


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
    rollout_is_weights: Tensor | None = None,
) -> PPOLossOutput:
    """The same loss from log-probs [...] (and entropy [...], nats) that the caller has, in any floating dtype.

    Differentiable in logprobs, entropy and values. All other arguments as in fused_ppo_loss. The options of
    config that concern logits are not used, nor is process_group; config.entropy_coef needs entropy.
    """
    if process_group is not None:
        checks.group(process_group)
    config = checked_config(config)
    logprobs = checks.floating("logprobs", logprobs)
    shape = logprobs.shape
    if entropy is not None:
        entropy = checks.floating("entropy", entropy, logprobs, shape)
    elif config.entropy_coef != 0:
        raise ValueError(f"entropy is None, but config.entropy_coef={config.entropy_coef} needs it")
    batch = Batch(shape, logprobs, config, mask, cu_seqlens, shift=False)
    given = batch.check(
        Given(
            old_logprobs,
            advantages,
            ref_logprobs,
            rollout_logprobs,
            rollout_is_weights,
            token_weights,
            values,
            old_values,
            returns,
            value_mask,
            normalizer,
            loss_scale,
        )
    )
    flat = [None if x is None else x.reshape(-1).to(accumulate_dtype(logprobs.dtype)) for x in (logprobs, entropy)]
    assert flat[0] is not None
    return loss_of_logprobs(batch, given, flat[0], flat[1])


def ppo_value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor | None = None,
    *,
    old_values: Tensor | None = None,
    config: PPOLossConfig = DEFAULT,
    cu_seqlens: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    loss_scale: float | Tensor = 1.0,
) -> PPOLossOutput:
    """The value term alone, for a critic that is optimised apart: loss = config.vf_coef * value_loss.

    values, returns, old_values: [...]; the arguments, their errors and the output are those of ppo_loss.
    """
    values = checks.floating("values", values)
    batch = Batch(values.shape, values, checked_config(config), mask, cu_seqlens, shift=False)
    nothing = torch.zeros_like(values, requires_grad=False)
    ref_logprobs = nothing if config.kl_coef != 0 else None
    given = Given(
        None, nothing, ref_logprobs, None, None, None, values, old_values, returns, None, normalizer, loss_scale
    )
    return loss_of_logprobs(batch, batch.check(given), batch.flat(nothing), None)
