"""Film reviews: fetch them, split them, make a tokenizer and prompts from them.

The text is 10,604 film-review snippets, each with the mean rating of about twenty people in [-4, 4], published
with C. J. Hutto and E. Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text",
ICWSM 2014. They come inside a source distribution on the Python package index, are fetched once and never vendored.
"""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ppo_kernels.trainer.fetch import DataError, fetch
from ppo_kernels.trainer.toy import toy_snippets

SDIST = "vaderSentiment-3.3.2.tar.gz"
SDIST_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
PAD, BOS, EOS = 0, 1, 2  # N+2: three distinct tokens; padding is never told from text by comparing ids


class Snippet(NamedTuple):
    text: str
    rating: float  # [-4, 4]


class Split(NamedTuple):
    """Disjoint by snippet and by text; the same for tokenizer, SFT, reward model and prompts."""

    train: list[Snippet]
    validation: list[Snippet]
    heldout: list[Snippet]


class Prompts(NamedTuple):
    train: list[str]
    heldout: list[str]  # none equals a training prompt


# ---- fetch ----------------------------------------------------------------------------------------------------------


def fetch_sdist() -> Path:
    """The pinned archive's path; raises DataError, with the remedy, when it can neither be found nor fetched."""
    hint = ", or run `ppo-train demo --smoke`, which needs no download"
    return fetch(SDIST, "vaderSentiment==3.3.2", SDIST_SHA256, "2.5 MB", hint)


def movie_snippets() -> list[Snippet]:
    """All rated film-review snippets, in the archive's order."""
    with tarfile.open(fetch_sdist()) as outer:
        inner_file = outer.extractfile(f"{SDIST[:-7]}/additional_resources/hutto_ICWSM_2014.tar.gz")
        assert inner_file is not None
        with tarfile.open(fileobj=io.BytesIO(inner_file.read())) as inner:
            member = inner.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
            assert member is not None
            raw = member.read()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("cp1252")
    rows = [line.split("\t", 2) for line in text.splitlines() if line.count("\t") >= 2]
    return [Snippet(" ".join(row[2].split()), float(row[1])) for row in rows]


# ---- split ----------------------------------------------------------------------------------------------------------


def load_split(source: str, seed: int, heldout_rows: int, validation_rows: int) -> Split:
    """`source` is "movies" or "toy"."""
    if source == "toy":
        snippets = [Snippet(*pair) for pair in toy_snippets(seed, 5 * (heldout_rows + validation_rows))]
    else:
        snippets = movie_snippets()
    ids = list(range(len(snippets)))
    random.Random(seed).shuffle(ids)
    cut = heldout_rows + validation_rows
    if cut >= len(ids):
        raise DataError(
            f"data.heldout_rows + demo.text.validation = {cut} leaves no training text of {len(ids)} snippets"
        )
    heldout, validation, train = ids[:heldout_rows], ids[heldout_rows:cut], ids[cut:]
    # A text that occurs twice must not sit on both sides: training gives way to held-out, validation to both.
    held = {snippets[i].text for i in heldout}
    rows = [snippets[i] for i in train if snippets[i].text not in held]
    seen = held | {row.text for row in rows}
    return Split(
        rows, [snippets[i] for i in validation if snippets[i].text not in seen], [snippets[i] for i in heldout]
    )


def make_prompts(split: Split, words: int) -> Prompts:
    """The first `words` words of every snippet at least twice as long, without duplicates, in the split's order."""

    def cut(snippets: list[Snippet]) -> list[str]:
        texts = (snippet.text.split() for snippet in snippets)
        return list(dict.fromkeys(" ".join(text[:words]) for text in texts if len(text) > 2 * words))

    train = cut(split.train)
    known = set(train)
    return Prompts(train, [prompt for prompt in cut(split.heldout) if prompt not in known])


# ---- tokens ---------------------------------------------------------------------------------------------------------


def train_tokenizer(split: Split, vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab` tokens from the training texts alone."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator((snippet.text for snippet in split.train), trainer)
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str], max_tokens: int, eos: bool) -> list[list[int]]:
    """`<bos>` + text, + `<eos>` if asked and if it fits: a text cut short has not ended."""
    rows: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [([BOS] + row + ([EOS] if eos else []))[:max_tokens] for row in rows]


def batches(lengths: list[int], size: int, generator: torch.Generator) -> list[list[int]]:
    """One epoch of index batches in random order; rows of similar length share a batch, to compute little padding."""
    order = torch.randperm(len(lengths), generator=generator).tolist()
    pool = 50 * size
    order = [i for at in range(0, len(order), pool) for i in sorted(order[at : at + pool], key=lengths.__getitem__)]
    groups = [order[at : at + size] for at in range(0, len(order), size)]
    return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]


def fingerprint(split: Split) -> str:
    """A hash of every text and rating, for the cache key."""
    return hashlib.sha256(repr(split).encode()).hexdigest()
