"""Log-probabilities of tokens from logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from ppo_kernels import checks
from ppo_kernels.autograd import RowOptions, RowStats
from ppo_kernels.config import MAX_TEMPERATURE, MIN_TEMPERATURE, TEMPERATURE_RULE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@overload
def logprobs_from_logits(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    shift: bool = False,
    return_entropy: Literal[False] = False,
    process_group: ProcessGroup | None = None,
) -> Tensor: ...
@overload
def logprobs_from_logits(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    shift: bool = False,
    return_entropy: Literal[True],
    process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]: ...
def logprobs_from_logits(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    shift: bool = False,
    return_entropy: bool = False,
    process_group: ProcessGroup | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[tokens] and optionally its entropy, in nats; the softmax is never stored.

    Args:
        logits: [..., V] bf16, fp16, fp32 or fp64; any strides (the last axis dense, or it is copied). Row t scores
            tokens[t].
        tokens: [...] integers in [0, V), logits' leading shape.
        mask: the result's shape; bool, integer or float 0/1. A masked row is not read: 0 log-prob, 0 entropy, 0
            gradient.
        temperature: in [1e-30, 1e30]; divides the logits, for log-prob and entropy alike.
        vocab_size: columns from this one on are padding and do not exist (their gradient is 0).
        shift: logits [..., S, V] and tokens [..., S] cover the whole sequence and row t scores tokens[t + 1], by
            addressing: no slice, no copy. The result has shape [..., S - 1].
        return_entropy: also return the entropy of each row.

    Returns:
        logprobs, or (logprobs, entropy): fp32 (fp64 for fp64 logits), differentiable once in both. A row's values are
        the same bits in any batch. -inf logits have probability 0; a row that is all -inf is NaN.

    Raises:
        TypeError, ValueError: wrong types, shapes or devices. IndexError: a token outside the vocabulary, on a CPU
        (NaN for that token on a GPU).
    """
    checks.not_yet(process_group=process_group)
    logits, tokens, columns = checks.logits_and_tokens(logits, tokens, shift, vocab_size)
    temperature = checks.number("temperature", temperature, MIN_TEMPERATURE, MAX_TEMPERATURE, TEMPERATURE_RULE)
    options = RowOptions(temperature, columns, bool(shift), bool(return_entropy))
    shape = scored_shape(tokens, shift)
    valid = checks.mask("mask", mask, logits, shape)
    logprobs, entropy = RowStats.apply(logits, tokens, None if valid is None else valid.reshape(-1), options, False)
    return (logprobs.view(shape), entropy.view(shape)) if return_entropy else logprobs.view(shape)


def scored_shape(tokens: Tensor, shift: bool) -> torch.Size:
    """The shape of per-token results."""
    return torch.Size((*tokens.shape[:-1], tokens.shape[-1] - 1)) if shift else tokens.shape
