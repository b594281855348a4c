"""Argument checks shared by the public functions. Every error is one sentence that names the argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ppo_kernels.pieces import Shard


def plain(name: str, x: Any) -> Tensor:
    """x itself, or the local tensor of a replicated DTensor; a sharded one is refused."""
    if type(x).__name__ == "DTensor":
        if not all(placement.is_replicate() for placement in x.placements):
            raise TypeError(f"{name} is a DTensor with placements {x.placements}, expected Replicate or a plain tensor")
        x = x.to_local()
    checked: Tensor = x
    return checked


def tensor(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    return plain(name, x)


def floating(name: str, x: object, like: Tensor | None = None, shape: Sequence[int] | None = None) -> Tensor:
    x = tensor(name, x)
    if not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")
    return matching(name, x, like, shape)


def matching(name: str, x: Tensor, like: Tensor | None, shape: Sequence[int] | None) -> Tensor:
    """Same device as `like`, exactly this shape: nothing broadcasts."""
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(x.shape)}, expected {list(shape)}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} is on {x.device}, expected {like.device} like the other inputs")
    return x


def eager_cpu(x: Tensor) -> bool:
    """Whether values may be looked at: nowhere else without a device synchronisation or a graph break."""
    return x.device.type == "cpu" and not traced(x)


def traced(x: Tensor) -> bool:
    """Whether there are no values: under torch.compile, or FakeTensorMode, whose results are fake even if x is not."""
    return torch.compiler.is_compiling() or type(x.new_empty(0)).__name__ == "FakeTensor"


def mask(name: str, x: object, like: Tensor, shape: Sequence[int]) -> Tensor | None:
    """A bool tensor from a mask of any dtype holding 0 and 1; None stays None (all valid)."""
    if x is None:
        return None
    x = matching(name, tensor(name, x), like, shape)
    if x.dtype == torch.bool:
        return x
    if x.is_complex():
        raise TypeError(f"{name} must be bool, integer or float 0/1, got {x.dtype}")
    if eager_cpu(x) and not bool(((x == 0) | (x == 1)).all()):
        raise ValueError(f"{name} must hold only 0 and 1; weights go into token_weights")
    return x != 0


def logits_and_tokens(
    logits: object, tokens: object, shift: bool, vocab_size: int | None, shard: Shard | None = None
) -> tuple[Tensor, Tensor, int]:
    """(logits, tokens, number of columns that exist, of all ranks' if the logits are a shard)."""
    logits = floating("logits", logits)
    if logits.dim() == 0 or (logits.shape[-1] == 0 and shard is None):
        raise ValueError(f"logits has shape {list(logits.shape)}, expected [..., V] with V >= 1")
    tokens = token_ids(tokens, logits, logits.shape[:-1], shift)
    width = logits.shape[-1] if shard is None else shard.all_columns
    return logits, tokens, existing_columns(vocab_size, width, "the logits' last axis")


def token_ids(tokens: object, like: Tensor, shape: Sequence[int], shift: bool) -> Tensor:
    tokens = tensor("tokens", tokens)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"tokens must be an integer tensor, got {tokens.dtype}")
    matching("tokens", tokens, like, shape)
    if shift and (tokens.dim() == 0 or tokens.shape[-1] == 0):
        raise ValueError(f"tokens has shape {list(tokens.shape)}, but shift=True needs a sequence of at least 1 token")
    return tokens


def existing_columns(vocab_size: int | None, width: int, what: str) -> int:
    """vocab_size, or all `width` columns."""
    columns = width if vocab_size is None else vocab_size
    if isinstance(columns, bool) or not isinstance(columns, (int, torch.SymInt)):
        raise TypeError(f"vocab_size must be an int or None, got {vocab_size!r}")
    if not 1 <= columns <= width:
        raise ValueError(f"vocab_size is {vocab_size}, expected 1 <= vocab_size <= {width}, {what}")
    return columns


def writable(logits: Tensor) -> None:
    """ValueError unless a gradient can be written over the logits: no element twice, the last axis dense."""
    extent, overlap = 1, False
    for stride, size in sorted((stride, size) for size, stride in zip(logits.shape, logits.stride(), strict=True)):
        if size > 1:
            overlap |= stride < extent
            extent += stride * (size - 1)
    if overlap or (logits.shape[-1] > 1 and logits.stride(-1) != 1):
        raise ValueError(
            f"logits has strides {logits.stride()}, expected a dense last axis and no overlap for inplace_grad"
        )


def number(name: str, x: object, low: float, high: float, rule: str) -> float:
    """A finite Python number with low <= x <= high; `rule` says so in words."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name} must be a Python number, got {type(x).__name__}")
    if not (low <= x <= high and abs(x) < float("inf")):
        raise ValueError(f"{name} is {x}, expected {rule}")
    return float(x)


def positive(name: str, x: object) -> float:
    return number(name, x, 5e-324, float("inf"), "a finite number > 0")


def non_negative(name: str, x: object) -> float:
    return number(name, x, 0.0, float("inf"), "a finite number >= 0")


def cu_seqlens(x: object, like: Tensor, length: int) -> Tensor:
    """int64 [B + 1], 0 = x[0] <= x[1] <= ... <= x[B] = length (values are checked on a CPU)."""
    x = matching("cu_seqlens", tensor("cu_seqlens", x), like, None)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {x.dtype}")
    if x.dim() != 1 or x.shape[0] < 1:
        raise ValueError(f"cu_seqlens has shape {list(x.shape)}, expected [B + 1]")
    if eager_cpu(x):
        first, last = int(x[0]), int(x[-1])
        if first != 0 or last != length or bool((x[1:] < x[:-1]).any()):
            raise ValueError(f"cu_seqlens must rise from 0 to {length}, the packed length, got {x.tolist()}")
    return x.to(torch.int64)


def group(process_group: object) -> ProcessGroup:
    import torch.distributed as dist

    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup, got {type(process_group).__name__}")
    return process_group


def summing(process_group: object) -> Callable[[Tensor], Tensor]:
    """A function that adds a tensor up over the ranks of the group."""
    import torch.distributed as dist

    group(process_group)

    def add(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=process_group)
        return x

    return add
