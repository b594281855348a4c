"""What a careful colleague would say about an update: each remark with its number and the key to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from ppo_kernels.trainer.config import Config

Stats = dict[str, float]


class Watch:
    """Called with the numbers of each update in turn; returns what is worth saying, nothing when all is well.

    `earlier`: the numbers of the updates before, about which all has been said; a row may be of another version.
    """

    def __init__(self, config: Config, earlier: Iterable[Stats] = ()) -> None:
        self.config = config
        self.first: Stats | None = None
        self.evaluations: list[tuple[float, float]] = []  # held-out reward and independent metric
        self.evaluated_at = -1.0
        for stats in earlier:
            with contextlib.suppress(KeyError, TypeError):
                self(stats)

    def __call__(self, s: Stats) -> list[str]:
        first = self.first or s
        rules = [
            (s["val/first_logprob_drift"] > 1e-3 * (50 if self.config.train.bf16 else 1),
             f"ratio is not 1 before the first step: log-probs moved by {s['val/first_logprob_drift']:.1e}; rollout "
             "and training do not compute the same thing (rollout.temperature, dropout, train.bf16)"),
            (s["objective/kl"] < -0.5,
             f"KL to the reference is {s['objective/kl']:.2f} nats, below 0: sampling and scoring disagree, or "
             "the estimate is noisy: raise rollout.prompts"),
            (s["objective/kl"] > max(4 * (self.config.kl.target or 25.0), 1.0),
             f"KL runs away: {s['objective/kl']:.1f} nats per response; raise kl.coef={s['objective/kl_coef']:.3g}, or "
             "set kl.target"),
            (s["objective/entropy"] < 0.1 * first["objective/entropy"],
             f"entropy collapsed to {s['objective/entropy']:.2f} nats per token, from "
             f"{first['objective/entropy']:.2f}: raise ppo.entropy_coef or kl.coef, or lower optim.actor_lr"),
            (s["policy/clipfrac_avg"] > 0.3,
             f"{s['policy/clipfrac_avg']:.0%} of tokens clipped: lower optim.actor_lr or ppo.epochs"),
            (s["objective/scores_std"] < 1e-6,
             f"every response has the same score, {s['objective/scores']:.3g}: PPO has nothing to learn from; see "
             "reward.function"),
            (s["response_length/eos_rate"] < 0.5,
             f"only {s['response_length/eos_rate']:.0%} of responses end by themselves: raise rollout.max_new_tokens, "
             "or set reward.missing_eos_value"),
            (s["critic/explained_var"] < 0 and s["episode"] > 10 * self.config.sequences,
             f"the critic explains {s['critic/explained_var']:.2f} of the returns' variance, less than a constant "
             "would: set optim.critic_warmup, or raise optim.critic_lr"),
            (s["skipped_steps"] > 0,
             f"{s['skipped_steps']:.0f} optimizer steps left out: not finite, or a ratio above guard.max_ratio="
             f"{self.config.guard.max_ratio:g}; lower optim.actor_lr"),
        ]  # fmt: skip
        self.first = first
        return [text for said, text in rules if said] + self._hacking(s)

    def _hacking(self, s: Stats) -> list[str]:
        """A reward that rises while the independent metric falls, or on training prompts alone."""
        if "heldout/reward" not in s or s["heldout/update"] == self.evaluated_at:
            return []
        self.evaluated_at = s["heldout/update"]
        width = s["heldout/reward_high"] - s["heldout/reward_low"]
        advice = []
        gap = s["objective/scores"] - s["heldout/reward"]
        if gap > 2 * width > 0:
            advice.append(
                f"training prompts score {gap:.2f} more than held-out ones: it learns prompts by heart; raise "
                "kl.coef, or use more prompts (data.train)"
            )
        if "heldout/metric" in s:
            self.evaluations.append((s["heldout/reward"], s["heldout/metric"]))
            reward, metric = (x - y for x, y in zip(self.evaluations[-1], self.evaluations[0], strict=True))
            noise = s["heldout/metric_high"] - s["heldout/metric_low"]
            if reward > width / 2 and metric < -noise / 2:
                advice.append(
                    f"reward hacking: held-out reward rose by {reward:.2f} while {self.config.eval.metric} fell by "
                    f"{-metric:.2f}; raise kl.coef, or set kl.target"
                )
        return advice
