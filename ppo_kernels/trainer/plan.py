"""What a configuration will do and need: the batches of an update, and the memory of each rank."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch

from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.ranks import Ranks
from ppo_kernels.trainer.rewards import RewardFunction

MIB = 2**20


def batches(config: Config, ranks: int) -> list[str]:
    sequences, minibatch = config.sequences, config.sequences // config.ppo.minibatches
    steps = config.ppo.epochs * config.ppo.minibatches
    micro = min(config.ppo.microbatch, minibatch // ranks)
    budget = f", at most {config.ppo.max_tokens} tokens" if config.ppo.max_tokens else ""
    return [
        f"rollout: {config.rollout.prompts} prompts x {config.rollout.samples_per_prompt} samples = {sequences} "
        f"sequences, {sequences // ranks} on each of {ranks} ranks",
        f"update: {config.ppo.epochs} epochs x {config.ppo.minibatches} minibatches of {minibatch} = {steps} optimizer "
        f"steps; {micro} sequences a forward and backward{budget}",
    ]


def memory(config: Config, roles: Any, ranks: int, longest: int) -> list[tuple[str, int]]:
    """(what, bytes) on one rank: weights, gradients, optimizer, and the largest activations that are kept.

    The activations are an estimate: 34 bytes per token, layer and hidden unit in bf16 (Korthikanti et al. 2022, eq. 2,
    without the attention scores, which fused attention does not store), twice that in fp32; with gradient checkpointing
    one hidden state per layer instead, and one layer at a time.
    """
    shards = ranks if config.train.parallel == "fsdp" else 1
    lora = config.model.lora_rank is not None

    def count(model: Any, trained: bool) -> int:
        return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)

    actor, critic = roles.actor.model, roles.critic
    rows = [
        ("actor, critic: weights", 4 * (count(actor, False) + count(critic, False)) // shards),
        ("actor, critic: gradients", 4 * (count(actor, True) + count(critic, True)) // shards),
        ("actor, critic: AdamW", 8 * (count(actor, True) + count(critic, True)) // shards),
    ]
    if not lora:
        rows.append(("reference: weights", 4 * count(roles.reference.model, False)))
    if roles.reward is not None:
        rows.append(("reward model: weights", 4 * count(roles.reward, False)))
    shape = roles.actor.base.config.get_text_config()
    layers, hidden = shape.num_hidden_layers, shape.hidden_size
    tokens = min(config.ppo.microbatch, max(config.sequences // config.ppo.minibatches // ranks, 1)) * longest
    if config.ppo.max_tokens is not None:
        tokens = min(tokens, max(config.ppo.max_tokens, longest))
    per_token = (17 if config.train.bf16 else 34) * 2 * hidden
    kept = layers * per_token
    if config.train.gradient_checkpointing:
        kept = layers * 4 * hidden + per_token
    rows.append((f"activations of {tokens} tokens (estimate)", 2 * tokens * kept))
    return rows


def check_run(config: Config, ranks: Ranks, reward_function: RewardFunction | None) -> None:
    """Shows the plan, makes one update in memory, and shows what that took."""
    from ppo_kernels.trainer.dry import dry_task, dry_update

    started = time.perf_counter()
    with dry_task(config, ranks, reward_function) as task:
        longest = max(len(task.text.prompt(row)) for row in task.train) + config.rollout.max_new_tokens
        rows = memory(config, task.roles, ranks.size, longest)
        if ranks.main:
            print("\n".join(batches(config, ranks.size)))
            for what, size in [*rows, ("planned, on each rank", sum(size for _, size in rows))]:
                print(f"{size / MIB:12,.0f} MiB  {what}")
            if config.train.loss == "linear":
                vocabulary = task.roles.actor.base.config.get_text_config().vocab_size
                rows_at_once = min(config.ppo.microbatch, config.sequences // config.ppo.minibatches // ranks.size)
                logits = 4 * vocabulary * rows_at_once * longest
                print(f"{logits / MIB:12,.0f} MiB  not needed: the fp32 logits of a microbatch (train.loss=linear)")
        stats = dry_update(task)
    if not ranks.main:
        return
    if ranks.device.type == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / MIB:12,.0f} MiB  allocated at most by the update made")
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{peak:12,.0f} MiB  resident at most, the interpreter and libraries included")
    seconds = time.perf_counter() - started
    print(
        f"one update: {stats['time/update']:.1f} s, {seconds:.1f} s with loading; log-probs off by "
        f"{stats['val/first_logprob_drift']:.1e} before its first step"
    )
