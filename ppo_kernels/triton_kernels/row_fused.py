"""Stats, loss and gradient of a row in one visit, for a scalar loss: one program a row reads it, takes the token's
coefficients, and reads it again, last columns first, while it is still in the cache.

The sums of the loss are taken by token_loss from the log-probs that this kernel leaves.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_kernels.strides import in_place
from ppo_kernels.triton_kernels import launch, row_grad, row_stats
from ppo_kernels.triton_kernels.row_grad import store_gradient, store_zeros
from ppo_kernels.triton_kernels.row_math import (
    finish,
    gradient_factors,
    known_token,
    load_mask,
    offset_of,
    row_scale,
    scored_row,
    store_stats,
    target_logit,
)
from ppo_kernels.triton_kernels.row_stats import row_sums, store_partial
from ppo_kernels.triton_kernels.rows import split_sums
from ppo_kernels.triton_kernels.small_rows import SMALL, small_row_fused
from ppo_kernels.triton_kernels.token_loss import flat_inputs, row_coefficients, token_loss

RUNTIME = ["inner", "shift", "stride_outer", "stride_inner", "grad_stride_outer", "grad_stride_inner", "splits"]


@triton.jit(do_not_specialize=RUNTIME)
def row_fused_kernel(
    logits, grad, tokens, valids, outputs, token_inputs, loss_params, partials,
    inner, shift, stride_outer, stride_inner, grad_stride_outer, grad_stride_inner, splits, vocab, columns, k, per_t,
    temperatures,
    ENTROPY: tl.constexpr, SPREAD: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr, BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, CONGRUENT: tl.constexpr,
):  # fmt: skip
    q = tl.program_id(0)
    scored, n = scored_row(q, inner, shift)
    valid = load_mask(valids, n, scored)
    to = grad + offset_of(q, inner, shift, grad_stride_outer, grad_stride_inner)
    blocks = tl.cdiv(columns, BLOCK).to(tl.int32)
    if valid:
        y = known_token(tl.load(tokens + q + shift), vocab)
        row = logits + offset_of(q, inner, shift, stride_outer, stride_inner)
        x_y = target_logit(row, y, valid)
        k, per_t = row_scale(temperatures, n, valid, k, per_t)
        if partials is None:
            m, s, w = split_sums(row, 0, y, vocab, k, None, ENTROPY, LANES, UNROLL, BLOCKS, ALIGNED)
        else:
            for split in range(splits):
                m, s, w = split_sums(row, split, y, vocab, k, None, ENTROPY, LANES, UNROLL, BLOCKS, ALIGNED)
                store_partial(partials, q, split, splits, m, s, w, ENTROPY)
            tl.debug_barrier()
            m, s, w = row_sums(partials + q.to(tl.int64) * splits * 3, splits, True, k, None, ENTROPY, SPLITS, 0)
        stats = finish(m, s, w, x_y, k, per_t, None, ENTROPY)
        store_stats(outputs, n, stats, None, ENTROPY)
        logprob, entropy, top, total, mean = stats
        c, e = row_coefficients(logprob, entropy, token_inputs, n, True, loss_params)
        tl.debug_barrier()  # all have read before one writes
        if (c != 0) | (e != 0):
            factors = gradient_factors(logprob, top, total, mean, c, e, k, per_t, None, SPREAD)
            store_gradient(row, to, 0, blocks, y, vocab, columns, k, factors, None, SPREAD, BLOCK, CONGRUENT, True)
        else:
            store_zeros(to, 0, blocks, columns, BLOCK)
    else:
        if scored:
            store_stats(outputs, n, (0.0, 0.0, 0.0, 1.0, 0.0), None, ENTROPY)
        store_zeros(to, 0, blocks, columns, BLOCK)


def row_fused(logits: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """The operator ppo_kernels::row_fused."""
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return grad, *_row_fused_into(grad, logits, *args)


def row_fused_(logits: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """The operator ppo_kernels::row_fused_."""
    outputs: tuple[Tensor, ...] = in_place(_row_fused_into, logits, *args)
    return outputs


def _row_fused_into(
    grad: Tensor,
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    row_temperature: Tensor | None,
    softcap: float,
    vocab_size: int,
    shift: bool,
    want_entropy: bool,
    *given: Any,
) -> tuple[Tensor, ...]:
    *token_inputs, params = given
    valid = token_inputs[2]
    options = (temperature, row_temperature, softcap, vocab_size, shift)
    launch.check_tokens(tokens, valid, vocab_size, shift)
    rows = launch.Rows(logits, tokens, valid, *options, grad)
    one_visit = launch.one_visit_wins(vocab_size, logits.element_size()) and rows.cap is None
    if vocab_size > SMALL and not one_visit:
        row = (tokens, valid, *options)
        outputs = row_stats.row_stats(logits, *row, want_entropy)
        logprobs, entropy, *stats = outputs
        loss = token_loss(logprobs, entropy if want_entropy else None, *given)
        coefficients = (logprobs, *stats, loss[2], loss[3] if float(params[4]) != 0 else None)
        row_grad.row_grad_into(grad, logits, *row, *coefficients)
        return *outputs, *loss
    flat = flat_inputs(tuple(token_inputs))
    outputs = rows.outputs(want_entropy)
    args: tuple[Any, ...] = (rows.logits, grad, rows.tokens, rows.valid, outputs)
    args += ((flat[0], flat[1], flat[3], flat[4]), tuple(map(float, params)))
    spread = want_entropy and float(params[4]) != 0
    if vocab_size <= SMALL:
        small_row_fused(rows, args, want_entropy, spread)
    else:
        _launch(rows, args, want_entropy, spread)
    return *outputs, *token_loss(outputs[0], outputs[1] if want_entropy else None, *flat, params)


def _launch(rows: launch.Rows, args: tuple[Any, ...], want_entropy: bool, spread: bool) -> None:
    shape = rows.shape
    partials = None if shape.splits == 1 else rows.empty(rows.all * shape.splits * 3)
    numbers = (*rows.numbers(), *rows.grad_strides, shape.splits, rows.vocab, rows.columns, *rows.scaling[:3])
    launch.run(
        row_fused_kernel,
        rows.all,
        (*args, partials, *numbers),
        num_warps=launch.row_warps(shape),
        device=rows.logits.device,
        ENTROPY=want_entropy,
        SPREAD=spread,
        LANES=shape.lanes,
        UNROLL=shape.unroll,
        BLOCKS=shape.blocks,
        SPLITS=triton.next_power_of_2(shape.splits),
        BLOCK=32 * shape.lanes // rows.logits.element_size(),  # 32 bytes a thread
        ALIGNED=rows.aligned,
        CONGRUENT=rows.congruent,
    )
