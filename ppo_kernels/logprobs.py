"""Log-probabilities of tokens from logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from ppo_kernels import checks, parallel
from ppo_kernels.autograd import RowStats
from ppo_kernels.row_options import row_options, scored_shape, without_ignored

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@overload
def logprobs_from_logits(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    shift: bool = False,
    return_entropy: Literal[False] = False,
    process_group: ProcessGroup | None = None,
    ignore_index: int | None = None,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    inplace_grad: bool = False,
) -> Tensor: ...
@overload
def logprobs_from_logits(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    shift: bool = False,
    return_entropy: Literal[True],
    process_group: ProcessGroup | None = None,
    ignore_index: int | None = None,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    inplace_grad: bool = False,
) -> tuple[Tensor, Tensor]: ...
def logprobs_from_logits(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    vocab_size: int | None = None,
    shift: bool = False,
    return_entropy: bool = False,
    process_group: ProcessGroup | None = None,
    ignore_index: int | None = None,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    inplace_grad: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(z)[tokens] and optionally its entropy, in nats; the softmax is never stored.

    z = logits / temperature; with all options, softcap * tanh(scale * logits / softcap) / temperature.

    Args:
        logits: [..., V] bf16, fp16, fp32 or fp64; any strides (the last axis dense, or it is copied). Row t scores
            tokens[t].
        tokens: [...] integers in [0, V), logits' leading shape.
        mask: the result's shape; bool, integer or float 0/1. A masked row is not read: 0 log-prob, 0 entropy, 0
            gradient.
        temperature: in [1e-30, 1e30]; divides the logits, for log-prob and entropy alike. Or a floating-point tensor on
            the logits' device: the result's shape, that without its last axis (one per sequence), or []. It is a
            constant, used as fp32 (fp64 if it is); masked rows may hold anything.
        vocab_size: columns from this one on are padding and do not exist (their gradient is 0).
        shift: logits [..., S, V] and tokens [..., S] cover the whole sequence and row t scores tokens[t + 1], by
            addressing: no slice, no copy. The result has shape [..., S - 1].
        return_entropy: also return the entropy of each row.
        process_group: the vocabulary is spread over the ranks of this group (tensor parallelism): each has logits
            [..., V / ranks] of contiguous columns in rank order, padded at the end if need be (vocab_size then tells
            how many exist), and the same of everything else. One collective of a few floats a row; every rank gets the
            whole result, and the gradient of its columns. Logits that are a DTensor with Shard(-1) need no group.
        ignore_index: rows whose token this is are masked too.
        logit_softcap: > 0 (Gemma 2: 30); logits are bounded to +-softcap by tanh. -inf logits stay -inf.
        logit_scale: > 0 (Cohere); multiplies the logits first.
        inplace_grad: write the gradient over the logits, in backward, as fused_ppo_loss does.

    Returns:
        logprobs, or (logprobs, entropy): fp32 (fp64 for fp64 logits), differentiable once in both. A row's values are
        the same bits in any batch. -inf logits have probability 0; a row that is all -inf is NaN.

    Raises:
        TypeError, ValueError: wrong types, shapes, devices or numbers. IndexError: a token outside the vocabulary, on a
        CPU. On a GPU, or compiled, a bad token or a bad temperature in a tensor gives NaN for its row.
    """
    logits, shard = parallel.of_logits(logits, process_group)
    logits, tokens, columns = checks.logits_and_tokens(logits, tokens, shift, vocab_size, shard)
    shape = scored_shape(tokens, shift)
    valid = without_ignored(checks.mask("mask", mask, logits, shape), tokens, ignore_index, shift)
    options = row_options(
        temperature,
        logit_scale,
        logit_softcap,
        shape=shape,
        valid=valid,
        like=logits,
        vocab_size=columns,
        shift=shift,
        want_entropy=return_entropy,
    )
    if inplace_grad:
        checks.writable(logits)
    inplace = inplace_grad and not torch.compiler.is_compiling()
    flat_valid = None if valid is None else valid.reshape(-1)
    logprobs, entropy = RowStats.apply(logits, tokens, flat_valid, options, inplace, shard)
    return (logprobs.view(shape), entropy.view(shape)) if return_entropy else logprobs.view(shape)
