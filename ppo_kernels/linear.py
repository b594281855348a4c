"""The language-model head and the loss together: logits exist a chunk at a time, in one workspace.

    fused   chunks of rows: logits = h W^T + b, loss and gradient in place of them (row_fused), then dH and dW from the
            same workspace. Three matrix products in all.
    stats   log-prob and entropy alone, by tiles that stay in cache (pieces.py). One product.
    grad    any upstream gradients: the logits again, then as above; with `stats`, four products. Plan.low goes by
            slices of the vocabulary instead of chunks of rows, which needs no fp32 copy of dW.

Only rows that count are computed: those of the mask, and for the gradient (on a CPU) those whose coefficients are not
0. dW, and the gradient of the bias, are accumulated in fp32. With a shard, weight and bias are this rank's columns, and
dH is its part of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_kernels import ops, pieces, reference
from ppo_kernels.batch import both
from ppo_kernels.heads import Grads, Head
from ppo_kernels.loss_terms import TokenInputs
from ppo_kernels.metrics import PPOMetrics
from ppo_kernels.ops import RowOptions
from ppo_kernels.pieces import Shard
from ppo_kernels.reference import accumulate_dtype

CHUNK_BYTES, GPU_CHUNK_ROWS = 256 * 2**20, 4096  # fewer rows, and adding to dW takes a GPU longer than the row kernels
CPU_TILE, GPU_TILE = (512, 8 * 2**20), (4096, 256 * 2**20)  # rows and bytes; a GPU has to be kept busy
COMPACTED_BYTES = 2**16  # of a row
MIN_COLUMNS, ALIGNMENT = 1024, 64  # of a tile or slice: products of odd widths are much slower


class Plan(NamedTuple):
    """How a call is computed: nothing of it changes what is computed, but for rounding.

    chunk_bytes: bound on the workspace; 0: the default. low: see above. valid_rows: how many rows the mask keeps;
    -1: count them. dtype: of the matrix products.
    """

    chunk_bytes: int
    low: bool
    valid_rows: int
    dtype: torch.dtype


class Rows:
    """The scored rows of hidden [..., H], and which of them are computed: the places `at` [count] among the N scored
    ones, None for all; `valid` [N] is what is left of the mask."""

    def __init__(
        self, hidden: Tensor, tokens: Tensor, mask: Tensor | None, options: RowOptions, known_count: int = -1
    ) -> None:
        self.hidden = hidden.reshape(-1, hidden.shape[-1])
        self.tokens = (tokens[..., 1:] if options.shift else tokens).reshape(-1).to(torch.int64)
        self.length = tokens.shape[-1] - 1 if options.shift else 0
        self.options = options._replace(shift=False)
        self.at = _places(mask, known_count)
        self.valid = mask if self.at is None else None
        if options.shift and self.at is None:
            self.at = torch.arange(self.tokens.numel(), device=hidden.device)
        self.count = self.tokens.numel() if self.at is None else self.at.numel()

    def chunks(self, size: int) -> Iterator[Any]:
        """Places, `size` at a time: slices, or indices."""
        for first in range(0, self.count, size):
            at = slice(first, min(first + size, self.count))
            yield at if self.at is None else self.at[at]

    def of_hidden(self, at: Any) -> Any:
        """Where these places are among the rows of hidden."""
        return at + at // self.length if self.length else at

    def part(self, at: Any, head: Head, columns: int) -> tuple[Tensor, Tensor, Tensor | None, RowOptions]:
        """Of these places: hidden [C, H], tokens, mask and options. A row that is masked must not reach a product."""
        hidden, valid = head.cast(self.hidden[self.of_hidden(at)]), self.valid
        temperatures = self.options.row_temperature
        if valid is not None:
            valid = valid[at]
            hidden = torch.where(valid[:, None], hidden, 0.0)
        if temperatures is not None:
            temperatures = temperatures[at]
        options = self.options._replace(row_temperature=temperatures, vocab_size=columns)
        return hidden, self.tokens[at], valid, options


def _places(mask: Tensor | None, known_count: int) -> Tensor | None:
    """Where mask [N] is set; waits for the device if the count is not known. While a CUDA graph is captured nothing may
    wait: None, all rows are computed."""
    if mask is None:
        return None
    if known_count >= 0:
        return torch.nonzero_static(mask, size=known_count, fill_value=0)[:, 0]
    if mask.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    return mask.nonzero()[:, 0]


def _chunk_rows(width: int, head: Head, plan: Plan, count: int = 0, summed: bool = False) -> int:
    """How many rows of `width` logits the workspace holds: at least one.

    By default it holds all `count` rows if that takes no more than the fp32 sum of dW that several chunks need beside
    it: one chunk needs none, is faster and rounds once. `summed`: dW is asked for.
    """
    row = (max(_padded(width), 1) + 2 * head.weight.shape[1]) * head.dtype.itemsize  # and hidden, and its gradient
    least = 1 if plan.chunk_bytes or head.weight.device.type == "cpu" else GPU_CHUNK_ROWS
    rows = max(least, (plan.chunk_bytes or CHUNK_BYTES) // row)
    needed = summed and head.weight.dtype.itemsize == 2 and not plan.low
    spared = 4 * head.weight.numel() if needed and not plan.chunk_bytes else 0
    return count if rows < count <= rows + spared // row else rows


def _workspace(rows: int, columns: int, head: Head) -> Tensor:
    """[rows, columns], each row at an aligned address."""
    return torch.empty(rows, _padded(columns), dtype=head.dtype, device=head.weight.device)[:, :columns]


def _padded(columns: int) -> int:
    return columns if columns < MIN_COLUMNS else -(-columns // ALIGNMENT) * ALIGNMENT


def _columns(weight: Tensor, options: RowOptions, shard: Shard | None) -> tuple[int, int, int]:
    """This weight's columns: the first one, how many exist, and how many there would be but for padding."""
    if shard is None:
        return 0, options.vocab_size, options.vocab_size
    return shard.start, pieces.local_columns(weight.shape[0], options.vocab_size, shard), shard.width


