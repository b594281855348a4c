"""The four roles: actor and frozen reference (causal LMs), critic and reward model (a trunk with a scalar head)."""

from __future__ import annotations

import argparse
import copy
import inspect
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ppo_kernels.trainer.config import ModelConfig
from ppo_kernels.trainer.data import BOS, EOS, PAD


class Scalar(nn.Module):
    """A language model's trunk with one number per position: reward model and critic.

    A fresh head is zero (N+11, critic) or N(0, 1/sqrt(hidden + 1)) with bias 0 (N+9, reward model).
    """

    def __init__(self, trunk: PreTrainedModel, zero_head: bool, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.trunk = trunk
        width = trunk.config.hidden_size
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.bias)
        if zero_head:
            nn.init.zeros_(self.head.weight)
        else:
            nn.init.normal_(self.head.weight, std=1 / math.sqrt(width + 1), generator=generator)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """ids, mask [B, S] -> fp32 [B, S]; position t has seen tokens 0..t."""
        hidden = self.trunk(input_ids=ids, attention_mask=mask, position_ids=positions(mask)).last_hidden_state
        return self.head(hidden).squeeze(-1).float()  # type: ignore[no-any-return]


class Roles(NamedTuple):
    actor: PreTrainedModel
    reference: PreTrainedModel
    critic: Scalar
    reward: Scalar


def new_language_model(config: ModelConfig, seed: int) -> LlamaForCausalLM:
    """A Llama from scratch, weights a function of the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab,
                hidden_size=config.hidden,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                intermediate_size=config.ffn,
                max_position_embeddings=256,
                tie_word_embeddings=True,
                attention_dropout=0.0,
                pad_token_id=PAD,
                bos_token_id=BOS,
                eos_token_id=EOS,
            )
        )


def assign_roles(sft: PreTrainedModel, reward: Scalar, critic_init: str = "reward") -> Roles:
    """Actor and reference from the SFT model, critic from the reward model: its head already predicts the score."""
    critic = copy.deepcopy(reward) if critic_init == "reward" else Scalar(copy.deepcopy(sft.base_model), zero_head=True)
    roles = Roles(copy.deepcopy(sft), freeze(sft), critic.requires_grad_(True), freeze(reward))
    for model in roles:
        assert_no_dropout(model)
    return roles


def freeze(model: Any) -> Any:
    return model.eval().requires_grad_(False)


def assert_no_dropout(model: nn.Module) -> None:
    """N+12: with dropout the ratio is not 1 before the first step and nothing below means anything."""
    active = [name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0]
    settings = vars(getattr(model, "config", None) or argparse.Namespace())
    active += [name for name, value in settings.items() if "dropout" in name and isinstance(value, float) and value > 0]
    if active:
        raise ValueError(f"dropout must be 0 in every model, found it in {', '.join(active)}")


def positions(mask: torch.Tensor) -> torch.Tensor:
    """N+3: position ids that start at 0 on the first real token, whatever padding precedes it. [B, S] int64."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def logits_of(
    model: PreTrainedModel,
    ids: torch.Tensor,  # [B, new] the tokens not yet in the cache
    mask: torch.Tensor,  # [B, S] everything so far
    keep: int,
    cache: DynamicCache | None = None,
) -> torch.Tensor:
    """The logits of the last `keep` positions, [B, keep, V]; reads and extends the cache if given."""
    renamed = "cache" in inspect.signature(model.forward).parameters  # from transformers 5.24 on
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions(mask)[:, -ids.shape[1] :],
        use_cache=cache is not None,
        logits_to_keep=keep,
        **({"cache" if renamed else "past_key_values": cache} if cache is not None else {}),
    )
    return output.logits  # type: ignore[no-any-return]


def save_language_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """A plain directory that AutoModelForCausalLM and AutoTokenizer load."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
