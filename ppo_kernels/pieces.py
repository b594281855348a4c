"""Rows of logits in pieces of the vocabulary, a tile of a matrix product or another rank's shard.

Of each row a piece tells four numbers, over its own columns:

    m = max(x_i),   s = sum(exp(t_i)) without the target,   w = sum(exp(t_i) * t_i),   t_y;   t_i = (x_i - m) / T

Pieces combine into one in any grouping, and the whole row's numbers give its log-prob and entropy. The target is left
out of s, so that a target that holds nearly all probability keeps its 1 - p, as in reference.py. t_y is -inf where the
target is in another piece; m is -inf where nothing is here. Everything is of size N and computed in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ppo_kernels import checks, ops
from ppo_kernels.ops import RowOptions
from ppo_kernels.reference import accumulate_dtype, check_tokens, tempered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


NUMBERS = 4
NEUTRAL = (0.0, 0.0, 0.0, 1.0, 0.0)  # ops.row_stats of a row that is not valid
SURE = -1.0  # from this log-prob on, the sum without the target is not a difference


class Shard(NamedTuple):
    """This rank's columns, from `start` on, of a vocabulary of all_columns that is spread over the ranks of a group.

    width: how many each rank has, but for the last ones, which may have less. sum_hidden_grad: the gradient of hidden
    states is added up over the ranks; without, each has its part.
    """

    start: int
    width: int
    all_columns: int
    group: ProcessGroup
    sum_hidden_grad: bool = True


def of_columns(
    logits: Tensor, tokens: Tensor, valid: Tensor | None, options: RowOptions, start: int, columns: int
) -> Tensor:
    """[N, 4] of logits [..., >= columns], whose first `columns` columns are those from `start` on."""
    local, here = local_tokens(tokens, start, columns)
    shape = logits.shape[:-1]
    if columns == 0:
        outer, inner = shape[:-1].numel(), (shape[-1] if shape else 1) - int(options.shift)
        return nothing(outer * inner, logits)
    options = options._replace(vocab_size=columns)
    logprobs, _, m, s, *mean = (x.double() for x in ops.row_stats(logits, torch.where(here, local, 0), valid, *options))
    here = (here[..., 1:] if options.shift else here).reshape(-1)
    t_y = torch.where(here, logprobs + s.log(), -torch.inf)
    e_y = t_y.exp()
    others = torch.where(logprobs > SURE, e_y * torch.expm1(-logprobs), s - e_y)
    others = torch.where(here, others, s)
    w = mean[0] * s if options.want_entropy else torch.zeros_like(s)
    found = torch.stack([m, others, w, t_y], -1)
    return torch.where((s == 0)[:, None], nothing(1, found), found)  # all are -inf; a NaN has reached s


def local_tokens(tokens: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Tokens counted from column `start`, and whether they are among the next `columns`; -1 where they are not."""
    local = tokens.to(torch.int64) - start
    here = (local >= 0) & (local < columns)
    return torch.where(here, local, -1), here


def nothing(n: int, like: Tensor) -> Tensor:
    """[n, 4] of no columns."""
    piece = torch.zeros(n, NUMBERS, dtype=torch.float64, device=like.device)
    piece[:, 0] = piece[:, 3] = -torch.inf
    return piece


def combine(pieces: Tensor, options: RowOptions) -> Tensor:
    """[K, N, 4] -> [N, 4]."""
    m_k, others, w, t_y = pieces.unbind(-1)
    m = m_k.amax(0)
    d = tempered(m_k.T, m, options.temperature, options.row_temperature, options.softcap)[0].T
    empty = (m_k == -torch.inf) & (others == 0)
    d = torch.where(empty, 0.0, d)
    r = torch.where(empty, 0.0, d.exp())
    w = torch.where(r == 0, 0.0, r * (w + (others + t_y.exp()) * d))
    return torch.stack([m, (r * others).sum(0), w.sum(0), (t_y + d).amax(0)], -1)


