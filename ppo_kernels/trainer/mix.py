"""Plain language-model losses beside PPO's: pretraining text (PPO-ptx, Ouyang et al. 2022, eq. 2) and SFT pairs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from ppo_kernels import logprobs_from_hidden
from ppo_kernels.trainer import seeds
from ppo_kernels.trainer.config import MixConfig
from ppo_kernels.trainer.data import Text, pad, read_lines, read_objects, read_rows
from ppo_kernels.trainer.fetch import DataError
from ppo_kernels.trainer.models import Policy


class Example(NamedTuple):
    ids: list[int]
    start: int  # the loss is on tokens from here on


class Source(NamedTuple):
    name: str  # "ptx" or "sft"
    coef: float
    examples: list[Example]


def load_sources(config: MixConfig, text: Text, prompt_key: str = "prompt") -> list[Source]:
    """The sources that the configuration names. Raises DataError."""
    sources = []
    if config.ptx:
        ending = text.ending({"prompt": ""})
        lines = [text.tokenizer(line)["input_ids"] for line in _texts(Path(config.ptx))]
        examples = [_cut(ids, 1, ending, text, config) for ids in lines]
        sources.append(Source("ptx", config.ptx_coef, [x for x in examples if len(x.ids) > x.start]))
    if config.sft:
        examples = []
        for row in read_rows(Path(config.sft), prompt_key):
            if not isinstance(row.get("response"), str):
                raise DataError(f"{config.sft}: every row needs a response, a text")
            prompt = text.prompt(row)
            ids = prompt + text.ids(row["response"])
            examples.append(_cut(ids, len(prompt), text.ending(row), text, config))
        sources.append(Source("sft", config.sft_coef, [x for x in examples if len(x.ids) > x.start]))
    for source in sources:
        if not source.examples:
            raise DataError(f"mix.{source.name}: no text of at least two tokens")
    return sources


def _cut(ids: list[int], start: int, ending: int, text: Text, config: MixConfig) -> Example:
    """EOS at the end if it fits: a text cut short has not ended."""
    ids = ids if ids and ids[-1] in text.eos else [*ids, ending]
    return Example(ids[: config.max_tokens], start)


def _texts(path: Path) -> list[str]:
    if path.suffix == ".jsonl":
        rows = [row for _, row in read_objects(path)]
        if not all(isinstance(row, dict) and isinstance(row.get("text"), str) for row in rows):
            raise DataError(f"{path}: every row needs a text")
        return [row["text"] for row in rows]
    return [line for line in read_lines(path) if line.strip()]


def pick(source: Source, count: int, step: int, stream: int, seed: int) -> list[Example]:
    """The examples of one optimizer step: a permutation per epoch, a function of the seed."""
    total = len(source.examples)
    orders: dict[int, list[int]] = {}
    picked = []
    for position in range(step * count, (step + 1) * count):
        epoch = position // total
        if epoch not in orders:
            orders[epoch] = seeds.permutation(total, "mix", source.name, seed, stream, epoch).tolist()
        picked.append(source.examples[orders[epoch][position % total]])
    return picked


def tokens(examples: list[Example]) -> int:
    """How many carry the loss."""
    return sum(len(example.ids) - example.start for example in examples)


def negative_log_likelihood(policy: Policy, examples: list[Example], filler: int, device: torch.device) -> torch.Tensor:
    """The sum over the tokens that carry the loss, nats."""
    ids, attention = (x.to(device) for x in pad([example.ids for example in examples], "right", filler))
    starts = torch.tensor([example.start for example in examples], device=device)
    mask = attention & (torch.arange(ids.shape[1], device=device) >= starts[:, None])
    hidden = policy.hidden(ids, attention, ids.shape[1])
    logprobs: torch.Tensor = logprobs_from_hidden(
        hidden, policy.head.weight, ids, mask[:, 1:], bias=policy.head.bias, shift=True, **policy.head.options
    )
    return -logprobs.sum()