def _check_count(x: Tensor, mask: Tensor | None, plan: Plan) -> Tensor:
    """x; NaN if plan.valid_rows is wrong (on a CPU that has been an error)."""
    if mask is None or plan.valid_rows < 0:
        return x
    return x.masked_fill(mask.sum() != plan.valid_rows, torch.nan)


# ---- log-probs ------------------------------------------------------------------------------------------------------


def stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    mask: Tensor | None,
    options: RowOptions,
    plan: Plan,
    shard: Shard | None = None,
) -> tuple[Tensor, ...]:
    """ops.row_stats of the logits, which exist as tiles."""
    rows = Rows(hidden, tokens, mask, options, plan.valid_rows)
    reference.check_tokens(rows.tokens, mask, options.vocab_size)
    start, columns, width = _columns(weight, options, shard)
    head = Head(weight, bias, columns, plan.dtype)
    tile_rows, tile_bytes = CPU_TILE if weight.device.type == "cpu" else GPU_TILE
    tile = max(1, min(tile_bytes, plan.chunk_bytes or tile_bytes) // head.dtype.itemsize)
    at_once = min(_chunk_rows(width, head, plan), max(tile_rows, tile // max(columns, 1)))
    width = min(max(columns, 1), max(1, tile // at_once // MIN_COLUMNS) * MIN_COLUMNS)
    workspace = _workspace(min(at_once, rows.count), width, head)
    found = pieces.nothing(rows.tokens.numel(), hidden).clone()
    for at in rows.chunks(at_once):
        h, y, valid, chosen = rows.part(at, head, columns)
        tiles = [pieces.nothing(len(h), hidden)]
        for first in range(0, columns, width):
            here = min(width, columns - first)
            logits = workspace[: len(h), :here]
            head.logits(h, logits, first)
            tiles.append(pieces.of_columns(logits, y, valid, chosen, start + first, here))
        found[at] = pieces.combine(torch.stack(tiles), chosen)
    if shard is not None:
        found = pieces.over_ranks(found, rows.tokens, mask, rows.options, shard, accumulate_dtype(hidden.dtype))
    logprobs, *others = pieces.finish(found, rows.tokens, mask, rows.options, accumulate_dtype(hidden.dtype))
    return _check_count(logprobs, mask, plan), *others


# ---- gradients ------------------------------------------------------------------------------------------------------


def grad(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    mask: Tensor | None,
    options: RowOptions,
    given: Sequence[Tensor | None],
    plan: Plan,
    needs: Sequence[bool],
    shard: Shard | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dL/dhidden, dL/dweight, dL/dbias); given: logprobs, row_max, row_sum, row_mean, grad_logprobs, grad_entropy."""
    active = mask if hidden.device.type != "cpu" else both(mask, _nonzero(given[4], given[5]))
    rows = Rows(hidden, tokens, active, options, plan.valid_rows if active is mask else -1)
    start, columns, width = _columns(weight, options, shard)
    head = Head(weight, bias, columns, plan.dtype)
    if plan.low:  # the fp32 sum of a slice's dW takes as much as the workspace
        columns_at_once = (plan.chunk_bytes or CHUNK_BYTES) // (max(hidden.shape[-1], 1) * 4)
        width = min(width, max(1, columns_at_once // MIN_COLUMNS) * MIN_COLUMNS)
    size = _chunk_rows(width, head, plan, rows.count, needs[1])
    grads = Grads(hidden, weight, bias, head, needs, shard, width, chunks=-(-rows.count // size))
    logits = workspace = _workspace(min(size, rows.count), min(width, columns), head)
    for first in range(0, columns, width):
        here = min(width, columns - first)
        for at in rows.chunks(size):
            h, y, valid, chosen = rows.part(at, head, columns)
            coefficients = [x[at] if x is not None and x.numel() else None for x in given]
            logits = workspace[: len(h), :here]
            head.logits(h, logits, first)
            local, _ = pieces.local_tokens(y, start + first, here)
            ops.row_grad_(logits, local, valid, *chosen._replace(vocab_size=here)[:-1], *coefficients)
            grads.add(h, logits, rows.of_hidden(at), first)
    del workspace, logits
    return grads.finished()


def fused(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    options: RowOptions,
    inputs: TokenInputs,
    params: list[float],
    plan: Plan,
    needs: Sequence[bool],
    shard: Shard | None = None,
) -> tuple[Tensor, ...]:
    """(dL/dhidden, dL/dweight, dL/dbias, *ops.row_stats, *ops.token_loss)."""
    rows = Rows(hidden, tokens, inputs.valid, options, plan.valid_rows)
    reference.check_tokens(rows.tokens, inputs.valid, options.vocab_size)
    inputs = inputs._replace(weight=_check_count(inputs.weight, inputs.valid, plan))
    _, columns, width = _columns(weight, options, shard)
    head = Head(weight, bias, columns, plan.dtype)
    size = _chunk_rows(width, head, plan, rows.count, needs[1])
    grads = Grads(hidden, weight, bias, head, needs, shard, width, chunks=-(-rows.count // size))
    terms, metrics, *token_grads = _values_alone(inputs, params)
    results = [inputs.advantages.new_full(inputs.advantages.shape, x) for x in pieces.NEUTRAL]
    if not options.want_entropy:
        results[1], results[4] = results[1].new_empty(0), results[4].new_empty(0)
    logits = workspace = _workspace(min(size, rows.count), columns, head)
    for at in rows.chunks(size):
        h, y, valid, chosen = rows.part(at, head, columns)
        logits = workspace[: len(h)]
        head.logits(h, logits)
        part = _tokens_at(inputs, at, valid)
        if shard is None:
            outputs = ops.row_fused_(logits, y, *chosen, *part, params)
        else:
            outputs = _sharded_fused_(logits, y, chosen._replace(vocab_size=options.vocab_size), part, params, shard)
        for result, output in zip(results, outputs[:5], strict=True):
            if result.numel():
                result[at] = output
        terms, metrics = terms + outputs[5], (PPOMetrics(metrics) + PPOMetrics(outputs[6])).packed
        token_grads[0][at] = outputs[7]
        if options.want_entropy:
            token_grads[1][at] = outputs[8]
        h, logits, at = _active(h, logits, at, outputs[7], outputs[8])
        grads.add(h, logits, rows.of_hidden(at))
    del workspace, logits
    results[0] = _check_count(results[0], inputs.valid, plan)
    return *grads.finished(), *results, _check_count(terms, inputs.valid, plan), metrics, *token_grads


def _tokens_at(inputs: TokenInputs, at: Any, valid: Tensor | None) -> TokenInputs:
    """Of a chunk, without the values."""
    old_logprobs, advantages, _, weight, ref_logprobs = (None if x is None else x[at] for x in inputs[:5])
    assert advantages is not None
    assert weight is not None
    return TokenInputs(old_logprobs, advantages, valid, weight, ref_logprobs)


def _values_alone(inputs: TokenInputs, params: list[float]) -> tuple[Tensor, ...]:
    """ops.token_loss of the values, whose mask may be another, and of no token."""
    nothing = torch.zeros_like(inputs.advantages)
    no_token = torch.zeros_like(nothing, dtype=torch.bool)
    outputs: tuple[Tensor, ...] = ops.token_loss(nothing, nothing, *inputs._replace(valid=no_token), params)
    return outputs


def _sharded_fused_(
    logits: Tensor, y: Tensor, options: RowOptions, part: TokenInputs, params: list[float], shard: Shard
) -> tuple[Tensor, ...]:
    """ops.row_fused_ of logits whose columns are a shard."""
    logprobs, entropy, *others = pieces.sharded_row_stats(logits, y, part.valid, options, shard)
    loss = ops.token_loss(logprobs, entropy if options.want_entropy else None, *part, params)
    mean, grad_entropy = (others[2], loss[3]) if options.want_entropy else (None, None)
    columns = logits.shape[1]
    if columns:
        local, _ = pieces.local_tokens(y, shard.start, columns)
        row = (local, part.valid, *options._replace(vocab_size=columns)[:-1])
        ops.row_grad_(logits, *row, logprobs, *others[:2], mean, loss[2], grad_entropy)
    return logprobs, entropy, *others, *loss


def _active(h: Tensor, logits: Tensor, at: Any, c: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Without the rows whose gradient is 0, those that stay moved up in the workspace. A GPU would have to wait for
    their number, and to move small rows takes longer than to multiply them."""
    if h.device.type != "cpu" or logits.shape[1] * logits.element_size() < COMPACTED_BYTES:
        return h, logits, at
    kept = _nonzero(c, e).nonzero()[:, 0]
    if len(kept) == len(h):
        return h, logits, at
    for to, where in enumerate(kept.tolist()):
        if to != where:
            logits[to].copy_(logits[where])
    places = torch.arange(at.start, at.stop) if isinstance(at, slice) else at
    return h[kept], logits[: len(kept)], places[kept]


def _nonzero(c: Tensor | None, e: Tensor | None) -> Tensor:
    assert c is not None
    return c != 0 if e is None or e.numel() == 0 else (c != 0) | (e != 0)
