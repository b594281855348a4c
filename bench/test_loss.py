"""Log-probs with entropy, and the PPO loss, forward and backward, against eager PyTorch, torch.compile and a plain
copy."""

from collections.abc import Callable
from typing import Any

import baselines
import pytest
import torch
from race import race

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits

SHAPES = [(n, v) for v in (32000, 50257, 151936) for n in (256, 2048)] + [(256, 8), (2048, 8), (65536, 8)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AGREEMENT = {"fp32": 1e-5, "bf16": 1e-2}  # relative Frobenius distance of the gradients

shapes = pytest.mark.parametrize(("rows", "vocab"), SHAPES, ids=[f"N{n}-V{v}" for n, v in SHAPES])
dtypes = pytest.mark.parametrize("dtype", DTYPES)
entropies = pytest.mark.parametrize("entropy", [False, True], ids=["plain", "entropy"])


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Every shape is compiled for itself: nothing is generalised from an earlier one."""
    torch._dynamo.reset()


class Batch:
    """One batch of logits whose gradient may replace them; `reset` puts them back."""

    def __init__(self, rows: int, vocab: int, dtype: torch.dtype, masked: float) -> None:
        generator = torch.Generator().manual_seed(0)
        self.saved = torch.randn(rows, vocab, generator=generator).mul_(2).to(dtype)
        self.logits = self.saved.clone().requires_grad_()
        self.copy = torch.empty_like(self.saved)
        self.tokens = torch.randint(vocab, (rows,), generator=generator)
        self.advantages = torch.randn(rows, generator=generator)
        self.mask = torch.rand(rows, generator=generator) >= masked
        noise = 0.1 * torch.randn(rows, generator=generator)
        self.old_logprobs = logprobs_from_logits(self.saved, self.tokens) + noise

    def reset(self) -> None:
        self.logits.grad = None
        with torch.no_grad():
            self.logits.copy_(self.saved)

    def gradient(self, contender: Callable[[], Any]) -> torch.Tensor:
        self.reset()
        contender()
        assert self.logits.grad is not None
        return self.logits.grad.float().clone()


def check_and_race(
    benchmark: Any, batch: Batch, dtype: str, contenders: dict[str, Callable[[], Any]], compiled: bool
) -> None:
    if not compiled:
        contenders = {name: f for name, f in contenders.items() if name != "compile"}
    ours, eager = batch.gradient(contenders["ours"]), batch.gradient(contenders["eager"])
    assert (ours - eager).norm() <= AGREEMENT[dtype] * eager.norm(), "the contenders do not compute the same gradient"
    del ours, eager
    race(benchmark, {"copy": lambda: batch.copy.copy_(batch.saved), **contenders}, batch.reset)


@shapes
@dtypes
@entropies
@pytest.mark.parametrize("masked", [0.0, 0.5], ids=["masked0", "masked50"])
def test_ppo_loss(
    benchmark: Any, rows: int, vocab: int, dtype: str, entropy: bool, masked: float, with_compile: bool
) -> None:
    batch = Batch(rows, vocab, DTYPES[dtype], masked)
    coef = 0.01 if entropy else 0.0
    config = PPOLossConfig(entropy_coef=coef, return_entropy=entropy)
    given = (batch.tokens, batch.old_logprobs, batch.advantages, batch.mask)
    compiled = torch.compile(baselines.ppo_loss, dynamic=False)
    contenders = {
        "eager": lambda: baselines.ppo_loss(batch.logits, *given, coef).backward(),
        "compile": lambda: compiled(batch.logits, *given, coef).backward(),
        "ours": lambda: fused_ppo_loss(batch.logits, *given, config=config, inplace_grad=True).loss.backward(),
        "ours, own gradient": lambda: fused_ppo_loss(batch.logits, *given, config=config).loss.backward(),
    }
    check_and_race(benchmark, batch, dtype, contenders, with_compile)


@shapes
@dtypes
def test_logprobs_and_entropy(benchmark: Any, rows: int, vocab: int, dtype: str, with_compile: bool) -> None:
    batch = Batch(rows, vocab, DTYPES[dtype], masked=0.0)

    def both(f: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        def run() -> None:
            logprobs, entropy = f(batch.logits, batch.tokens, True)
            (logprobs * batch.advantages + 0.01 * entropy).sum().backward()

        return run

    contenders = {
        "eager": both(baselines.logprobs_and_entropy),
        "compile": both(torch.compile(baselines.logprobs_and_entropy, dynamic=False)),
        "ours": both(lambda logits, tokens, entropy: logprobs_from_logits(logits, tokens, return_entropy=entropy)),
    }
    check_and_race(benchmark, batch, dtype, contenders, with_compile)
