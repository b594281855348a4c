"""The linear forms: log-probs and the PPO loss from hidden states and the weight of the head; logits never exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ppo_kernels import checks, parallel
from ppo_kernels.batch import Given, prepare
from ppo_kernels.config import PPOLossConfig
from ppo_kernels.linear import Plan
from ppo_kernels.linear_autograd import FusedLinear, LinearStats
from ppo_kernels.output import DEFAULT, PPOLossOutput, checked_config, decomposes, loss_of_logprobs, output
from ppo_kernels.pieces import Shard
from ppo_kernels.row_options import row_options, scored_shape, without_ignored

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Memory = Literal["fast", "low"]
MAX_CHUNK_BYTES = 2**62  # what an operator takes as an integer


@overload
def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    return_entropy: Literal[False] = False,
    chunk_bytes: int | None = None,
    process_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    shift: bool = False,
    ignore_index: int | None = None,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    memory: Memory = "fast",
    valid_rows: int | None = None,
    reduce_hidden_grad: bool = True,
) -> Tensor: ...
@overload
def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    return_entropy: Literal[True],
    chunk_bytes: int | None = None,
    process_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    shift: bool = False,
    ignore_index: int | None = None,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    memory: Memory = "fast",
    valid_rows: int | None = None,
    reduce_hidden_grad: bool = True,
) -> tuple[Tensor, Tensor]: ...
def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    return_entropy: bool = False,
    chunk_bytes: int | None = None,
    process_group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    shift: bool = False,
    ignore_index: int | None = None,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    memory: Memory = "fast",
    valid_rows: int | None = None,
    reduce_hidden_grad: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """logprobs_from_logits of hidden @ weight.T + bias, which exists a tile at a time.

    Only rows that the mask keeps are computed. In forward one matrix product; in backward three, the first of which
    makes the logits again.

    Args:
        hidden: [..., H] bf16, fp16, fp32 or fp64, the head's input; row t scores tokens[t].
        weight: [V, H], as in torch.nn.Linear; hidden's dtype, or under autocast any. It may be tied or frozen.
        bias: [V].
        chunk_bytes: bound on the memory for logits, but for one row of them; default: 256 MiB, on a GPU 4096 rows if
            that is more, and what an fp32 sum of a 16-bit weight's gradient would take, if then all rows are one chunk
            and need none. (A matrix product may round a row differently in another chunk.)
        process_group: the rows of weight and bias are spread over its ranks, as columns of logits are in
            logprobs_from_logits. weight and bias may be DTensors with Shard(0) over it.
        memory: "low" computes gradients by slices of the vocabulary, so that no more than chunk_bytes of a 16-bit
            weight's gradient are in fp32 (and all of hidden's); fused_linear_ppo_loss makes the logits again then.
        valid_rows: how many rows are kept, if the host knows: on a GPU they are otherwise counted, which waits for the
            device before the first product (and again in a backward that makes logits). A wrong number is an error on a
            CPU, NaN elsewhere.
        reduce_hidden_grad: with process_group, add the gradient of hidden up over the ranks. False leaves each rank its
            part of the sum, for a caller whose own layer does that.
        mask, temperature, return_entropy, vocab_size, shift, ignore_index, logit_softcap, logit_scale: as in
            logprobs_from_logits.

    Returns:
        logprobs, or (logprobs, entropy), fp32 (fp64 for fp64), differentiable once by hidden, weight and bias. The
        gradient of the weight is accumulated in fp32 and has the weight's dtype.

    Raises:
        As logprobs_from_logits.
    """
    weight, bias, shard = parallel.of_head(weight, bias, process_group, reduce_hidden_grad)
    hidden, weight, bias, tokens, columns, dtype = _checked(hidden, weight, bias, tokens, shift, vocab_size, shard)
    shape = scored_shape(tokens, shift)
    valid = without_ignored(checks.mask("mask", mask, hidden, shape), tokens, ignore_index, shift)
    options = row_options(
        temperature,
        logit_scale,
        logit_softcap,
        shape=shape,
        valid=valid,
        like=hidden,
        vocab_size=columns,
        shift=shift,
        want_entropy=return_entropy,
    )
    flat_valid = None if valid is None else valid.reshape(-1)
    plan = _plan(chunk_bytes, memory, valid_rows, flat_valid, shape.numel(), dtype)
    logprobs, entropy = LinearStats.apply(hidden, weight, bias, tokens, flat_valid, options, plan, shard)
    return (logprobs.view(shape), entropy.view(shape)) if return_entropy else logprobs.view(shape)


def fused_linear_ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    chunk_bytes: int | None = None,
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
    memory: Memory = "fast",
    valid_rows: int | None = None,
    reduce_hidden_grad: bool = True,
) -> PPOLossOutput:
    """fused_ppo_loss of hidden @ weight.T + bias, which exists a chunk at a time.

    Where a token's loss depends on its own log-prob alone, all gradients are computed in forward, with three matrix
    products; with ratios of sequences, aggregation="none", fp16, torch.compile or memory="low", in backward, with four
    in all. Only rows that the mask keeps are computed, and on a CPU only those with a gradient go into its products.

    Args:
        hidden, weight, bias, chunk_bytes, process_group, memory, valid_rows, reduce_hidden_grad: as in
            logprobs_from_hidden.
        inplace_grad: not possible, for there are no logits to write over.
        All others as in fused_ppo_loss.

    Gradients reach hidden, weight, bias and values, once differentiable.

    Raises:
        As fused_ppo_loss.
    """
    if inplace_grad:
        raise ValueError("inplace_grad is True, but there are no logits here to write a gradient over")
    config = checked_config(config)
    weight, bias, shard = parallel.of_head(weight, bias, process_group, reduce_hidden_grad)
    checked = _checked(hidden, weight, bias, tokens, shift, config.vocab_size, shard)
    hidden, weight, bias, tokens, columns, dtype = checked
    batch, given, options = prepare(
        hidden,
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
    plan = _plan(chunk_bytes, memory, valid_rows, batch.valid, batch.shape.numel(), dtype)
    head = (hidden, weight, bias)
    differentiate = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in head)
    in_forward = differentiate and not plan.low and dtype != torch.float16 and not checks.traced(hidden)
    if in_forward and decomposes(config) and not batch.waits_for_logprobs(given):
        valid, inputs = batch.valid, batch.inputs(given)
        if inputs.valid is not valid:  # weights of 0 have taken tokens out
            plan = plan._replace(valid_rows=-1)
        loss, terms, metrics, logprobs, entropy = FusedLinear.apply(
            *head, inputs.values, tokens, inputs, list(config.params()), options, plan, shard
        )
        return output(batch, inputs, loss, terms, metrics, logprobs, entropy if config.return_entropy else None)
    logprobs, entropy = LinearStats.apply(*head, tokens, batch.valid, options, plan, shard)
    return loss_of_logprobs(batch, given, logprobs, entropy if config.return_entropy else None)


def _checked(
    hidden: Any,
    weight: Any,
    bias: Any,
    tokens: Any,
    shift: bool,
    vocab_size: int | None,
    shard: Shard | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, int, torch.dtype]:
    """(hidden, weight, bias, tokens, how many columns exist, dtype of the products)."""
    if type(hidden).__name__ == "DTensor" and shard is not None and not shard.sum_hidden_grad:
        raise TypeError("hidden is a DTensor, whose gradient cannot be a part of a sum: give hidden.to_local()")
    hidden = checks.floating("hidden", hidden)
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden has shape {list(hidden.shape)}, expected [..., H] with H >= 1")
    weight = checks.floating("weight", weight, hidden)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or (weight.shape[0] == 0 and shard is None):
        raise ValueError(f"weight has shape {list(weight.shape)}, expected [V, {hidden.shape[-1]}] with V >= 1")
    given = {"weight": weight}
    if bias is not None:
        given["bias"] = bias = checks.floating("bias", bias, hidden, (weight.shape[0],))
    device, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:  # which autocast leaves alone
        dtype = torch.get_autocast_dtype(device)
    else:
        for name, x in given.items():
            if x.dtype != dtype:
                raise TypeError(f"{name} is {x.dtype}, expected {dtype} like hidden (or autocast)")
    tokens = checks.token_ids(tokens, hidden, hidden.shape[:-1], shift)
    width = weight.shape[0] if shard is None else shard.all_columns
    return hidden, weight, bias, tokens, checks.existing_columns(vocab_size, width, "the weight's rows"), dtype


def _plan(
    chunk_bytes: int | None, memory: str, valid_rows: int | None, valid: Tensor | None, n: int, dtype: torch.dtype
) -> Plan:
    """Checked; valid [N]: which rows are kept."""
    for name, x in (("chunk_bytes", chunk_bytes), ("valid_rows", valid_rows)):
        if x is not None and (isinstance(x, bool) or not isinstance(x, int)):
            raise TypeError(f"{name} must be an int or None, got {type(x).__name__}")
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ValueError(f"chunk_bytes is {chunk_bytes}, expected at least 1")
    if memory not in ("fast", "low"):
        raise ValueError(f"memory must be 'fast' or 'low', got {memory!r}")
    if valid_rows is not None:
        if not 0 <= valid_rows <= n:
            raise ValueError(f"valid_rows is {valid_rows}, expected 0 <= valid_rows <= {n}")
        kept = n if valid is None else int(valid.sum()) if checks.eager_cpu(valid) else valid_rows
        if kept != valid_rows:
            raise ValueError(f"valid_rows is {valid_rows}, but {kept} rows are kept")
    known_rows = -1 if valid_rows is None else valid_rows
    return Plan(min(chunk_bytes or 0, MAX_CHUNK_BYTES), memory == "low", known_rows, dtype)
