"""Gradients of the linear forms: two autograd functions over linear.py, and its operators for torch.compile.

LinearStats  log-prob and entropy of each row; backward is one `grad` with any upstream gradients
FusedLinear  the loss: all gradients are computed in forward, and scaled in backward
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from ppo_kernels import linear, ops
from ppo_kernels.autograd import loss_and_terms, once_differentiable, scale_
from ppo_kernels.linear import Plan
from ppo_kernels.loss_terms import TokenInputs
from ppo_kernels.ops import RowOptions
from ppo_kernels.pieces import Shard

_PLAN = "int chunk_bytes, bool low, int valid_rows, ScalarType dtype"
_HEAD = f"Tensor hidden, Tensor weight, Tensor? bias, {ops.ROW}, bool want_entropy"
ops.library.define(f"linear_stats({_HEAD}, {_PLAN}) -> ({ops.STATS})")
ops.library.define(
    f"linear_grad({_HEAD}, {ops.COEFFICIENTS}, {_PLAN}, bool[] needs) "
    "-> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)"
)
linear_stats = torch.ops.ppo_kernels.linear_stats.default
linear_grad = torch.ops.ppo_kernels.linear_grad.default


def _stats(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, mask: Tensor | None, *args: Any) -> Any:
    return linear.stats(hidden, weight, bias, tokens, mask, RowOptions(*args[:6]), Plan(*args[6:]))


def _grad(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, mask: Tensor | None, *args: Any) -> Any:
    options, given, plan, needs = RowOptions(*args[:6]), args[6:12], Plan(*args[12:16]), args[16]
    return linear.grad(hidden, weight, bias, tokens, mask, options, given, plan, needs)


ops.library.impl("linear_stats", _stats, "CompositeExplicitAutograd")
ops.library.impl("linear_grad", _grad, "CompositeExplicitAutograd")


@torch.library.register_fake("ppo_kernels::linear_stats", lib=ops.library)
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return ops.fake_stats(hidden, tokens, shift=args[5], want_entropy=args[6])


@torch.library.register_fake("ppo_kernels::linear_grad", lib=ops.library)
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    given = (hidden, weight, weight[:, 0] if bias is None else bias)
    return tuple(x.new_empty(x.shape if need else 0) for x, need in zip(given, args[-1], strict=True))


def _autocast_off(x: Tensor) -> torch.autocast:
    """The products are in plan.dtype already."""
    return torch.autocast(x.device.type, enabled=False)


def _stats_of(tensors: Any, options: RowOptions, plan: Plan, shard: Shard | None) -> Any:
    with _autocast_off(tensors[0]):
        if shard is None:
            return linear_stats(*tensors, *options, *plan)
        hidden, weight, bias, tokens, valid = tensors
        return linear.stats(hidden, weight, bias, tokens, valid, options, plan, shard)


def _grads_of(
    tensors: Any, options: RowOptions, given: Any, plan: Plan, shard: Shard | None, needs: list[bool]
) -> list[Tensor | None]:
    with _autocast_off(tensors[0]):
        if shard is None:
            found = linear_grad(*tensors, *options, *given, *plan, needs)
        else:
            hidden, weight, bias, tokens, valid = tensors
            found = linear.grad(hidden, weight, bias, tokens, valid, options, given, plan, needs, shard)
    return [x if need else None for x, need in zip(found, needs, strict=True)]


class LinearStats(Function):
    """(hidden, weight, bias, tokens, valid, options, plan, shard) -> (logprobs [N], entropy [N])."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        valid: Tensor | None,
        options: RowOptions,
        plan: Plan,
        shard: Shard | None,
    ) -> tuple[Tensor, Tensor]:
        given = (hidden, weight, bias, tokens, valid)
        logprobs, entropy, *stats = _stats_of(given, options, plan, shard)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(options.row_temperature, *given, logprobs, *stats)
        ctx.options, ctx.plan, ctx.shard = options._replace(row_temperature=None), plan, shard
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 8
        row_temperature, *given = ctx.saved_tensors
        tensors, stats = given[:5], given[5:]
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(stats[0])
        upstream = (grad_logprobs.contiguous(), None if grad_entropy is None else grad_entropy.contiguous())
        options = ctx.options._replace(row_temperature=row_temperature)
        needs = list(ctx.needs_input_grad[:3])
        found = _grads_of(tensors, options, (*stats, *upstream), ctx.plan, ctx.shard, needs)
        return *found, None, None, None, None, None


class FusedLinear(Function):
    """(hidden, weight, bias, values, tokens, other token inputs, params, options, plan, shard) -> (loss, terms,
    metrics, logprobs, entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        values: Tensor | None,
        tokens: Tensor,
        inputs: TokenInputs,
        params: list[float],
        options: RowOptions,
        plan: Plan,
        shard: Shard | None,
    ) -> tuple[Tensor, ...]:
        inputs, needs = inputs._replace(values=values), ctx.needs_input_grad[:3]
        with _autocast_off(hidden):
            found = linear.fused(hidden, weight, bias, tokens, options, inputs, params, plan, needs, shard)
        ctx.grads = [x if need else None for x, need in zip(found[:3], needs, strict=True)]
        logprobs, entropy, *stats = found[3:8]
        terms, metrics, grad_logprobs, grad_entropy, grad_values = found[8:]
        ctx.options, ctx.plan, ctx.shard = options._replace(row_temperature=None), plan, shard
        ctx.entropy_matters = params[4] != 0
        upstream = (grad_logprobs, grad_entropy)
        given = (hidden, weight, bias, tokens, inputs.valid, logprobs, *stats)
        ctx.save_for_backward(values, grad_values, *upstream, options.row_temperature, *given)
        return *loss_and_terms(ctx, terms, metrics, logprobs, entropy), logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Any, ...]:
        needs = list(ctx.needs_input_grad[:3])
        grads, ctx.grads = ctx.grads, None  # the first backward takes the buffers and scales them in place
        _, grad_values, grad_logprobs, grad_entropy, row_temperature, *given = ctx.saved_tensors
        if grads is not None:
            grads = [x if need else None for x, need in zip(grads, needs, strict=True)]
            for x in grads:
                if x is not None:
                    scale_(x, grad)
        else:
            upstream = (grad * grad_logprobs, grad * grad_entropy if ctx.entropy_matters else None)
            options = ctx.options._replace(row_temperature=row_temperature)
            tensors, stats = given[:5], given[5:]
            grads = _grads_of(tensors, options, (*stats, *upstream), ctx.plan, ctx.shard, needs)
        return *grads, grad * grad_values if ctx.needs_input_grad[3] else None, *(None,) * 6
