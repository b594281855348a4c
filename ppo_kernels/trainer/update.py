"""One PPO update: epochs over shuffled minibatches, one optimizer step per minibatch (N+17).

A minibatch is cut into microbatches to save memory, and over the ranks. Every token's loss is divided by the valid
tokens of the whole minibatch, so that the sum of all gradients is the minibatch's, however it was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ppo_kernels.trainer import mix, seeds
from ppo_kernels.trainer.algo import Algorithm, Metrics
from ppo_kernels.trainer.config import Config, OptimConfig
from ppo_kernels.trainer.models import Roles, autocast
from ppo_kernels.trainer.ranks import Ranks, reshard, synchronised, whole
from ppo_kernels.trainer.rollout import Trajectory, response_values


class Diverged(Exception):
    """The update cannot be finished in good order; `batch` is its rollout."""

    def __init__(self, problem: str, batch: Trajectory) -> None:
        super().__init__(problem)
        self.batch = batch


class Optimizers:
    """AdamW for actor and critic, each with its own learning rate (N+6, N+21)."""

    def __init__(self, actor: torch.nn.Module, critic: torch.nn.Module, config: OptimConfig) -> None:
        self.config = config
        self.models = {"actor": actor, "critic": critic}
        self.optimizers = {
            name: torch.optim.AdamW(
                [p for p in model.parameters() if p.requires_grad],
                lr=lr, eps=config.eps, weight_decay=config.weight_decay, fused=True,
            )
            for (name, model), lr in zip(self.models.items(), (config.actor_lr, config.critic_lr), strict=True)
        }  # fmt: skip
        for optimizer in self.optimizers.values():  # as AdamW's first step would: a checkpoint is always complete
            for p in optimizer.param_groups[0]["params"]:
                step = torch.zeros((), dtype=torch.float32, device=p.device)
                optimizer.state[p] = {
                    "step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)
                }  # fmt: skip

    def schedule(self, update: int, updates: int) -> float:
        """Sets the learning rates of update number `update`, from 0; returns the actor's."""
        done = update / updates
        factor = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}[
            self.config.schedule
        ]
        factor *= min(1.0, (update + 1) / (self.config.warmup + 1))
        for name, lr in (("actor", self.config.actor_lr), ("critic", self.config.critic_lr)):
            self.optimizers[name].param_groups[0]["lr"] = lr * factor
        return self.config.actor_lr * factor

    def clip(self) -> tuple[float, float]:
        """Clips the gradients of each model; their norms before that."""
        norms = [
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.config.max_grad_norm, foreach=True)
            for model in self.models.values()
        ]
        return float(whole(norms[0])), float(whole(norms[1]))

    def step(self, *names: str) -> None:
        reshard(*self.models.values())
        for name in names:
            self.optimizers[name].step()

    def clear(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)


class Setting(NamedTuple):
    """What an update needs besides the batch."""

    config: Config
    roles: Roles
    optimizers: Optimizers
    algorithm: Algorithm
    sources: list[mix.Source]
    filler: int  # the padding id
    ranks: Ranks


def update(
    batch: Trajectory,
    advantages: torch.Tensor,  # [B, T], and so is `returns`
    returns: torch.Tensor,
    setting: Setting,
    number: int,
    stream: int,
    clip: float,
    skips: int,
) -> Metrics:
    """All epochs of update `number`; metrics averaged over tokens and steps, and "skips": left out in a row, so far.

    `skips` is where that count starts; an update's first step, with ratios of 1 whatever came before, does not end it.
    Raises Diverged when it reaches guard.max_skips, and when the KL since the rollout is above guard.max_kl: no later
    step of the update would come back.
    """
    config, optimizers = setting.config, setting.optimizers
    parts: list[Metrics] = []
    norms: list[tuple[float, float]] = []
    skipped = taken = 0
    names = ("critic",) if number < config.optim.critic_warmup else ("actor", "critic")
    stopped = False
    steps = config.ppo.epochs * config.ppo.minibatches
    for rows in minibatches(len(batch.mask), config.ppo.epochs, config.ppo.minibatches, config.seed, stream, number):
        step = number * steps + len(parts)
        metrics = minibatch_gradients(batch, advantages, returns, rows, setting, clip, step, stream)
        norm = optimizers.clip()
        parts.append(metrics)
        norms.append(norm)
        if metrics["approx_kl_k3"] > config.guard.max_kl:
            kl, limit = metrics["approx_kl_k3"], config.guard.max_kl
            raise Diverged(f"the KL since the rollout is {kl:.3g} nats per token, above guard.max_kl={limit:g}", batch)
        problem = explosion(metrics, norm, config)
        stopped = config.ppo.target_kl_stop is not None and metrics["approx_kl_k3"] > config.ppo.target_kl_stop
        if problem:
            skipped, skips = skipped + 1, skips + 1
        elif not stopped:
            optimizers.step(*names)
            taken += 1
            skips = skips if len(parts) == 1 and steps > 1 else 0
        optimizers.clear()
        if skips >= config.guard.max_skips:
            raise Diverged(f"{skips} optimizer steps in a row left out: {problem}", batch)
        if stopped:
            break
    merged = merge(parts)
    return merged | {
        "first_loss_policy": parts[0]["policy_loss"],
        "first_loss_value": parts[0]["value_loss"],
        "first_ratio_max": parts[0]["ratio_max"],
        "first_logprob_drift": parts[0]["logprob_drift"],
        "grad_norm_actor": sum(norm[0] for norm in norms) / len(norms),
        "grad_norm_critic": sum(norm[1] for norm in norms) / len(norms),
        "optimizer_steps": taken,
        "skipped_steps": skipped,
        "skips": skips,
        "stopped_early": float(stopped),
    }


