"""`ppo-train demo`: text -> SFT -> reward model -> PPO -> report, from nothing to a picture in a few minutes."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

import ppo_kernels
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.data import load_split, make_prompts, train_tokenizer
from ppo_kernels.trainer.evaluate import MEASURES, Evaluation, evaluate
from ppo_kernels.trainer.log import Log, Stage
from ppo_kernels.trainer.loop import ppo
from ppo_kernels.trainer.models import assign_roles, save_language_model
from ppo_kernels.trainer.pretrain import cached_models
from ppo_kernels.trainer.report import write_report

EVALUATION_SEED = 20_000  # the same random stream before and after, and for every configuration


def demo(config: Config) -> Path:
    """Runs everything; returns the run's folder. Raises DataError when the text cannot be had."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    transformers.utils.logging.disable_progress_bar()  # one progress display is enough
    split = load_split(config.data)  # first of all: without text there is no run and no folder
    folder = new_folder(Path(config.out), config.name)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(), sort_keys=False))
    (folder / "env.json").write_text(json.dumps(environment(), indent=1))

    stages = [Stage("text", 6), Stage("SFT", 100), Stage("reward model", 40), Stage("before", 5), Stage("PPO", 100)]
    stages += [Stage("after", 5), Stage("report", 2)]
    with Log(folder, f"ppo_kernels demo · {folder}", stages, config.log.tensorboard) as log:
        log.begin("text")
        prompts = make_prompts(split, config.data.prompt_words)
        tokenizer = train_tokenizer(split, config.model.vocab)
        sizes = f"{len(split.train)} train, {len(split.validation)} validation, {len(split.heldout)} held-out reviews"
        log.end(f"{sizes}; {len(prompts.train)} and {len(prompts.heldout)} prompts")

        sft, reward = cached_models(config, split, tokenizer, log)
        roles = assign_roles(sft, reward, config.ppo.critic_init)

        def measure(chosen: list[str]) -> Evaluation:
            return evaluate(
                roles.actor, roles.reference, roles.reward, tokenizer, chosen, config.rollout, EVALUATION_SEED
            )

        def curve_point(update: int) -> dict[str, float]:
            result = measure(prompts.heldout[: config.eval.curve_prompts])
            return flatten("heldout", result) | {"heldout/update": update}

        log.begin("before")
        train_set = prompts.train[: config.eval.prompts]
        heldout_set = prompts.heldout[: config.eval.prompts]
        before = {"heldout": measure(heldout_set), "train": measure(train_set)}
        log.end(one_line(before["heldout"]))

        log.begin("PPO", config.ppo.updates)
        ppo(config, roles, tokenizer, prompts.train[: config.rollout.train_prompts], curve_point, log)
        log.end()

        log.begin("after")
        after = {"heldout": measure(heldout_set), "train": measure(train_set)}
        log.end(one_line(after["heldout"]))

        log.begin("report")
        save_language_model(roles.actor, tokenizer, folder / "final")
        write_samples(folder, heldout_set, before["heldout"], after["heldout"], config.eval.samples)
        seconds = {view.name: round(view.seconds, 2) for view in log.views[:-1]}
        summary = {
            "before": {name: summarize(result) for name, result in before.items()},
            "after": {name: summarize(result) for name, result in after.items()},
            "prompts": {"train": len(train_set), "heldout": len(heldout_set)},
            "stage_seconds": seconds | {"total": round(log.elapsed(), 2)},
            "sizes": {"parameters": parameters(roles.actor), "text": sizes},
        }
        (folder / "summary.json").write_text(json.dumps(summary, indent=1))
        write_report(folder)
        log.end(str(folder / "report.html"))
    show(summary, folder)
    return folder


def new_folder(out: Path, name: str) -> Path:
    """runs/demo, or runs/demo-2 and so on: an earlier run is never touched."""
    for number in range(1, 10_000):
        folder = out / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{out / name} and 9,998 numbered siblings exist; remove some")


def environment() -> dict[str, Any]:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in (Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else [])
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": " ".join(["ppo-train", *sys.argv[1:]]),
        "ppo_kernels": getattr(ppo_kernels, "__version__", "unknown"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "backend": os.environ.get("PPO_KERNELS_BACKEND", "automatic"),
    }


def flatten(prefix: str, result: Evaluation) -> dict[str, float]:
    values: dict[str, float] = {}
    for name, (mean, low, high) in result.estimates.items():
        values |= {f"{prefix}/{name}": mean, f"{prefix}/{name}_low": low, f"{prefix}/{name}_high": high}
    return values


def summarize(result: Evaluation) -> dict[str, list[float]]:
    return {name: list(estimate) for name, estimate in result.estimates.items()}


def one_line(result: Evaluation) -> str:
    reward, vader = result.estimates["reward"], result.estimates["vader"]
    return f"held-out: learned reward {reward.mean:+.3f}, VADER {vader.mean:+.3f}"


def parameters(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def write_samples(folder: Path, prompts: list[str], before: Evaluation, after: Evaluation, count: int) -> None:
    """The first `count` held-out prompts, unselected, with one sampled response each."""
    rows = zip(prompts, before.texts, before.rewards, after.texts, after.rewards, strict=True)
    with (folder / "samples.jsonl").open("w") as file:
        for prompt, old, old_score, new, new_score in list(rows)[:count]:
            row = {"prompt": prompt, "before": old, "before_reward": old_score, "after": new, "after_reward": new_score}
            file.write(json.dumps(row) + "\n")


def show(summary: dict[str, Any], folder: Path) -> None:
    """The before/after table and a few samples, printed."""
    console = Console(width=None if Console().is_terminal else 120)
    table = Table(title="before and after PPO, mean and bootstrap 95% interval")
    for heading in ("", "held-out before", "held-out after", "training before", "training after"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, (label, form, _) in MEASURES.items():
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
