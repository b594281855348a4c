"""A Config from YAML and `key=value` strings, every mistake reported at once, unknown names with the nearest one."""

from __future__ import annotations

import difflib
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ppo_kernels.trainer.config import Config

Tree = dict[str, Any]


class ConfigError(Exception):
    """One or more mistakes in the configuration; `problems` holds one line for each, `rest` what is right, if that is
    a configuration by itself: it may hold mistakes of another kind."""

    def __init__(self, problems: list[str], rest: Config | None = None) -> None:
        super().__init__("\n".join(problems))
        self.problems, self.rest = problems, rest


DEMO: Tree = {
    "name": "demo",
    "data": {"train": "movies", "heldout_rows": 1600},
    "rollout": {"prompts": 64, "max_new_tokens": 16, "temperature": 0.8},
    "optim": {"actor_lr": 5e-4, "critic_lr": 1e-3},
    "train": {"updates": 75},
    "eval": {"prompts": 512, "metric": "vader"},
    "demo": {},
}

SMOKE: Tree = {
    **DEMO,
    "name": "smoke",
    "data": {"train": "toy", "heldout_rows": 120},
    "rollout": {"prompts": 32, "max_new_tokens": 16, "temperature": 0.8},
    "ppo": {"microbatch": 16},
    "kl": {"coef": 0.1},
    "optim": {"actor_lr": 2e-3, "critic_lr": 2e-3},
    "train": {"updates": 15, "threads": 1},  # a model this small gains nothing from more
    "save": {"every": 5},
    "eval": {"prompts": 128, "every": 5, "curve_prompts": 32, "samples": 6, "metric": "vader"},
    "demo": {
        "model": {"hidden": 32, "layers": 2, "heads": 2, "ffn": 64, "vocab": 420},
        "text": {"validation": 60, "max_tokens": 24},
        "sft": {"steps": 150, "lr": 1e-2, "warmup": 5},
        "reward": {"steps": 150, "batch": 16, "lr": 5e-3},
    },
}

RESUMABLE = (  # what may differ in a run that goes on; all else would make it another run
    "train.updates", "train.threads", "save.", "eval.every", "log.", "guard.", "out",
)  # fmt: skip


def read_file(path: Path) -> Tree:
    """A YAML file's mapping; raises ConfigError."""
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: not YAML: {' '.join(str(error).split())}"]) from error
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: expected `key: value` lines, found a {type(tree).__name__}"])
    return tree


def load(overrides: list[str], base: Tree | None = None) -> Config:
    """The configuration from the defaults, `base` and `key.sub=value` strings, later ones winning.

    Raises ConfigError with every problem found.
    """
    tree, problems = override(base or {}, overrides)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        mistakes = [dict(problem) for problem in error.errors()]
        raise ConfigError([*problems, *map(_explain, mistakes)], _without(tree, mistakes)) from error
    if problems:
        raise ConfigError(problems, config)
    return config


def _without(tree: Tree, mistakes: list[Tree]) -> Config | None:
    tree = _copy(tree)
    for mistake in mistakes:
        node: Any = tree
        *parents, leaf = mistake["loc"] or ("",)
        for parent in parents:
            node = node.get(parent, {}) if isinstance(node, dict) else {}
        if isinstance(node, dict):
            node.pop(leaf, None)
    try:
        return Config.model_validate(tree)
    except ValidationError:
        return None


def resumed(saved: Tree, overrides: list[str]) -> Config:
    """The saved configuration with those overrides that a run may change on its way."""
    config = load(overrides, saved)
    problems = another_run(load([], saved), config)
    if problems:
        raise ConfigError(problems)
    return config


def another_run(saved: Config, given: Config) -> list[str]:
    """What cannot change on a run's way, and differs."""
    before, after = flat(saved.model_dump()), flat(given.model_dump())
    return [
        f"{key}: this run was started with {before.get(key)!r}, {after.get(key)!r} would make it another run; "
        "start a new one under another name"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and not key.startswith(RESUMABLE)
    ]


def override(base: Tree, overrides: list[str]) -> tuple[Tree, list[str]]:
    """A copy of `base` with every `key.sub=value` put into it, and what was wrong with those that could not be."""
    tree, problems = _copy(base), []
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            problems.append(f"{item}: expected key=value, for example ppo.clip=0.1")
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            child = node.get(parent)
            child = node[parent] = {} if child is None else child
            if not isinstance(child, dict):
                problems.append(f"{key}: {parent} is a value, not a section")
                break
            node = child
        else:
            node[leaf] = value
    return tree, problems


def _copy(tree: Tree) -> Tree:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in tree.items()}


def flat(tree: Tree, prefix: str = "") -> Tree:
    """{"ppo": {"clip": 0.2}} -> {"ppo.clip": 0.2}."""
    found: Tree = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def names(schema: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every key of the schema, dotted."""
    found: list[str] = []
    for name, field in schema.model_fields.items():
        kinds = [field.annotation, *typing.get_args(field.annotation)]
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        found += names(section, f"{prefix}{name}.") if section else [prefix + name]
    return found


def _explain(problem: Tree) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown name{nearest(key)}"
    if problem["type"] == "value_error":  # raised by a validator of ours, which names the keys itself
        return str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "literal_error":
        allowed = [word.strip("'") for word in problem["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        close = difflib.get_close_matches(str(problem["input"]), allowed, 1, 0.4)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"{key}={problem['input']!r}: expected one of {', '.join(allowed)}{hint}"
    return f"{key}={problem['input']!r}: {problem['msg']}"


def nearest(key: str) -> str:
    known = names()
    by_leaf = {name.rpartition(".")[2]: name for name in reversed(known)}
    close = difflib.get_close_matches(key, known, 1, 0.75) or [
        by_leaf[leaf] for leaf in difflib.get_close_matches(key.rpartition(".")[2], list(by_leaf), 1, 0.6)
    ]
    return f"; did you mean {close[0]}?" if close else ""