def finish(
    piece: Tensor, tokens: Tensor, valid: Tensor | None, options: RowOptions, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """(logprobs, entropy, row_max, row_sum, row_mean) [N] as ops.row_stats gives them, from whole rows [N, 4]."""
    m, others, w, t_y = piece.unbind(-1)
    log_sum = torch.log1p(others + torch.expm1(t_y))
    total = others + t_y.exp()
    mean = w / total
    outside = (tokens < 0) | (tokens >= options.vocab_size)  # on a CPU that has been an error
    found: tuple[Tensor, ...] = ((t_y - log_sum).masked_fill(outside, torch.nan), log_sum - mean, m, total, mean)
    if valid is not None:
        found = tuple(x.masked_fill(~valid, value) for x, value in zip(found, NEUTRAL, strict=True))
    logprobs, entropy, row_max, row_sum, row_mean = (x.to(dtype) for x in found)
    if not options.want_entropy:
        entropy, row_mean = entropy.new_empty(0), row_mean.new_empty(0)
    return logprobs, entropy, row_max, row_sum, row_mean


# ---- over ranks -----------------------------------------------------------------------------------------------------


def sharded_row_stats(
    logits: Tensor, tokens: Tensor, valid: Tensor | None, options: RowOptions, shard: Shard
) -> tuple[Tensor, ...]:
    """ops.row_stats of logits whose columns are those of `shard`; tokens and options.vocab_size are of all columns."""
    scored = (tokens[..., 1:] if options.shift else tokens).reshape(-1).to(torch.int64)
    check_tokens(scored, valid, options.vocab_size)
    columns = local_columns(logits.shape[-1], options.vocab_size, shard)
    piece = of_columns(logits, tokens, valid, options, shard.start, columns)
    dtype = accumulate_dtype(logits.dtype)
    return finish(over_ranks(piece, scored, valid, options, shard, dtype), scored, valid, options, dtype)


def local_columns(there: int, vocab_size: int, shard: Shard) -> int:
    """How many of the shard's columns `there` are not padding."""
    return max(0, min(there, vocab_size - shard.start))


def over_ranks(
    piece: Tensor, tokens: Tensor, valid: Tensor | None, options: RowOptions, shard: Shard, dtype: torch.dtype
) -> Tensor:
    """[N, 4] of whole rows from every rank's piece, by one collective of N + 1 rows in `dtype`.

    The last row tells what the others have: the same, or it is an error on a CPU and NaN on a GPU.
    """
    import torch.distributed as dist

    mine = torch.cat([piece, piece.new_zeros(1, NUMBERS)]).to(dtype)
    mine[-1, 0], mine[-1, 1], mine[-1, 2] = shard.width, options.vocab_size, options.want_entropy
    mine[-1, 3] = checksum(tokens, valid)
    ranks = dist.get_world_size(shard.group)
    gathered = mine.new_empty(ranks * len(mine), NUMBERS)
    dist.all_gather_into_tensor(gathered, mine, group=shard.group)
    gathered = gathered.view(ranks, len(mine), NUMBERS)
    cuts = gathered[:, -1]
    differ = (cuts != cuts[0]).any()
    if checks.eager_cpu(differ) and bool(differ):
        raise ValueError(
            "process_group: its ranks have different (columns, vocab_size, entropy, checksum of tokens and mask): "
            f"{cuts.tolist()}, expected the same rows on all and a vocabulary that is padded to equal shards"
        )
    return combine(gathered[:, :-1].double(), options).masked_fill(differ, torch.nan)


def checksum(tokens: Tensor, valid: Tensor | None) -> Tensor:
    """A number below 2^24, exact in fp32, that other tokens or another mask will hardly have."""
    prime = 65521
    rows = torch.arange(1, len(tokens) + 1, device=tokens.device)
    words = rows * (tokens % prime + 1) % prime
    return (words if valid is None else torch.where(valid, words, 0)).sum() % prime
