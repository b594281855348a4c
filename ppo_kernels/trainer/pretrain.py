"""The two stages before PPO: a language model from scratch, and a reward model on its trunk."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ppo_kernels import logprobs_from_logits
from ppo_kernels.trainer.config import Config, DemoConfig, DemoModel, DemoReward, DemoSFT
from ppo_kernels.trainer.data import pad
from ppo_kernels.trainer.fetch import cache_dir
from ppo_kernels.trainer.log import Log
from ppo_kernels.trainer.models import Scalar, load_language_model, scalar_from
from ppo_kernels.trainer.movies import BOS, EOS, PAD, Snippet, Split, batches, encode, fingerprint

Check = Callable[[], None]  # raises when the run was asked to end

FORMAT = 2  # of the cached models; raise it when an older cache must not be read
RATING_SCALE = 4.0  # human ratings are in [-4, 4], rewards in [-1, 1]


# ---- SFT ------------------------------------------------------------------------------------------------------------


def new_language_model(config: DemoModel, seed: int) -> LlamaForCausalLM:
    """A Llama from scratch, weights a function of the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab,
                hidden_size=config.hidden,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                intermediate_size=config.ffn,
                max_position_embeddings=256,
                tie_word_embeddings=True,
                attention_dropout=0.0,
                pad_token_id=PAD,
                bos_token_id=BOS,
                eos_token_id=EOS,
            )
        )


def train_sft(
    seed: int, config: DemoConfig, split: Split, tokenizer: PreTrainedTokenizerFast, log: Log, check: Check
) -> PreTrainedModel:
    model = new_language_model(config.model, seed)
    rows = encode(tokenizer, [snippet.text for snippet in split.train], config.text.max_tokens, eos=True)
    validation = encode(tokenizer, [snippet.text for snippet in split.validation], config.text.max_tokens, eos=True)
    generator = torch.Generator().manual_seed(seed)

    def loss(picked: list[int]) -> torch.Tensor:
        return _language_loss(model, [rows[i] for i in picked])[0]

    _fit(model, config.sft, [len(row) for row in rows], generator, loss, "sft/loss", log, check)
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
    seed: int, config: DemoConfig, sft: Any, split: Split, tokenizer: PreTrainedTokenizerFast, log: Log, check: Check
) -> Scalar:
    """Least squares on the human rating at the last token, and with a smaller weight at every earlier one.

    The prefixes make the model sensible on responses cut short, and a good critic to start from: what it says before
    token t is the score to expect.
    """
    generator = torch.Generator().manual_seed(seed + 2)
    model = scalar_from(sft, generator)
    rows = encode(tokenizer, [snippet.text for snippet in split.train], config.text.max_tokens, eos=True)
    ratings = torch.tensor([snippet.rating / RATING_SCALE for snippet in split.train])

    def loss(picked: list[int]) -> torch.Tensor:
        ids, mask = pad([rows[i] for i in picked], "right")
        error: torch.Tensor = (model(ids, mask) - ratings[picked, None]).square()
        at_end = error.gather(1, mask.sum(1, keepdim=True) - 1).mean()
        return at_end + config.reward.prefix_weight * error[mask].mean()

    _fit(model, config.reward, [len(row) for row in rows], generator, loss, "reward/loss", log, check)
    correlation, sign = judge(model, split.validation, tokenizer, config.text.max_tokens)
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
    config: DemoSFT | DemoReward,
    lengths: list[int],
    generator: torch.Generator,
    loss_of: Callable[[list[int]], torch.Tensor],  # row numbers -> scalar
    name: str,
    log: Log,
    check: Check,
) -> None:
    """AdamW over shuffled batches with a linear warm-up, then a cosine to 5% of the learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=config.weight_decay, betas=(0.9, 0.95), fused=True)
    queue: list[list[int]] = []
    for step in range(config.steps):
        check()
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


def cache_key(seed: int, split: Split, *sections: Any) -> str:
    """A hash of everything a stage depends on: the seed, the text and sections of the configuration."""
    parts = [FORMAT, seed, fingerprint(split), torch.__version__, *(section.model_dump() for section in sections)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def cached_models(
    config: Config, split: Split, tokenizer: PreTrainedTokenizerFast, log: Log, check: Check
) -> tuple[Path, Path]:
    """Directories of the SFT and the reward model: of the user cache if this very configuration was trained before."""
    demo = config.demo
    assert demo is not None
    parts = (demo.model, demo.text, demo.sft)
    sft_folder = cache_dir() / "models" / f"sft-{cache_key(config.seed, split, *parts)}"
    reward_folder = cache_dir() / "models" / f"reward-{cache_key(config.seed, split, *parts, demo.reward)}"

    log.begin("SFT", demo.sft.steps)
    if not _reused(sft_folder, demo.cache, log):
        sft = train_sft(config.seed, demo, split, tokenizer, log, check)
        _publish(sft_folder, sft, tokenizer, log)
        log.end()

    log.begin("reward model", demo.reward.steps)
    if not _reused(reward_folder, demo.cache, log):
        reward = train_reward(config.seed, demo, load_language_model(str(sft_folder)), split, tokenizer, log, check)
        _publish(reward_folder, reward.classifier, tokenizer, log)
        log.end()
    return sft_folder, reward_folder


def _reused(folder: Path, cache: bool, log: Log) -> bool:
    if not cache or not (folder / "history.json").exists():
        return False
    log.replay(json.loads((folder / "history.json").read_text()), cached=True)
    log.end("from the cache")
    return True


def _publish(folder: Path, model: Any, tokenizer: Any, log: Log) -> None:
    """Writes the files beside `folder` and renames them into place, so that a cache entry is whole or absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    (temporary / "history.json").write_text(json.dumps(log.history()))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
