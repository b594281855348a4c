"""The CPU kernels: a ctypes binding of csrc/, which is built once per instruction-set level (setup.py).

The best level this CPU runs is loaded; PPO_KERNELS_ISA=v2|v3|v4|neon|generic forces one. Threads are PyTorch's OpenMP
pool, as many as torch.get_num_threads(). The structures below mirror those in csrc/kernels.cpp, token_loss.h and gae.h.
"""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Sequence
from ctypes import Structure, byref, c_char_p, c_double, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_kernels.config import LossParams
from ppo_kernels.metrics import NAMES
from ppo_kernels.reference import raise_bad_token
from ppo_kernels.strides import in_place, two_strides

ABI_VERSION = 6
LEVELS = ("v4", "v3", "v2", "neon", "generic")  # best first; not all are built on one machine
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MASK_MODES = {"skip": 0, "zero": 1, "dense": 2}


class _Rows(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("logits", "grad", "tokens", "valid")),
        *((name, c_int64) for name in ("dtype", "outer", "inner", "shift", "stride_outer", "stride_inner")),
        *((name, c_int64) for name in ("grad_stride_outer", "grad_stride_inner", "columns", "vocab")),
        ("temperature", c_double),
        ("temperatures", c_void_p),
        ("softcap", c_double),
    ]


class _RowOutputs(Structure):
    _fields_ = [(name, c_void_p) for name in ("logprobs", "entropy", "max", "sum", "mean")]


class _RowInputs(Structure):
    _fields_ = [(name, c_void_p) for name in ("logprobs", "max", "sum", "mean", "grad_logprobs", "grad_entropy")]


_TOKEN_INPUTS = ("old_logprobs", "advantages", "valid", "weight", "ref_logprobs")
_VALUE_INPUTS = ("values", "old_values", "returns", "value_valid", "value_weight")


class _Tokens(Structure):
    _fields_ = [
        ("n", c_int64),
        *((name, c_void_p) for name in _TOKEN_INPUTS + _VALUE_INPUTS),
        ("params", c_float * len(LossParams._fields)),
        *((name, c_void_p) for name in ("grad_logprobs", "grad_entropy", "grad_values")),
    ]


class _Gae(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("rewards", "values", "valid", "bootstrap", "next_values", "terminated")),
        *((name, c_void_p) for name in ("truncated", "segments")),
        ("sequences", c_int64),
        ("gamma", c_double),
        ("lam", c_double),
        ("row_lam", c_void_p),
        ("mask_mode", c_int64),
        ("advantages", c_void_p),
        ("returns", c_void_p),
    ]


# ---- loading --------------------------------------------------------------------------------------------------------


def _open(level: str) -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(__file__).with_name(f"_native_{level}.so")))
    if library.ppk_abi_version() != ABI_VERSION:
        raise OSError(f"_native_{level}.so is of another version; rebuild it with: pip install -e .")
    library.ppk_level.restype = c_char_p
    library.ppk_first_bad_token.restype = c_int64
    return library


def built_levels() -> list[str]:
    """Levels with a library beside this file, best first."""
    return [level for level in LEVELS if Path(__file__).with_name(f"_native_{level}.so").exists()]


@functools.cache
def runnable_levels() -> list[str]:
    """Built levels that this CPU runs, best first. The lowest built level, which runs everywhere, is asked."""
    built = built_levels()
    if not built:
        return []
    lowest = _open(built[-1])
    return [level for level in built if lowest.ppk_cpu_supports(level.encode())]


@functools.cache
def library() -> ctypes.CDLL:
    """The native library; RuntimeError that says why when there is none."""
    wanted = os.environ.get("PPO_KERNELS_ISA", "")
    if wanted and wanted not in LEVELS:
        raise ValueError(f"PPO_KERNELS_ISA must be one of {', '.join(LEVELS)}, got {wanted!r}")
    levels = runnable_levels()
    if wanted and wanted not in levels:
        raise RuntimeError(
            f"PPO_KERNELS_ISA={wanted} cannot run here; built and runnable: {', '.join(levels) or 'none'}"
        )
    if not levels:
        raise RuntimeError("the native library is not built for this CPU; a C++ compiler and pip install -e . build it")
    return _open(wanted or levels[0])


