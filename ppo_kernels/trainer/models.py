"""The four roles: actor and frozen reference (causal LMs), critic and reward model (a trunk with a scalar head)."""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DynamicCache,
)

from ppo_kernels.integrations.transformers import patch_lm_head
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.fetch import DataError
from ppo_kernels.trainer.ranks import Ranks, distribute, reshard, whole


class Policy:
    """A causal LM and its head apart, so that logits need not exist. `module` is what a training forward calls."""

    def __init__(self, model: Any, adapter_off: bool = False) -> None:
        self.model, self.module, self.adapter_off = model, model, adapter_off
        self.head = patch_lm_head(model)
        self.base = self.head.model
        # from transformers 5.24 on it is called cache
        self.cache_name = "cache" if "cache" in inspect.signature(self.base.forward).parameters else "past_key_values"

    def hidden(self, ids: torch.Tensor, attention: torch.Tensor, keep: int) -> torch.Tensor:
        """What the head is given at the last `keep` positions, [B, keep, H]; ids, attention [B, S]."""
        with self._adapter():
            output = self._called()(
                input_ids=ids, attention_mask=attention, position_ids=positions(attention), logits_to_keep=keep,
                use_cache=False,
            )  # fmt: skip
        return output.logits  # type: ignore[no-any-return]

    def logits(
        self,
        ids: torch.Tensor,  # [B, new] the tokens not yet in the cache
        attention: torch.Tensor,  # [B, S] everything so far
        keep: int,
        cache: DynamicCache | None = None,
    ) -> torch.Tensor:
        """The logits of the last `keep` positions, [B, keep, V]; reads and extends the cache if given."""
        with self._adapter(), self.head.logits():
            output = self._called()(
                input_ids=ids,
                attention_mask=attention,
                position_ids=positions(attention)[:, -ids.shape[1] :],
                use_cache=cache is not None,
                logits_to_keep=keep,
                **({self.cache_name: cache} if cache is not None else {}),
            )
        return output.logits  # type: ignore[no-any-return]

    def _called(self) -> Any:
        """DDP's forward may meet the other ranks, which call the model as often in training only."""
        return self.module if torch.is_grad_enabled() else self.model

    def _adapter(self) -> contextlib.AbstractContextManager[Any]:
        return self.model.disable_adapter() if self.adapter_off else contextlib.nullcontext()


class Scalar(nn.Module):
    """One number per position from a sequence classifier with one label: reward model and critic."""

    def __init__(self, classifier: Any) -> None:
        super().__init__()
        if not hasattr(classifier, "score"):
            raise DataError(
                f"{type(classifier).__name__} has no head called score that can be read at every token, as the "
                "classifiers on causal language models of transformers have"
            )
        self.classifier = classifier

    def forward(self, ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """ids, attention [B, S] -> fp32 [B, S]; position t has seen tokens 0..t."""
        output = self.classifier.base_model(
            input_ids=ids, attention_mask=attention, position_ids=positions(attention), use_cache=False
        )
        return self.classifier.score(output.last_hidden_state).squeeze(-1).float()  # type: ignore[no-any-return]


class Roles(NamedTuple):
    actor: Policy
    reference: Policy
    critic: Scalar
    reward: Scalar | None
    critic_module: nn.Module  # what a training forward of the critic calls

    def train(self, mode: bool) -> None:
        """Gradient checkpointing is on in train mode only, and needs the cache off."""
        self.actor.model.train(mode)
        self.critic.train(mode)


def load_roles(config: Config, ranks: Ranks) -> Roles:
    """All four from the directories that the configuration names."""
    actor: Any = load_language_model(config.model.actor)
    reward = load_scalar(config.reward.model) if config.reward.model else None
    critic_from = config.model.critic if config.model.critic != "auto" else "reward" if reward else "actor"
    if critic_from == "reward":
        critic = copy.deepcopy(reward)
    elif critic_from == "actor":
        critic = scalar_from(actor)
    else:
        critic = load_scalar(critic_from)
    assert critic is not None
    if config.model.lora_rank:
        reference, actor = None, with_lora(actor, config)
    else:
        frozen = config.model.reference
        reference = copy.deepcopy(actor) if frozen == "actor" else load_language_model(frozen)
    return assemble(config, ranks, actor, reference, critic, reward)


def assemble(config: Config, ranks: Ranks, actor: Any, reference: Any, critic: Scalar, reward: Scalar | None) -> Roles:
    """Places the models on the device, wraps those that train; without `reference` it is the actor's base (LoRA)."""
    for model in (actor, reference, critic, reward):
        if model is not None:
            assert_no_dropout(model)
            model.to(ranks.device)
    if config.train.gradient_checkpointing:
        for trained in (actor, critic.classifier):
            trained.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    critic.requires_grad_(True)
    policy = Policy(actor)
    policy.module = distribute(actor, ranks, config.train.parallel)
    if reference is not None:
        freeze(reference)
    frozen = Policy(actor, adapter_off=True) if reference is None else Policy(reference)
    reward = freeze(reward) if reward is not None else None
    return Roles(policy, frozen, critic, reward, distribute(critic, ranks, config.train.parallel))


def load_language_model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, config=without_dropout(folder), dtype=torch.float32)


