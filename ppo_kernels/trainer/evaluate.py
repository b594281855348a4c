"""Before, during and after: sample answers to fixed prompts and measure them, with intervals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from ppo_kernels.trainer.algo import ALGORITHMS
from ppo_kernels.trainer.config import RolloutConfig
from ppo_kernels.trainer.data import encode, pad
from ppo_kernels.trainer.models import Scalar
from ppo_kernels.trainer.rollout import generate, response_logprobs, sequence_scores

BATCH = 128

MEASURES = {  # in this order -> label, format, what it means
    "reward": ("Learned reward", "{:+.3f}", "a model of human ratings, scaled to [−1, 1]; what PPO maximises"),
    "vader": ("VADER", "{:+.3f}", "sentiment by a word list, in [−1, 1]; never trained on"),
    "kl": ("KL to the SFT model", "{:.2f}", "nats per response; how far the policy moved"),
    "entropy": ("Entropy", "{:.2f}", "nats per token; how varied the text still is"),
    "length": ("Length", "{:.1f}", "tokens per response"),
    "eos": ("Ended by itself", "{:.0%}", "share of responses that reached their end"),
}


class Estimate(NamedTuple):
    """A mean with its bootstrap 95% interval."""

    mean: float
    low: float
    high: float


class Evaluation(NamedTuple):
    estimates: dict[str, Estimate]  # one for each of MEASURES
    texts: list[str]  # prompt and response
    rewards: list[float]


def bootstrap(values: NDArray[np.float64], resamples: int = 2000, seed: int = 0) -> Estimate:
    """Percentile bootstrap of the mean over rows, resampled with replacement."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), (resamples, len(values)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(float(values.mean()), float(low), float(high))


@torch.no_grad()
def evaluate(
    actor: PreTrainedModel,
    reference: PreTrainedModel,
    reward: Scalar,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    config: RolloutConfig,
    seed: int,
) -> Evaluation:
    """One sampled response per prompt, at the training temperature, from a random stream of its own."""
    generator = torch.Generator().manual_seed(seed)
    analyzer = SentimentIntensityAnalyzer()
    columns: list[list[float]] = [[] for _ in MEASURES]
    texts: list[str] = []
    for at in range(0, len(prompts), BATCH):
        ids, mask = pad(encode(tokenizer, prompts[at : at + BATCH], 64, eos=False), "left")
        samples = generate(actor, ids, mask, config, generator)
        logprobs, entropy = response_logprobs(actor, samples, ALGORITHMS["fused"], config.temperature)
        ref_logprobs, _ = response_logprobs(reference, samples, ALGORITHMS["fused"], config.temperature)
        length = samples.mask.sum(1)
        new_texts = [
            tokenizer.decode(row[keep], skip_special_tokens=True)
            for row, keep in zip(samples.ids, samples.attention, strict=True)
        ]
        measured = [
            sequence_scores(reward, samples.ids, samples.attention),
            torch.tensor([analyzer.polarity_scores(text)["compound"] for text in new_texts]),
            (logprobs - ref_logprobs).sum(1),
            entropy.sum(1) / length,
            length,
            samples.has_eos,
        ]
        for column, values in zip(columns, measured, strict=True):
            column += values.double().tolist()
        texts += new_texts
    estimates = {name: bootstrap(np.asarray(column)) for name, column in zip(MEASURES, columns, strict=True)}
    return Evaluation(estimates, texts, columns[0])
