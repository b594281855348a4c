"""What each trainer computes by default, as a PPOLossConfig: `PPOLossConfig.verl()` and so on.

tests/peers compares each preset marked * with the named release itself, the others with their published formulas.
Options are this library's names; any of them can be overridden: `PPOLossConfig.verl(clip_high=0.28)`.
"""

from __future__ import annotations

from typing import Any, TypeVar

C = TypeVar("C", bound="Presets")


class Presets:
    """Constructors of PPOLossConfig, one per trainer. An unknown variant is a ValueError."""

    @classmethod
    def verl(cls: type[C], loss_mode: str = "vanilla", **overrides: Any) -> C:
        """verl 0.9.1 *: actor (policy_loss.loss_mode) and critic, which are optimised apart, hence vf_coef=1.

        Give normalizer and loss_scale from its global_batch_info. The KL clamps are those of low_var_kl, k3; its other
        estimators have none. gspo keeps verl's clip of 0.2 and token mean; the paper's are 3e-4 and 4e-4, and
        seq-mean-token-mean.
        """
        common = {
            "log_ratio_clamp": 20.0,
            "value_clip": 0.5,
            "vf_coef": 1.0,
            "kl_input_clamp": 20.0,
            "kl_output_clamp": 10.0,
        }
        modes: dict[str, dict[str, Any]] = {
            "vanilla": {"dual_clip": 3.0},
            "gspo": {"ratio_level": "sequence_token", "log_ratio_clamp": 10.0},
            "sapo": {"loss_type": "sapo", "aggregation": "seq-mean-token-mean"},
            "cispo": {"loss_type": "cispo"},
            "gpg": {"loss_type": "reinforce", "log_ratio_clamp": None},
        }
        return _make(cls, common, modes, "loss_mode", loss_mode, overrides)

    @classmethod
    def openrlhf(cls: type[C], policy_loss_type: str = "ppo", **overrides: Any) -> C:
        """OpenRLHF 0.11.2 *: PolicyLoss and ValueLoss, optimised apart. normalizer=batch_num_tokens or
        global_batch_size, loss_scale=dp_size; rollout correction is off unless rollout_logprobs are given."""
        common = {
            "value_clip": 0.5,
            "vf_coef": 1.0,
            "kl_estimator": "k1",
            "kl_output_clamp": 10.0,
            "rollout_is_mode": "mask",
            "rollout_is_min": 0.5,
            "rollout_is_max": 5.0,
        }
        types: dict[str, dict[str, Any]] = {
            "ppo": {"log_ratio_clamp": 20.0},
            "gspo": {"ratio_level": "sequence", "aggregation": "seq-mean-token-mean"},
        }
        return _make(cls, common, types, "policy_loss_type", policy_loss_type, overrides)

    @classmethod
    def trl_ppo(cls: type[C], **overrides: Any) -> C:
        """TRL 1.16.0, trl.experimental.ppo: one loss, KL in the reward. value_mask is one token longer than mask."""
        return _make(cls, {"value_clip": 0.2, "vf_coef": 0.1, "temperature": 0.7 + 1e-7}, {}, "", "", overrides)

    @classmethod
    def trl_grpo(cls: type[C], loss_type: str = "dapo", **overrides: Any) -> C:
        """TRL 1.16.0 *, GRPOTrainer. dapo, cispo and vespo: normalizer=num_items_in_batch / num_processes. The other
        types divide by the gradient accumulation: loss_scale. dr_grpo needs agg_max_len=max_completion_length; vespo
        rollout_is_weights=integrations.trl_loss.vespo_weights(...). The rollout correction is the one for vLLM,
        sequence_mask."""
        common = {
            "kl_estimator": "k3",
            "agg_include_empty": True,
            "rollout_is_level": "sequence",
            "rollout_is_mode": "mask",
            "rollout_is_max": 3.0,
        }
        types: dict[str, dict[str, Any]] = {
            "dapo": {},
            "bnpo": {},
            "grpo": {"aggregation": "seq-mean-token-mean"},
            "dr_grpo": {"aggregation": "seq-mean-token-sum-norm"},
            "luspo": {"aggregation": "seq-mean-token-sum", "ratio_level": "sequence"},
            "cispo": {"loss_type": "cispo", "cispo_ratio_max": 0.2},
            "sapo": {"loss_type": "sapo", "aggregation": "seq-mean-token-mean"},
            "vespo": {"loss_type": "reinforce"},
        }
        return _make(cls, common, types, "loss_type", loss_type, overrides)

    @classmethod
    def liger(cls: type[C], loss_type: str = "dapo", **overrides: Any) -> C:
        """liger-kernel 0.8.5 *, LigerFusedLinearGRPOLoss: TRL's losses with beta = 0.04."""
        return cls.trl_grpo(loss_type, **{"kl_coef": 0.04, **overrides})

    @classmethod
    def nemo_rl(cls: type[C], **overrides: Any) -> C:
        """NeMo-RL, ClippedPGLossFn and MseValueLossFn: normalizer=global_valid_toks."""
        settings = {
            "vf_coef": 1.0,
            "kl_coef": 0.01,
            "kl_gradient": "score",
            "kl_input_clamp": 20.0,
            "kl_output_clamp": 10.0,
        }
        return _make(cls, settings, {}, "", "", overrides)

    @classmethod
    def slime(cls: type[C], **overrides: Any) -> C:
        """slime: means per sample, no half in the value loss; with rollout_logprobs, TIS clamped to [0, 2]."""
        settings = {
            "aggregation": "seq-mean-token-mean",
            "agg_include_empty": True,
            "value_clip": 0.2,
            "vf_coef": 1.0,
            "value_loss_scale": 1.0,
            "kl_estimator": "k1",
            "rollout_is_min": 0.0,
            "rollout_is_max": 2.0,
        }
        return _make(cls, settings, {}, "", "", overrides)

    @classmethod
    def areal(cls: type[C], **overrides: Any) -> C:
        """AReaL, decoupled loss: old_logprobs are its proximal_logprobs, rollout_logprobs its old_logprobs. Tokens with
        a weight above 5 are rejected, and still counted: RejectionSamplingConfig's defaults."""
        settings = {"value_clip": 0.5, "vf_coef": 1.0, "rollout_is_mode": "mask", "rollout_is_max": 5.0}
        return _make(cls, settings, {}, "", "", overrides)

    @classmethod
    def deepspeed_chat(cls: type[C], **overrides: Any) -> C:
        """DeepSpeed-Chat (DeepSpeedExamples): actor and critic optimised apart, KL in the reward."""
        return _make(cls, {"value_clip": 0.2, "vf_coef": 1.0}, {}, "", "", overrides)

    @classmethod
    def torchrl(cls: type[C], **overrides: Any) -> C:
        """torchrl 0.14.1 *, ClipPPOLoss: smooth_l1 values, entropy bonus on."""
        settings = {"vf_coef": 1.0, "value_loss_type": "huber", "huber_delta": 1.0, "entropy_coef": 0.01}
        return _make(cls, settings, {}, "", "", overrides)

    @classmethod
    def rsl_rl(cls: type[C], **overrides: Any) -> C:
        """rsl-rl-lib 5.5.1 *, PPO."""
        settings = {"value_clip": 0.2, "vf_coef": 1.0, "value_loss_scale": 1.0, "entropy_coef": 0.01}
        return _make(cls, settings, {}, "", "", overrides)

    @classmethod
    def cleanrl(cls: type[C], **overrides: Any) -> C:
        """CleanRL, ppo.py."""
        return _make(cls, {"value_clip": 0.2, "entropy_coef": 0.01}, {}, "", "", overrides)


