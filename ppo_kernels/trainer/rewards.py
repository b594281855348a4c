"""What a response is worth: a reward model, a Python function, or both mixed; then clipped, normalised, and marked down
when it never ended.

A reward function takes a list of samples and returns a number for each, or a list of numbers, one per turn. A sample is
{"prompt": as in the row, "response": the last answer, "responses": all of them, "row": the row}.
"""

from __future__ import annotations

import importlib.util
import math
import numbers
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ppo_kernels.trainer.config import RewardConfig

Sample = dict[str, Any]
RewardFunction = Callable[[list[Sample]], list[Any]]


class PluginError(Exception):
    """A function of the user's is not there, or does not do what it should; the message names it."""


def load_plugin(spec: str) -> Any:
    """`file.py:name` -> what that file calls `name`."""
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py") or not name:
        raise PluginError(f"{spec}: expected file.py:name")
    if not Path(path).is_file():
        raise PluginError(f"{spec}: there is no file {path}")
    module_spec = importlib.util.spec_from_file_location(f"ppo_train_plugin_{Path(path).stem}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look there
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:  # so that it can import what lies beside it
        sys.path.append(folder)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{spec}: importing {path} raised {type(error).__name__}: {error}") from error
    if not callable(getattr(module, name, None)):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        raise PluginError(f"{spec}: {path} has no function {name}; it has {known or 'none'}")
    return getattr(module, name)


def reward_function(config: RewardConfig, train: str) -> RewardFunction | None:
    """The function that `reward.function` names; "task" is the built-in task's own."""
    if config.function == "task":
        if train != "arithmetic":
            raise PluginError(f"reward.function=task: data.train={train} has no reward of its own")
        from ppo_kernels.trainer import arithmetic

        return arithmetic.score
    return load_plugin(config.function) if config.function else None


def call(function: RewardFunction, samples: list[Sample], name: str) -> list[list[float]]:
    """One list of numbers for each sample: one number for the whole, or one for each turn. Raises PluginError."""
    try:
        values = list(function(samples))
    except (Exception, SystemExit) as error:
        raise PluginError(f"{name} raised {type(error).__name__}: {error}") from error
    if len(values) != len(samples):
        raise PluginError(f"{name} returned {len(values)} values for {len(samples)} samples")
    result = []
    for value, sample in zip(values, samples, strict=True):
        if hasattr(value, "tolist"):  # a tensor's or an array's
            value = value.tolist()
        per_turn = list(value) if isinstance(value, list | tuple) else [value]
        if not all(isinstance(number, numbers.Real) for number in per_turn):
            raise PluginError(f"{name} returned {value!r}, expected a number, or a list of one number per turn")
        if len(per_turn) not in (1, len(sample["responses"])):
            turns = len(sample["responses"])
            raise PluginError(f"{name} returned {len(per_turn)} numbers for a sample of {turns} turns")
        result.append([float(number) for number in per_turn])
    return result


def begin(environment: Callable[[Any], Any], row: Any) -> Any:
    """A row's own environment. Raises PluginError."""
    try:
        return environment(row)
    except (Exception, SystemExit) as error:
        raise PluginError(f"data.environment raised {type(error).__name__}: {error}") from error


def step(environment: Any, response: str) -> tuple[str | None, float]:
    """What the environment replies (None: it is over), and the reward of the turn. Raises PluginError."""
    try:
        answer = environment.step(response)
    except (Exception, SystemExit) as error:
        raise PluginError(f"data.environment: step raised {type(error).__name__}: {error}") from error
    reply, reward = answer if isinstance(answer, tuple | list) and len(answer) == 2 else ("", None)
    if not (reply is None or isinstance(reply, str)) or not isinstance(reward, numbers.Real):
        raise PluginError(f"data.environment: step returned {answer!r}, expected (text or None, number)")
    return reply, float(reward)


class Moments(NamedTuple):
    """How many, mean and sum of squared deviations of the scores so far; part of every checkpoint."""

    number: float = 0.0
    mean: float = 0.0
    deviations: float = 0.0

    def add(self, x: torch.Tensor) -> Moments:
        """Chan's parallel update."""
        n, mean = float(x.numel()), float(x.double().mean())
        total, delta = self.number + n, mean - self.mean
        deviations = self.deviations + float((x.double() - mean).square().sum())
        return Moments(total, self.mean + delta * n / total, deviations + delta * delta * self.number * n / total)

    def standardize(self, x: torch.Tensor) -> torch.Tensor:
        """Equal scores so far are only centred."""
        deviation = math.sqrt(self.deviations / self.number) if self.number else 1.0
        return (x - self.mean) / (deviation if deviation > 1e-6 else 1.0)


def clipped(scores: torch.Tensor, config: RewardConfig) -> torch.Tensor:
    return scores if config.clip is None else scores.clamp(-config.clip, config.clip)


def finish(
    scores: torch.Tensor,  # [B]
    has_eos: torch.Tensor,  # [B]
    config: RewardConfig,
    moments: Moments,
) -> tuple[torch.Tensor, Moments]:
    """Clipped, then normalised, then the penalty of a response that never ended (N+14); and the moments after."""
    scores = clipped(scores, config)
    if config.normalize == "running":
        moments = moments.add(scores)
    if config.normalize != "none":
        scores = (Moments().add(scores) if config.normalize == "batch" else moments).standardize(scores)
    value = config.missing_eos_value
    missing = scores - value if config.missing_eos == "subtract" else torch.full_like(scores, value)
    return torch.where(has_eos, scores, missing), moments
