"""The stages of `ppo-train demo` before PPO: text, an SFT model and a reward model, all made here in a few minutes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.data import Rows
from ppo_kernels.trainer.log import Log
from ppo_kernels.trainer.movies import load_split, make_prompts, train_tokenizer
from ppo_kernels.trainer.pretrain import cached_models


def prepare(config: Config, folder: Path, log: Log, check: Callable[[], None]) -> tuple[Config, Rows, dict[str, str]]:
    """The configuration with the models it names now, the prompts, and facts for the report. The models are kept in
    `folder`/start: a resume does not depend on the cache."""
    assert config.demo is not None
    log.begin("text")
    split = load_split(config.data.train, config.data.seed, config.data.heldout_rows, config.demo.text.validation)
    prompts = make_prompts(split, config.demo.text.prompt_words)
    train, heldout = ([{"prompt": text} for text in part] for part in prompts)
    rows = Rows(train[: config.data.limit], heldout)
    sizes = f"{len(split.train)} train, {len(split.validation)} validation, {len(split.heldout)} held-out reviews"
    log.end(f"{sizes}; {len(rows.train)} and {len(rows.heldout)} prompts")

    start = folder / "start"
    if start.exists():
        written = log.size() > 0
        for name, kept in (("SFT", "actor"), ("reward model", "reward")):
            log.begin(name)
            if not written:  # ended before the first checkpoint
                log.replay(json.loads((start / kept / "history.json").read_text()))
            log.end("done before")
    else:
        tokenizer = train_tokenizer(split, config.demo.model.vocab)
        sft, reward = cached_models(config, split, tokenizer, log, check)
        beside = folder / "tmp-start"
        shutil.rmtree(beside, ignore_errors=True)
        for name, model in (("actor", sft), ("reward", reward)):
            shutil.copytree(model, beside / name)
        os.replace(beside, start)
    named = config.model_copy(
        update={
            "model": config.model.model_copy(update={"actor": str(start / "actor")}),
            "reward": config.reward.model_copy(update={"model": str(start / "reward")}),
        }
    )
    return named, rows, {"text": sizes}


def show(summary: dict[str, Any], folder: Path) -> None:
    """The before/after table and a few samples, printed."""
    console = Console(width=None if Console().is_terminal else 120)
    table = Table(title="before and after PPO, mean and bootstrap 95% interval")
    for heading in ("", "held-out before", "held-out after", "training before", "training after"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, (label, form, _) in summary["measures"].items():
        cells = []
        for side in ("heldout", "train"):
            for moment in ("before", "after"):
                mean, low, high = (form.format(value) for value in summary[moment][side][name])
                cells.append(f"{mean}\n[dim]{low} … {high}[/]")
        table.add_row(label, *cells)
    console.print(table)
    samples = Table(title="held-out prompts, first in line, one sample each", show_lines=True)
    for heading in ("before", "reward", "after", "reward"):
        samples.add_column(heading)
    for line in (folder / "samples.jsonl").read_text().splitlines()[:6]:
        row = json.loads(line)
        samples.add_row(row["before"], f"{row['before_reward']:+.2f}", row["after"], f"{row['after_reward']:+.2f}")
    console.print(samples)
    console.print(f"report: {(folder / 'report.html').resolve()}", soft_wrap=True)
