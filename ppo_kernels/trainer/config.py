"""The configuration: one schema, `key=value` overrides, every mistake reported at once.

There are three batch words, all global: `rollout.prompts` (sequences per update), `ppo.minibatches` (optimizer steps
per epoch) and `ppo.microbatch` (sequences per forward and backward; trades memory only, never the result).
"""

from __future__ import annotations

import difflib
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ConfigError(Exception):
    """One or more mistakes in the configuration; `problems` holds one line for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class ModelConfig(Section):
    hidden: int = Field(128, ge=8)
    layers: int = Field(3, ge=1)
    heads: int = Field(4, ge=1)
    ffn: int = Field(341, ge=8)
    vocab: int = Field(2048, ge=300)  # 256 bytes, 3 special tokens and the merges

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> ModelConfig:
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(f"model.heads={self.heads} must divide model.hidden={self.hidden} into an even head size")
        return self


class DataConfig(Section):
    source: Literal["movies", "toy"] = "movies"
    seed: int = 0  # the split depends on this alone, so that every run is judged on the same held-out prompts
    heldout: int = Field(1600, ge=1)  # snippets never trained on; their prompts are what the report is about
    validation: int = Field(800, ge=1)  # snippets that judge the reward model
    prompt_words: int = Field(3, ge=1)
    max_tokens: int = Field(64, ge=8)  # longer snippets are cut for SFT and the reward model


class SFTConfig(Section):
    steps: int = Field(1200, ge=1)
    batch: int = Field(16, ge=1)
    lr: float = Field(4e-3, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    warmup: int = Field(50, ge=0)


class RewardConfig(Section):
    steps: int = Field(450, ge=1)
    batch: int = Field(32, ge=1)
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    warmup: int = Field(20, ge=0)
    prefix_weight: float = Field(0.3, ge=0)  # every prefix also predicts the rating: responses may be cut short


class RolloutConfig(Section):
    prompts: int = Field(64, ge=1)
    max_new_tokens: int = Field(16, ge=1)
    temperature: float = Field(0.8, gt=0)
    missing_eos_penalty: float = Field(0.0, ge=0)  # subtracted from the score of a response that never ended
    train_prompts: int | None = Field(None, ge=1)  # use only the first n training prompts (to study overfitting)


class PPOConfig(Section):
    updates: int = Field(75, ge=1)
    epochs: int = Field(2, ge=1)
    minibatches: int = Field(2, ge=1)
    microbatch: int = Field(32, ge=1)
    clip: float = Field(0.2, gt=0)
    value_clip: float | None = Field(0.2, gt=0)
    vf_coef: float = Field(0.5, gt=0)
    critic_init: Literal["reward", "zero"] = "reward"  # from the reward model, or the SFT trunk and a zero head
    entropy_coef: float = 0.0
    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    whiten_advantages: bool = True


class KLConfig(Section):
    estimator: Literal["k1", "k2", "k3"] = "k1"
    coef: float = Field(0.04, ge=0)  # nats of divergence from the SFT model cost this much reward
    target: float | None = Field(None, gt=0)  # nats per sequence; set it for the adaptive controller
    horizon: int = Field(10_000, ge=1)


class OptimConfig(Section):
    actor_lr: float = Field(5e-4, gt=0)
    critic_lr: float = Field(1e-3, gt=0)
    schedule: Literal["linear", "constant"] = "linear"
    eps: float = Field(1e-5, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)


class TrainConfig(Section):
    loss_backend: Literal["fused", "reference"] = "fused"
    threads: int | None = Field(None, ge=1)  # null: all cores


class EvalConfig(Section):
    prompts: int = Field(512, ge=8)  # held-out and training prompts in the before/after table
    every: int = Field(10, ge=1)
    curve_prompts: int = Field(128, ge=8)  # held-out prompts behind the curves
    samples: int = Field(12, ge=1)


class LogConfig(Section):
    tensorboard: bool = True


class Config(Section):
    name: str = Field("demo", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    out: str = "runs"
    seed: int = 1
    cache: bool = True  # reuse the SFT and reward model of an earlier run with the same configuration
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sft: SFTConfig = SFTConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    ppo: PPOConfig = PPOConfig()
    kl: KLConfig = KLConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _minibatches_divide_prompts(self) -> Config:
        prompts, minibatches = self.rollout.prompts, self.ppo.minibatches
        if prompts % minibatches:
            valid = [n for n in range(1, prompts + 1) if prompts % n == 0]
            near = sorted(valid, key=lambda n: abs(n - minibatches))[:2]
            raise ValueError(
                f"ppo.minibatches={minibatches} does not divide rollout.prompts={prompts}; "
                f"try {' or '.join(map(str, sorted(near)))}"
            )
        return self


SMOKE: dict[str, Any] = {
    "name": "smoke",
    "model": {"hidden": 32, "layers": 2, "heads": 2, "ffn": 64, "vocab": 420},
    "data": {"source": "toy", "heldout": 120, "validation": 60, "max_tokens": 24},
    "sft": {"steps": 150, "lr": 1e-2, "warmup": 5},
    "reward": {"steps": 150, "batch": 16, "lr": 5e-3},
    "rollout": {"prompts": 32},
    "ppo": {"updates": 15, "microbatch": 16},
    "kl": {"coef": 0.1},
    "optim": {"actor_lr": 2e-3, "critic_lr": 2e-3},
    "train": {"threads": 1},  # a model this small gains nothing from more
    "eval": {"prompts": 128, "every": 5, "curve_prompts": 32, "samples": 6},
}


def load(overrides: list[str], base: dict[str, Any] | None = None) -> Config:
    """The configuration from the defaults, `base` and `key.sub=value` strings, later ones winning.

    Raises ConfigError with every problem found: unknown names come with the nearest valid one.
    """
    tree: dict[str, Any] = _copy(base or {})
    problems: list[str] = []
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
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                problems.append(f"{key}: {parent} is a value, not a section")
                break
            node = child
        else:
            node[leaf] = value
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems += [_explain(dict(problem)) for problem in error.errors()]
    if problems:
        raise ConfigError(problems)
    return config


def _copy(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, dict) else value for key, value in tree.items()}


def names() -> list[str]:
    """Every key of the schema, dotted."""
    found = []
    for name, value in Config():
        found += [f"{name}.{leaf}" for leaf, _ in value] if isinstance(value, Section) else [name]
    return found


def _explain(problem: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown name{_nearest(key)}"
    if problem["type"] == "value_error":  # raised by a validator above, which names the keys itself
        return str(problem["msg"]).removeprefix("Value error, ")
    return f"{key}={problem['input']!r}: {problem['msg']}"


def _nearest(key: str) -> str:
    by_leaf = {name.rpartition(".")[2]: name for name in names()}
    close = difflib.get_close_matches(key, names(), 1, 0.75) or [
        by_leaf[leaf] for leaf in difflib.get_close_matches(key.rpartition(".")[2], list(by_leaf), 1, 0.6)
    ]
    return f"; did you mean {close[0]}?" if close else ""
