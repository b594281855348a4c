"""`make bench-peers`: the policy loss from logits, forward and backward, by the released packages of other trainers.

Each peer's own functions, as its trainer calls them: log-prob of the tokens, entropy, clipped loss. Contenders take
turns in every round and medians are compared. Writes bench/results/peers-<device>.json and .md.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from run import RESULTS, device_name
from torch import Tensor

import ppo_kernels
from ppo_kernels import PPOLossConfig, fused_ppo_loss

B, T, V = 4, 64, 151936
COEF, ROUNDS = 0.01, 7


class Batch:
    """[B, T, V] logits, and everything the losses read."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.saved = torch.randn(B, T, V, generator=generator).mul_(2).to(dtype)
        self.leaf = self.saved.clone().requires_grad_()
        self.tokens = torch.randint(V, (B, T), generator=generator)
        self.advantages = torch.randn(B, 1, generator=generator).expand(B, T).contiguous()
        self.mask = torch.ones(B, T, dtype=torch.int64)
        noise = 0.1 * torch.randn(B, T, generator=generator)
        self.old = ppo_kernels.logprobs_from_logits(self.saved, self.tokens) + noise

    def reset(self) -> None:
        self.leaf.grad = None
        with torch.no_grad():
            self.leaf.copy_(self.saved)


def ours(batch: Batch, coef: float) -> Tensor:
    config = PPOLossConfig(entropy_coef=coef, return_entropy=coef != 0)
    given = (batch.tokens, batch.old, batch.advantages, batch.mask)
    return fused_ppo_loss(batch.leaf, *given, config=config, inplace_grad=True).loss


def verl(batch: Batch, coef: float) -> Tensor:
    """verl's functions, with its dual clip out of reach."""
    from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits
    from verl.workers.config import FSDPActorConfig

    logits = batch.leaf + 0  # what it may write over is not a leaf
    actor = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=1e9)
    entropy = entropy_from_logits(logits) if coef else None
    logprobs = logprobs_from_logits(logits, batch.tokens, inplace_backward=not coef)
    loss = compute_policy_loss_vanilla(batch.old, logprobs, batch.advantages, batch.mask, "token-mean", actor)[0]
    return loss if entropy is None else loss - coef * agg_loss(entropy, batch.mask, "token-mean")


def trl(batch: Batch, coef: float) -> Tensor:
    """TRL's two functions of the vocabulary, and the loss of its GRPOTrainer written out."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logprobs = selective_log_softmax(batch.leaf, batch.tokens)
    ratio = (logprobs - batch.old).exp()
    loss = -torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    if coef:
        loss = loss - coef * entropy_from_logits(batch.leaf)
    return (loss * batch.mask).sum() / batch.mask.sum()


CONTENDERS: dict[str, Callable[[Batch, float], Tensor]] = {"ours": ours, "verl": verl, "trl": trl}


def measure(dtype: torch.dtype, coef: float) -> dict[str, Any]:
    batch, gradients = Batch(dtype), {}
    for name, contender in CONTENDERS.items():
        batch.reset()
        contender(batch, coef).backward()
        gradients[name] = batch.leaf.grad.float().clone()  # type: ignore[union-attr]
    reference = gradients.pop("ours")
    distance = {name: float((x - reference).norm() / reference.norm()) for name, x in gradients.items()}
    del reference, gradients
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(ROUNDS):
        for name, contender in CONTENDERS.items():
            batch.reset()
            start = time.perf_counter()
            contender(batch, coef).backward()
            times[name].append(time.perf_counter() - start)
    medians = {name: round(1e3 * statistics.median(values), 2) for name, values in times.items()}
    return {"dtype": str(dtype)[6:], "entropy": coef != 0, "median_ms": medians, "gradient_distance": distance}


def markdown(report: dict[str, Any]) -> str:
    releases = ", ".join(f"{name} {version}" for name, version in report["releases"].items())
    lines = [
        f"# {report['device']}, {report['threads']} threads: beside the released packages",
        "",
        f"`make bench-peers`: policy loss from [{B}, {T}, {V}] logits, forward and backward, medians of {ROUNDS} rounds"
        f" in turn. {releases}. gradient distance: relative Frobenius distance of the peer's gradient from ours.",
        "",
        "| logits | entropy bonus | ours, ms | verl / ours | trl / ours | gradient distance, verl | trl |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["cases"]:
        ms, far = row["median_ms"], row["gradient_distance"]
        ratios = " | ".join(f"{ms[name] / ms['ours']:.1f}" for name in ("verl", "trl"))
        cells = f"{row['dtype']} | {'yes' if row['entropy'] else 'no'} | {ms['ours']:.1f} | {ratios}"
        lines.append(f"| {cells} | {far['verl']:.1e} | {far['trl']:.1e} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    from importlib.metadata import version

    report = {
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "releases": {name: version(name) for name in ("torch", "verl", "trl")},
        "cases": [measure(dtype, coef) for dtype in (torch.float32, torch.bfloat16) for coef in (0.0, COEF)],
    }
    base = RESULTS / ("peers-" + re.sub(r"[^a-z0-9]+", "-", device_name().lower()).strip("-"))
    base.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    base.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
