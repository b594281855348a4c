"""The cases of gpu_cases.py as functions on a device: what runs, how it is reset, and the exact answer.

Checks: float64 on all rows for log-probs, entropy and loss, on a sample of rows for gradients of logits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from gpu_cases import LINEAR, Case
from torch import Tensor

from ppo_kernels import PPOLossConfig, fused_ppo_loss, gae, logprobs_from_logits, masked_whiten, ops, ppo_loss

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COEF, GAMMA, LAM = 0.01, 0.99, 0.95
SAMPLED_ROWS, SAMPLED_SEQUENCES = 48, 4


class Absent(Exception):
    """Something optional is not installed."""


def nothing() -> None:
    pass


class Work(NamedTuple):
    """`check` gets what `run` returned and gives the errors found: {"wrong": sentence} where one is too large."""

    run: Callable[[], Any]
    check: Callable[[Any], dict[str, Any]]
    ideal_bytes: float
    logits_bytes: int = 0
    reset: Callable[[], Any] = nothing


class Rows:
    """Random logits and everything per token, with the exact log-probs, entropies and loss in float64."""

    def __init__(self, case: Case, device: str) -> None:
        n, v = case.rows, case.columns
        random: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device}
        self.logits = torch.randn(n, v, dtype=DTYPES[case.dtype], **random).mul_(2).requires_grad_()
        self.tokens = torch.randint(v, (n,), **random)
        self.advantages = torch.randn(n, **random)
        self.mask = torch.rand(n, **random) >= case.masked
        self.valid = int(self.mask.sum())
        self.logprobs, self.entropy = self._exact_scores()
        self.old = (self.logprobs + 0.05 * torch.randn(n, **random)).float()  # next to no ratio is clipped
        self.upstream = torch.randn(n, **random), COEF * torch.randn(n, **random)
        self.sample = torch.linspace(0, n - 1, min(n, SAMPLED_ROWS), device=device).long()

    def _exact_scores(self) -> tuple[Tensor, Tensor]:
        chunk = max(1, (1 << 28) // self.logits.shape[1])
        logprobs, entropy = [], []
        for x, y in zip(self.logits.detach().split(chunk), self.tokens.split(chunk), strict=True):
            logp = torch.log_softmax(x.double(), -1)
            logprobs.append(logp.gather(-1, y[:, None])[:, 0])
            entropy.append(-(logp.exp() * logp).sum(-1))
        return torch.cat(logprobs).masked_fill(~self.mask, 0.0), torch.cat(entropy).masked_fill(~self.mask, 0.0)

    def exact_loss(self, coef: float) -> tuple[float, Tensor, Tensor]:
        """Loss, and its derivative by each log-prob and by each entropy."""
        lp = self.logprobs.clone().requires_grad_()
        ratio, advantages = (lp - self.old.double()).exp(), self.advantages.double()
        surrogate = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        loss = torch.where(self.mask, surrogate - coef * self.entropy, 0.0).sum() / max(self.valid, 1)
        (by_logprob,) = torch.autograd.grad(loss, lp)
        return loss.item(), by_logprob, torch.full_like(lp, -coef / max(self.valid, 1)).detach()

    def check_scores(self, logprobs: Tensor, entropy: Tensor | None, bar: float = 2e-6) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, got, want in (("logprob", logprobs, self.logprobs), ("entropy", entropy, self.entropy)):
            if got is not None:
                error = ((got.detach().double() - want).abs() / want.abs().clamp(min=1)).max().item()
                found[f"{name}_error"] = error
                if not error <= bar:
                    found["wrong"] = f"{name} off by {error:.2g}, expected at most {bar:.0e}"
        return found

    def check_gradient(
        self, got: Tensor, by_logprob: Tensor, by_entropy: Tensor | None, bar: float | None = None
    ) -> dict[str, Any]:
        """fp32: relative Frobenius error 2e-6; bf16: 1 unit in the last place. `bar`: another Frobenius error."""
        rows = self.sample
        x = self.logits.detach()[rows].double().requires_grad_()
        logp = torch.log_softmax(x, -1)
        loss = by_logprob[rows].double() * logp.gather(-1, self.tokens[rows][:, None])[:, 0]
        if by_entropy is not None:
            loss = loss - by_entropy[rows].double() * (logp.exp() * logp).sum(-1)
        (exact,) = torch.autograd.grad(torch.where(self.mask[rows], loss, 0.0).sum(), x)
        value = got.detach()[rows].double()
        relative = ((value - exact).norm() / exact.norm().clamp(min=1e-300)).item()
        right = relative <= (bar or 2e-6)
        if got.dtype == torch.bfloat16 and bar is None:
            rounded = exact.bfloat16().double()
            bound = rounded.abs() * 2.0**-7 + 1e-6 * exact.abs().amax(-1, keepdim=True)
            right = bool(((value - rounded).abs() <= bound).all())
        wrong = {} if right else {"wrong": f"gradient off by {relative:.2g} (relative Frobenius error)"}
        return {"gradient_error": relative} | wrong

    def check_loss(self, result: Any, coef: float, peer: bool = False) -> dict[str, Any]:
        """`result`: gradient, loss, log-probs, entropy, of which a peer has the first two and the bars of its dtype."""
        gradient, loss, logprobs, entropy = result
        exact, by_logprob, by_entropy = self.exact_loss(coef)
        found = {} if logprobs is None else self.check_scores(logprobs, entropy)
        found |= self.check_gradient(gradient, by_logprob, by_entropy if coef else None, bar=2e-2 if peer else None)
        found["loss_error"] = error = abs(loss.item() - exact)
        return found if error <= (1e-3 if peer else 1e-5) else found | {"wrong": f"loss off by {error:.2g}"}


@functools.lru_cache(maxsize=1)
def rows_of(rows: int, columns: int, dtype: str, masked: float, device: str) -> Rows:
    """Neighbours in the list of cases share their inputs."""
    return Rows(Case("", rows, columns, dtype, masked), device)


def prepare(case: Case, device: str) -> Work:
    if case.quantity in PER_TOKEN:
        return PER_TOKEN[case.quantity](case, device)
    if case.quantity in LINEAR:
        from gpu_linear import linear_work

        return linear_work(case, device)
    batch = rows_of(case.rows, case.columns, case.dtype, case.masked, device)
    if case.contender != "ours":
        from gpu_peers import peer_work

        return peer_work(case, batch)
    return row_grad_work(case, batch) if case.quantity.startswith("grad") else vocabulary_work(case, batch)


def traffic(case: Case, batch: Rows, reads: int, writes: int, per_token: int) -> float:
    """Bytes: valid rows are read, all rows are written, and every token has its few numbers."""
    row = case.columns * batch.logits.element_size()
    return (reads * batch.valid + writes * case.rows) * row + case.rows * per_token


def in_place(batch: Rows) -> tuple[Tensor, Callable[[], Any]]:
    """Logits that may be overwritten, and how to put them back."""
    logits = batch.logits.detach().clone()
    return logits.requires_grad_(), lambda: logits.detach().copy_(batch.logits.detach())


def vocabulary_work(case: Case, batch: Rows) -> Work:
    logits, reset = in_place(batch) if case.quantity == "fused_" else (batch.logits, nothing)
    coef = COEF if case.entropy else 0.0
    config = PPOLossConfig(entropy_coef=coef, return_entropy=case.entropy)

    def scores() -> tuple[Tensor, Tensor | None]:
        if case.entropy:
            return logprobs_from_logits(logits, batch.tokens, batch.mask, return_entropy=True)
        return logprobs_from_logits(logits, batch.tokens, batch.mask), None

    def stats() -> Any:
        with torch.no_grad():
            return scores()

    def scores_and_gradient() -> Any:
        logprobs, _ = scores()
        return torch.autograd.grad(logprobs, logits, batch.upstream[0])[0], logprobs.detach()

    def fused() -> Any:
        out = fused_ppo_loss(
            logits,
            batch.tokens,
            batch.old,
            batch.advantages,
            batch.mask,
            config=config,
            inplace_grad=case.quantity == "fused_",
        )
        return torch.autograd.grad(out.loss, logits)[0], out.loss.detach(), out.logprobs, out.entropy

    def split() -> Any:
        logprobs, entropy = scores()
        out = ppo_loss(logprobs, batch.old, batch.advantages, batch.mask, entropy=entropy, config=config)
        return torch.autograd.grad(out.loss, logits)[0], out.loss.detach(), out.logprobs, out.entropy

    size = logits.numel() * logits.element_size()
    scored = 8 + 1 + 4 + (4 if case.entropy else 0)  # token, mask; log-prob, entropy
    if case.quantity == "stats":
        return Work(stats, lambda got: batch.check_scores(*got), traffic(case, batch, 1, 0, scored), size)
    if case.quantity == "scores":

        def check(got: Any) -> dict[str, Any]:
            return batch.check_scores(got[1], None) | batch.check_gradient(got[0], batch.upstream[0], None)

        return Work(scores_and_gradient, check, traffic(case, batch, 2, 1, scored + 4), size)
    run, reads = (split, 2) if case.quantity == "split" else (fused, 1)
    ideal = traffic(case, batch, reads, 1, scored + 8)  # and old log-prob, advantage
    return Work(run, lambda got: batch.check_loss(got, coef), ideal, size, reset)


def row_grad_work(case: Case, batch: Rows) -> Work:
    logits, reset = in_place(batch) if case.quantity == "grad_" else (batch.logits, nothing)
    logits = logits.detach()
    row = (batch.tokens, batch.mask, 1.0, None, math.inf, case.columns, False)
    logprobs, _, *state = ops.row_stats(logits, *row, case.entropy)
    by_logprob, by_entropy = batch.upstream[0], batch.upstream[1] if case.entropy else None

    def run() -> Tensor:
        if case.quantity == "grad":
            return ops.row_grad(logits, *row, logprobs, *state, by_logprob, by_entropy)
        ops.row_grad_(logits, *row, logprobs, *state, by_logprob, by_entropy)
        return logits

    per_token = 8 + 1 + 4 * (6 if case.entropy else 4)  # token, mask; log-prob, max, sum, mean, both coefficients
    ideal = traffic(case, batch, 1, 1, per_token)
    size = logits.numel() * logits.element_size()
    return Work(run, lambda got: batch.check_gradient(got, by_logprob, by_entropy), ideal, size, reset)


def token_loss_work(case: Case, device: str) -> Work:
    logprobs, old, advantages, mask = _per_token(case, device)
    logprobs = (logprobs - 3).requires_grad_()
    old = logprobs.detach() + 0.05 * old
    config = PPOLossConfig(return_entropy=False)

    def run() -> Any:
        out = ppo_loss(logprobs, old, advantages, mask, config=config)
        return torch.autograd.grad(out.loss, logprobs)[0], out.loss.detach()

    def check(got: Any) -> dict[str, Any]:
        lp = logprobs.detach().double().requires_grad_()
        ratio = (lp - old.double()).exp()
        loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        loss = torch.where(mask, loss, 0.0).sum() / mask.sum()
        (exact,) = torch.autograd.grad(loss, lp)
        found = _largest_error(got[0], exact, 1e-5 * exact.abs().max().item())
        found["loss_error"] = error = abs(got[1] - loss).item()
        return found if error <= 1e-5 else found | {"wrong": f"loss off by {error:.2g}"}

    return Work(run, check, case.rows * (4 * 4 + 1))


def whiten_work(case: Case, device: str) -> Work:
    x, _, _, mask = _per_token(case, device)

    def check(got: Tensor) -> dict[str, Any]:
        valid = x.double()[mask]
        exact = torch.where(mask, (x.double() - valid.mean()) / (valid.var(correction=0) + 1e-8).sqrt(), 0.0)
        return _largest_error(got, exact, 2e-6)

    return Work(lambda: masked_whiten(x, mask), check, case.rows * (4 + 1 + 4))


def gae_work(case: Case, device: str) -> Work:
    """Unmasked without a mask; masked steps are skipped."""
    rewards, values, _, mask = _per_token(case, device)
    given = mask if case.masked else None

    def check(got: Any) -> dict[str, Any]:
        sequences = sorted({int(i) for i in torch.linspace(0, case.rows - 1, min(case.rows, SAMPLED_SEQUENCES))})
        found: dict[str, Any] = {}
        for i in sequences:
            r, v, m = (x[i].tolist() for x in (rewards, values, mask))
            exact, running, following = [0.0] * len(r), 0.0, 0.0
            for t in reversed(range(len(r))):
                if m[t]:
                    running = r[t] + GAMMA * following - v[t] + GAMMA * LAM * running
                    exact[t], following = running, v[t]
            found |= _largest_error(got.advantages[i], torch.tensor(exact, dtype=torch.float64, device=device), 1e-4)
        return found

    ideal = case.rows * case.columns * (4 * 4 + (1 if case.masked else 0))
    return Work(lambda: gae(rewards, values, given, gamma=GAMMA, lam=LAM), check, ideal)


def _per_token(case: Case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three random tensors and a mask."""
    random: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    shape = (case.rows, case.columns) if case.columns > 1 else (case.rows,)
    a, b, c = (torch.randn(shape, **random) for _ in range(3))
    return a, b, c, torch.rand(shape, **random) >= case.masked


def _largest_error(got: Tensor, exact: Tensor, bar: float) -> dict[str, Any]:
    error = (got.double() - exact).abs().max().item()
    return {"error_abs": error} | ({} if error <= bar else {"wrong": f"off by {error:.2g}, expected at most {bar:.1g}"})


PER_TOKEN: dict[str, Callable[[Case, str], Work]] = {
    "gae": gae_work,
    "token_loss": token_loss_work,
    "whiten": whiten_work,
}
