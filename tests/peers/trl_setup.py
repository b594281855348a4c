"""A tiny model and tokenizer made here, and GRPOTrainers, stock and ours, for test_trl.py and test_trl_training.py."""

from __future__ import annotations

import math
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may ask the network

import random
from pathlib import Path
from string import ascii_lowercase

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from ppo_kernels.integrations.trl import GRPOMixin

transformers.logging.set_verbosity_error()
PAD, EOS = 0, 1


def text(lines: int = 100, words: int = 10) -> list[str]:
    """Words of random letters; nothing that is edited for other reasons, so that the trainings stay the same."""
    rng = random.Random(0)
    return [
        " ".join("".join(rng.choices(ascii_lowercase, k=rng.randint(2, 8))) for _ in range(words)) for _ in range(lines)
    ]


TEXT = text()


class Ours(GRPOMixin, GRPOTrainer):
    pass


def tokenizer(vocabulary: int = 300) -> PreTrainedTokenizerFast:
    bytes_of = Tokenizer(models.BPE(unk_token="<unk>"))
    bytes_of.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<pad>", "<eos>", "<unk>"]
    bytes_of.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=bytes_of, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def config(vocabulary: int, **options) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **{"tie_word_embeddings": False, **options},
    )


def save_model(path: Path, vocabulary: int) -> str:
    torch.manual_seed(0)
    Qwen2ForCausalLM(config(vocabulary)).save_pretrained(path)
    return str(path)


def reward(completion_ids, **_) -> list[float]:
    return [sum(token % 3 == 0 for token in completion) / 6 for completion in completion_ids]


def make(cls: type, model, processing_class, output: Path, **options) -> GRPOTrainer:
    peft_config = options.pop("peft_config", None)
    settings = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "num_iterations": 2,
        "optim": "sgd",  # Adam divides the gradient of a key's bias, which is 0 but for rounding, by its own size
        "learning_rate": 0.02,
        "max_grad_norm": 1000.0,  # logged and never reached: a wrong factor in the loss must reach the weights
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "temperature": 0.9,
        "generation_kwargs": {"sequence_bias": [[[EOS], 3.0]]},  # completions of 1 to 12 tokens
    }
    prompts = [line[: 10 + 3 * i] for i, line in enumerate(TEXT[:16])]
    trainer = cls(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(output), **{**settings, **options}),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        eval_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts[:2]]),
        processing_class=processing_class,
        peft_config=peft_config,
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    trainer.current_gradient_accumulation_steps = 2
    return trainer


def apart(got: dict, want: dict) -> float:
    """The relative distance of all tensors together."""
    assert got.keys() == want.keys()
    error, size = (sum(x.double().square().sum() for x in y) for y in ([got[n] - want[n] for n in want], want.values()))
    return math.sqrt(error) / max(math.sqrt(size), 1e-30)