def load_scalar(folder: str) -> Scalar:
    config = without_dropout(folder)
    return Scalar(AutoModelForSequenceClassification.from_pretrained(folder, config=config, dtype=torch.float32))


def without_dropout(folder: str) -> Any:
    """The configuration of a model with every dropout at 0 (N+12)."""
    config = AutoConfig.from_pretrained(folder)
    for name, value in vars(config).items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def load_tokenizer(folder: str) -> Any:
    """Raises DataError."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"model.actor={folder}: no tokenizer can be loaded from it: {reason}") from error


def scalar_from(language_model: Any, generator: torch.Generator | None = None) -> Scalar:
    """The trunk of a causal LM, copied, with a fresh head: zero (N+11, a critic), or N(0, 1/sqrt(hidden + 1)) from
    `generator` (N+9, a reward model)."""
    config = copy.deepcopy(language_model.config)
    config.num_labels = 1
    try:
        classifier = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise DataError(
            f"transformers has no sequence classifier for a {type(language_model).__name__}: name one of another kind "
            "that reads the same tokens, model.critic=DIRECTORY"
        ) from error
    classifier.base_model.load_state_dict(language_model.base_model.state_dict())
    weight = classifier.score.weight
    if generator is None:
        nn.init.zeros_(weight)
    else:
        nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1] + 1), generator=generator)
    return Scalar(classifier)


def with_lora(actor: Any, config: Config) -> Any:
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(
        r=config.model.lora_rank or 0,
        lora_alpha=config.model.lora_alpha,
        target_modules=config.model.lora_targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return get_peft_model(actor, options)


def autocast(config: Config, ranks: Ranks) -> contextlib.AbstractContextManager[Any]:
    """Around every forward, sampling and scoring too: the ratio starts at 1 only if all compute alike."""
    return torch.autocast(ranks.device.type, torch.bfloat16, enabled=config.train.bf16)


def freeze(model: Any) -> Any:
    return model.eval().requires_grad_(False)


def assert_no_dropout(model: nn.Module) -> None:
    """N+12: with dropout the ratio is not 1 before the first step and nothing below means anything."""
    active = [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
    settings = vars(getattr(getattr(model, "classifier", model), "config", None) or argparse.Namespace())
    unused = ("classifier_dropout", "summary_first_dropout")  # of heads that are not called here
    active += [
        name
        for name, value in settings.items()
        if "dropout" in name and name not in unused and isinstance(value, float) and value > 0
    ]
    if active:
        raise ValueError(f"dropout must be 0 in every model, found it in {', '.join(active)}")


def positions(mask: torch.Tensor) -> torch.Tensor:
    """N+3: position ids that start at 0 on the first real token, whatever padding precedes it. [B, S] int64."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def plain_directory(model: Any, tokenizer: Any, folder: Path, ranks: Ranks) -> None:
    """What AutoModel and AutoTokenizer load, adapters merged; every rank calls it, rank 0 writes."""
    if hasattr(model, "merge_and_unload"):
        if not ranks.main:
            return
        model = copy.deepcopy(model).merge_and_unload()
    reshard(model)
    state = {name: whole(value).cpu() for name, value in model.state_dict().items()}
    if ranks.main:
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
