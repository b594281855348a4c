"""Gradients: three autograd functions over the operators of ops.py.

    RowStats   log-prob and entropy of each row; backward is one row_grad with any upstream gradients
    TokenLoss  the loss of given log-probs; its coefficients are known in forward and scaled in backward
    FusedLoss  both at once: the gradient of the logits is written in forward, in the same visit to each row

All are once differentiable. Masks, old log-probs, advantages and returns are constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx, once_differentiable

from ppo_kernels import checks, ops


class RowOptions(NamedTuple):
    """How rows of logits are read."""

    temperature: float
    vocab_size: int
    shift: bool
    want_entropy: bool


class RowStats(Function):
    """(logits, tokens, valid, options, inplace) -> (logprobs [N], entropy [N])."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, valid: Tensor | None, options: RowOptions, inplace: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, *stats = ops.row_stats(logits, tokens, valid, *options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, tokens, valid, logprobs, *stats)
        ctx.options, ctx.inplace = options, inplace
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        if not ctx.needs_input_grad[0] or (grad_logprobs is None and grad_entropy is None):
            return (None,) * 5
        logits, tokens, valid, *stats = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(stats[0])
        if grad_entropy is not None:
            grad_entropy = grad_entropy.contiguous()
        arguments = (logits, tokens, valid, *ctx.options[:3], *stats, grad_logprobs.contiguous())
        if ctx.inplace:
            ops.row_grad_(*arguments, grad_entropy)
            torch.autograd.graph.increment_version(logits)
            return logits.detach(), None, None, None, None
        return ops.row_grad(*arguments, grad_entropy), None, None, None, None


class TokenLoss(Function):
    """(logprobs, entropy, values, *other token inputs, params) -> (loss, terms, metrics)."""

    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, entropy: Tensor | None, values: Tensor | None, inputs: Any, params: list[float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        terms, metrics, *grads = ops.token_loss(logprobs, entropy, *inputs._replace(values=values), params)
        ctx.save_for_backward(*grads)
        ctx.entropy_matters = entropy is not None and params[4] != 0
        return _outputs(ctx, terms, metrics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Any, ...]:
        grad_logprobs, grad_entropy, grad_values = ctx.saved_tensors
        return (
            grad * grad_logprobs if ctx.needs_input_grad[0] else None,
            grad * grad_entropy if ctx.needs_input_grad[1] and ctx.entropy_matters else None,
            grad * grad_values if ctx.needs_input_grad[2] else None,
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
        ctx.save_for_backward(grad_values, None if inplace else logits, tokens, inputs.valid, *saved)
        return *_outputs(ctx, terms, metrics, logprobs, entropy), logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Any, ...]:
        grad_logits, ctx.grad_logits = ctx.grad_logits, None
        if not ctx.needs_input_grad[0]:
            grad_logits = None
        elif grad_logits is not None:
            _scale_(grad_logits, grad)
        elif ctx.inplace:
            raise RuntimeError(
                "inplace_grad=True allows one backward: the logits' memory already became their gradient"
            )
        else:
            grad_logits = FusedLoss._recompute(ctx, grad)
        grad_values = grad * ctx.saved_tensors[0] if ctx.needs_input_grad[1] else None
        return grad_logits, grad_values, None, None, None, None, None

    @staticmethod
    def _recompute(ctx: Any, grad: Tensor) -> Tensor:
        """A second backward over the same graph (retain_graph=True): the first one gave the buffer away."""
        _, logits, tokens, valid, *stats, grad_logprobs, grad_entropy = ctx.saved_tensors
        upstream = (grad * grad_logprobs, grad * grad_entropy if ctx.entropy_matters else None)
        result: Tensor = ops.row_grad(logits, tokens, valid, *ctx.options[:3], *stats, *upstream)
        return result


def _outputs(ctx: FunctionCtx, terms: Tensor, metrics: Tensor, *also: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, terms, metrics), of which only the loss is differentiable."""
    ctx.mark_non_differentiable(terms, metrics, *also)
    return terms[0].clone(), terms, metrics


def _scale_(grad_logits: Tensor, grad: Tensor) -> None:
    """grad_logits *= grad; the usual upstream gradient, 1, costs nothing."""
    if not checks.eager_cpu(grad) or grad.item() != 1.0:
        ops.scale_(grad_logits, grad)
