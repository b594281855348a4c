"""Before, during and after: sample answers to fixed held-out prompts and measure them, with intervals (N+25)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ppo_kernels.trainer import rewards
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.data import Row
from ppo_kernels.trainer.rollout import converse, score
from ppo_kernels.trainer.task import Task


class Measure(NamedTuple):
    label: str
    form: str
    meaning: str


class Estimate(NamedTuple):
    """A mean with its bootstrap 95% interval."""

    mean: float
    low: float
    high: float


class Evaluation(NamedTuple):
    estimates: dict[str, Estimate]  # one for each of `measures`
    texts: list[str]  # the whole conversation
    rewards: list[float]  # what the rows are judged by: score and turn rewards
    scores: list[float]  # without the turn rewards

    def flat(self, prefix: str) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, (mean, low, high) in self.estimates.items():
            values |= {f"{prefix}/{name}": mean, f"{prefix}/{name}_low": low, f"{prefix}/{name}_high": high}
        return values


def measures(config: Config) -> dict[str, Measure]:
    """In this order, name -> label, format, what it means."""
    demo = config.demo is not None
    found = {
        "reward": Measure(
            "Learned reward" if config.reward.model or demo else "Reward",
            "{:+.3f}",
            "a model of human ratings, scaled to [−1, 1]; what PPO maximises"
            if demo
            else "what PPO maximises, before clipping, normalising and penalties",
        )
    }
    if config.eval.metric == "vader":
        found["metric"] = Measure("VADER", "{:+.3f}", "sentiment by a word list, in [−1, 1]; never trained on")
    elif config.eval.metric:
        found["metric"] = Measure(config.eval.metric.rpartition(":")[2], "{:+.3f}", "independent; never trained on")
    return found | {
        "kl": Measure("KL to the reference", "{:.2f}", "nats per response; how far the policy moved"),
        "entropy": Measure("Entropy", "{:.2f}", "nats per token; how varied the text still is"),
        "length": Measure("Length", "{:.1f}", "tokens per response"),
        "eos": Measure("Ended by itself", "{:.0%}", "share of responses that reached their end"),
    }


def load_metric(spec: str | None) -> Callable[[list[dict[str, Any]]], list[float]] | None:
    """eval.metric: a function of samples as reward functions are, given "text" too: prompt and response."""
    if spec != "vader":
        return rewards.load_plugin(spec) if spec else None
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    return lambda samples: [analyzer.polarity_scores(sample["text"])["compound"] for sample in samples]


def bootstrap(values: NDArray[np.float64], resamples: int = 2000, seed: int = 0) -> Estimate:
    """Percentile bootstrap of the mean over rows, resampled with replacement."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), (resamples, len(values)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(float(values.mean()), float(low), float(high))


@torch.no_grad()
def evaluate(task: Task, rows: list[Row], name: str) -> Evaluation:
    """One sampled response per row, at the training temperature, from random streams of its own: the same every time
    for a row of this set, whatever was trained between."""
    config, ranks = task.config, task.ranks
    count = len(rows)
    rows = rows + rows[-1:] * (-count % ranks.size)  # every rank as many; what is too much is dropped below
    keys: list[tuple[int | str, ...]] = [("evaluate", name, i) for i in range(len(rows))]
    mine = list(ranks.share(rows))
    task.roles.train(False)
    with ranks.together("an evaluation"):
        samples = converse(
            task.roles.actor, mine, list(ranks.share(keys)), task.text, task.environment, config, ranks, task.between
        )
        trajectory = score(samples, mine, task.roles, task.reward_function, task.algorithm, task.text, config, ranks)
        texts = [task.text.decode(ids[keep]) for ids, keep in zip(trajectory.ids, trajectory.attention, strict=True)]
        columns = {"reward": (trajectory.scores + trajectory.turn_rewards.sum(1)).double().tolist()}
        if task.metric is not None:
            given = [
                {"prompt": row["prompt"], "response": turns[-1], "responses": turns, "row": row, "text": text}
                for row, turns, text in zip(mine, samples.turns, texts, strict=True)
            ]
            judged = rewards.call(task.metric, given, "eval.metric")
            columns["metric"] = [sum(values) for values in judged]
    length = trajectory.mask.sum(1)
    scores = ranks.gather(trajectory.scores.tolist())[:count]
    columns |= {
        "kl": (trajectory.logprobs - trajectory.ref_logprobs).sum(1).double().tolist(),
        "entropy": (trajectory.entropy.sum(1) / length).double().tolist(),
        "length": length.double().tolist(),
        "eos": trajectory.has_eos.double().tolist(),
    }
    columns = {name: ranks.gather(column)[:count] for name, column in columns.items()}
    estimates = {name: bootstrap(np.asarray(column)) for name, column in columns.items()}
    return Evaluation(estimates, ranks.gather(texts)[:count], columns["reward"], scores)
