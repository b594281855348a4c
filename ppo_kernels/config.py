"""What the loss computes: one frozen, validated dataclass, and its form as plain numbers for the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs")
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30  # beyond, 1 / temperature is no fp32 number that the kernels can use
TEMPERATURE_RULE = f"> 0, between {MIN_TEMPERATURE} and {MAX_TEMPERATURE}"


class LossParams(NamedTuple):
    """The configuration as the kernels read it: floats in this order; an option that is off is infinite.

    csrc/token_loss.h reads the same numbers in the same order.
    """

    ratio_low: float  # 1 - clip_low
    ratio_high: float  # 1 + clip_high
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


@dataclass(frozen=True, kw_only=True)
class PPOLossConfig:
    """Options of `fused_ppo_loss` and `ppo_loss`. All are checked on construction (ValueError, TypeError).

    Policy (Schulman et al. 2017, eq. 7):
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; clip_high=None means clip_low.
        dual_clip: c > 1; for negative advantages the loss is at most -c*A (Ye et al. 2020). None: off.
        log_ratio_clamp: clamp log(new/old) to +-this before the exponential (nats); no gradient outside. None: off.
    Terms added to the loss:
        entropy_coef: the loss gains -entropy_coef * entropy.
        kl_coef: the loss gains kl_coef * KL(policy, reference), estimated per token by kl_estimator with
            d = logprob - ref_logprob: "k1" d, "k2" d^2/2, "k3" exp(-d) - 1 + d, "abs" |d| (Schulman 2020,
            "Approximating KL").
        kl_input_clamp, kl_output_clamp: clamp d, or the estimate, to +-this (nats); no gradient outside. None: off.
        value_clip: clip the new value to old_value +- value_clip and take the larger squared error. None: off.
        vf_coef, value_loss_scale: the loss gains vf_coef * value_loss_scale * (value - return)^2.
    Aggregation of the per-token losses l with mask m, n_i valid tokens in sequence i, B sequences:
        "token-mean": sum(m*l) / sum(m);  "seq-mean-token-mean": mean_i(sum_t(m*l) / n_i);
        "seq-mean-token-sum": mean_i(sum_t(m*l));  "seq-mean-token-sum-norm": the same over agg_max_len (Dr. GRPO).
        agg_include_empty: count sequences without a valid token in B (TRL does, verl and OpenRLHF do not).
    Logits:
        temperature: logits are divided by it, for log-prob and entropy alike.
        vocab_size: columns from this one on are padding and do not exist. None: all columns.
        return_entropy: False skips the entropy (the output's `entropy` is then None); needs entropy_coef == 0.
    Reserved for sequence-level and other losses; other values raise NotImplementedError:
        ratio_level="token", loss_type="ppo", kl_gradient="autograd".
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
    kl_gradient: str = "autograd"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type.startswith("float"):  # annotations are strings here
                _check_number(field.name, value, optional="None" in field.type)
            elif field.type == "bool" and not isinstance(value, bool):
                raise TypeError(f"{field.name} must be True or False, got {value!r}")
        for name in ("clip_low", "clip_high", "log_ratio_clamp", "kl_input_clamp", "kl_output_clamp", "value_clip"):
            _check(name, getattr(self, name), lambda x: x >= 0, ">= 0")
        _check("agg_max_len", self.agg_max_len, lambda x: x > 0, "> 0")
        _check("temperature", self.temperature, lambda x: MIN_TEMPERATURE <= x <= MAX_TEMPERATURE, TEMPERATURE_RULE)
        _check("dual_clip", self.dual_clip, lambda x: x > 1, "> 1")
        _check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _check_choice("aggregation", self.aggregation, AGGREGATIONS)
        if self.aggregation == "seq-mean-token-sum-norm" and self.agg_max_len is None:
            raise ValueError("aggregation='seq-mean-token-sum-norm' needs agg_max_len, the fixed length to divide by")
        if self.vocab_size is not None and (isinstance(self.vocab_size, bool) or not isinstance(self.vocab_size, int)):
            raise TypeError(f"vocab_size must be an int or None, got {self.vocab_size!r}")
        _check("vocab_size", self.vocab_size, lambda x: x > 0, "> 0")
        if self.entropy_coef != 0 and not self.return_entropy:
            raise ValueError(f"return_entropy=False contradicts entropy_coef={self.entropy_coef}: the bonus needs it")
        for name, only in (("ratio_level", "token"), ("loss_type", "ppo"), ("kl_gradient", "autograd")):
            if getattr(self, name) != only:
                raise NotImplementedError(f"{name}={getattr(self, name)!r} is not supported yet, only {only!r}")

    def params(self) -> LossParams:
        """The numbers the kernels need."""
        off = math.inf
        clip_high = self.clip_low if self.clip_high is None else self.clip_high
        return LossParams(
            ratio_low=1.0 - self.clip_low,
            ratio_high=1.0 + clip_high,
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
        )


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
