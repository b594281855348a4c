"""The two stages before PPO: a language model from scratch, and a reward model on its trunk."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ppo_kernels import logprobs_from_logits
from ppo_kernels.trainer.config import Config, RewardConfig, SFTConfig
from ppo_kernels.trainer.data import Snippet, Split, batches, cache_dir, encode, fingerprint, pad
from ppo_kernels.trainer.log import Log
from ppo_kernels.trainer.models import Scalar, new_language_model, save_language_model

FORMAT = 1  # of the cached models; raise it when an older cache must not be read
RATING_SCALE = 4.0  # human ratings are in [-4, 4], rewards in [-1, 1]


# ---- SFT ------------------------------------------------------------------------------------------------------------


def train_sft(config: Config, split: Split, tokenizer: PreTrainedTokenizerFast, log: Log) -> PreTrainedModel:
    model = new_language_model(config.model, config.seed)
    rows = encode(tokenizer, [snippet.text for snippet in split.train], config.data.max_tokens, eos=True)
    validation = encode(tokenizer, [snippet.text for snippet in split.validation], config.data.max_tokens, eos=True)
    generator = torch.Generator().manual_seed(config.seed)

    def loss(picked: list[int]) -> torch.Tensor:
        return _language_loss(model, [rows[i] for i in picked])[0]

    _fit(model, config.sft, [len(row) for row in rows], generator, loss, "sft/loss", log)
    final = validation_loss(model, validation)
    log.step(config.sft.steps, {"sft/validation_loss": final}, f"validation {final:.3f} nats per token")
    return model


def _language_loss(model: PreTrainedModel, rows: list[list[int]]) -> tuple[torch.Tensor, int]:
    """Mean negative log-likelihood per token in nats, and the number of tokens."""
    ids, mask = pad(rows, "right")
    logits = model(input_ids=ids, attention_mask=mask).logits
    logprobs = logprobs_from_logits(logits, ids, mask[:, 1:], shift=True)
    count = int(mask[:, 1:].sum())
    return -logprobs.sum() / count, count


@torch.no_grad()
def validation_loss(model: PreTrainedModel, rows: list[list[int]]) -> float:
    """Nats per token over all rows."""
    parts = [_language_loss(model, rows[at : at + 64]) for at in range(0, len(rows), 64)]
    return sum(float(loss) * count for loss, count in parts) / sum(count for _, count in parts)


# ---- reward model ---------------------------------------------------------------------------------------------------


def train_reward(
    config: Config, sft: PreTrainedModel, split: Split, tokenizer: PreTrainedTokenizerFast, log: Log
) -> Scalar:
    """Least squares on the human rating at the last token, and with a smaller weight at every earlier one.

    The prefixes make the model sensible on responses cut short, and a good critic to start from: what it says before
    token t is the score to expect.
    """
    generator = torch.Generator().manual_seed(config.seed + 2)
    model = Scalar(copy.deepcopy(sft.base_model), zero_head=False, generator=generator)
    rows = encode(tokenizer, [snippet.text for snippet in split.train], config.data.max_tokens, eos=True)
    ratings = torch.tensor([snippet.rating / RATING_SCALE for snippet in split.train])

    def loss(picked: list[int]) -> torch.Tensor:
        ids, mask = pad([rows[i] for i in picked], "right")
        error: torch.Tensor = (model(ids, mask) - ratings[picked, None]).square()
        at_end = error.gather(1, mask.sum(1, keepdim=True) - 1).mean()
        return at_end + config.reward.prefix_weight * error[mask].mean()

    _fit(model, config.reward, [len(row) for row in rows], generator, loss, "reward/loss", log)
    correlation, sign = judge(model, split.validation, tokenizer, config.data.max_tokens)
    values = {"reward/validation_correlation": correlation, "reward/validation_sign_accuracy": sign}
    log.step(config.reward.steps, values, f"validation correlation {correlation:.2f}, sign right {sign:.0%}")
    return model


@torch.no_grad()
def judge(
    model: Scalar, snippets: list[Snippet], tokenizer: PreTrainedTokenizerFast, max_tokens: int
) -> tuple[float, float]:
    """Correlation with the human ratings, and how often the sign is right."""
    ratings = torch.tensor([snippet.rating for snippet in snippets])
    rows = encode(tokenizer, [snippet.text for snippet in snippets], max_tokens, eos=True)
    parts = []
    for at in range(0, len(rows), 64):
        ids, mask = pad(rows[at : at + 64], "right")
        parts.append(model(ids, mask).gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1))
    scores = torch.cat(parts)
    correlation = float(torch.corrcoef(torch.stack([scores, ratings]))[0, 1])
    return correlation, float(((scores > 0) == (ratings > 0)).float().mean())


# ---- common ---------------------------------------------------------------------------------------------------------


def _fit(
    model: torch.nn.Module,
    config: SFTConfig | RewardConfig,
    lengths: list[int],
    generator: torch.Generator,
    loss_of: Callable[[list[int]], torch.Tensor],  # row numbers -> scalar
    name: str,
    log: Log,
) -> None:
    """AdamW over shuffled batches with a linear warm-up, then a cosine to 5% of the learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=config.weight_decay, betas=(0.9, 0.95), fused=True)
    queue: list[list[int]] = []
    for step in range(config.steps):
        queue = queue or batches(lengths, config.batch, generator)
        cosine = 0.05 + 0.95 * (1 + math.cos(math.pi * step / config.steps)) / 2
        optimizer.param_groups[0]["lr"] = config.lr * min(1.0, (step + 1) / max(config.warmup, 1)) * cosine
        loss = loss_of(queue.pop())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(config.steps // 50, 1) == 0:
            log.step(step, {name: loss.item()}, f"step {step}/{config.steps} | loss {loss.item():.3f}")


# ---- cache ----------------------------------------------------------------------------------------------------------


def cache_key(config: Config, split: Split, *sections: str) -> str:
    """A hash of everything a stage depends on: the seed, the text and the named sections of the configuration."""
    parts = {"format": FORMAT, "seed": config.seed, "text": fingerprint(split), "torch": torch.__version__}
    parts |= {name: getattr(config, name).model_dump() for name in sections}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def cached_models(
    config: Config, split: Split, tokenizer: PreTrainedTokenizerFast, log: Log
) -> tuple[PreTrainedModel, Scalar]:
    """The SFT and the reward model: read from the user cache if this very configuration was trained before."""
    sft_folder = cache_dir() / "models" / f"sft-{cache_key(config, split, 'model', 'data', 'sft')}"
    reward_folder = cache_dir() / "models" / f"reward-{cache_key(config, split, 'model', 'data', 'sft', 'reward')}"

    log.begin("SFT", config.sft.steps)
    if config.cache and (sft_folder / "history.json").exists():
        sft = AutoModelForCausalLM.from_pretrained(sft_folder, dtype=torch.float32)
        log.replay(json.loads((sft_folder / "history.json").read_text()))
        log.end("from the cache")
    else:
        sft = train_sft(config, split, tokenizer, log)
        _publish(sft_folder, lambda folder: save_language_model(sft, tokenizer, folder), log)
        log.end()

    log.begin("reward model", config.reward.steps)
    if config.cache and (reward_folder / "history.json").exists():
        reward = Scalar(copy.deepcopy(sft.base_model), zero_head=True)
        reward.load_state_dict(torch.load(reward_folder / "reward.pt", weights_only=True))
        log.replay(json.loads((reward_folder / "history.json").read_text()))
        log.end("from the cache")
    else:
        reward = train_reward(config, sft, split, tokenizer, log)
        _publish(reward_folder, lambda folder: torch.save(reward.state_dict(), folder / "reward.pt"), log)
        log.end()
    return sft, reward


def _publish(folder: Path, save: Callable[[Path], object], log: Log) -> None:
    """Writes the files beside `folder` and renames them into place, so that a cache entry is whole or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    save(temporary)
    (temporary / "history.json").write_text(json.dumps(log.history()))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
