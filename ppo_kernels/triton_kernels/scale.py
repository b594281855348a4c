"""x *= factor, for a factor that only the device knows. When it is 1, as it nearly always is, x is left alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ppo_kernels.strides import in_place, two_strides
from ppo_kernels.triton_kernels import launch
from ppo_kernels.triton_kernels.arithmetic import rounded
from ppo_kernels.triton_kernels.row_math import offset_of

BLOCK, BLOCKS = 4096, 8
RUNTIME = ["inner", "stride_outer", "stride_inner", "parts"]


@triton.jit(do_not_specialize=RUNTIME)
def scale_kernel(
    x, factor, inner, stride_outer, stride_inner, parts, columns, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    by = tl.load(factor).to(tl.float32)
    if by != 1:
        pid = tl.program_id(0)
        row, part = pid // parts, pid % parts
        to = x + offset_of(row, inner, 0, stride_outer, stride_inner)
        start = part.to(tl.int64) * (BLOCKS * BLOCK) + tl.arange(0, BLOCK)
        for block in range(BLOCKS):
            at = start + block * BLOCK
            scaled = tl.load(to + at, mask=at < columns, other=0.0).to(tl.float32) * by
            tl.store(to + at, rounded(scaled, x.dtype.element_ty), mask=at < columns)


def scale_(x: Tensor, factor: Tensor) -> None:
    """The operator ppo_kernels::scale_."""
    in_place(_scale, x.view(-1) if x.is_contiguous() else x, factor)


def _scale(x: Tensor, _: Tensor, factor: Tensor) -> None:
    _, outer, stride_outer, stride_inner = two_strides(x)
    inner = x.shape[-2] if x.dim() > 1 else 1
    parts = triton.cdiv(x.shape[-1], BLOCK * BLOCKS)
    args = (x, factor, inner, stride_outer, stride_inner, parts, x.shape[-1])
    programs = outer * inner * parts
    launch.run(scale_kernel, programs, args, num_warps=8, device=x.device, BLOCK=BLOCK, BLOCKS=BLOCKS)
