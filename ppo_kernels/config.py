"""What the loss computes: one frozen, validated dataclass, and its form as plain numbers for the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from ppo_kernels.presets import Presets

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "none",
)
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
KL_GRADIENTS = ("autograd", "k2", "is_weighted", "score")
LOSS_TYPES = ("ppo", "cispo", "reinforce", "sapo")
RATIO_LEVELS = ("token", "sequence", "sequence_token")
ROLLOUT_IS_LEVELS = ("token", "sequence", "sequence_geomean")
ROLLOUT_IS_MODES = ("truncate", "mask", "seq_mask")
PER_TOKEN_OUTPUTS = ("loss", "policy_loss", "kl", "ratio", "clip_mask", "dual_clip_mask", "rollout_is_weights")
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30  # beyond, 1 / temperature is no fp32 number that the kernels can use
TEMPERATURE_RULE = f"> 0, between {MIN_TEMPERATURE} and {MAX_TEMPERATURE}"


class LossParams(NamedTuple):
    """The configuration as the kernels read it: floats in this order; an option that is off is infinite.

    csrc/token_loss.h reads the same numbers in the same order.
    """

    ratio_low: float  # 1 - clip_low; for cispo the smallest weight
    ratio_high: float  # 1 + clip_high; for cispo the largest weight
    dual_clip: float
    log_ratio_clamp: float
    entropy_coef: float
    kl_coef: float
    kl_estimator: float  # index into KL_ESTIMATORS
    kl_input_clamp: float
    kl_output_clamp: float
    value_clip: float
    vf_coef: float
    value_loss_scale: float
    huber_delta: float  # infinite: squared error
    loss_type: float  # index into LOSS_TYPES
    sapo_tau_pos: float
    sapo_tau_neg: float
    kl_gradient: float  # index into KL_GRADIENTS
    ratio_level: float  # index into RATIO_LEVELS; the kernels know level 0 only


@dataclass(frozen=True, kw_only=True)
class PPOLossConfig(Presets):
    """Options of `fused_ppo_loss` and `ppo_loss`. All are checked on construction (ValueError, TypeError).

    The classmethods (presets.py) are what other trainers compute: PPOLossConfig.verl(), .openrlhf(), .trl_grpo() ...

    Policy: a loss of the ratio r = exp(logprob - old_logprob) and the advantage A, by loss_type:
        "ppo" (Schulman et al. 2017, eq. 7): max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); clip_high=None means
            clip_low. dual_clip: c > 1; for negative A the loss is at most -c*A (Ye et al. 2020). None: off.
        "cispo" (MiniMax-M1, 2025): -A * w * logprob with the constant w = clip(r, cispo_ratio_min, cispo_ratio_max).
            Neither given: 1 - clip_low and 1 + clip_high (verl). Only one given: no other bound (TRL: max).
        "reinforce" (Williams 1992): -A * logprob.
        "sapo" (Soft Adaptive Policy Optimization, Gao et al. 2025): -A * sigmoid(tau * (r - 1)) * 4 / tau with tau =
            sapo_tau_pos where A > 0, else sapo_tau_neg.
        ratio_level: "token"; "sequence" (GSPO, Zheng et al. 2025, eq. 7): r is the geometric mean over the valid tokens
            of the sequence; "sequence_token" (eq. 13): the same value, but each token's gradient is its own.
        log_ratio_clamp: clamp log r to +-this (nats) before the exponential, at sequence level from above only; no
            gradient outside. None: off.
    Rollout correction, when rollout_logprobs are given: the policy loss is multiplied by the constant w = exp(
    old_logprob - rollout_logprob), by rollout_is_level per "token", its product over the "sequence", or its geometric
    mean ("sequence_geomean"). rollout_is_mode="truncate" clamps w to [rollout_is_min, rollout_is_max]; "mask" makes it
    0 outside; "seq_mask" makes it 0 where the sequence's geometric mean is outside. None: no bound.
        A token with w = 0 has no policy loss, and counts in the denominator.
        rollout_mask_in_denominator: False takes it out of the mask, and so out of all terms and counts.
    Terms added to the loss:
        entropy_coef: the loss gains -entropy_coef * entropy.
        kl_coef: the loss gains kl_coef * KL(policy, reference), estimated per token by kl_estimator with
            d = logprob - ref_logprob: "k1" d, "k2" d^2/2, "k3" exp(-d) - 1 + d, "abs" |d| (Schulman 2020,
            "Approximating KL").
        kl_input_clamp, kl_output_clamp: clamp d, or what enters the loss, to +-this (nats); no gradient outside, but
            for kl_gradient="k2". None: off.
        kl_gradient: "autograd" dk; "k2": value k, gradient d (straight-through: verl's "k3+"); "is_weighted": r * k,
            differentiated through r too (TRL's use_bias_correction_kl); "score": value k, gradient k + dk (NeMo-RL).
        value_clip: clip the new value to old_value +- value_clip and take the larger error. None: off.
        vf_coef, value_loss_scale: the loss gains vf_coef * value_loss_scale * (value - return)^2; with
            value_loss_type="huber" an error beyond huber_delta counts huber_delta * (2 |error| - huber_delta).
    Aggregation of the per-token losses l with mask m, n_i valid tokens in sequence i, B sequences:
        "token-mean": sum(m*l) / sum(m);  "token-sum": sum(m*l);  "seq-mean-token-mean": mean_i(sum_t(m*l) / n_i);
        "seq-mean-token-sum": mean_i(sum_t(m*l));  "seq-mean-token-sum-norm": the same over agg_max_len (Dr. GRPO);
        "none": the loss is per token, m*l.
        agg_include_empty: count sequences without a valid token in B (TRL does, verl and OpenRLHF do not).
    Logits:
        temperature: logits are divided by it, for log-prob and entropy alike.
        logit_scale, logit_softcap: the model's own head, logits * logit_scale, then cap * tanh(logits / cap).
        vocab_size: columns from this one on are padding and do not exist. None: all columns.
        ignore_index: tokens equal to it are masked. None: no such token.
        return_entropy: False skips the entropy (the output's `entropy` is then None); needs entropy_coef == 0.
    nonfinite: "propagate": a NaN in a valid token shows in the loss; "mask": a token whose log-prob (new, old,
        reference or rollout) is not finite adds nothing, and still counts in the denominator.
    per_token_outputs: names of per-token results wanted in the output's `per_token`: "loss" (policy, entropy and KL
        together), "policy_loss", "kl", "ratio", "clip_mask", "dual_clip_mask" (bool), "rollout_is_weights".
    """

    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    log_ratio_clamp: float | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_input_clamp: float | None = None
    kl_output_clamp: float | None = None
    value_clip: float | None = None
    vf_coef: float = 0.5
    value_loss_scale: float = 0.5
    aggregation: str = "token-mean"
    agg_max_len: float | None = None
    agg_include_empty: bool = False
    temperature: float = 1.0
    vocab_size: int | None = None
    return_entropy: bool = True
    ratio_level: str = "token"
    loss_type: str = "ppo"
    cispo_ratio_min: float | None = None
    cispo_ratio_max: float | None = None
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    rollout_is_level: str = "token"
    rollout_is_mode: str = "truncate"
    rollout_is_min: float | None = None
    rollout_is_max: float | None = None
    rollout_mask_in_denominator: bool = True
    kl_gradient: str = "autograd"
    value_loss_type: str = "mse"
    huber_delta: float = 10.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    ignore_index: int | None = None
    nonfinite: str = "propagate"
    per_token_outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type.startswith("float"):  # annotations are strings here
                _check_number(field.name, value, optional="None" in field.type)
            elif field.type == "bool" and not isinstance(value, bool):
                raise TypeError(f"{field.name} must be True or False, got {value!r}")
        for name in _NOT_NEGATIVE:
            _check(name, getattr(self, name), lambda x: x >= 0, ">= 0")
        for name in ("agg_max_len", "sapo_tau_pos", "sapo_tau_neg", "huber_delta", "logit_scale", "logit_softcap"):
            _check(name, getattr(self, name), lambda x: x > 0, "> 0")
        _check("temperature", self.temperature, lambda x: MIN_TEMPERATURE <= x <= MAX_TEMPERATURE, TEMPERATURE_RULE)
        _check("dual_clip", self.dual_clip, lambda x: x > 1, "> 1")
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        _check_outputs(self.per_token_outputs)
        if self.aggregation == "seq-mean-token-sum-norm" and self.agg_max_len is None:
            raise ValueError("aggregation='seq-mean-token-sum-norm' needs agg_max_len, the fixed length to divide by")
        for name in ("vocab_size", "ignore_index"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name} must be an int or None, got {value!r}")
        _check("vocab_size", self.vocab_size, lambda x: x > 0, "> 0")
        for low, high in (("cispo_ratio_min", "cispo_ratio_max"), ("rollout_is_min", "rollout_is_max")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise ValueError(f"{low}={least} is above {high}={most}")
        if self.entropy_coef != 0 and not self.return_entropy:
            raise ValueError(f"return_entropy=False contradicts entropy_coef={self.entropy_coef}: the bonus needs it")
        if self.loss_type != "ppo" and self.dual_clip is not None:
            raise ValueError(f"dual_clip={self.dual_clip} has no meaning for loss_type={self.loss_type!r}")

    def params(self) -> LossParams:
        """The numbers the kernels need."""
        off = math.inf
        ratio_low, ratio_high = 1.0 - self.clip_low, 1.0 + (self.clip_low if self.clip_high is None else self.clip_high)
        if self.loss_type == "cispo":
            if self.cispo_ratio_min is not None or self.cispo_ratio_max is not None:
                ratio_low = 0.0 if self.cispo_ratio_min is None else self.cispo_ratio_min
                ratio_high = off if self.cispo_ratio_max is None else self.cispo_ratio_max
        elif self.loss_type != "ppo":
            ratio_low, ratio_high = -off, off
        return LossParams(
            ratio_low=ratio_low,
            ratio_high=ratio_high,
            dual_clip=off if self.dual_clip is None else self.dual_clip,
            log_ratio_clamp=off if self.log_ratio_clamp is None else self.log_ratio_clamp,
            entropy_coef=self.entropy_coef,
            kl_coef=self.kl_coef,
            kl_estimator=float(KL_ESTIMATORS.index(self.kl_estimator)),
            kl_input_clamp=off if self.kl_input_clamp is None else self.kl_input_clamp,
            kl_output_clamp=off if self.kl_output_clamp is None else self.kl_output_clamp,
            value_clip=off if self.value_clip is None else self.value_clip,
            vf_coef=self.vf_coef,
            value_loss_scale=self.value_loss_scale,
            huber_delta=self.huber_delta if self.value_loss_type == "huber" else off,
            loss_type=float(LOSS_TYPES.index(self.loss_type)),
            sapo_tau_pos=self.sapo_tau_pos,
            sapo_tau_neg=self.sapo_tau_neg,
            kl_gradient=float(KL_GRADIENTS.index(self.kl_gradient)),
            ratio_level=float(RATIO_LEVELS.index(self.ratio_level)),
        )


_NOT_NEGATIVE = (
    "clip_low",
    "clip_high",
    "log_ratio_clamp",
    "kl_input_clamp",
    "kl_output_clamp",
    "value_clip",
    "cispo_ratio_min",
    "cispo_ratio_max",
    "rollout_is_min",
    "rollout_is_max",
)
_CHOICES = {
    "loss_type": LOSS_TYPES,
    "ratio_level": RATIO_LEVELS,
    "rollout_is_level": ROLLOUT_IS_LEVELS,
    "rollout_is_mode": ROLLOUT_IS_MODES,
    "kl_estimator": KL_ESTIMATORS,
    "kl_gradient": KL_GRADIENTS,
    "value_loss_type": ("mse", "huber"),
    "aggregation": AGGREGATIONS,
    "nonfinite": ("propagate", "mask"),
}


def _check_number(name: str, value: object, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number{' or None' if optional else ''}, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value!r}")


def _check(name: str, value: float | None, holds: object, rule: str) -> None:
    if value is not None and not holds(value):  # type: ignore[operator]
        raise ValueError(f"{name} must be {rule}, got {value!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_outputs(names: object) -> None:
    if not isinstance(names, tuple):
        raise TypeError(f"per_token_outputs must be a tuple of names, got {names!r}")
    for name in names:
        _check_choice("per_token_outputs", name, PER_TOKEN_OUTPUTS)