def level() -> str:
    """The instruction-set level in use."""
    name: bytes = library().ppk_level()
    return name.decode()


def require() -> None:
    """Raises unless the native library can be used."""
    library()


def available() -> bool:
    """Whether the native library can be used; warns once when it cannot. A forced level that cannot run is an error."""
    if os.environ.get("PPO_KERNELS_ISA"):
        return bool(library())
    try:
        library()
    except (RuntimeError, OSError) as why:
        warnings.warn(f"ppo_kernels runs on plain PyTorch, slowly: {why}", RuntimeWarning, stacklevel=2)
        return False
    return True


# ---- operators ------------------------------------------------------------------------------------------------------


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _flat(x: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    return None if x is None else x.to(dtype).contiguous()


class _Call:
    """One call's view of rows of logits; keeps every tensor alive that the structure points to."""

    def __init__(
        self,
        logits: Tensor,
        tokens: Tensor,
        valid: Tensor | None,
        options: Sequence[Any],
        grad: Tensor | None = None,
    ) -> None:
        temperature, row_temperature, softcap, vocab_size, shift = options
        logits, outer, stride_outer, stride_inner = two_strides(logits)
        inner = (logits.shape[-2] if logits.dim() > 1 else 1) - shift
        tokens, valid = tokens.to(torch.int64).contiguous(), _flat(valid, torch.bool)
        row_temperature = _flat(row_temperature, torch.float64)
        grad_strides = (0, 0) if grad is None else two_strides(grad)[2:]
        self.n = outer * inner
        self.keep = (logits, tokens, valid, grad, row_temperature)
        self.struct = _Rows(
            *(_pointer(x) for x in (logits, grad, tokens, valid)),
            *(DTYPES[logits.dtype], outer, inner, int(shift), stride_outer, stride_inner),
            *(*grad_strides, logits.shape[-1], vocab_size),
            *(temperature, _pointer(row_temperature), softcap),
        )

    def check_tokens(self) -> None:
        bad = library().ppk_first_bad_token(byref(self.struct))
        if bad >= 0:
            tokens, shift = self.keep[1], self.struct.shift
            raise_bad_token((tokens[..., 1:] if shift else tokens).reshape(-1), bad, self.struct.vocab)

    def outputs(self, like: Tensor, want_entropy: bool) -> tuple[list[Tensor], _RowOutputs]:
        extra = self.n if want_entropy else 0
        sizes = (self.n, extra, self.n, self.n, extra)
        out = [torch.empty(size, dtype=torch.float32, device=like.device) for size in sizes]
        return out, _RowOutputs(*(_pointer(x) if x.numel() else None for x in out))


def row_stats(
    logits: Tensor,
    tokens: Tensor,
    valid: Tensor | None,
    temperature: float,
    row_temperature: Tensor | None,
    softcap: float,
    vocab_size: int,
    shift: bool,
    want_entropy: bool,
) -> tuple[Tensor, ...]:
    """See ops.py; the same holds for all functions below."""
    call = _Call(logits, tokens, valid, (temperature, row_temperature, softcap, vocab_size, shift))
    call.check_tokens()
    out, pointers = call.outputs(logits, want_entropy)
    library().ppk_row_stats(byref(call.struct), byref(pointers), torch.get_num_threads())
    return tuple(out)


def row_grad(logits: Tensor, *args: Any) -> Tensor:
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _row_grad_into(grad, logits, *args)
    return grad


def row_grad_(logits: Tensor, *args: Any) -> None:
    in_place(_row_grad_into, logits, *args)


def _row_grad_into(grad: Tensor, logits: Tensor, tokens: Tensor, valid: Tensor | None, *args: Any) -> None:
    options, coefficients = args[:5], args[5:]
    call = _Call(logits, tokens, valid, options, grad)
    if call.n == 0:  # with shift there may be rows all the same, none of which scores anything
        grad.zero_()
    flat = [_flat(x) for x in coefficients]
    library().ppk_row_grad(byref(call.struct), byref(_RowInputs(*map(_pointer, flat))), torch.get_num_threads())


def _tokens(n: int, like: Tensor, args: tuple[Any, ...]) -> tuple[_Tokens, list[Tensor], list[Tensor | None]]:
    """The structure, the gradients it fills, and the inputs to keep alive."""
    *inputs, params = args
    inputs = [_flat(x, torch.bool if i in (2, 8) else torch.float32) for i, x in enumerate(inputs)]
    values = inputs[5]
    grads = [torch.empty(n, dtype=torch.float32, device=like.device) for _ in range(3 if values is not None else 2)]
    struct = _Tokens(n, *map(_pointer, inputs), (c_float * len(LossParams._fields))(*params), *map(_pointer, grads))
    if values is None:
        grads.append(torch.zeros(n, dtype=torch.float32, device=like.device))
    return struct, grads, inputs


def _loss_outputs() -> tuple[Tensor, Tensor]:
    return torch.empty(4), torch.empty(len(NAMES))


def token_loss(logprobs: Tensor, entropy: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    logprobs, entropy_ = logprobs.contiguous(), _flat(entropy)
    struct, grads, _keep = _tokens(logprobs.numel(), logprobs, args)
    if entropy is None:
        grads[1].zero_()
    terms, metrics = _loss_outputs()
    pointers = map(_pointer, (logprobs, entropy_, terms, metrics))
    library().ppk_token_loss(byref(struct), *map(c_void_p, pointers), torch.get_num_threads())
    return terms, metrics, *grads


def row_fused(logits: Tensor, *args: Any) -> tuple[Tensor, ...]:
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return grad, *_row_fused_into(grad, logits, *args)


def row_fused_(logits: Tensor, *args: Any) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = in_place(_row_fused_into, logits, *args)
    return outputs


def _row_fused_into(grad: Tensor, logits: Tensor, tokens: Tensor, *args: Any) -> tuple[Tensor, ...]:
    options, want_entropy, token_inputs = args[:5], args[5], args[6:]
    call = _Call(logits, tokens, token_inputs[2], options, grad)
    call.check_tokens()
    if call.n == 0:
        grad.zero_()
    out, pointers = call.outputs(logits, want_entropy)
    struct, grads, _keep = _tokens(call.n, logits, token_inputs)
    terms, metrics = _loss_outputs()
    sums = map(c_void_p, map(_pointer, (terms, metrics)))
    library().ppk_row_fused(byref(call.struct), byref(struct), byref(pointers), *sums, torch.get_num_threads())
    return *out, terms, metrics, *grads


def gae(
    rewards: Tensor,
    values: Tensor,
    valid: Tensor | None,
    bootstrap: Tensor | None,
    next_values: Tensor | None,
    terminated: Tensor | None,
    truncated: Tensor | None,
    segments: Tensor,
    gamma: float,
    lam: float,
    mask_mode: str,
    row_lam: Tensor | None,
) -> tuple[Tensor, Tensor]:
    floats = [_flat(x) for x in (rewards, values, bootstrap, next_values)]
    flags = [_flat(x, torch.bool) for x in (valid, terminated, truncated)]
    segments = segments.to(torch.int64).contiguous()
    advantages, returns = (torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device) for _ in range(2))
    r, v, b, nv, m, term, trunc = map(_pointer, (*floats, *flags))
    struct = _Gae(r, v, m, b, nv, term, trunc, segments.data_ptr(), segments.numel() - 1, gamma, lam)
    row_lam = _flat(row_lam, torch.float64)
    struct.row_lam, struct.mask_mode = _pointer(row_lam), MASK_MODES[mask_mode]
    struct.advantages, struct.returns = advantages.data_ptr(), returns.data_ptr()
    library().ppk_gae(byref(struct), torch.get_num_threads())
    return advantages, returns
