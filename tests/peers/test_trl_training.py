"""Whole trainings with TRL's GRPOTrainer 1.16.0 and with GRPOMixin: every number logged, and the weights at the end."""

from __future__ import annotations

import pytest
import torch
import trl_setup
from peft import LoraConfig
from trl import GRPOTrainer
from trl_setup import Ours, apart

from ppo_kernels import fused_ppo_loss
from ppo_kernels.integrations import trl as integration

LOGGED_OF_TIME = ("step_time", "runtime", "per_second")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def processing_class():
    return trl_setup.tokenizer()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, processing_class):
    return trl_setup.save_model(tmp_path_factory.mktemp("model"), len(processing_class))


def run(cls, model_path, processing_class, tmp_path, **options):
    """A trainer after training; `moved` is how far each weight went."""
    trainer = trl_setup.make(cls, model_path, processing_class, tmp_path, **options)
    before = weights(trainer)
    trainer.train()
    trainer.moved = {name: x - before[name] for name, x in weights(trainer).items()}
    return trainer


def weights(trainer):
    return {name: x.clone() for name, x in trainer.accelerator.unwrap_model(trainer.model).state_dict().items()}


def assert_same_training(stock, ours):
    """To 1e-4, for rounding grows from step to step: ten times what was measured, and 1% in any coefficient is more."""
    assert len(stock.state.log_history) == len(ours.state.log_history)
    for step, (want, got) in enumerate(zip(stock.state.log_history, ours.state.log_history, strict=True)):
        assert want.keys() == got.keys()
        for name in want:
            if any(part in name for part in LOGGED_OF_TIME):
                continue
            expected = None if want[name] is None else pytest.approx(want[name], rel=1e-4, abs=2e-5)
            assert got[name] == expected, f"{name} at step {step}"
    assert apart(ours.moved, stock.moved) <= 1e-4


def test_ratios_leave_one_and_lengths_vary_in_the_trainings_compared(model_path, processing_class, tmp_path):
    trainer = run(Ours, model_path, processing_class, tmp_path, max_steps=8, beta=0.05)
    history = trainer.state.log_history
    assert max(x.get("clip_ratio/region_mean", 0) for x in history) > 0.1
    assert history[0]["completions/min_length"] < history[0]["completions/max_length"]
    assert history[0]["kl"] < 1e-9  # policy and reference are the same weights, in batches of another size


def test_dapo_with_a_reference_model(model_path, processing_class, tmp_path):
    runs = [run(cls, model_path, processing_class, tmp_path, max_steps=8, beta=0.05) for cls in (GRPOTrainer, Ours)]
    assert_same_training(*runs)


@pytest.mark.parametrize("loss_type", ["bnpo", "grpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"])
def test_loss_type(loss_type, model_path, processing_class, tmp_path):
    options = {"loss_type": loss_type, "max_steps": 4}
    options |= {"importance_sampling_level": "sequence"} if loss_type in ("luspo", "grpo") else {}
    options |= {"learning_rate": 0.002} if loss_type == "luspo" else {}  # it multiplies by the length
    options |= {"epsilon_high": 2.0} if loss_type == "cispo" else {"epsilon_high": 0.28}
    assert_same_training(*(run(cls, model_path, processing_class, tmp_path, **options) for cls in (GRPOTrainer, Ours)))


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1, "use_bias_correction_kl": True, "delta": 1.5},
        {"top_entropy_quantile": 0.3, "off_policy_mask_threshold": 0.02, "mask_truncated_completions": True},
        {"entropy_coef": 0.01, "beta": 0.05},
        {"use_adaptive_entropy": True, "entropy_target": 5.0, "entropy_coef_delta": 0.01},
        {"num_iterations": 1, "steps_per_generation": 4, "generation_batch_size": None},
        {"gradient_checkpointing": True, "beta": 0.05},
        {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4},
        {"beta": 0.05, "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options, model_path, processing_class, tmp_path):
    options = {"max_steps": 4, **options}
    assert_same_training(*(run(cls, model_path, processing_class, tmp_path, **options) for cls in (GRPOTrainer, Ours)))


def test_mixed_precision_sees_the_logits_before_their_upcast(model_path, processing_class, tmp_path, monkeypatch):
    """accelerate's autocast casts what the model returns to fp32: log-probs here, which are fp32 already."""
    dtypes = []

    def watch(logits, *args, **kwargs):
        dtypes.append(logits.dtype)
        return fused_ppo_loss(logits, *args, **kwargs)

    monkeypatch.setattr(integration, "fused_ppo_loss", watch)
    options = {"max_steps": 1, "num_iterations": 1}
    stock, ours = (run(c, model_path, processing_class, tmp_path, bf16=True, **options) for c in (GRPOTrainer, Ours))
    assert dtypes == [torch.bfloat16, torch.bfloat16]
    for name, bar in {"reward": 0.0, "loss": 1e-4, "entropy": 1e-4}.items():
        want, got = (x.state.log_history[0][name] for x in (stock, ours))
        assert got == pytest.approx(
            want, rel=bar, abs=0.01 * bar
        )  # the loss of whitened advantages is 0 but for rounding
    assert apart(ours.moved, stock.moved) <= 0.08  # twenty units in the last place of bf16
