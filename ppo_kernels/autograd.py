"""Gradients: three autograd functions over the operators of ops.py.

    RowStats   log-prob and entropy of each row; backward is one row_grad with any upstream gradients
    TokenLoss  the loss of given log-probs; its coefficients are known in forward and scaled in backward
    FusedLoss  both at once: the gradient of the logits is written in forward, in the same visit to each row

All are once differentiable. Masks, old log-probs, advantages and returns are constants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx

from ppo_kernels import checks, loss_terms, ops, pieces
from ppo_kernels.aggregation import Sequences
from ppo_kernels.loss_terms import TokenInputs
from ppo_kernels.ops import RowOptions
from ppo_kernels.pieces import Shard


class _Once(Function):
    """x as it is, with a gradient by `inputs`, what it was computed from, that is an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError("trying to differentiate twice: the losses of ppo_kernels are once differentiable")


def once_differentiable(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """PyTorch's decorator lets a gradient go without a graph where the upstream one is a constant: the second
    derivative is then silently 0 beside other terms. Here it is an error, on every path to the saved inputs."""

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # no create_graph=True
            return found
        inputs = [x for x in (*grads, *ctx.saved_tensors) if x is not None and x.requires_grad]
        return tuple(None if x is None else _Once.apply(x.detach().requires_grad_(), *inputs) for x in found)

    return once


class RowStats(Function):
    """(logits, tokens, valid, options, inplace, shard) -> (logprobs [N], entropy [N]).

    shard: the logits' columns are some of options.vocab_size, and the others are on other ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        valid: Tensor | None,
        options: RowOptions,
        inplace: bool,
        shard: Shard | None,
    ) -> tuple[Tensor, Tensor]:
        if shard is None:
            logprobs, entropy, *stats = ops.row_stats(logits, tokens, valid, *options)
        else:
            logprobs, entropy, *stats = pieces.sharded_row_stats(logits, tokens, valid, options, shard)
            columns = pieces.local_columns(logits.shape[-1], options.vocab_size, shard)
            tokens, _ = pieces.local_tokens(tokens, shard.start, columns)
            options = options._replace(vocab_size=columns)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(options.row_temperature, logits, tokens, valid, logprobs, *stats)
        ctx.options, ctx.inplace = options._replace(row_temperature=None), inplace
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        if not ctx.needs_input_grad[0] or (grad_logprobs is None and grad_entropy is None):
            return (None,) * 6
        row_temperature, logits, tokens, valid, *stats = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(stats[0])
        if grad_entropy is not None:
            grad_entropy = grad_entropy.contiguous()
        if ctx.options.vocab_size == 0:  # a shard of padding alone
            return logits.detach().zero_() if ctx.inplace else torch.zeros_like(logits), None, None, None, None, None
        options = ctx.options._replace(row_temperature=row_temperature)
        arguments = (logits, tokens, valid, *options[:-1], *stats, grad_logprobs.contiguous())
        if ctx.inplace:
            ops.row_grad_(*arguments, grad_entropy)
            torch.autograd.graph.increment_version(logits)
            return logits.detach(), None, None, None, None, None
        return ops.row_grad(*arguments, grad_entropy), None, None, None, None, None


class TokenLoss(Function):
    """(logprobs, entropy, values, other token inputs, params, sequences, reduce) -> (loss, terms, metrics).

    sequences: for ratios of sequences, else None. reduce: the loss is a sum; without, it is per token [N].
    """

    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        entropy: Tensor | None,
        values: Tensor | None,
        inputs: TokenInputs,
        params: list[float],
        sequences: Sequences | None,
        reduce: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = inputs._replace(values=values)
        ctx.entropy_matters = entropy is not None and params[4] != 0
        ctx.sequences, ctx.reduce = sequences, reduce
        if sequences is None and reduce:
            terms, metrics, *grads = ops.token_loss(logprobs, entropy, *inputs, params)
            ctx.save_for_backward(*grads, None, None, logprobs, entropy, values)
            return loss_and_terms(ctx, terms, metrics)
        result = loss_terms.token_loss(logprobs, entropy, inputs, params, sequences)
        grad_ratio = None if sequences is None else result.grad_ratio
        grads = [result.grad_logprobs, result.grad_entropy, result.grad_values]
        ctx.save_for_backward(*grads, grad_ratio, inputs.valid, logprobs, entropy, values)
        ctx.mark_non_differentiable(result.terms, result.metrics)
        return result.terms[0].clone() if reduce else result.losses, result.terms, result.metrics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Any, ...]:
        grad_logprobs, grad_entropy, grad_values, grad_ratio, valid = ctx.saved_tensors[:5]
        for_logprobs = None
        if ctx.needs_input_grad[0]:
            for_logprobs = grad * grad_logprobs
            if grad_ratio is not None:  # the mean over valid tokens is its own transpose
                for_logprobs = for_logprobs + _select(valid, ctx.sequences.mean(grad * grad_ratio, valid))
        return (
            for_logprobs,
            grad * grad_entropy if ctx.needs_input_grad[1] and ctx.entropy_matters else None,
            grad * grad_values if ctx.needs_input_grad[2] else None,
            None,
            None,
            None,
            None,
        )


class FusedLoss(Function):
    """(logits, values, tokens, *token inputs, params, options, inplace) -> (loss, terms, metrics, logprobs,
    entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        values: Tensor | None,
        tokens: Tensor,
        inputs: Any,
        params: list[float],
        options: RowOptions,
        inplace: bool,
    ) -> tuple[Tensor, ...]:
        arguments = (tokens, *options, *inputs._replace(values=values), params)
        if inplace:
            grad_logits: Tensor = logits
            outputs = ops.row_fused_(logits, *arguments)
            torch.autograd.graph.increment_version(logits)
        else:
            grad_logits, *outputs = ops.row_fused(logits, *arguments)
        logprobs, entropy, row_max, row_sum, row_mean, terms, metrics, grad_logprobs, grad_entropy, grad_values = (
            outputs
        )
        # Held as an attribute, not saved: the first backward takes the buffer and scales it in place.
        ctx.grad_logits = grad_logits.detach()
        ctx.inplace, ctx.options = inplace, options
        ctx.entropy_matters = params[4] != 0
        saved = (logprobs, row_max, row_sum, row_mean, grad_logprobs, grad_entropy)
        ctx.save_for_backward(values, grad_values, None if inplace else logits, tokens, inputs.valid, *saved)
        return *loss_and_terms(ctx, terms, metrics, logprobs, entropy), logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Any, ...]:
        grad_logits, ctx.grad_logits = ctx.grad_logits, None
        if not ctx.needs_input_grad[0]:
            grad_logits = None
        elif grad_logits is not None:
            scale_(grad_logits, grad)
        elif ctx.inplace:
            raise RuntimeError(
                "inplace_grad=True allows one backward: the logits' memory already became their gradient"
            )
        else:
            grad_logits = FusedLoss._recompute(ctx, grad)
        grad_values = grad * ctx.saved_tensors[1] if ctx.needs_input_grad[1] else None
        return grad_logits, grad_values, None, None, None, None, None

    @staticmethod
    def _recompute(ctx: Any, grad: Tensor) -> Tensor:
        """A second backward over the same graph (retain_graph=True): the first one gave the buffer away."""
        _, _, logits, tokens, valid, *stats, grad_logprobs, grad_entropy = ctx.saved_tensors
        upstream = (grad * grad_logprobs, grad * grad_entropy if ctx.entropy_matters else None)
        result: Tensor = ops.row_grad(logits, tokens, valid, *ctx.options[:-1], *stats, *upstream)
        return result


def _select(valid: Tensor | None, x: Tensor) -> Tensor:
    return x if valid is None else torch.where(valid, x, 0.0)


def loss_and_terms(ctx: FunctionCtx, terms: Tensor, metrics: Tensor, *also: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, terms, metrics), of which only the loss is differentiable."""
    ctx.mark_non_differentiable(terms, metrics, *also)
    return terms[0].clone(), terms, metrics


def scale_(grad_logits: Tensor, grad: Tensor) -> None:
    """grad_logits *= grad; the usual upstream gradient, 1, costs nothing."""
    if not checks.eager_cpu(grad) or grad.item() != 1.0:
        ops.scale_(grad_logits, grad)
