"""Text: fetch it, split it, tokenize it, cut prompts from it.

The demo's text is 10,604 film-review snippets, each with the mean rating of about twenty people in [-4, 4], published
with C. J. Hutto and E. Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text",
ICWSM 2014. They come inside a source distribution on the Python package index, are fetched once and never vendored.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ppo_kernels.trainer.config import DataConfig
from ppo_kernels.trainer.toy import toy_snippets

SDIST = "vaderSentiment-3.3.2.tar.gz"
SDIST_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
PAD, BOS, EOS = 0, 1, 2  # N+2: three distinct tokens; padding is never told from text by comparing ids


class DataError(Exception):
    """The text is not there; the message says what to do."""


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


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ppo_kernels"


# ---- fetch ----------------------------------------------------------------------------------------------------------


def fetch_sdist() -> Path:
    """The path of the pinned archive, downloaded with pip on the first call.

    Raises DataError, with the remedy, when it can neither be found nor fetched, or when its checksum differs.
    """
    path = cache_dir() / SDIST
    if not path.exists():
        print(f"fetching {SDIST} (2.5 MB, once)", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            failure = _pip_download(Path(folder))
            if not (Path(folder) / SDIST).exists():
                raise DataError(
                    f"cannot fetch {SDIST} ({failure}); connect to the package index once, or put that file at {path}, "
                    "or run `ppo-train demo --smoke`, which needs no download"
                )
            os.replace(Path(folder) / SDIST, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SDIST_SHA256:
        raise DataError(f"{path} has sha256 {digest}, expected {SDIST_SHA256}; delete the file and run again")
    return path


def _pip_download(folder: Path) -> str:
    """Downloads the archive into `folder`; returns the last line of pip's complaint if there was one."""
    pin = folder / "pin.txt"  # with a hash, pip checks the archive before it runs anything from it
    pin.write_text(f"vaderSentiment==3.3.2 --hash=sha256:{SDIST_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--retries", "1", "--timeout", "15", "--no-binary", ":all:", "--dest", str(folder), "-r", str(pin)]
    if importlib.util.find_spec("setuptools"):
        command.append("--no-build-isolation")  # 2 seconds instead of 17: nothing is built, only named
    result = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"pip exited with {result.returncode}"


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


def load_split(config: DataConfig) -> Split:
    if config.source == "toy":
        count = 5 * (config.heldout + config.validation)
        snippets = [Snippet(*pair) for pair in toy_snippets(config.seed, count)]
    else:
        snippets = movie_snippets()
    ids = list(range(len(snippets)))
    random.Random(config.seed).shuffle(ids)
    cut = [config.heldout, config.heldout + config.validation]
    if cut[1] >= len(ids):
        raise DataError(f"data.heldout + data.validation = {cut[1]} leaves no training text of {len(ids)} snippets")
    heldout, validation, train = ids[: cut[0]], ids[cut[0] : cut[1]], ids[cut[1] :]
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
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str], max_tokens: int, eos: bool) -> list[list[int]]:
    """`<bos>` + text, + `<eos>` if asked and if it fits: a text cut short has not ended."""
    rows: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [([BOS] + row + ([EOS] if eos else []))[:max_tokens] for row in rows]


def pad(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask, int64 and bool [B, longest row]; `side` says where the padding goes."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        ids[i, start : start + len(row)] = torch.tensor(row)
        mask[i, start : start + len(row)] = True
    return ids, mask


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
