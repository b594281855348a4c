"""Rows of a tensor as two strides, which is how the kernels address them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor


def two_strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x, copied only if its rows have no two strides, with (outer, stride_outer, stride_inner) of its rows."""
    if x.numel() == 0 or (x.stride(-1) != 1 and x.shape[-1] > 1):
        x = x.contiguous()
    shape, strides = x.shape[:-1], x.stride()[:-1]
    if not shape:
        return x, 1, 0, 0
    leading = [(size, stride) for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size != 1]
    if x.numel() and any(stride != size * below for (_, stride), (size, below) in itertools.pairwise(leading)):
        return two_strides(x.contiguous())
    outer = math.prod(size for size, _ in leading)
    return x, outer, leading[-1][1] if leading else 0, strides[-1]


def in_place(into: Callable[..., Any], logits: Tensor, *args: Any) -> Any:
    """into(grad, logits, ...) with the gradient over the logits, by way of a copy if their rows have no two strides."""
    rows = two_strides(logits)[0]
    outputs = into(rows, rows, *args)
    if rows is not logits:
        logits.copy_(rows)
    return outputs
