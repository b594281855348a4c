"""How rows of logits are read, from the public arguments: temperature, scale, softcap, and tokens to ignore."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ppo_kernels import checks
from ppo_kernels.config import MAX_TEMPERATURE, MIN_TEMPERATURE, TEMPERATURE_RULE
from ppo_kernels.ops import RowOptions
from ppo_kernels.reference import accumulate_dtype


def row_options(
    temperature: float | Tensor,
    logit_scale: float,
    logit_softcap: float | None,
    *,
    shape: Sequence[int],
    valid: Tensor | None,
    like: Tensor,
    vocab_size: int,
    shift: bool,
    want_entropy: bool,
) -> RowOptions:
    """Options for logits `like` whose scored rows have this shape and, if not all are, this mask of valid ones.

    z = softcap * tanh(scale * x / softcap) / temperature: the scale goes into the other two.
    """
    scale = _number("logit_scale", logit_scale)
    softcap = math.inf if logit_softcap is None else _number("logit_softcap", logit_softcap)
    if softcap != math.inf and scale != 1:
        softcap = _number("logit_softcap / logit_scale", softcap / scale)
    row_temperature = None
    if isinstance(temperature, Tensor):
        row_temperature, temperature = _row_temperature(temperature, scale, shape, valid, like), 1.0
    else:
        temperature = _number("temperature", temperature)
        if scale != 1:
            temperature = _number("temperature / logit_scale", temperature / scale)
    return RowOptions(temperature, row_temperature, softcap, vocab_size, bool(shift), bool(want_entropy))


def scored_shape(tokens: Tensor, shift: bool) -> torch.Size:
    """The shape of per-token results."""
    return torch.Size((*tokens.shape[:-1], tokens.shape[-1] - 1)) if shift else tokens.shape


def without_ignored(valid: Tensor | None, tokens: Tensor, ignore_index: int | None, shift: bool) -> Tensor | None:
    """The mask `valid` of scored rows, also without those whose token is ignore_index."""
    if ignore_index is None:
        return valid
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int or None, got {type(ignore_index).__name__}")
    scored = tokens[..., 1:] if shift else tokens
    kept = scored.to(torch.int64) != ignore_index  # 255 as uint8 is not -1
    return kept if valid is None else valid & kept


def _number(name: str, x: object) -> float:
    return checks.number(name, x, MIN_TEMPERATURE, MAX_TEMPERATURE, TEMPERATURE_RULE)


def _row_temperature(
    temperature: Tensor, scale: float, shape: Sequence[int], valid: Tensor | None, like: Tensor
) -> Tensor:
    """[N], fp32 or fp64, from one per row, one per sequence, or one for all; a constant."""
    given = checks.floating("temperature", temperature, like).detach()
    shape = tuple(shape)
    if given.shape not in ((), shape[:-1], shape):
        expected = " or ".join(str(list(s)) for s in dict.fromkeys((shape, shape[:-1], ())))
        raise ValueError(f"temperature has shape {list(given.shape)}, expected {expected}")
    if given.dim() < len(shape):
        given = given.reshape(*given.shape, *[1] * (len(shape) - given.dim()))
    given = given.to(torch.float64) / scale if scale != 1 else given.to(accumulate_dtype(given.dtype))
    rows = given.expand(shape)
    if checks.eager_cpu(rows):
        bad = ~((rows >= MIN_TEMPERATURE) & (rows <= MAX_TEMPERATURE))
        if valid is not None:
            bad = bad & valid
        if bool(bad.any()):
            worst = float(rows[bad][0])
            name = "temperature" if scale == 1 else "temperature / logit_scale"
            raise ValueError(f"{name} holds {worst} for a row that is scored, expected {TEMPERATURE_RULE}")
    return rows.reshape(-1)
