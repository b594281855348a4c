"""PPO for language models on one page. Everything it calls is one file away and does what its name says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial

from ppo_kernels import AdaptiveKLController
from ppo_kernels.trainer import faults
from ppo_kernels.trainer.checkpoint import Progress
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.data import update_rows
from ppo_kernels.trainer.log import Log
from ppo_kernels.trainer.rewards import finish
from ppo_kernels.trainer.rollout import Trajectory, converse, gather, score
from ppo_kernels.trainer.stats import step_line, summarize
from ppo_kernels.trainer.task import Task
from ppo_kernels.trainer.update import Diverged, Optimizers, Setting, update
from ppo_kernels.trainer.watch import Watch


def ppo_update(
    task: Task, progress: Progress, optimizers: Optimizers, broken_off: Callable[[], None] = lambda: None
) -> tuple[dict[str, float], Progress]:
    """One update: trains the actor and the critic in place. Returns its numbers and the progress after it.

    `broken_off` is called, on every rank, before an error that came while sampling and scoring is raised: nothing was
    trained yet.
    """
    config, ranks, roles, algorithm = task.config, task.ranks, task.roles, task.algorithm
    number, stream, started = progress.update, progress.stream, time.perf_counter()
    lr = optimizers.schedule(number, config.train.updates)

    # 1. sample a response to each of this rank's prompts, score it under all four models; then all ranks have all rows
    rows = update_rows(task.train, number, stream, config)
    keys: list[tuple[int | str, ...]] = [("sample", config.seed, stream, number, i) for i in range(len(rows))]
    mine = list(ranks.share(rows))
    roles.train(False)
    try:
        with ranks.together("a rollout"):
            samples = converse(
                roles.actor, mine, list(ranks.share(keys)), task.text, task.environment, config, ranks, task.between
            )
            generated = time.perf_counter()
            part = score(samples, mine, roles, task.reward_function, algorithm, task.text, config, ranks)
    except Exception:
        broken_off()
        raise
    batch = Trajectory(*(field.to(ranks.device) for field in gather(part, task.text.pad, ranks)))
    faults.point("update:sampled")
    for name, field in batch._asdict().items():
        if not bool(field.isfinite().all()):
            raise Diverged(f"{name} of the rollout are not finite", batch)

    # 2. the reward of a token is its KL penalty; the last one also gets the score, clipped and normalised
    scores, moments = finish(batch.scores, batch.has_eos, config.reward, progress.moments)
    policies = (batch.logprobs, batch.ref_logprobs, batch.mask)
    kl = -algorithm.token_rewards(0 * scores, *policies, kl_coef=1.0, kl_estimator=config.kl.estimator)
    rewards = batch.turn_rewards + algorithm.token_rewards(
        scores, *policies, kl_coef=progress.kl_coef, kl_estimator=config.kl.estimator
    )
    total = float(rewards.sum(1).mean())
    if config.ppo.whiten_rewards:
        rewards = algorithm.whiten(rewards, batch.mask, shift_mean=False)

    # 3. advantages over the whole batch, whitened over its valid tokens (N+18)
    advantages, returns = algorithm.advantages(rewards, batch.values, batch.mask, config.ppo)
    if config.ppo.whiten_advantages:
        advantages = algorithm.whiten(advantages, batch.mask)

    # 4. several epochs of clipped policy and value steps on the same batch
    roles.train(True)
    setting = Setting(config, roles, optimizers, algorithm, task.sources, task.text.pad, ranks)
    metrics = update(batch, advantages, returns, setting, number, stream, progress.clip, progress.skips)
    faults.point("update:trained")

    # 5. adapt the KL coefficient and the clip range to what was measured
    stats = summarize(batch, kl, total, returns, progress, metrics)
    kl_coef = progress.kl_coef
    warm = number >= config.optim.critic_warmup  # before that the actor does not move: there is nothing to adapt to
    if config.kl.target is not None and warm:
        kl_coef = AdaptiveKLController(kl_coef, config.kl.target, config.kl.horizon).update(
            stats["objective/kl"], len(rows)
        )
    clip = adapted_clip(progress.clip, metrics["approx_kl_k3"], config) if warm else progress.clip
    seconds = time.perf_counter() - started
    stats |= {"lr": lr, "time/update": seconds, "time/generate": generated - started}
    after = Progress(**{**vars(progress), "update": number + 1, "kl_coef": kl_coef, "clip": clip, "moments": moments,
                        "skips": int(metrics["skips"])})  # fmt: skip
    return stats, after


def adapted_clip(clip: float, kl: float, config: Config) -> float:
    """Half as wide again when an update moves too little, narrower when it moves too far (rsl_rl does so with lr)."""
    target, (low, high) = config.ppo.clip_target_kl, config.ppo.clip_bounds
    if target is None or not math.isfinite(kl) or target / 2 <= kl <= target * 2:
        return clip
    return max(low, clip / 1.5) if kl > target else min(high, clip * 1.5)


def ppo(
    task: Task,
    progress: Progress,
    optimizers: Optimizers,
    log: Log,
    evaluate: Callable[[int], dict[str, float]],  # of an update number -> held-out metrics for the log
    save: Callable[..., None],  # of a progress, if that is due; or now=True
    roll_back: Callable[[Progress, Diverged], Progress],
    earlier: Iterable[dict[str, float]] = (),  # the numbers of the updates before this process
) -> Progress:
    """Trains until config.train.updates; returns the progress at the end."""
    config, watch = task.config, Watch(task.config, earlier)
    while progress.update < config.train.updates or progress.pending:
        started = time.perf_counter()
        try:
            if not progress.pending:
                stats, progress = ppo_update(task, progress, optimizers, partial(save, progress, now=True))
                progress.pending = stats
        except Diverged as diverged:
            progress = roll_back(progress, diverged)
            continue
        number = progress.update
        if number % config.eval.every == 0 or number == config.train.updates:
            try:
                progress.heldout = evaluate(number)
            except Exception:
                save(progress, now=True)
                raise
        stats, progress.pending = progress.pending | progress.heldout, None
        progress.seconds += time.perf_counter() - started
        log.step(number, stats, step_line(number, config.train.updates, stats))
        for advice in watch(stats):
            log.note(advice)
        faults.point("update:logged")
        save(progress)
    return progress
