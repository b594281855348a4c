"""The trainer on a CUDA device, and the same runs on a CPU: three updates of a model with one layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("transformers", "pydantic", "rich", "yaml", "safetensors"):
    pytest.importorskip(package, reason=f"the trainer needs {package}, which is not installed")

from trainer.rank_runs import final, go, rows  # noqa: E402
from trainer.runs import make_models, tiny  # noqa: E402

pytestmark = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])


@pytest.fixture
def base(tmp_path: Path) -> Iterator[dict[str, Any]]:
    threads = torch.get_num_threads()
    found = tiny(make_models(tmp_path), tmp_path)
    found["train"]["updates"] = 3
    yield found
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def letters(samples: list[dict[str, Any]]) -> list[float]:
    return [sample["response"].count("e") / (1 + len(sample["response"])) for sample in samples]


def test_a_resume_is_bit_identical(device: str, base: dict[str, Any]) -> None:
    calls = 0

    def unreliable(samples: list[dict[str, Any]]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 8:  # in update 3, before anything of it is trained
            raise ConnectionError("no answer")
        return letters(samples)

    settings = (f"train.device={device}", "train.deterministic=true", "ppo.entropy_coef=0.01", "save.every=9")
    code, _, straight = go(base, "name=straight", *settings, reward_function=letters)
    assert code == 0
    code, _, broken = go(base, "name=broken", *settings, reward_function=unreliable)
    assert code == 2
    assert sorted(place.name for place in broken.glob("checkpoints/step_*"))[-1] == "step_000002"
    assert go(base, "name=broken", *settings, folder=broken, reward_function=letters)[0] == 0
    assert rows(broken) == rows(straight)
    assert all(torch.equal(value, final(broken)[name]) for name, value in final(straight).items())


def test_the_kernels_train_as_plain_pytorch_does(device: str, base: dict[str, Any]) -> None:
    runs = []
    for loss in ("reference", "logits", "linear"):
        settings = (f"name={loss}", f"train.loss={loss}", f"train.device={device}", "ppo.entropy_coef=0.01")
        code, _, folder = go(base, *settings)
        assert code == 0
        runs.append(folder)
    for run in runs[1:]:
        for one, other in zip(rows(run), rows(runs[0]), strict=True):
            for key in ("loss/policy_avg", "loss/value_avg", "objective/entropy", "objective/kl"):
                assert one[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5), (run.name, key)


def test_bf16_checkpointed_and_cut_by_tokens(device: str, base: dict[str, Any]) -> None:
    settings = ("train.bf16=true", "train.gradient_checkpointing=true", "ppo.max_tokens=30", "ppo.whiten_rewards=true")
    code, _, folder = go(base, f"train.device={device}", *settings)
    assert code == 0
    for row in rows(folder):
        assert row["val/first_logprob_drift"] < 0.05
        assert row["optimizer_steps"] == 2
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in final(folder).values())
