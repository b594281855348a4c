"""What can be found wrong before a model is loaded: every path, plugin, package and number, all in one list."""

from __future__ import annotations

import difflib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ppo_kernels.trainer import rewards
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.data import BUILT_IN, Row, load_rows, prompt_of
from ppo_kernels.trainer.fetch import DataError
from ppo_kernels.trainer.movies import load_split
from ppo_kernels.trainer.rewards import PluginError


def problems(config: Config, ranks: int, reward_function: Any = None) -> list[str]:
    """One line for each mistake, naming the key and what to do; empty if the run can start on that many ranks."""
    found = _numbers(config, ranks) + _packages(config)
    if config.demo is not None and not found:  # without text there is no run and no folder: raises DataError
        load_split(config.data.train, config.data.seed, config.data.heldout_rows, config.demo.text.validation)
    if config.demo is None:
        found += _models(config, reward_function is not None) + _files(config)
        if not found:
            found += _plugins(config, reward_function)
    return found


def _numbers(config: Config, ranks: int) -> list[str]:
    found = []
    if config.train.device == "cuda" and not torch.cuda.is_available():
        found.append("train.device=cuda: this machine has no CUDA device that PyTorch can use; try auto or cpu")
    if config.rollout.prompts % ranks:
        found.append(f"rollout.prompts={config.rollout.prompts} does not divide over {ranks} ranks; "
                     f"try {_multiple(config.rollout.prompts, ranks)}")  # fmt: skip
    elif config.sequences // config.ppo.minibatches % ranks:
        found.append(f"a minibatch of {config.sequences // config.ppo.minibatches} sequences does not divide over "
                     f"{ranks} ranks: change ppo.minibatches or rollout.prompts")  # fmt: skip
    if (config.mix.ptx or config.mix.sft) and config.mix.rows % ranks:
        found.append(f"mix.rows={config.mix.rows} does not divide over {ranks} ranks; "
                     f"try {_multiple(config.mix.rows, ranks)}")  # fmt: skip
    if config.optim.critic_warmup >= config.train.updates:
        found.append(f"optim.critic_warmup={config.optim.critic_warmup} leaves none of train.updates="
                     f"{config.train.updates} for the actor")  # fmt: skip
    if config.ppo.max_tokens is not None and config.ppo.max_tokens < config.rollout.max_new_tokens:
        found.append(
            f"ppo.max_tokens={config.ppo.max_tokens} holds no response of rollout.max_new_tokens="
            f"{config.rollout.max_new_tokens} tokens; try {2 * config.rollout.max_new_tokens} or more"
        )
    if config.demo is not None and ranks > 1:
        found.append("the demo trains its models in one process: run it once, then a configuration with "
                     "model.actor=runs/demo/start/actor on many")  # fmt: skip
    return found


def _multiple(number: int, of: int) -> str:
    below, above = number // of * of, -(-number // of) * of
    return f"{below} or {above}" if below else str(above)


def _packages(config: Config) -> list[str]:
    wanted = []
    if config.model.lora_rank:
        wanted.append(("model.lora_rank", "peft"))
    if config.eval.metric == "vader":
        wanted.append(("eval.metric=vader", "vaderSentiment"))
    return [
        f"{key} needs the package {name}: pip install {name}"
        for key, name in wanted
        if importlib.util.find_spec(name) is None
    ]


