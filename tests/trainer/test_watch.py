"""What is said about an update: when, with which number, and which key to change."""

from __future__ import annotations

import re

import pytest

from ppo_kernels.trainer.settings import load, names
from ppo_kernels.trainer.watch import Watch

WELL = {
    "val/first_logprob_drift": 1e-6,
    "objective/kl": 2.0,
    "objective/kl_coef": 0.04,
    "objective/entropy": 3.0,
    "policy/clipfrac_avg": 0.05,
    "objective/scores": 0.5,
    "objective/scores_std": 0.3,
    "response_length/eos_rate": 0.9,
    "critic/explained_var": 0.6,
    "episode": 10_000.0,
    "skipped_steps": 0.0,
}


def heldout(update: int, reward: float, metric: float) -> dict[str, float]:
    found: dict[str, float] = {"heldout/update": update, "objective/scores": reward}
    for name, value in (("reward", reward), ("metric", metric)):
        found |= {f"heldout/{name}": value, f"heldout/{name}_low": value - 0.05, f"heldout/{name}_high": value + 0.05}
    return found


def said(*updates: dict[str, float]) -> list[str]:
    """About the last of them."""
    watch = Watch(load(["eval.metric=vader"]))
    return [watch(WELL | update) for update in updates][-1]


def test_nothing_is_said_when_all_is_well() -> None:
    assert said({}, {}, heldout(10, 0.5, 0.2)) == []


@pytest.mark.parametrize(
    ("number", "words", "key"),
    [
        ({"val/first_logprob_drift": 0.02}, "2.0e-02", "rollout.temperature"),
        ({"objective/kl": -0.9}, "-0.90 nats", "rollout.prompts"),
        ({"objective/kl": 300.0}, "300.0 nats", "kl.coef"),
        ({"objective/entropy": 0.1}, "to 0.10 nats per token, from 3.00", "ppo.entropy_coef"),
        ({"policy/clipfrac_avg": 0.4}, "40% of tokens clipped", "optim.actor_lr"),
        ({"objective/scores_std": 0.0}, "the same score, 0.5", "reward.function"),
        ({"response_length/eos_rate": 0.2}, "only 20%", "rollout.max_new_tokens"),
        ({"critic/explained_var": -0.3}, "-0.30", "optim.critic_warmup"),
        ({"skipped_steps": 2.0}, "2 optimizer steps", "optim.actor_lr"),
    ],
)
def test_a_remark_has_its_number_and_a_key_to_change(number: dict[str, float], words: str, key: str) -> None:
    (remark,) = said({}, number)
    assert words in remark
    assert key in remark
    assert set(re.findall(r"\b[a-z]+\.[a-z_]+\b", remark)) <= set(names())


def test_a_reward_that_rises_while_the_independent_metric_falls_is_hacking() -> None:
    first = heldout(0, 0.1, 0.5)
    (remark,) = said(first, heldout(10, 0.6, 0.2))
    assert "reward hacking: held-out reward rose by 0.50 while vader fell by 0.30" in remark
    assert said(first, heldout(10, 0.6, 0.6)) == []
    assert said(first, heldout(10, 0.1, 0.2)) == []
    assert said(first, heldout(10, 0.6, 0.48)) == []  # within the noise of the metric
    assert said(first, heldout(10, 0.6, 0.2), heldout(10, 0.6, 0.2)) == []  # said once for each evaluation


def test_after_a_resume_it_still_knows_where_the_run_began() -> None:
    config = load(["eval.metric=vader"])
    earlier = [WELL | heldout(0, 0.1, 0.5), WELL | {"objective/entropy": 1.0}, {"step": 3.0}]
    watch = Watch(config, earlier)
    low = {"objective/entropy": 0.2}
    assert [remark.split(":")[0] for remark in watch(WELL | low | heldout(10, 0.6, 0.2))] == [
        "entropy collapsed to 0.20 nats per token, from 3.00",
        "reward hacking",
    ]
    assert Watch(config, [{"step": 3.0}, *earlier])(WELL | {"objective/entropy": 0.2}) != []
    assert Watch(config)(WELL | low | heldout(10, 0.6, 0.2)) == []


def test_prompts_learned_by_heart_are_noticed() -> None:
    (remark,) = said(heldout(10, 0.5, 0.5) | {"objective/scores": 0.9})
    assert "training prompts score 0.40 more than held-out ones" in remark


def test_without_an_independent_metric_no_hacking_is_seen() -> None:
    rewards = [{k: v for k, v in heldout(i, 0.1 + i / 20, 0.0).items() if "metric" not in k} for i in (0, 10)]
    assert said(*rewards) == []
