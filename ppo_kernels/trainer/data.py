"""Rows, prompts and tokens: what the actor is asked, and what becomes of its answer as text.

A row is a JSON object: {"prompt": "text"}, {"prompt": [{"role": "user", "content": ...}, ...]}, or {"turns": ["first
question", "second", ...]}, whose later turns are asked whatever the model answers. Other keys are for the reward.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ppo_kernels.trainer import seeds
from ppo_kernels.trainer.config import Config, DataConfig
from ppo_kernels.trainer.fetch import DataError

Row = dict[str, Any]
BUILT_IN = ("movies", "toy", "arithmetic")
MARK = "\ue000"  # a private-use character: no tokenizer or template gives it a meaning


class Rows(NamedTuple):
    train: list[Row]
    heldout: list[Row]
    shared: int = 0  # training rows that were left out because their prompt is held out


# ---- rows -----------------------------------------------------------------------------------------------------------


def load_rows(config: DataConfig, prompt_words: int = 3) -> Rows:
    """Training and held-out rows, no held-out prompt among the training ones. Raises DataError."""
    if config.train in ("movies", "toy"):
        from ppo_kernels.trainer.movies import load_split, make_prompts

        prompts = make_prompts(load_split(config.train, config.seed, config.heldout_rows, 0), prompt_words)
        train, heldout = ([{"prompt": text} for text in part] for part in prompts)
    elif config.train == "arithmetic":
        from ppo_kernels.trainer import arithmetic

        try:
            train, heldout = arithmetic.split(config.seed, 1000, config.heldout_rows)
        except ValueError as error:
            raise DataError(f"data.heldout_rows={config.heldout_rows}: {error}") from error
    else:
        train = read_rows(Path(config.train), config.prompt_key)
        if config.heldout is not None:
            heldout = read_rows(Path(config.heldout), config.prompt_key)
        else:
            order = seeds.permutation(len(train), "split", config.seed).tolist()
            heldout = [train[i] for i in order[: config.heldout_rows]]
            train = [train[i] for i in order[config.heldout_rows :]]
    known = {prompt_of(row) for row in heldout}  # training gives way: the report is about the held-out ones
    unknown = [row for row in train if prompt_of(row) not in known]
    if train and not unknown:
        raise DataError(f"data.train={config.train}: every training prompt is also a held-out one; make them differ")
    shared, train = len(train) - len(unknown), unknown[: config.limit]
    if not train or not heldout:
        raise DataError(
            f"data.train={config.train}: {len(train)} training and {len(heldout)} held-out rows; "
            f"data.heldout_rows={config.heldout_rows} leaves too little; try {max((len(train) + len(heldout)) // 5, 2)}"
        )
    return Rows(train, heldout, shared)


def read_rows(path: Path, prompt_key: str = "prompt") -> list[Row]:
    """The rows of a .jsonl file, their prompt under "prompt"; raises DataError naming the line."""
    rows = []
    for number, row in read_objects(path):
        if "turns" in row:
            turns = row["turns"]
            if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
                raise DataError(f"{path}, line {number}: turns must be a list of texts")
            row = row | {"prompt": [{"role": "user", "content": turns[0]}]}
        elif prompt_key not in row:
            raise DataError(f"{path}, line {number}: no key {prompt_key!r} among {', '.join(row) or 'none'}")
        else:
            row = row | {"prompt": row[prompt_key]}
        if not _is_prompt(row["prompt"]):
            raise DataError(f"{path}, line {number}: a prompt is a text, or a list of messages with role and content")
        rows.append(row)
    return rows


def read_objects(path: Path) -> list[tuple[int, Row]]:
    """(line number, JSON object) of a .jsonl file, empty lines left out; raises DataError naming the line."""
    rows = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected an object, found a {type(row).__name__}")
        rows.append((number, row))
    return rows


def read_lines(path: Path) -> list[str]:
    """splitlines() would cut at U+2028 too, inside a text."""
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from error


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    return isinstance(prompt, list) and bool(prompt) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
    )  # fmt: skip


def prompt_of(row: Row) -> str:
    """Of a row, as one text, for comparing."""
    return json.dumps(row["turns"] if "turns" in row else row["prompt"])


def update_rows(rows: list[Row], update: int, stream: int, config: Config) -> list[Row]:
    """The rows of one update, `samples_per_prompt` of each side by side: a permutation per epoch, a function of the
    seed, so that any update can be made again."""
    count, size = len(rows), config.rollout.prompts
    span = range(update * size, (update + 1) * size)
    orders = {
        epoch: seeds.permutation(count, "order", config.seed, stream, epoch).tolist()
        for epoch in {position // count for position in span}
    }
    picked = [rows[orders[position // count][position % count]] for position in span]
    return [row for row in picked for _ in range(config.rollout.samples_per_prompt)]


# ---- tokens ---------------------------------------------------------------------------------------------------------


class Text:
    """A tokenizer, and how prompts, replies and answers become tokens and text.

    Attributes:
        pad: the id that fills up rows. It may equal EOS: masks are carried along, nothing is told from ids (N+2).
        eos: the ids that end a response.
        room: the positions that the models have, or None.
    """

    def __init__(
        self,
        tokenizer: Any,
        config: DataConfig,
        generation_eos: int | list[int] | None = None,
        vocabulary: int | None = None,
        room: int | None = None,
    ) -> None:
        self.tokenizer, self.room = tokenizer, room
        ids = generation_eos if generation_eos is not None else tokenizer.eos_token_id
        ids = [ids] if isinstance(ids, int) else list(ids or [])
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        if not ids:
            raise DataError("the tokenizer has no EOS token: a response could never end")
        self.eos = tuple(dict.fromkeys(ids))
        padding = tokenizer.pad_token_id  # some add one to the tokenizer and not to the model
        known = padding is not None and (vocabulary is None or padding < vocabulary)
        self.pad = padding if known else self.eos[0]
        self.templated = config.chat_template == "auto" and getattr(tokenizer, "chat_template", None) is not None

    def prompt(self, row: Row) -> list[int]:
        """The ids of a row's prompt, ready to be answered."""
        prompt = row["prompt"]
        if self._templates(row):
            text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            return self.ids(text)
        text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        ids: list[int] = self.tokenizer(text)["input_ids"]
        while ids and ids[-1] in self.eos:  # some tokenizers end every text
            ids.pop()
        return ids or [self.tokenizer.bos_token_id if self.tokenizer.bos_token_id is not None else self.eos[0]]

    def reply(self, text: str, row: Row, ended: bool) -> list[int]:
        """The ids between two answers of the model: the end of its turn, unless it wrote that itself, and `text`.

        What the model wrote is never tokenized again: its own tokens carry the loss.
        """
        if not self._templates(row):
            return self.ids(text)
        ids = self._after_an_answer([{"role": "user", "content": text}])
        before = list(itertools.takewhile(lambda token: token not in self.eos, ids))
        closed = ended and len(before) < len(ids) and not self.tokenizer.decode(before).strip()
        return ids[len(before) + 1 :] if closed else ids

    def ending(self, row: Row) -> int:
        """The id that ends an answer: the chat template's, else the tokenizer's."""
        if self._templates(row):
            for token in self._after_an_answer([]):
                if token in self.eos:
                    return token
        own = self.tokenizer.eos_token_id
        return own if own is not None else self.eos[0]

    def _after_an_answer(self, more: list[Any]) -> list[int]:
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}, *more]
        whole = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=bool(more))
        _, found, rest = whole.partition(MARK)
        if not found:
            raise DataError("the chat template leaves out what an assistant said: it cannot hold a conversation")
        return self.ids(rest)

    def _templates(self, row: Row) -> bool:
        return self.templated and isinstance(row["prompt"], list)

    def decode(self, ids: torch.Tensor | list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def pad(rows: list[list[int]], side: str, filler: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask, int64 and bool [B, longest row]; `side` says where the padding goes."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), filler)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        ids[i, start : start + len(row)] = torch.tensor(row)
        mask[i, start : start + len(row)] = True
    return ids, mask