def explosion(metrics: Metrics, norms: tuple[float, float], config: Config) -> str:
    """Why this step must not be taken; empty if it may."""
    if not all(math.isfinite(metrics[name]) for name in ("policy_loss", "value_loss")):
        return f"the loss is {metrics['policy_loss']} (policy), {metrics['value_loss']} (value)"
    if not all(map(math.isfinite, norms)):
        return f"the gradient norm is {norms[0]} (actor), {norms[1]} (critic)"
    if metrics["ratio_max"] > config.guard.max_ratio:
        return f"a token's ratio is {metrics['ratio_max']:.3g}, above guard.max_ratio={config.guard.max_ratio:g}"
    return ""


def minibatch_gradients(
    batch: Trajectory,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    rows: torch.Tensor,  # of the whole batch
    setting: Setting,
    clip: float,
    step: int,
    stream: int,
) -> Metrics:
    """Adds the minibatch's gradients to the parameters of every rank; returns its metrics over all ranks."""
    config, roles, ranks = setting.config, setting.roles, setting.ranks
    # what torchrun's wrappers divide by the ranks is multiplied by them here
    normalizer = max(float(batch.mask[rows].sum()), 1.0) / ranks.size
    parts: list[Metrics] = []
    extra: Metrics = {}

    def ppo(index: torch.Tensor) -> None:
        piece = batch.rows(index)
        width = piece.mask.shape[1]
        with autocast(config, ranks):
            values = response_values(roles.critic_module, piece.ids, piece.attention, width)
            loss, logprobs, metrics = setting.algorithm.loss(
                roles.actor, piece.ids, piece.attention, piece.logprobs, advantages[index, :width], piece.mask,
                values, piece.values, returns[index, :width], normalizer, config.rollout.temperature, clip, config.ppo,
            )  # fmt: skip
        loss.backward()
        drift = (logprobs.detach() - piece.logprobs).where(piece.mask, 0.0).abs().max()
        parts.append(metrics | {"logprob_drift": float(drift)})

    def language(source: mix.Source) -> Callable[[], None]:
        chosen = mix.pick(source, config.mix.rows, step, stream, config.seed)
        count = mix.tokens(chosen) / ranks.size

        def run() -> None:
            mine = list(ranks.share(chosen))
            with autocast(config, ranks):
                loss = mix.negative_log_likelihood(roles.actor, mine, setting.filler, ranks.device) / count
            (source.coef * loss).backward()
            extra[f"{source.name}_loss"] = float(loss.detach())

        return run

    pieces = microbatches(batch, rows, config, ranks)
    languages = [language(source) for source in setting.sources]
    for i, index in enumerate(pieces):
        last = i + 1 == len(pieces)
        with synchronised(roles.critic_module, last), synchronised(roles.actor.module, last and not languages):
            ppo(index)
    for i, run in enumerate(languages):
        with synchronised(roles.actor.module, i + 1 == len(languages)):
            run()
    merged = merge(ranks.gather(parts))
    for name in sorted(extra):
        merged[name] = sum(ranks.gather([extra[name]])) / ranks.size
    return merged


def minibatches(rows: int, epochs: int, count: int, *key: int) -> Iterator[torch.Tensor]:
    """Every row once in each epoch, in `count` pieces."""
    for epoch in range(epochs):
        yield from seeds.permutation(rows, "minibatches", *key, epoch).chunk(count)


def microbatches(batch: Trajectory, rows: torch.Tensor, config: Config, ranks: Ranks) -> list[torch.Tensor]:
    """This rank's rows of a minibatch, in pieces of at most ppo.microbatch rows and ppo.max_tokens tokens.

    All ranks get equally many pieces, or one would wait for another forever; each knows the others' rows.
    """
    width = batch.mask.shape[1]
    parts = batch.attention[:, :-width].sum(1).cpu(), batch.attention[:, -width:].sum(1).cpu()
    cuts = [_pieces(rows[rank :: ranks.size], *parts, config) for rank in range(ranks.size)]
    most = max(map(len, cuts))
    mine = cuts[ranks.rank]
    while len(mine) < most:
        mine.sort(key=len)
        largest = mine.pop()
        mine += largest.chunk(2)
    return mine


def _pieces(rows: torch.Tensor, prompts: torch.Tensor, responses: torch.Tensor, config: Config) -> list[torch.Tensor]:
    """The longest prompt and the longest response of a piece make its width: one is padded left, the other right."""
    limit = config.ppo.max_tokens
    if limit is None:
        return list(rows.split(config.ppo.microbatch))
    pieces: list[list[int]] = []
    widest = [0, 0]
    for row in rows[(prompts + responses)[rows].argsort(stable=True)].tolist():
        here = [int(prompts[row]), int(responses[row])]
        together = [max(pair) for pair in zip(widest, here, strict=True)]
        if pieces and len(pieces[-1]) < config.ppo.microbatch and (len(pieces[-1]) + 1) * sum(together) <= limit:
            pieces[-1].append(row)
            widest = together
        else:
            pieces.append([row])
            widest = here
    return [torch.tensor(piece) for piece in pieces]


def merge(parts: list[Metrics]) -> Metrics:
    """Token-weighted means of the parts' means; sums of counts; extremes of extremes."""
    tokens = max(sum(part["tokens"] for part in parts), 1.0)
    merged = {key: sum(part[key] * part["tokens"] for part in parts) / tokens for key in parts[0]}
    return merged | {
        "tokens": tokens,
        "ratio_min": min(part["ratio_min"] for part in parts),
        "ratio_max": max(part["ratio_max"] for part in parts),
        "logprob_drift": max(part["logprob_drift"] for part in parts),
    }