def _make(
    cls: type[C],
    common: dict[str, Any],
    variants: dict[str, dict[str, Any]],
    argument: str,
    variant: str,
    overrides: dict[str, Any],
) -> C:
    if variants and variant not in variants:
        raise ValueError(f"{argument} must be one of {', '.join(variants)}, got {variant!r}")
    return cls(**{**common, **variants.get(variant, {}), **overrides})


# The same for advantages: keyword arguments of `gae` and of `masked_whiten`, by the name of the trainer's preset. A
# trainer that is absent has no such step. TRL and slime have no mask in GAE; DeepSpeed-Chat's is the end of the row.
GAE_OPTIONS: dict[str, dict[str, Any]] = {
    "verl": {"gamma": 1.0, "lam": 1.0, "mask_mode": "skip"},
    "openrlhf": {"gamma": 1.0, "lam": 1.0, "mask_mode": "zero"},
    "trl_ppo": {"gamma": 1.0, "lam": 0.95, "mask_mode": "dense"},
    "nemo_rl": {"gamma": 1.0, "lam": 0.95, "mask_mode": "skip"},
    "slime": {"gamma": 1.0, "lam": 1.0, "mask_mode": "dense"},
    "areal": {"gamma": 1.0, "lam": 1.0, "mask_mode": "skip"},
    "deepspeed_chat": {"gamma": 1.0, "lam": 0.95, "mask_mode": "dense"},
    "rsl_rl": {"gamma": 0.99, "lam": 0.95},
    "cleanrl": {"gamma": 0.99, "lam": 0.95},
}
WHITEN_OPTIONS: dict[str, dict[str, Any]] = {
    "verl": {"unbiased": True, "eps": 1e-8, "eps_on": "var"},
    "openrlhf": {"unbiased": False, "eps": 1e-8, "eps_on": "clamp"},
    "trl_ppo": {"unbiased": True, "eps": 1e-8, "eps_on": "var"},
    "nemo_rl": {"unbiased": True, "eps": 1e-8, "eps_on": "var"},
    "slime": {"unbiased": True, "eps": 1e-8, "eps_on": "var"},
    "areal": {"unbiased": True, "eps": 1e-5, "eps_on": "std"},
    "torchrl": {"unbiased": True, "eps": 1e-12, "eps_on": "clamp"},
    "rsl_rl": {"unbiased": True, "eps": 1e-8, "eps_on": "std"},
    "cleanrl": {"unbiased": True, "eps": 1e-8, "eps_on": "std"},
}
