"""The loss from hidden states, from logits and in plain PyTorch train the same model from the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ppo_kernels.trainer import train
from ppo_kernels.trainer.settings import load

UPDATES = 6

# Every term of the loss and of the reward, ragged microbatches, a temperature, a KL coefficient that adapts.
EVERYTHING = [
    f"train.updates={UPDATES}", "rollout.prompts=12", "rollout.max_new_tokens=8", "rollout.temperature=0.8",
    "rollout.microbatch=5", "ppo.epochs=3", "ppo.minibatches=4", "ppo.microbatch=2", "ppo.entropy_coef=0.02",
    "ppo.value_clip=0.1", "ppo.whiten_rewards=true", "ppo.gamma=0.98", "kl.coef=0.1", "kl.target=0.5", "kl.horizon=100",
    "reward.normalize=running", "reward.clip=3", "reward.missing_eos_value=0.3",
]  # fmt: skip


def run(settings: dict[str, Any], *overrides: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The numbers of every update, and the final weights of actor and critic."""
    config = load([*EVERYTHING, *overrides], settings)
    assert train(config) == 0
    folder = Path(config.out) / config.name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve = [
        {name: value for name, value in row.items() if isinstance(value, float) and not name.startswith("time/")}
        for row in rows
        if row["stage"] == "ppo"
    ]
    for row in curve:
        del row["seconds"]
    weights = {
        f"{model}/{name}": tensor
        for model, path in (("actor", folder / "final"), ("critic", folder / "final" / "critic"))
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    return curve, weights


def test_every_loss_gives_the_same_curve_and_the_same_weights(quick: dict[str, Any], model_directory: Path) -> None:
    """Measured after these 72 optimizer steps: metrics differ by at most 2e-6 (of a gradient norm of 8), weights by
    4e-6 of the largest in their tensor. Every bound leaves a factor of 10 at least."""
    reward = f"reward.model={model_directory / 'reward'}"
    plain, plain_weights = run(quick, "name=reference", "train.loss=reference", reward)
    assert len(plain) == UPDATES
    for name in ("policy/clipfrac_avg", "val/clipfrac_avg", "objective/kl", "policy/approxkl_avg"):
        assert plain[1][name] > 0, f"{name}: a part of the loss that this would not compare"
    assert len({row["objective/kl_coef"] for row in plain}) == UPDATES
    for loss in ("logits", "linear"):
        curve, weights = run(quick, f"name={loss}", f"train.loss={loss}", reward)
        for expected, actual in zip(plain, curve, strict=True):
            assert actual == pytest.approx(expected, rel=1e-5, abs=2e-5), loss
        assert weights.keys() == plain_weights.keys()
        for name, tensor in plain_weights.items():
            bound = 5e-5 * float(tensor.abs().max())
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=bound, msg=f"{loss}: {name}")
        assert any(not torch.equal(weights[name], plain_weights[name]) for name in weights), "the same code ran twice"
