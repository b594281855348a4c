"""Comparisons with the oracle, each at the bar it has to meet."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from oracle import to_numpy

# Significant bits after the leading one, and the exponent of the smallest subnormal, of each logits dtype.
_FRACTION_BITS = {torch.bfloat16: (7, -133), torch.float16: (10, -24), torch.float32: (23, -149)}


def ulp(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Distance between neighbouring numbers of `dtype` at |x|."""
    bits, smallest = _FRACTION_BITS[dtype]
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 1e-300)))
    return np.exp2(np.maximum(exponent - bits, smallest))


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return to_numpy(torch.from_numpy(np.asarray(x)).to(dtype))


def assert_within(got: Any, want: Any, bound: Any, what: str = "") -> None:
    """|got - want| <= bound elementwise; infinities and NaN must sit in the same places. Shapes must match exactly."""
    got, want = to_numpy(got), to_numpy(want)
    bound = np.broadcast_to(np.asarray(bound, dtype=np.float64), want.shape)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    finite = np.isfinite(want)
    assert np.array_equal(got[~finite], want[~finite], equal_nan=True), f"{what}: {got[~finite]} != {want[~finite]}"
    assert np.isfinite(got[finite]).all(), f"{what}: {got} not finite where {want} is"
    error = np.abs(got[finite] - want[finite])
    excess = error - bound[finite]
    if excess.size and excess.max() > 0:
        worst = int(excess.argmax())
        raise AssertionError(
            f"{what}: got {got[finite][worst]!r}, expected {want[finite][worst]!r}, "
            f"error {error[worst]:.3g} > {bound[finite][worst]:.3g}"
        )


def assert_close(got: Any, want: Any, rel: float = 5e-7, scale: float | None = None, what: str = "") -> None:
    """Error at most `rel` of each value, or of `scale` where terms of that size cancel."""
    want = to_numpy(want)
    size = np.abs(want) if scale is None else np.maximum(np.abs(want), scale)
    assert_within(got, want, rel * np.where(np.isfinite(size), size, 0.0), what)


def assert_logprobs(got: Any, want: Any) -> None:
    """The library promises 2e-6 * max(1, |logprob|) for any dtype of logits; so far every backend is 4 times better."""
    want = to_numpy(want)
    assert_within(got, want, 5e-7 * np.fmax(1.0, np.where(np.isfinite(want), np.abs(want), 1.0)), "logprob")


def assert_entropy(got: Any, want: Any, bar: float = 1e-6) -> None:
    want = to_numpy(want)
    assert_within(got, want, bar * np.fmax(1.0, np.where(np.isfinite(want), np.abs(want), 1.0)), "entropy")


def assert_logits_grad(got: torch.Tensor, want: np.ndarray, bar: float = 1e-6) -> None:
    """fp32: relative Frobenius error <= bar. bf16, fp16: 1 ulp of the rounded value plus 1e-6 of the row's largest.

    The library promises a bar of 2e-6, which only logits tens of nats apart come near.
    """
    value = to_numpy(got)
    assert value.shape == want.shape, f"gradient of shape {value.shape}, expected {want.shape}"
    assert np.isfinite(value).all(), "gradient must be finite"
    assert np.isfinite(want).all()
    if got.dtype in (torch.float32, torch.float64):
        bar = bar if got.dtype == torch.float32 else 1e-12
        size, error = np.linalg.norm(want), np.linalg.norm(value - want)
        assert error <= bar * size, f"gradient: relative error {error / max(size, 1e-300):.3g} > {bar:.3g}"
        return
    reference = rounded(want, got.dtype)
    row_largest = np.abs(want).max(axis=-1, keepdims=True) if want.size else np.zeros(want.shape)
    assert_within(value, reference, ulp(reference, got.dtype) + 1e-6 * row_largest, f"gradient ({got.dtype})")


INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"


def examples(number: int) -> int:
    """How many random inputs to try; fewer in Triton's interpreter, which is slow."""
    return number // 8 if INTERPRETER else number


def leaf(x: torch.Tensor) -> torch.Tensor:
    """A fresh leaf that wants a gradient, with x's values and strides."""
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal including the sign of zero and the payload of NaN."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    return a.detach().contiguous().view(-1).view(torch.uint8).equal(b.detach().contiguous().view(-1).view(torch.uint8))
