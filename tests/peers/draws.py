"""Random batches, and comparison at a bar."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NAN, INF = float("nan"), float("inf")
BATCH, LENGTH, VOCAB, HIDDEN = 6, 9, 37, 16

# The bar of two float32 computations, as all bars here ten times what was measured with any instruction set. The worst
# is the weight of VESPO, the exponential of a sum over tokens. A wrong formula shows in float64 too, or is off by 1e-3.
FP32 = 1e-4


class Draw(NamedTuple):
    """Per token [B, T]; logprobs is a leaf with gradient."""

    logprobs: Tensor
    old: Tensor
    ref: Tensor
    rollout: Tensor
    advantages: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor


def draw(dtype: torch.dtype = torch.float32, spread: float = 0.5, shape: tuple[int, int] = (BATCH, LENGTH)) -> Draw:
    """log ratios with this standard deviation: far enough for every clip; some are 0, and so are some advantages."""

    def near(x: Tensor, deviation: float) -> Tensor:
        return x + deviation * torch.randn(shape, dtype=dtype) * (torch.rand(shape) > 0.1)

    logprobs = -3 * torch.rand(shape, dtype=dtype)
    advantages = torch.randn(shape, dtype=dtype) * (torch.rand(shape) > 0.1)
    values = torch.randn(shape, dtype=dtype)
    return Draw(
        logprobs=logprobs.requires_grad_(),
        old=near(logprobs.detach(), spread),
        ref=near(logprobs.detach(), 1.0),
        rollout=near(logprobs.detach(), 0.7),
        advantages=advantages,
        values=values.requires_grad_(),
        old_values=near(values.detach(), 0.5),
        returns=near(values.detach(), 1.0),
    )


MASKS = ("all", "lengths", "holes", "one", "lengths_int")


def mask(kind: str, shape: tuple[int, int] = (BATCH, LENGTH)) -> Tensor:
    """all; lengths: of which one is 0 and one is full; holes: of an episode of several turns; one: a single token."""
    if kind == "all":
        return torch.ones(shape, dtype=torch.int64)
    lengths = torch.randint(1, shape[1], shape[:1])
    lengths[0], lengths[1] = 0, shape[1]
    prefix = torch.arange(shape[1]) < lengths[:, None]
    if kind == "holes":
        return prefix & (torch.rand(shape) > 0.3)
    if kind == "one":
        return (torch.arange(shape[0] * shape[1]) == shape[1] + 1).view(shape)
    return prefix.long() if kind == "lengths_int" else prefix


def close(
    got: Tensor | float | list[float], want: Tensor | float | list[float], rel: float = FP32, what: str = ""
) -> None:
    """|got - want| <= rel * the largest of want, and at least of 1. Infinities and NaN must sit in the same places."""
    got, want = (torch.as_tensor(x).detach().double() for x in (got, want))
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, expected {list(want.shape)}"
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite), f"{what}: got {got}, expected {want}"
    scale = max(1.0, float(torch.where(finite, want, 0.0).abs().max())) if want.numel() else 1.0
    error = float(torch.where(finite, got - want, 0.0).abs().max()) if want.numel() else 0.0
    assert error <= rel * scale, f"{what}: error {error:.3g} > {rel * scale:.3g}: got {got}, expected {want}"


def close_grads(ours: Tensor, theirs: Tensor, leaf: Tensor, rel: float = FP32) -> None:
    """Same value and same gradient; a gradient's error counts against its largest element."""
    close(ours, theirs, rel, "loss")
    upstream = torch.ones_like(theirs)
    want = torch.autograd.grad(theirs, leaf, upstream, retain_graph=True)[0]
    got = torch.autograd.grad(ours, leaf, upstream.to(ours.dtype), retain_graph=True)[0]
    scale = float(want.abs().max().clamp(min=1e-30))
    close(got / scale, want / scale, rel, "gradient")
