"""PPO for language models on one page. Everything it calls is one file away and does what its name says."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerFast

from ppo_kernels import AdaptiveKLController, FixedKLController
from ppo_kernels.trainer.algo import ALGORITHMS
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.data import encode, pad
from ppo_kernels.trainer.log import Log
from ppo_kernels.trainer.models import Roles
from ppo_kernels.trainer.rollout import generate, score
from ppo_kernels.trainer.stats import step_line, summarize, watch
from ppo_kernels.trainer.update import Optimizers, update


def ppo(
    config: Config,
    roles: Roles,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    evaluate: Callable[[int], dict[str, float]],
    log: Log,
) -> None:
    """Trains `roles.actor` (and the critic) in place. `evaluate(update)` returns held-out metrics for the log."""
    algorithm = ALGORITHMS[config.train.loss_backend]
    optimizers = Optimizers(roles.actor, roles.critic, config.optim)
    sampling = torch.Generator().manual_seed(config.seed)  # N+7: one named random stream per purpose
    shuffling = torch.Generator().manual_seed(config.seed + 1)
    kl = (
        FixedKLController(config.kl.coef)
        if config.kl.target is None
        else AdaptiveKLController(config.kl.coef, config.kl.target, config.kl.horizon)
    )
    heldout = evaluate(0)

    for number in range(config.ppo.updates):
        started = time.perf_counter()
        lr = optimizers.schedule(done=number / config.ppo.updates)

        # 1. sample a response to each prompt, then score it: log-probs, reference, values, reward
        batch = prompt_batch(prompts, number, config)
        ids, mask = pad(encode(tokenizer, batch, config.data.max_tokens, eos=False), "left")
        samples = generate(roles.actor, ids, mask, config.rollout, sampling)
        generated = time.perf_counter()
        trajectory = score(samples, roles, algorithm, config.rollout)

        # 2. the reward of a token is its KL penalty; the last one also gets the score
        rewards = algorithm.token_rewards(
            trajectory.scores, trajectory.logprobs, trajectory.ref_logprobs, trajectory.mask, trajectory.has_eos,
            kl.value, config.kl, config.rollout.missing_eos_penalty,
        )  # fmt: skip

        # 3. advantages over the whole batch, whitened over its valid tokens (N+18)
        advantages, returns = algorithm.advantages(rewards, trajectory.values, trajectory.mask, config.ppo)
        if config.ppo.whiten_advantages:
            advantages = algorithm.whiten(advantages, trajectory.mask)

        # 4. several epochs of clipped policy and value steps on the same batch
        metrics = update(
            trajectory, advantages, returns, roles.actor, roles.critic, optimizers, algorithm, config, shuffling
        )

        # 5. adapt the KL coefficient, measure, report
        stats = summarize(trajectory, rewards, returns, kl.value, metrics)
        kl.update(stats["objective/kl"], len(batch))
        if (number + 1) % config.eval.every == 0 or number + 1 == config.ppo.updates:
            heldout = evaluate(number + 1)
        seconds = time.perf_counter() - started
        timing = {"lr": lr, "time/update": seconds, "time/generate": generated - started}
        stats |= timing | heldout
        log.step(number + 1, stats, step_line(number + 1, config.ppo.updates, stats))
        for advice in watch(stats):
            log.note(advice)


def prompt_batch(prompts: list[str], update: int, config: Config) -> list[str]:
    """The prompts of one update: a permutation per epoch, a function of the seed, so that any update can be redone."""
    count, size = len(prompts), config.rollout.prompts
    positions = range(update * size, (update + 1) * size)
    orders = {
        epoch: torch.randperm(count, generator=torch.Generator().manual_seed(config.seed * 100_003 + epoch)).tolist()
        for epoch in {position // count for position in positions}
    }
    return [prompts[orders[position // count][position % count]] for position in positions]
