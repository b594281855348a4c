"""The charts that reports can have."""

from __future__ import annotations

from typing import NamedTuple

from ppo_kernels.trainer.record import Measures

TRAINING, HELDOUT = "training batch", "held-out, 95% interval"


class Panel(NamedTuple):
    title: str
    unit: str
    lines: dict[str, str]  # metric -> label
    zero: bool = True  # the axis starts there
    floor: float | None = None  # what is lower is drawn there

    @property
    def share(self) -> float:
        """Changes by less than this share of the value cannot be seen."""
        return 0.01 if self.zero else 1e-6


def panels(measures: Measures) -> list[Panel]:
    reward, metric = measures["reward"][0], measures.get("metric", ("Independent metric",))[0]
    return [
        Panel(reward, "mean per response", {"objective/scores": TRAINING, "heldout/reward": HELDOUT}, zero=False),
        Panel(metric, "held-out, never trained on", {"heldout/metric": HELDOUT}, zero=False),
        Panel("Training minus held-out", reward.lower(), {"gap": "gap"}),
        Panel("KL to the reference", "nats per response", {"objective/kl": TRAINING, "heldout/kl": HELDOUT}),
        Panel("KL coefficient", "as adapted", {"objective/kl_coef": "kl.coef"}),
        Panel("Entropy", "nats per token", {"policy/entropy_avg": TRAINING, "heldout/entropy": HELDOUT}),
        Panel("Response length", "tokens", {"response_length/mean": "mean", "response_length/max": "longest"}),
        Panel("Ended by itself", "of responses", {"response_length/eos_rate": TRAINING, "heldout/eos": HELDOUT}),
        Panel("Clipped", "of tokens", {"policy/clipfrac_avg": "policy", "val/clipfrac_avg": "value"}),
        Panel("KL of one update", "nats per token", {"policy/approxkl_avg": "KL"}),
        Panel("Clip range", "as adapted", {"policy/clip_range": "ppo.clip"}),
        Panel("Optimizer steps", "per update", {"optimizer_steps": "taken", "skipped_steps": "left out"}),
        Panel("Value loss", "mean per token", {"loss/value_avg": "value loss"}),
        Panel("Critic", "explained variance of the returns", {"critic/explained_var": "explained"}, False, floor=-1.0),
        Panel("Gradient norms", "before clipping", {"grad_norm/actor": "actor", "grad_norm/critic": "critic"}),
        Panel("Losses beside PPO", "nats per token", {"loss/ptx": "pretraining text", "loss/sft": "SFT pairs"}),
        Panel("Time", "seconds per update", {"time/update": "whole", "time/generate": "sampling"}),
    ]
