"""The linear forms among the cases of gpu_cases.py, and beside them their matrix products, eager PyTorch, and Liger.

Logits in 16 bits are rounded, by anyone: errors against float64 are compared with those of plain PyTorch in the same
dtype, for all log-probs, and for the gradients of some rows of hidden and of weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import baselines
import torch
from gpu_cases import Case
from gpu_work import DTYPES, SAMPLED_ROWS, Absent, Work
from torch import Tensor

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss, logprobs_from_hidden
from ppo_kernels.heads import product
from ppo_kernels.linear import GPU_CHUNK_ROWS

HIDDEN, DRY_HIDDEN, DRY_CHUNK_ROWS = 4096, 16, 5
CONFIG = PPOLossConfig(return_entropy=False)


class Rows(NamedTuple):
    """Log-probs of the tokens [N], of some columns [N, K], and of all columns in some rows [S, V]."""

    tokens: Tensor
    columns: Tensor
    sample: Tensor


class Answers(NamedTuple):
    """The loss, and its gradient by the sampled rows of hidden [S, H] and of weight [K, H]."""

    loss: Tensor
    hidden: Tensor
    weight: Tensor


class Batch:
    """hidden [N, H], weight [V, H], everything per token, and what float64 and plain PyTorch say of them."""

    def __init__(self, case: Case, device: str) -> None:
        n, v, self.dtype = case.rows, case.columns, DTYPES[case.dtype]
        h = HIDDEN if device == "cuda" else DRY_HIDDEN
        random: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device}
        self.hidden = torch.randn(n, h, dtype=self.dtype, **random).requires_grad_()
        self.weight = torch.randn(v, h, dtype=self.dtype, **random).mul_(2 * h**-0.5).requires_grad_()
        self.tokens = torch.randint(v, (n,), **random)
        self.advantages = torch.randn(n, **random)
        self.mask = torch.rand(n, **random) >= case.masked
        self.sample = torch.linspace(0, n - 1, min(n, SAMPLED_ROWS), device=device).long()
        anywhere = torch.linspace(0, v - 1, min(v, SAMPLED_ROWS), device=device).long()
        self.columns = torch.cat([anywhere, self.tokens[self.sample]])
        self.exact, self.plain = self._rows(torch.float64), self._rows(self.dtype)
        self.old = (self.exact.tokens + 0.02 * torch.randn(n, **random)).float()  # no ratio is clipped

    @torch.no_grad()
    def _rows(self, dtype: torch.dtype) -> Rows:
        wide = torch.promote_types(dtype, torch.float32)
        weight = self.weight.to(dtype)

        def logprobs(hidden: Tensor) -> Tensor:
            return torch.log_softmax((hidden.to(dtype) @ weight.T).to(wide), -1)

        chunk, parts = max(1, (1 << 27) // len(weight)), []
        for hidden, tokens in zip(self.hidden.split(chunk), self.tokens.split(chunk), strict=True):
            found = logprobs(hidden)
            parts.append((found.gather(-1, tokens[:, None])[:, 0], found[:, self.columns]))
        of_tokens, of_columns = (torch.cat(part) for part in zip(*parts, strict=True))
        return Rows(of_tokens, of_columns, logprobs(self.hidden[self.sample]))

    def answers(self, rows: Rows, dtype: torch.dtype) -> Answers:
        logprobs = rows.tokens.clone().requires_grad_()
        ratio, advantages = (logprobs - self.old).exp(), self.advantages.to(logprobs.dtype)
        surrogate = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        loss = torch.where(self.mask, surrogate, 0.0).sum() / self.mask.sum()
        (by_logprob,) = torch.autograd.grad(loss, logprobs)
        every = torch.arange(len(self.weight), device=self.columns.device)
        targets = self.tokens[:, None]
        in_sample = by_logprob[self.sample, None] * ((targets[self.sample] == every).float() - rows.sample.exp())
        in_columns = by_logprob[:, None] * ((targets == self.columns).float() - rows.columns.exp())
        hidden, weight = self.hidden.detach().to(dtype), self.weight.detach().to(dtype)
        return Answers(loss.detach(), in_sample.to(dtype) @ weight, in_columns.to(dtype).T @ hidden)

    def compare(self, name: str, got: Tensor, exact: Tensor, plain: Tensor) -> dict[str, Any]:
        error, allowed = _relative(got, exact), 1.25 * _relative(plain, exact) + 1e-6
        found: dict[str, Any] = {f"{name}_error": error, f"{name}_error_allowed": allowed}
        wrong = f"{name} off by {error:.2g}, expected at most {allowed:.2g} (relative Frobenius error)"
        return found if error <= allowed else found | {"wrong": wrong}

    def check_scores(self, logprobs: Tensor) -> dict[str, Any]:
        exact, plain = (rows.tokens[self.mask] for rows in (self.exact, self.plain))
        return self.compare("logprob", logprobs.detach()[self.mask], exact, plain)

    def check_loss(self, loss: Tensor, logprobs: Tensor, by_hidden: Tensor, by_weight: Tensor) -> dict[str, Any]:
        exact, plain = self.answers(self.exact, torch.float64), self.answers(self.plain, self.dtype)
        found = self.check_scores(logprobs)
        found |= self.compare("hidden_gradient", by_hidden[self.sample], exact.hidden, plain.hidden)
        found |= self.compare("weight_gradient", by_weight[self.columns], exact.weight, plain.weight)
        found["loss_error"] = error = abs(loss.item() - exact.loss.item())
        return found if error <= 1e-3 else found | {"wrong": f"loss off by {error:.2g}"}


def _relative(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-300))


@functools.lru_cache(maxsize=1)
def batch_of(rows: int, columns: int, dtype: str, masked: float, device: str) -> Batch:
    return Batch(Case("", rows, columns, dtype, masked), device)


def linear_work(case: Case, device: str) -> Work:
    batch = batch_of(case.rows, case.columns, case.dtype, case.masked, device)
    valid = int(batch.mask.sum())
    contender = SCORES if case.quantity == "linear_scores" else LOSSES
    run = contender[case.contender](case, batch, valid)
    chunk_rows = GPU_CHUNK_ROWS if device == "cuda" else DRY_CHUNK_ROWS
    inputs = batch.weight.nbytes + valid * batch.hidden[0].nbytes
    training = case.quantity != "linear_scores"
    sizes = {
        "flops": 2.0 * (3 if training else 1) * valid * batch.weight.numel(),
        "gradient_bytes": batch.weight.nbytes + batch.hidden.nbytes if training else 0,
        "chunk_and_fp32_bytes": chunk_rows * case.columns * batch.dtype.itemsize + 4 * batch.weight.numel(),
    }

    def check(got: Any) -> dict[str, Any]:
        if case.contender in UNCHECKED:
            return sizes | {"checked": UNCHECKED[case.contender]}
        return sizes | (batch.check_loss(*got) if training else batch.check_scores(got))

    ideal = (2 if training else 1) * inputs + case.rows * 4
    return Work(run, check, ideal, case.rows * case.columns * batch.dtype.itemsize)


def _given(case: Case, batch: Batch, valid: int) -> dict[str, Any]:
    return {"mask": batch.mask, "valid_rows": valid} if case.masked else {}


def our_loss(case: Case, batch: Batch, valid: int) -> Callable[[], Any]:
    head = (batch.hidden, batch.weight)
    options = _given(case, batch, valid) | {"memory": "low" if case.quantity == "linear_low" else "fast"}

    def run() -> Any:
        out = fused_linear_ppo_loss(*head, batch.tokens, batch.old, batch.advantages, config=CONFIG, **options)
        return out.loss.detach(), out.logprobs, *torch.autograd.grad(out.loss, head)

    return run


def our_scores(case: Case, batch: Batch, valid: int) -> Callable[[], Any]:
    @torch.no_grad()
    def run() -> Any:
        return logprobs_from_hidden(batch.hidden, batch.weight, batch.tokens, **_given(case, batch, valid))

    return run


def three_products(case: Case, batch: Batch, valid: int) -> Callable[[], Any]:
    """Of the rows that count, in chunks: their logits; the gradient of hidden, and that of weight added up in fp32."""
    hidden, weight = batch.hidden.detach()[batch.mask], batch.weight.detach()
    chunk = GPU_CHUNK_ROWS if hidden.is_cuda else DRY_CHUNK_ROWS

    def run() -> Any:
        workspace = hidden.new_empty(min(chunk, valid), len(weight))
        by_hidden, by_weight = torch.empty_like(hidden), torch.empty_like(weight, dtype=torch.float32)
        for first in range(0, valid, chunk):
            h, out = hidden[first : first + chunk], by_hidden[first : first + chunk]
            logits = workspace[: len(h)]
            torch.mm(h, weight.T, out=logits)
            torch.mm(logits, weight, out=out)
            product(by_weight, logits.T, h, add=first > 0)
        return by_hidden, by_weight

    return run


def one_product(case: Case, batch: Batch, valid: int) -> Callable[[], Any]:
    hidden, weight = batch.hidden.detach()[batch.mask], batch.weight.detach()
    chunk = GPU_CHUNK_ROWS if hidden.is_cuda else DRY_CHUNK_ROWS

    def run() -> Any:
        workspace = hidden.new_empty(min(chunk, valid), len(weight))
        for h in hidden.split(chunk):
            torch.mm(h, weight.T, out=workspace[: len(h)])

    return run


def eager(case: Case, batch: Batch, valid: int) -> Callable[[], Any]:
    """As trainers write it, with logits [N, V] and an fp32 softmax."""

    def run() -> Any:
        logits = batch.hidden @ batch.weight.T
        logprobs, _ = baselines.logprobs_and_entropy(logits, batch.tokens, False)
        ratio = (logprobs - batch.old).exp()
        surrogate = torch.max(-batch.advantages * ratio, -batch.advantages * ratio.clamp(0.8, 1.2))
        loss = (surrogate * batch.mask).sum() / batch.mask.sum()
        return loss.detach(), logprobs.detach(), *torch.autograd.grad(loss, (batch.hidden, batch.weight))

    return run


def liger(case: Case, batch: Batch, valid: int) -> Callable[[], Any]:
    """Its inputs are sequences, here 8, with an advantage for each."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    except ImportError as error:
        raise Absent(f"liger_kernel: {error}") from None
    on_cuda = batch.hidden.is_cuda  # a dry run does not wait for a compiler
    loss_of = LigerFusedLinearGRPOLoss(beta=0.0, compiled=on_cuda, use_ref_model=False, chunk_size=1)
    shape = (8, case.rows // 8) if case.rows % 8 == 0 else (1, case.rows)
    tokens, mask, old = (x.view(shape) for x in (batch.tokens, batch.mask, batch.old))
    advantages = batch.advantages[: shape[0]]

    def run() -> Any:
        hidden = batch.hidden.view(*shape, -1)
        loss = loss_of(hidden, batch.weight, tokens, mask, advantages, old_per_token_logps=old)[0]
        return torch.autograd.grad(loss, (batch.hidden, batch.weight))

    return run


Contender = Callable[[Case, Batch, int], Callable[[], Any]]
LOSSES: dict[str, Contender] = {"ours": our_loss, "products": three_products, "eager": eager, "liger": liger}
SCORES: dict[str, Contender] = {"ours": our_scores, "products": one_product}
UNCHECKED = {"products": "no: products alone", "liger": "no: another loss"}
