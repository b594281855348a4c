"""The operators: the one seam between the mathematics and the backends.

Every operator has a plain PyTorch kernel (reference.py) for any device, a fake kernel for torch.compile, and a faster
kernel where there is one: the native library on a CPU, Triton on a GPU. PPO_KERNELS_BACKEND=native|triton|reference,
read once here, overrides the choice. float64 always runs through the reference.

    row_stats   logits -> logprob, entropy, row max m and sum s                reads the vocabulary once
    row_grad    logits, m, s, H, dL/dlogprob, dL/dentropy -> dlogits           reads it once, writes it once
    row_fused   both, and the token loss between them, in one visit per row
    token_loss  log-probs -> loss, metrics, dL/dlogprob, dL/dentropy, dL/dvalues
    gae         rewards, values -> advantages, returns
    whiten      x -> (x - mean) / standard deviation
    scale_      gradient *= a number on the device

A trailing underscore: the gradient replaces the logits. All per-token tensors are flat [N], N being the number of
scored rows; with `shift`, row t of the last dimension scores token t + 1, by addressing. row_temperature [N], fp32 or
fp64, replaces temperature; where softcap is finite, softcap * tanh(x / softcap) replaces a logit x. To row_grad a token
outside [0, vocab_size) is in none of its columns, which are a part of the vocabulary. Autograd is in autograd.py, the
linear forms in linear.py.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_kernels import loss_terms, native, reference
from ppo_kernels.loss_terms import TokenInputs
from ppo_kernels.metrics import NAMES
from ppo_kernels.reference import accumulate_dtype


class RowOptions(NamedTuple):
    """How rows of logits are read. row_temperature [N] replaces temperature; an infinite softcap is none."""

    temperature: float
    row_temperature: Tensor | None
    softcap: float
    vocab_size: int
    shift: bool
    want_entropy: bool


TEMPERED = "float temperature, Tensor? row_temperature, float softcap, int vocab_size, bool shift"
ROW = f"Tensor tokens, Tensor? valid, {TEMPERED}"
COEFFICIENTS = (
    "Tensor logprobs, Tensor row_max, Tensor row_sum, Tensor? row_mean, Tensor grad_logprobs, Tensor? grad_entropy"
)
_TOKEN = (
    "Tensor? old_logprobs, Tensor advantages, Tensor? valid, Tensor weight, Tensor? ref_logprobs, "
    "Tensor? values, Tensor? old_values, Tensor? returns, Tensor? value_valid, Tensor? value_weight, float[] params"
)
_LOSS = "Tensor terms, Tensor metrics, Tensor grad_logprobs, Tensor grad_entropy, Tensor grad_values"
STATS = "Tensor logprobs, Tensor entropy, Tensor row_max, Tensor row_sum, Tensor row_mean"
_FUSED = f"Tensor tokens, {TEMPERED}, bool want_entropy, {_TOKEN}"

library = torch.library.Library("ppo_kernels", "DEF")
library.define(f"row_stats(Tensor logits, {ROW}, bool want_entropy) -> ({STATS})")
library.define(f"row_grad(Tensor logits, {ROW}, {COEFFICIENTS}) -> Tensor")
library.define(f"row_grad_(Tensor(a!) logits, {ROW}, {COEFFICIENTS}) -> ()")
library.define(f"token_loss(Tensor logprobs, Tensor? entropy, {_TOKEN}) -> ({_LOSS})")
library.define(f"row_fused(Tensor logits, {_FUSED}) -> (Tensor grad_logits, {STATS}, {_LOSS})")
library.define(f"row_fused_(Tensor(a!) logits, {_FUSED}) -> ({STATS}, {_LOSS})")
library.define(
    "gae(Tensor rewards, Tensor values, Tensor? valid, Tensor? bootstrap, Tensor? next_values, Tensor? terminated, "
    "Tensor? truncated, Tensor segments, float gamma, float lam, str mask_mode, Tensor? row_lam) "
    "-> (Tensor advantages, Tensor returns)"
)

library.define("whiten(Tensor x, Tensor? valid, bool shift_mean, bool unbiased, float eps, str eps_on) -> Tensor")
library.define("scale_(Tensor(a!) x, Tensor factor) -> ()")

row_stats = torch.ops.ppo_kernels.row_stats.default
row_grad = torch.ops.ppo_kernels.row_grad.default
row_grad_ = torch.ops.ppo_kernels.row_grad_.default
token_loss = torch.ops.ppo_kernels.token_loss.default
row_fused = torch.ops.ppo_kernels.row_fused.default
row_fused_ = torch.ops.ppo_kernels.row_fused_.default
gae = torch.ops.ppo_kernels.gae.default
whiten = torch.ops.ppo_kernels.whiten.default
scale_ = torch.ops.ppo_kernels.scale_.default


# ---- any device: plain PyTorch --------------------------------------------------------------------------------------


def _row_stats(logits: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *row, want_entropy = args
    logprobs, entropy, row_max, row_sum, row_mean = reference.row_stats(logits, *row)
    if not want_entropy:
        entropy, row_mean = entropy.new_empty(0), entropy.new_empty(0)
    return logprobs, entropy, row_max, row_sum, row_mean


def _row_grad_(logits: Tensor, *args: Any) -> None:
    logits.copy_(reference.row_grad(logits, *args))


def _token_loss(logprobs: Tensor, entropy: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    *inputs, params = args
    result: tuple[Tensor, ...] = loss_terms.token_loss(logprobs, entropy, TokenInputs(*inputs), params)[:5]
    return result


def _row_fused(logits: Tensor, *args: Any) -> tuple[Tensor, ...]:
    tokens, *options, want_entropy = args[:7]
    token_inputs = args[7:]
    row = (tokens, token_inputs[2], *options)
    logprobs, entropy, *stats = row_stats(logits, *row, want_entropy)
    loss = token_loss(logprobs, entropy if want_entropy else None, *token_inputs)
    grad_logprobs, grad_entropy = loss[2], loss[3] if want_entropy else None
    grad = row_grad(logits, *row, logprobs, *stats, grad_logprobs, grad_entropy)
    return grad, logprobs, entropy, *stats, *loss


def _row_fused_(logits: Tensor, *args: Any) -> tuple[Tensor, ...]:
    grad, *outputs = _row_fused(logits, *args)
    logits.copy_(grad)
    return tuple(outputs)


def _scale_(x: Tensor, factor: Tensor) -> None:
    x.mul_(factor)


_ANY_DEVICE: dict[str, Callable[..., Any]] = {
    "row_stats": _row_stats,
    "row_grad": reference.row_grad,
    "row_grad_": _row_grad_,
    "token_loss": _token_loss,
    "row_fused": _row_fused,
    "row_fused_": _row_fused_,
    "gae": reference.gae,
    "whiten": reference.whiten,
    "scale_": _scale_,
}
for _name, _kernel in _ANY_DEVICE.items():
    library.impl(_name, _kernel, "CompositeExplicitAutograd")


# ---- where there are faster ones ------------------------------------------------------------------------------------

FAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _native(name: str) -> Callable[..., Any]:
    general = _ANY_DEVICE[name]
    fast = getattr(native, name, general)

    def kernel(x: Tensor, *args: Any) -> Any:
        return fast(x, *args) if x.dtype in FAST_DTYPES else general(x, *args)

    return kernel


def _triton(name: str) -> Callable[..., Any]:
    """Triton is imported by the first call that needs it."""
    general = _ANY_DEVICE[name]

    def kernel(x: Tensor, *args: Any) -> Any:
        if x.dtype not in FAST_DTYPES:
            return general(x, *args)
        from ppo_kernels import triton_kernels

        if name.startswith("row") and x.shape[-1] > triton_kernels.MAX_VOCAB:
            return general(x, *args)
        return getattr(triton_kernels, name)(x, *args)

    return kernel


def _choose_cpu_backend() -> str:
    backend = os.environ.get("PPO_KERNELS_BACKEND", "")
    if backend == "":
        return "native" if native.available() else "reference"
    if backend == "native":
        native.require()
    elif backend == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError("PPO_KERNELS_BACKEND=triton runs on CPU tensors only with TRITON_INTERPRET=1")
    elif backend != "reference":
        raise ValueError(f"PPO_KERNELS_BACKEND must be native, triton or reference, got {backend!r}")
    return backend


def _choose_gpu_backend() -> str:
    if os.environ.get("PPO_KERNELS_BACKEND") == "reference":
        return "reference"
    return "triton" if importlib.util.find_spec("triton") else "reference"


CPU_BACKEND, GPU_BACKEND = _choose_cpu_backend(), _choose_gpu_backend()
_KERNELS: dict[str, Callable[[str], Callable[..., Any]]] = {"native": _native, "triton": _triton}
for _device, _backend in (("CPU", CPU_BACKEND), ("CUDA", GPU_BACKEND)):
    if _backend in _KERNELS:
        for _name in _ANY_DEVICE:
            library.impl(_name, _KERNELS[_backend](_name), _device)


# ---- torch.compile: shapes and dtypes -------------------------------------------------------------------------------


def fake_stats(logits: Tensor, tokens: Tensor, shift: bool, want_entropy: bool) -> tuple[Tensor, ...]:
    n = tokens.numel() // tokens.shape[-1] * (tokens.shape[-1] - 1) if shift else tokens.numel()
    dtype = accumulate_dtype(logits.dtype)
    extra = n if want_entropy else 0
    logprobs, entropy, row_max, row_sum, row_mean = (logits.new_empty(k, dtype=dtype) for k in (n, extra, n, n, extra))
    return logprobs, entropy, row_max, row_sum, row_mean


@torch.library.register_fake("ppo_kernels::row_stats", lib=library)
def _(logits: Tensor, tokens: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return fake_stats(logits, tokens, shift=args[5], want_entropy=args[6])


@torch.library.register_fake("ppo_kernels::row_grad", lib=library)
def _(logits: Tensor, *args: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake("ppo_kernels::row_grad_", lib=library)
def _(logits: Tensor, *args: Any) -> None:
    return None


@torch.library.register_fake("ppo_kernels::whiten", lib=library)
def _(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=accumulate_dtype(x.dtype))


@torch.library.register_fake("ppo_kernels::scale_", lib=library)
def _(x: Tensor, *args: Any) -> None:
    return None


@torch.library.register_fake("ppo_kernels::token_loss", lib=library)
def _fake_loss(logprobs: Tensor, entropy: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    values = args[5]
    terms, metrics = logprobs.new_empty(4), logprobs.new_empty(len(NAMES), dtype=torch.float32)
    grads = [torch.empty_like(logprobs if x is None else x) for x in (None, entropy, values)]
    return terms, metrics, *grads


@torch.library.register_fake("ppo_kernels::row_fused_", lib=library)
def _fake_fused_(logits: Tensor, tokens: Tensor, *args: Any) -> tuple[Tensor, ...]:
    _, _, _, _, shift, want_entropy, *token_inputs = args
    stats = fake_stats(logits, tokens, shift, want_entropy)
    return *stats, *_fake_loss(stats[0], stats[1] if want_entropy else None, *token_inputs)


@torch.library.register_fake("ppo_kernels::row_fused", lib=library)
def _(logits: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return logits.new_empty(logits.shape), *_fake_fused_(logits, *args)


@torch.library.register_fake("ppo_kernels::gae", lib=library)
def _(rewards: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(rewards.dtype)
    return rewards.new_empty(rewards.shape, dtype=dtype), rewards.new_empty(rewards.shape, dtype=dtype)