def _models(config: Config, given_reward: bool) -> list[str]:
    if not config.model.actor:
        return ["model.actor: the directory of a causal LM is needed"]
    found, vocabularies = [], {}
    named = {"model.actor": config.model.actor, "reward.model": config.reward.model}
    if config.model.reference != "actor":
        named["model.reference"] = config.model.reference
        if config.model.lora_rank:
            found.append("model.reference: under LoRA the reference is the actor with its adapter off; leave it out")
    if config.model.critic not in ("auto", "reward", "actor"):
        named["model.critic"] = config.model.critic
    for key, folder in named.items():
        if folder in (None, "smollm2-135m"):  # the latter is fetched when all else is right
            continue
        path = Path(folder) / "config.json"
        if not path.is_file():
            found.append(f"{key}={folder}: not a model directory, {path.name} is missing{_similar(Path(folder))}")
            if folder.count("/") == 1 and not Path(folder).parent.exists():
                found[-1] += "; names on a model hub are not fetched here: download it first"
            continue
        try:
            settings = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            found.append(f"{key}={folder}: {path.name} cannot be read: {error}")
            continue
        vocabularies[key] = settings.get("vocab_size")
        kinds = settings.get("architectures") or ["unknown"]
        classifier = key in ("reward.model", "model.critic")
        if classifier and not any("SequenceClassification" in kind for kind in kinds):
            found.append(f"{key}={folder}: holds a {kinds[0]}, expected a ...ForSequenceClassification with one label")
        elif classifier and settings.get("num_labels", len(settings.get("id2label") or [0, 1])) != 1:
            found.append(f"{key}={folder}: the classifier has more than one label")
        if not classifier and any("SequenceClassification" in kind for kind in kinds):
            found.append(f"{key}={folder}: holds a {kinds[0]}, expected a causal LM")
    found += [
        f"{key}: a vocabulary of {size} tokens, the actor's has {vocabularies['model.actor']}: all models read the "
        "same token ids"
        for key, size in vocabularies.items()
        if size is not None and size < (vocabularies.get("model.actor") or 0)
    ]
    if config.model.critic == "reward" and config.reward.model is None:
        found.append("model.critic=reward needs reward.model; try model.critic=actor")
    if not (config.reward.model or config.reward.function or given_reward or config.data.environment):
        found.append("reward.model, reward.function or data.environment: something must give a reward")
    scored = config.reward.model or config.reward.function or given_reward
    if not scored and (config.reward.clip is not None or config.reward.normalize != "none"):
        found.append("reward.clip and reward.normalize are about scores; an environment's rewards are left alone")
    return found


def _similar(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if (entry / "config.json").is_file()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, 1, 0.5)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _files(config: Config) -> list[str]:
    named = {"data.heldout": config.data.heldout, "mix.ptx": config.mix.ptx, "mix.sft": config.mix.sft}
    found = [f"{key}={path}: no such file" for key, path in named.items() if path and not Path(path).is_file()]
    train = config.data.train
    if not train:
        found.append(f"data.train: a .jsonl file is needed, or one of {', '.join(BUILT_IN)}")
    elif train not in BUILT_IN and not Path(train).is_file():
        close = difflib.get_close_matches(train, BUILT_IN, 1, 0.6)
        hint = f"; did you mean {close[0]}?" if close else f"; the built-in ones are {', '.join(BUILT_IN)}"
        found.append(f"data.train={train}: no such file{hint}")
    return found


def _plugins(config: Config, reward_function: Any) -> list[str]:
    """Loads the rows, and calls every function on two of them, before anything large is loaded."""
    found = []
    try:
        rows = load_rows(config.data)
        two = (rows.train + rows.heldout)[:2]
    except DataError as error:
        return [str(error)]
    samples = [_sample(row) for row in two]
    checks: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("reward.function", lambda: reward_function or rewards.reward_function(config.reward, config.data.train)),
        ("eval.metric", lambda: rewards.load_plugin(config.eval.metric)
                                if config.eval.metric not in (None, "vader") else None),
    )  # fmt: skip
    for key, make in checks:
        try:
            function = make()
            if function is not None:
                rewards.call(function, samples, key)
        except PluginError as error:
            found.append(str(error) if str(error).startswith(key) else f"{key}={error}")
    if config.data.environment:
        try:
            rewards.step(rewards.begin(rewards.load_plugin(config.data.environment), two[0]), "")
        except PluginError as error:
            found.append(str(error) if str(error).startswith("data.environment") else f"data.environment={error}")
    return found


def _sample(row: Row) -> dict[str, Any]:
    return {"prompt": row["prompt"], "response": "", "responses": [""], "row": row, "text": prompt_of(row)}
