"""Rows on whose columns the ranks differ most: sure tokens, shards at -inf, NaN on one rank; and a row's bits."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import torch
from checks import leaf, same_bits
from torch import Tensor
from vocab_parallel_cases import Ranks

from ppo_kernels import fused_ppo_loss, logprobs_from_hidden, logprobs_from_logits

# Of 8 columns: two ranks have 4, four ranks have 2.
EXTREME = {
    "sure, the rest on other ranks": ([20, -inf, -inf, -inf, 0, 0, 0, 0], 0),
    "sure, the rest on this rank": ([20.75, 0, -inf, -inf, -inf, -inf, -inf, -inf], 0),
    "sure, the rest everywhere": ([0, 0.5, 0, 0, 0, 23, 0, 1], 5),
    "sure, far below 0": ([-1000, -1000, -1023, -1020, -1000, -1000, -978, -1000], 6),
    "sure beyond fp32": ([0, 0, 0, 0, 60, 0, 0, 0], 4),
    "rather sure": ([0, 0, 0, 7, 0, 0, 0, 0], 3),
    "two are sure": ([0, 30, 0, 0, 0, 0, 30, 0], 6),
    "another is sure": ([0, 0, 0, 0, 0, 0, 0, 50], 0),
    "another on this rank is sure": ([0, 50, 0, 0, 0, 0, 0, 0], 0),
    "target at -inf": ([1, -inf, 2, 0, 0, 0, 0, 0], 1),
    "target at -inf as its whole shard": ([1, 2, 3, 4, -inf, -inf, -inf, -inf], 4),
    "other shards at -inf": ([1, 2, -inf, -inf, -inf, -inf, -inf, -inf], 0),
    "the first shard at -inf": ([-inf, -inf, -inf, -inf, 1, 2, 3, 4], 6),
    "the target is all there is": ([-inf, -inf, -inf, -inf, -inf, 3, -inf, -inf], 5),
    "another is all there is": ([-inf, -inf, -inf, 3, -inf, -inf, -inf, -inf], 5),
    "nothing is there": ([-inf] * 8, 2),
    "NaN beside the target": ([0, nan, 0, 0, 0, 0, 0, 0], 0),
    "NaN at the target": ([0, 1, 2, 3, nan, 0, 0, 0], 4),
    "NaN on another rank": ([0, 1, 2, 3, 4, 5, nan, 7], 0),
    "NaN among -inf": ([nan, -inf, -inf, -inf, 1, 2, 3, 4], 7),
    "NaN on the whole of another rank": ([nan, nan, nan, nan, 1, 2, 3, 4], 7),
    "NaN on the whole of this rank": ([1, 2, 3, 4, nan, nan, nan, nan], 7),
    "+inf at the target": ([0, 1, 2, inf, 0, 0, 0, 0], 3),
    "+inf on another rank": ([0, 1, 2, 3, 0, 0, 0, inf], 3),
    "all equal": ([7] * 8, 3),
    "all equal and huge": ([1e30] * 8, 7),
    "huge and far apart": ([1e30, -1e30, 0, 0, 0, 0, 0, 0], 0),
    "close": ([1000, 1000.0625, 1000, 1000, 1000, 999.9375, 1000, 1000], 5),
}
EXTREME_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.9},
    "capped": {"logit_softcap": 40.0},
    "rows": {"temperature": torch.linspace(0.7, 1.3, len(EXTREME))},
    "wide": {"copies": 50},
    "wide-capped": {"copies": 50, "logit_softcap": 40.0},
}
NOT_A_NUMBER = ("NaN", "+inf", "nothing")
EXTREME_UPSTREAM = (1.0, 0.25)


def extreme_rows(copies: int = 1) -> tuple[Tensor, Tensor]:
    """Each column as often as `copies` says, but for the target: its copies are not there."""
    rows, tokens = zip(*EXTREME.values(), strict=True)
    logits = torch.tensor(rows, dtype=torch.float32).repeat_interleave(copies, -1)
    for row, token in zip(logits, tokens, strict=True):
        row[token * copies + 1 : (token + 1) * copies] = -inf
    return logits, copies * torch.tensor(tokens)


def rows(at: Ranks) -> dict[str, dict[str, Tensor]]:
    return {name: scored(at, **options) for name, options in EXTREME_OPTIONS.items()}


def scored(at: Ranks, copies: int = 1, **options: Any) -> dict[str, Tensor]:
    logits, tokens = extreme_rows(copies)
    local = leaf(logits.chunk(at.world, -1)[at.rank])
    lp, h = logprobs_from_logits(local, tokens, return_entropy=True, process_group=at.group, **options)
    torch.autograd.backward([lp, h], [torch.full_like(lp, u) for u in EXTREME_UPSTREAM])
    return {"logprobs": lp.detach(), "entropy": h.detach(), "grad": local.grad}


HEAD_ROWS = [name for name, (row, _) in EXTREME.items() if np.isfinite(row).all() and "huge" not in name]
HEAD_BIAS = {"finite": [0.0] * 8, "a shard at -inf": [0, 0, 0, 0, -inf, -inf, -inf, -inf]}


def extreme_head_rows() -> tuple[Tensor, Tensor]:
    logits, tokens = extreme_rows()
    rows = [list(EXTREME).index(name) for name in HEAD_ROWS]
    return logits[rows], tokens[rows]


def rows_of_a_head(at: Ranks) -> dict[str, dict[str, Tensor]]:
    """The rows are hidden states, the weight is the identity; a bias may take columns away."""
    result = {}
    hidden, tokens = extreme_head_rows()
    for name, whole in HEAD_BIAS.items():
        bias = leaf(torch.tensor(whole).chunk(at.world)[at.rank])
        h, weight = leaf(hidden), leaf(torch.eye(8).chunk(at.world)[at.rank])
        given = {"bias": bias, "process_group": at.group}
        lp, entropy = logprobs_from_hidden(h, weight, tokens, return_entropy=True, **given)
        some = lp.isfinite()  # a gradient of the weight adds up the rows
        torch.autograd.backward([lp, entropy], [some * u for u in EXTREME_UPSTREAM])
        result[name] = {"logprobs": lp.detach(), "entropy": entropy.detach()}
        result[name] |= {"hidden": h.grad, "weight": weight.grad, "bias": bias.grad}
    return result


def bits(at: Ranks) -> dict[str, bool]:
    """Whether a row is the same bits alone, in a batch, and in the loss."""
    g = torch.Generator().manual_seed(3)
    whole, tokens = 5 * torch.randn(9, 400, generator=g), torch.randint(400, (9,), generator=g)
    local = leaf(whole.chunk(at.world, -1)[at.rank])
    options = {"process_group": at.group, "return_entropy": True}
    lp, h = logprobs_from_logits(local, tokens, **options)
    alone = [logprobs_from_logits(local[i : i + 1], tokens[i : i + 1], **options) for i in range(9)]
    mask = torch.arange(9) % 2 == 0
    masked = logprobs_from_logits(local, tokens, mask, **options)
    out = fused_ppo_loss(local, tokens, lp.detach(), torch.ones(9), mask, process_group=at.group)
    return {
        "alone": same_bits(torch.cat([x for x, _ in alone]), lp) and same_bits(torch.cat([x for _, x in alone]), h),
        "masked": same_bits(masked[0][mask], lp[mask]) and same_bits(masked[1][mask], h[mask]),
        "in the loss": same_bits(out.logprobs[mask], lp[mask]),
        "ratio of 1": out.metrics.compute()["ratio_min"] == out.metrics.compute()["ratio_max"] == 1,
    }
