"""The configuration: one schema. `settings.py` reads it from YAML and `key=value`.

There are three batch words, all global: `rollout.prompts` (times `samples_per_prompt`: sequences per update),
`ppo.minibatches` (optimizer steps per epoch) and `ppo.microbatch` (sequences per forward and backward on one rank;
trades memory only, never the result).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class ModelConfig(Section):
    actor: str = ""  # a directory of a causal LM of transformers, with its tokenizer
    critic: str = "auto"  # "reward": a copy of the reward model; "actor": the actor's trunk and a zero head; or a
    # directory of a sequence classifier with one label; auto: reward if there is a reward model, else actor
    reference: str = "actor"  # "actor": as it was at the start (under LoRA, with the adapter off); or a directory
    lora_rank: int | None = Field(None, ge=1)  # null: train every weight
    lora_alpha: float = Field(16.0, gt=0)
    lora_targets: str | list[str] = "all-linear"


class DataConfig(Section):
    train: str = ""  # a .jsonl file, or a built-in task: movies, toy, arithmetic
    heldout: str | None = None  # a .jsonl file; null: rows split off from `train`, never trained on
    heldout_rows: int = Field(256, ge=2)  # how many are split off
    prompt_key: str = "prompt"
    max_prompt: int = Field(512, ge=1)  # tokens; longer prompts are left out, and counted (N+23)
    chat_template: Literal["auto", "none"] = "auto"  # auto: for prompts that are messages, if the tokenizer has one
    environment: str | None = None  # file.py:name, called with a row: answers the model (docs/trainer.md)
    max_turns: int = Field(4, ge=1)
    seed: int = 0  # the split depends on this alone, so that every run is judged on the same held-out prompts
    limit: int | None = Field(None, ge=1)  # use only the first n training rows (to study overfitting)


class RewardConfig(Section):
    model: str | None = None  # a directory of a sequence classifier with one label
    model_weight: float = 1.0
    function: str | None = None  # file.py:name, or a built-in task's own: "task"
    function_weight: float = 1.0
    clip: float | None = Field(None, gt=0)  # scores are cut to [-clip, clip]; rewards of single turns are left alone
    normalize: Literal["none", "batch", "running", "start"] = "none"  # start: as the untrained actor's (N+10)
    missing_eos: Literal["subtract", "replace"] = "subtract"  # N+14
    missing_eos_value: float = 0.0  # what is subtracted from the score of a response that never ended, or the score


class RolloutConfig(Section):
    prompts: int = Field(64, ge=1)  # per update, over all ranks
    samples_per_prompt: int = Field(1, ge=1)
    max_new_tokens: int = Field(64, ge=1)  # per turn
    temperature: float = Field(1.0, ge=1e-3)
    microbatch: int = Field(64, ge=1)  # sequences per forward without gradient


class PPOConfig(Section):
    epochs: int = Field(2, ge=1)
    minibatches: int = Field(2, ge=1)
    microbatch: int = Field(32, ge=1)
    max_tokens: int | None = Field(None, ge=1)  # a microbatch of several rows has at most this many, padding included
    clip: float = Field(0.2, gt=0)
    clip_target_kl: float | None = Field(None, gt=0)  # nats per token: the clip range follows the measured KL
    clip_bounds: tuple[float, float] = (0.05, 0.4)
    value_clip: float | None = Field(0.2, gt=0)  # N+19
    vf_coef: float = Field(0.5, gt=0)
    entropy_coef: float = 0.0
    gamma: float = Field(1.0, gt=0, le=1)  # N+16
    lam: float = Field(0.95, ge=0, le=1)
    whiten_advantages: bool = True
    whiten_rewards: bool = False  # to unit variance, the mean kept (N+18)
    target_kl_stop: float | None = Field(None, gt=0)  # nats per token: an update ends when it has moved so far


class KLConfig(Section):
    estimator: Literal["k1", "k2", "k3"] = "k1"  # of the penalty, and of what is logged and adapted to (N+15)
    coef: float = Field(0.04, ge=0)  # nats of divergence from the reference cost this much reward
    target: float | None = Field(None, gt=0)  # nats per sequence; set it for the adaptive controller (N+20)
    horizon: int = Field(10_000, ge=1)


class MixConfig(Section):
    ptx: str | None = None  # .txt (one text a line) or .jsonl ({"text": ...}): PPO-ptx
    ptx_coef: float = Field(0.1, ge=0)
    sft: str | None = None  # .jsonl: {"prompt": ..., "response": ...}; the loss is on the response
    sft_coef: float = Field(0.1, ge=0)
    rows: int = Field(16, ge=1)  # of each, per optimizer step, over all ranks
    max_tokens: int = Field(512, ge=2)  # longer texts are cut


class OptimConfig(Section):
    actor_lr: float = Field(1e-6, gt=0)
    critic_lr: float = Field(1e-5, gt=0)
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup: int = Field(0, ge=0)  # updates over which both rates rise
    critic_warmup: int = Field(0, ge=0)  # updates in which the actor stays as it is
    weight_decay: float = Field(0.0, ge=0)
    eps: float = Field(1e-5, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)


class TrainConfig(Section):
    updates: int = Field(100, ge=1)
    loss: Literal["linear", "logits", "reference"] = "linear"  # from hidden states, from logits, in plain PyTorch
    parallel: Literal["ddp", "fsdp"] = "ddp"  # what torchrun's ranks do with the weights
    device: Literal["auto", "cpu", "cuda"] = "auto"
    bf16: bool = False  # autocast; weights and optimizer stay in fp32
    gradient_checkpointing: bool = False
    deterministic: bool = False  # on a GPU, for a resume to the bit; a CPU is deterministic as it is
    threads: int | None = Field(None, ge=1)  # null: PyTorch's choice, all cores; torchrun's is one


class SaveConfig(Section):
    every: int = Field(25, ge=1)  # updates
    keep: int = Field(2, ge=2)
    best: bool = True  # keep the actor with the best held-out reward too


class EvalConfig(Section):
    prompts: int = Field(256, ge=2)  # held-out and training prompts in the before/after table
    every: int = Field(10, ge=1)
    curve_prompts: int = Field(128, ge=2)  # held-out prompts behind the curves
    samples: int = Field(12, ge=1)
    metric: str | None = None  # an independent judge, never trained on: file.py:name, "vader", or null


class GuardConfig(Section):
    max_ratio: float = Field(100.0, gt=1)  # a step in which a token's ratio is larger is not taken
    max_kl: float = Field(5.0, gt=0)  # nats per token (k3) that an update may move before the run goes back
    max_skips: int = Field(3, ge=1)  # steps in a row that may be left out before the run goes back to a checkpoint
    max_rollbacks: int = Field(2, ge=0)  # then the run ends
    raise_kl: float = Field(2.0, ge=1)  # each rollback multiplies the KL coefficient


class LogConfig(Section):
    tensorboard: bool = True


class DemoModel(Section):
    hidden: int = Field(128, ge=8)
    layers: int = Field(3, ge=1)
    heads: int = Field(4, ge=1)
    ffn: int = Field(341, ge=8)
    vocab: int = Field(2048, ge=300)  # 256 bytes, 3 special tokens and the merges

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> DemoModel:
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"demo.model.heads={self.heads} must divide demo.model.hidden={self.hidden} into an even head size"
            )
        return self


class DemoText(Section):
    validation: int = Field(800, ge=1)  # snippets that judge the reward model
    prompt_words: int = Field(3, ge=1)
    max_tokens: int = Field(64, ge=8)  # longer snippets are cut for SFT and the reward model


class DemoSFT(Section):
    steps: int = Field(1200, ge=1)
    batch: int = Field(16, ge=1)
    lr: float = Field(4e-3, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    warmup: int = Field(50, ge=0)


class DemoReward(DemoSFT):
    steps: int = Field(450, ge=1)
    batch: int = Field(32, ge=1)
    lr: float = Field(1e-3, gt=0)
    warmup: int = Field(20, ge=0)
    prefix_weight: float = Field(0.3, ge=0)  # every prefix also predicts the rating: responses may be cut short


class DemoConfig(Section):
    """The stages before PPO of `ppo-train demo`, which makes its models itself."""

    model: DemoModel = DemoModel()
    text: DemoText = DemoText()
    sft: DemoSFT = DemoSFT()
    reward: DemoReward = DemoReward()
    cache: bool = True  # reuse the SFT and reward model of an earlier run with the same configuration


class Config(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    out: str = "runs"
    seed: int = Field(1, ge=0)
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    ppo: PPOConfig = PPOConfig()
    kl: KLConfig = KLConfig()
    mix: MixConfig = MixConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    save: SaveConfig = SaveConfig()
    eval: EvalConfig = EvalConfig()
    guard: GuardConfig = GuardConfig()
    log: LogConfig = LogConfig()
    demo: DemoConfig | None = None

    @property
    def sequences(self) -> int:
        """Per update, over all ranks."""
        return self.rollout.prompts * self.rollout.samples_per_prompt

    @model_validator(mode="after")
    def _minibatches_divide_sequences(self) -> Config:
        sequences, minibatches = self.sequences, self.ppo.minibatches
        if sequences % minibatches:
            divisors = [n for n in range(1, sequences + 1) if sequences % n == 0]
            near = sorted(sorted(divisors, key=lambda n: abs(n - minibatches))[:2])
            raise ValueError(
                f"ppo.minibatches={minibatches} does not divide rollout.prompts={sequences}; "
                f"try {' or '.join(map(str, near))}"
                if self.rollout.samples_per_prompt == 1
                else f"ppo.minibatches={minibatches} does not divide the {sequences} sequences of "
                f"rollout.prompts * rollout.samples_per_prompt; try {' or '.join(map(str, near))}"
            )
        return self

    @model_validator(mode="after")
    def _lora_is_not_sharded(self) -> Config:
        if self.model.lora_rank and self.train.parallel == "fsdp":
            raise ValueError("model.lora_rank needs train.parallel=ddp: an adapter has little to shard")
        return self

    @model_validator(mode="after")
    def _a_coefficient_can_be_adapted(self) -> Config:
        if self.kl.target is not None and self.kl.coef == 0:
            raise ValueError(f"kl.target={self.kl.target:g} adapts kl.coef by factors: it must start above 0")
        return self

    @model_validator(mode="after")
    def _clip_bounds_hold_the_clip_range(self) -> Config:
        low, high = self.ppo.clip_bounds
        if self.ppo.clip_target_kl and not 0 < low <= self.ppo.clip <= high:
            raise ValueError(f"ppo.clip_bounds={[low, high]} must hold ppo.clip={self.ppo.clip}, and be above 0")
        return self
