"""How every kernel is launched: its shape by the item size and the vocabulary, and one function that launches it.

Shapes are a function of the logits' dtype and V alone, so that a row gets the same bits in any batch; the number of
warps may differ between kernels and chips, for it changes no bit (see rows.py).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from ppo_kernels import reference
from ppo_kernels.strides import two_strides
from ppo_kernels.triton_kernels.arithmetic import LOG2E


class RowShape(NamedTuple):
    """How a row is cut up: splits of `blocks` blocks of `unroll` tiles of `lanes` chunks of 16 bytes."""

    lanes: int
    unroll: int
    blocks: int
    splits: int


MAX_LANES, MAX_UNROLL, MAX_BLOCKS = 256, 4, 4  # a split is 64 KiB at most


@functools.cache
def row_shape(vocab: int, itemsize: int) -> RowShape:
    """One split if it holds the row (32768 columns of 16 bits), otherwise as many full ones as it takes."""
    chunks = triton.cdiv(vocab * itemsize, 16)
    lanes = min(MAX_LANES, max(32, triton.next_power_of_2(triton.cdiv(chunks, MAX_UNROLL))))
    unroll = min(MAX_UNROLL, triton.next_power_of_2(triton.cdiv(chunks, lanes)))
    blocks = min(MAX_BLOCKS, triton.cdiv(chunks, lanes * unroll))
    return RowShape(lanes, unroll, blocks, triton.cdiv(chunks, lanes * unroll * blocks))


def one_visit_wins(vocab: int, itemsize: int) -> bool:
    """Whether row_fused beats row_stats, token_loss and row_grad in turn: while a row stays in a processor's own cache.

    A row of 32768 16-bit logits takes 64 KiB. Longer ones would be read again from L2 at best, by one program a
    processor, which leaves it idle between a row's two passes.
    """
    return row_shape(vocab, itemsize).splits == 1


def row_warps(shape: RowShape) -> int:
    """Warps of 32 threads per program: a lane is a thread."""
    return shape.lanes // 32


def grad_warps(block: int, itemsize: int) -> int:
    return max(1, min(8, block * itemsize // 2048))


GRAD_BLOCKS = 4  # per program


def grad_block(columns: int, itemsize: int) -> int:
    """Columns a block: 64 bytes a thread of 8 warps."""
    return min(16384 // itemsize, max(64, int(triton.next_power_of_2(columns))))


def _warps(wanted: int, device: torch.device) -> int:
    """Warps for `wanted` times 32 threads: AMD's data-centre chips have 64 in a warp."""
    return max(1, wanted // 2) if torch.version.hip and device.type == "cuda" else wanted


def run(
    kernel: Any, programs: int, args: Sequence[Any], *, num_warps: int, device: torch.device, **constants: Any
) -> None:
    """kernel[(programs,)](*args, **constants) on `device`; nothing at all for 0 programs.

    A product is fused with a sum only where a kernel says tl.fma, so that two kernels that share a function get the
    same bits from it.
    """
    if programs == 0:
        return
    guard = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with guard:
        kernel[(programs,)](*args, num_warps=_warps(num_warps, device), enable_fp_fusion=False, **constants)


def flat(x: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """x as the kernels read it: contiguous, of this dtype."""
    return None if x is None else x.to(dtype).contiguous()


def softcap_numbers(softcap: float) -> tuple[float, float, float] | None:
    """(k, the rest of k, 2 S) with k = 2 * log2(e) / S as fp32 (softcap.py); None without a softcap."""
    if softcap == math.inf:
        return None
    k = 2 * LOG2E.value / softcap
    high = float(np.float32(k))
    return high, k - high, 2 * softcap


class Rows:
    """Rows of logits (and of their gradient) as the kernels address them, and what a kernel needs to know of them.

    Row n of those that are scored is at (n // inner) * stride_outer + (n % inner) * stride_inner; with shift there is
    one more row in each outer one, which is not scored.
    """

    def __init__(
        self,
        logits: Tensor,
        tokens: Tensor,
        valid: Tensor | None,
        temperature: float,
        row_temperature: Tensor | None,
        softcap: float,
        vocab: int,
        shift: bool,
        grad: Tensor | None = None,
    ) -> None:
        self.logits, self.outer, self.stride_outer, self.stride_inner = two_strides(logits)
        self.columns, self.vocab, self.shift = logits.shape[-1], vocab, int(shift)
        self.inner = (logits.shape[-2] if logits.dim() > 1 else 1) - self.shift
        self.n = self.outer * self.inner  # scored rows
        self.all = self.outer * (self.inner + self.shift)
        self.tokens, self.valid = tokens.contiguous(), flat(valid, torch.bool)
        self.cap = softcap_numbers(softcap)
        temperatures = None if row_temperature is None else row_temperature.contiguous()
        self.scaling = (LOG2E.value / temperature, 1 / temperature, temperatures, self.cap)
        self.shape = row_shape(vocab, logits.element_size())
        self.aligned = self._multiples_of_16_bytes(self.logits.data_ptr(), self.stride_outer, self.stride_inner)
        self.grad_strides, self.congruent = (0, 0), False
        if grad is not None:
            self.grad_strides = two_strides(grad)[2:]
            outer, inner = self.grad_strides[0] - self.stride_outer, self.grad_strides[1] - self.stride_inner
            self.congruent = self._multiples_of_16_bytes(grad.data_ptr() - self.logits.data_ptr(), outer, inner)

    def _multiples_of_16_bytes(self, start: int, stride_outer: int, stride_inner: int) -> bool:
        """Whether start (bytes) + i * stride_outer + j * stride_inner (elements) is one for every row (i, j)."""
        strides = stride_outer * (self.outer > 1), stride_inner * (self.inner + self.shift > 1)
        return start % 16 == 0 and all(stride * self.logits.element_size() % 16 == 0 for stride in strides)

    def numbers(self) -> tuple[int, int, int, int]:
        """What kernels address the logits by."""
        return self.inner, self.shift, self.stride_outer, self.stride_inner

    def empty(self, n: int) -> Tensor:
        return torch.empty(n, dtype=torch.float32, device=self.logits.device)

    def outputs(self, want_entropy: bool) -> tuple[Tensor, ...]:
        """Room for log-prob, entropy, max, sum and mean of the scored rows."""
        return tuple(self.empty(self.n if wanted else 0) for wanted in (True, want_entropy, True, True, want_entropy))


def check_tokens(tokens: Tensor, valid: Tensor | None, vocab: int, shift: bool) -> None:
    """In the interpreter, on CPU tensors, a token outside the vocabulary is an error as on any CPU."""
    if tokens.device.type == "cpu":
        scored = tokens[..., 1:] if shift else tokens
        reference.check_tokens(scored.reshape(-1).to(torch.int64), valid, vocab)
