"""The matrix products of a language-model head, and the gradients they add up to."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_kernels.pieces import Shard
from ppo_kernels.reference import accumulate_dtype

CPU_FP16 = ("_is_amx_fp16_supported",)
CPU_COLUMNS = 4096  # of a product with the weight: with all of them at once it is slower
CPU_CAST_BYTES, GPU_CAST_BYTES = 8 * 2**20, 256 * 2**20  # of the part of a weight that is cast at a time


def products_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What products of inputs of this dtype are computed in. On a CPU without instructions for 16 bits, fp32: many
    times faster, and more precise."""
    if device.type != "cpu" or dtype.itemsize != 2:
        return dtype
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported") if dtype == torch.bfloat16 else CPU_FP16
    there = (getattr(torch.cpu, name, None) for name in names)
    fast = torch.backends.mkldnn.is_available() and any(supported is not None and supported() for supported in there)
    return dtype if fast else torch.float32


class Head:
    """weight [V, H] and bias [V], of which the first `columns` exist; rounded to one dtype, multiplied in `dtype`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, columns: int, rounded: torch.dtype) -> None:
        self.weight, self.bias = weight[:columns], None if bias is None else bias[:columns]
        self.columns, self.rounded, self.dtype = columns, rounded, products_dtype(rounded, weight.device)
        on_cpu = weight.device.type == "cpu"
        self.step, self.buffer = max(1, columns), None
        if not weight.dtype == rounded == self.dtype:
            row_bytes = max(1, weight.shape[1]) * self.dtype.itemsize
            self.step = max(1, (CPU_CAST_BYTES if on_cpu else GPU_CAST_BYTES) // row_bytes)
            self.buffer = weight.new_empty(min(self.step, columns), weight.shape[1], dtype=self.dtype)
        self.logits_step = min(self.step, CPU_COLUMNS) if on_cpu else self.step

    def cast(self, x: Tensor) -> Tensor:
        return x.to(self.rounded).to(self.dtype)

    def _parts(self, start: int, count: int, step: int) -> Iterator[tuple[slice, Tensor]]:
        """Parts of the columns [start, start + count), as counted from `start`, and their weights, which hold until the
        next part."""
        for first in range(0, count, step):
            part = slice(first, min(first + step, count))
            weight = self.weight[start + part.start : start + part.stop]
            if self.buffer is not None:
                rounded = weight if self.dtype == self.rounded else weight.to(self.rounded)
                weight = self.buffer[: len(weight)].copy_(rounded)
            yield part, weight

    def logits(self, hidden: Tensor, out: Tensor, start: int = 0) -> None:
        """Fills out [C, c] with columns [start, start + c)."""
        for part, weight in self._parts(start, out.shape[1], self.logits_step):
            if self.bias is None:
                torch.mm(hidden, weight.T, out=out[:, part])
            else:
                bias = self.cast(self.bias[start + part.start : start + part.stop])
                torch.addmm(bias, hidden, weight.T, out=out[:, part])

    def hidden_grad(self, grad_logits: Tensor, start: int) -> Tensor:
        """[C, H] from the gradient of columns [start, start + c); sums of parts are in fp32."""
        columns, shape = grad_logits.shape[1], (len(grad_logits), self.weight.shape[1])
        if columns == 0:
            return grad_logits.new_zeros(shape)
        total = grad_logits.new_empty(shape, dtype=accumulate_dtype(self.dtype) if columns > self.step else self.dtype)
        for part, weight in self._parts(start, columns, self.step):
            product(total, grad_logits[:, part], weight, add=part.start > 0)
        return total


class Grads:
    """Gradients of hidden, weight and bias; each is None unless `needs` says so.

    They come by slices of `width` columns, and of each slice by `chunks` of rows. The gradient of a 16-bit weight is
    summed in fp32, a slice at a time, unless one chunk is all there is.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        needs: Sequence[bool],
        shard: Shard | None,
        width: int,
        chunks: int,
    ) -> None:
        self.head, self.shard = head, shard
        self.dtypes = (hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype)
        self.one_slice = width >= head.columns
        wide = accumulate_dtype(head.dtype)
        self.hidden = self.weight = self.slice = self.bias = None
        self.columns = slice(0, 0)  # those that were added last
        if needs[0]:
            dtype = hidden.dtype if shard is None and self.one_slice else wide
            self.hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        if needs[1]:
            dtype = wide if self.one_slice and chunks > 1 else weight.dtype
            self.weight = torch.empty(weight.shape, dtype=dtype, device=weight.device)
            self.weight[head.columns :] = 0
            if dtype != wide and chunks > 1:
                self.slice = torch.empty(width, weight.shape[1], dtype=wide, device=weight.device)
        if needs[2]:
            self.bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device)

    def add(self, hidden: Tensor, grad_logits: Tensor, rows: Any, start: int = 0) -> None:
        """hidden [C, H], the gradient of columns [start, start + c) of their logits, and which rows of all they are."""
        columns = slice(start, start + grad_logits.shape[1])
        another_slice = columns != self.columns
        if self.hidden is not None:
            flat = self.hidden.view(-1, self.hidden.shape[-1])
            part = self.head.hidden_grad(grad_logits, start).to(flat.dtype)
            flat[rows] = part if self.one_slice else flat[rows] + part
        if self.weight is not None:
            if another_slice:
                self._store_slice()
            total = self.weight[columns] if self.slice is None else self.slice[: grad_logits.shape[1]]
            product(total, grad_logits.T, hidden, add=not another_slice)
        if self.bias is not None:
            self.bias[columns] += grad_logits.sum(0, dtype=self.bias.dtype)
        self.columns = columns

    def _store_slice(self) -> None:
        if self.weight is not None and self.slice is not None:
            self.weight[self.columns] = self.slice[: self.columns.stop - self.columns.start].to(self.weight.dtype)

    def finished(self) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden, weight, bias), empty where not needed."""
        self._store_slice()
        if self.weight is not None and self.columns.stop == 0:
            self.weight.zero_()
        if self.hidden is not None and self.shard is not None and self.shard.sum_hidden_grad:
            import torch.distributed as dist

            dist.all_reduce(self.hidden, group=self.shard.group)
        hidden, weight, bias = (
            self.head.weight.new_empty(0, dtype=dtype) if x is None else x.to(dtype)
            for x, dtype in zip((self.hidden, self.weight, self.bias), self.dtypes, strict=True)
        )
        return hidden, weight, bias


def product(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """out = a @ b, or out += a @ b, summed and kept in out's dtype."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
        return
    wide = out.dtype == torch.float32 and gives_fp32("mm", a.dtype, a.device)
    if wide and not add:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif wide and gives_fp32("addmm", a.dtype, a.device):
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        step = max(1, (CPU_CAST_BYTES if a.device.type == "cpu" else GPU_CAST_BYTES) // (4 * max(1, b.shape[1])))
        for first in range(0, len(out), step):
            part, rows = out[first : first + step], a[first : first + step]
            result = torch.mm(rows, b, out_dtype=out.dtype) if wide else torch.mm(rows, b)
            part.add_(result) if add else part.copy_(result)


@functools.cache
def gives_fp32(name: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch.mm or torch.addmm takes 16-bit matrices and an fp32 sum: on some devices, from some release on."""
    x = torch.ones(1, 1, dtype=dtype, device=device)
    try:
        if name == "mm":
            torch.mm(x, x, out_dtype=torch.float32)
        else:
            torch.addmm(x.float(), x, x, out_dtype=torch.float32)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return False
    return True
