"""PPOLossConfig's presets, and the errors of the options of other trainers."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest
import torch

from ppo_kernels import PPOLossConfig, fused_ppo_loss, ppo_loss
from ppo_kernels.presets import Presets

VARIANTS = {
    "verl": ("loss_mode", ("vanilla", "gspo", "sapo", "cispo", "gpg")),
    "openrlhf": ("policy_loss_type", ("ppo", "gspo")),
    "trl_grpo": ("loss_type", ("dapo", "bnpo", "grpo", "dr_grpo", "luspo", "cispo", "sapo")),
    "liger": ("loss_type", ("dapo", "bnpo", "grpo", "dr_grpo", "luspo", "cispo", "sapo")),
}
PLAIN = ("trl_ppo", "nemo_rl", "slime", "areal", "deepspeed_chat", "torchrl", "rsl_rl", "cleanrl")
ALL = [(name, v) for name, (_, variants) in VARIANTS.items() for v in variants] + [(name, None) for name in PLAIN]


def make(name, variant=None, **overrides):
    if variant == "dr_grpo":
        overrides.setdefault("agg_max_len", 512)
    return getattr(PPOLossConfig, name)(*(() if variant is None else (variant,)), **overrides)


def test_this_file_knows_every_preset():
    found = {n for n, f in inspect.getmembers(Presets, inspect.ismethod) if not n.startswith("_")}
    assert found == {*VARIANTS, *PLAIN}


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_every_preset_is_a_config_that_computes(name, variant):
    config = make(name, variant)
    assert type(config) is PPOLossConfig
    assert config == make(name, variant)
    lp = torch.tensor([[-1.0, -2.0], [-0.5, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.1, -1.5], [-0.4, -1.3]])
    values = torch.zeros(2, 2, requires_grad=True)
    out = ppo_loss(
        lp,
        old,
        torch.tensor([1.0, -1.0]),
        entropy=-old,
        values=values,
        old_values=old,
        returns=old,
        ref_logprobs=old,
        rollout_logprobs=old,
        config=config,
    )
    out.loss.backward()
    assert out.loss.isfinite()
    assert lp.grad.any()
    assert lp.grad.isfinite().all()


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_every_preset_takes_overrides(name, variant):
    config = make(name, variant, clip_high=0.77, temperature=0.5, value_clip=None, log_ratio_clamp=3.0)
    assert (config.clip_high, config.temperature, config.value_clip, config.log_ratio_clamp) == (0.77, 0.5, None, 3.0)
    same = dataclasses.replace(
        make(name, variant), clip_high=0.77, temperature=0.5, value_clip=None, log_ratio_clamp=3.0
    )
    assert config == same


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_an_unknown_name_is_a_type_error(name, variant):
    with pytest.raises(TypeError, match="epsilon_high"):
        make(name, variant, epsilon_high=0.28)


@pytest.mark.parametrize("name", VARIANTS)
def test_an_unknown_variant_is_a_value_error_that_lists_the_known(name):
    argument, variants = VARIANTS[name]
    for wrong in ("nonsense", "", "VANILLA", None):
        with pytest.raises(ValueError, match=rf"{argument if name != 'liger' else 'loss_type'} must be one of") as info:
            getattr(PPOLossConfig, name)(wrong)
        assert all(v in str(info.value) for v in variants)


@pytest.mark.parametrize("name", ["trl_grpo", "liger"])
def test_dr_grpo_needs_its_length(name):
    with pytest.raises(ValueError, match="agg_max_len"):
        getattr(PPOLossConfig, name)("dr_grpo")


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (("verl",), {"dual_clip": 3.0, "log_ratio_clamp": 20.0, "value_clip": 0.5, "agg_include_empty": False}),
        (("verl", "gspo"), {"ratio_level": "sequence_token", "log_ratio_clamp": 10.0, "dual_clip": None}),
        (("verl", "sapo"), {"loss_type": "sapo", "aggregation": "seq-mean-token-mean", "log_ratio_clamp": 20.0}),
        (("verl", "cispo"), {"loss_type": "cispo", "cispo_ratio_min": None, "cispo_ratio_max": None}),
        (("verl", "gpg"), {"loss_type": "reinforce"}),
        (("openrlhf",), {"log_ratio_clamp": 20.0, "dual_clip": None, "kl_estimator": "k1", "kl_output_clamp": 10.0}),
        (("openrlhf", "gspo"), {"ratio_level": "sequence", "log_ratio_clamp": None}),
        (("trl_ppo",), {"vf_coef": 0.1, "value_clip": 0.2, "log_ratio_clamp": None}),
        (("trl_grpo",), {"aggregation": "token-mean", "agg_include_empty": True, "kl_estimator": "k3"}),
        (("trl_grpo", "grpo"), {"aggregation": "seq-mean-token-mean"}),
        (("trl_grpo", "sapo"), {"loss_type": "sapo", "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05}),
        (("liger",), {"kl_coef": 0.04}),
        (("nemo_rl",), {"kl_gradient": "score", "kl_input_clamp": 20.0, "kl_output_clamp": 10.0, "kl_coef": 0.01}),
        (("slime",), {"value_loss_scale": 1.0, "rollout_is_min": 0.0, "rollout_is_max": 2.0}),
        (("areal",), {"rollout_is_max": 5.0, "value_clip": 0.5}),
        (("deepspeed_chat",), {"value_clip": 0.2, "value_loss_scale": 0.5}),
        (("torchrl",), {"value_loss_type": "huber", "entropy_coef": 0.01}),
        (("rsl_rl",), {"value_loss_scale": 1.0, "value_clip": 0.2, "entropy_coef": 0.01}),
        (("cleanrl",), {"value_loss_scale": 0.5, "vf_coef": 0.5, "entropy_coef": 0.01}),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, tuple) else "",
)
def test_the_settings_that_trainers_differ_in(config, settings):
    made = make(*config)
    assert {name: getattr(made, name) for name in settings} == settings


def test_torchrls_smooth_l1_is_this_librarys_huber():
    """smooth_l1 with beta 1: 0.5 e^2, or |e| - 0.5."""
    errors = torch.tensor([0.3, -0.9, 1.0, 2.5, -7.0])
    out = ppo_loss(
        torch.zeros(5),
        None,
        torch.zeros(5),
        values=errors,
        returns=torch.zeros(5),
        entropy=torch.zeros(5),
        config=PPOLossConfig.torchrl(),
    )
    assert out.value_loss.item() == pytest.approx(
        torch.nn.functional.smooth_l1_loss(errors, torch.zeros(5)).item(), rel=1e-6
    )


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "name", "options"),
    [
        (ValueError, "loss_type", {"loss_type": "grpo"}),
        (ValueError, "loss_type", {"loss_type": None}),
        (ValueError, "ratio_level", {"ratio_level": "seq"}),
        (ValueError, "rollout_is_level", {"rollout_is_level": "geomean"}),
        (ValueError, "rollout_is_mode", {"rollout_is_mode": "tis"}),
        (ValueError, "kl_gradient", {"kl_gradient": "k3"}),
        (ValueError, "kl_estimator", {"kl_estimator": "k4"}),
        (ValueError, "value_loss_type", {"value_loss_type": "smooth_l1"}),
        (ValueError, "aggregation", {"aggregation": "mean"}),
        (ValueError, "aggregation", {"aggregation": None}),
        (ValueError, "nonfinite", {"nonfinite": "raise"}),
        (ValueError, "dual_clip", {"dual_clip": 3.0, "loss_type": "cispo"}),
        (ValueError, "dual_clip", {"dual_clip": 3.0, "loss_type": "sapo"}),
        (ValueError, "dual_clip", {"dual_clip": 3.0, "loss_type": "reinforce"}),
        (ValueError, "cispo_ratio_min", {"cispo_ratio_min": 2.0, "cispo_ratio_max": 1.0}),
        (ValueError, "cispo_ratio_min", {"cispo_ratio_min": -0.1}),
        (ValueError, "cispo_ratio_max", {"cispo_ratio_max": math.nan}),
        (ValueError, "cispo_ratio_max", {"cispo_ratio_max": math.inf}),
        (ValueError, "rollout_is_min", {"rollout_is_min": 2.0, "rollout_is_max": 1.0}),
        (ValueError, "rollout_is_min", {"rollout_is_min": -1.0}),
        (TypeError, "rollout_is_max", {"rollout_is_max": "3"}),
        (TypeError, "rollout_mask_in_denominator", {"rollout_mask_in_denominator": 1}),
        (ValueError, "sapo_tau_pos", {"sapo_tau_pos": 0.0}),
        (ValueError, "sapo_tau_neg", {"sapo_tau_neg": -1.0}),
        (TypeError, "sapo_tau_neg", {"sapo_tau_neg": None}),
        (ValueError, "huber_delta", {"huber_delta": 0.0}),
        (TypeError, "huber_delta", {"huber_delta": None}),
        (ValueError, "agg_max_len", {"aggregation": "seq-mean-token-sum-norm"}),
        (ValueError, "agg_max_len", {"aggregation": "seq-mean-token-sum-norm", "agg_max_len": 0}),
        (ValueError, "per_token_outputs", {"per_token_outputs": ("ratios",)}),
        (ValueError, "per_token_outputs", {"per_token_outputs": ("logprobs",)}),
        (ValueError, "per_token_outputs", {"per_token_outputs": (1,)}),
        (TypeError, "per_token_outputs", {"per_token_outputs": "ratio"}),
        (TypeError, "per_token_outputs", {"per_token_outputs": ["ratio"]}),
        (TypeError, "per_token_outputs", {"per_token_outputs": None}),
    ],
    ids=str,
)
def test_options_that_are_refused(error, name, options):
    with pytest.raises(error, match=rf"\b{name}\b") as info:
        PPOLossConfig(**options)
    assert type(info.value) is error
    assert "\n" not in str(info.value)


def test_bounds_that_meet_are_allowed():
    PPOLossConfig(cispo_ratio_min=1.0, cispo_ratio_max=1.0, rollout_is_min=0.0, rollout_is_max=0.0)


FLAT = torch.zeros(4)


def policy(**rest):
    return ppo_loss(FLAT, FLAT, FLAT, **rest)


def fused(**rest):
    return fused_ppo_loss(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long), FLAT, FLAT, **rest)


CALLS = pytest.mark.parametrize("call", [policy, fused])


@CALLS
@pytest.mark.parametrize(
    ("name", "options", "given"),
    [
        ("ratio_level", {"ratio_level": "sequence"}, {}),
        ("ratio_level", {"ratio_level": "sequence_token"}, {}),
        ("rollout_is_level", {"rollout_is_level": "sequence"}, {"rollout_logprobs": FLAT}),
        ("rollout_is_level", {"rollout_is_level": "sequence_geomean"}, {"rollout_logprobs": FLAT}),
        ("rollout_is_mode", {"rollout_is_mode": "seq_mask"}, {"rollout_logprobs": FLAT}),
        ("aggregation", {"aggregation": "seq-mean-token-mean"}, {}),
    ],
)
def test_what_needs_sequences_says_so_for_flat_tokens(call, name, options, given):
    with pytest.raises(ValueError, match=rf"\b{name}\b.*cu_seqlens"):
        call(config=PPOLossConfig(**options), **given)
    call(config=PPOLossConfig(**options), cu_seqlens=torch.tensor([0, 1, 4], dtype=torch.int32), **given)


@CALLS
def test_rollout_options_without_rollout_inputs_need_nothing(call):
    call(config=PPOLossConfig(rollout_is_level="sequence", rollout_is_mode="seq_mask", rollout_is_max=2.0))


@CALLS
def test_both_sources_of_weights_are_one_too_many(call):
    with pytest.raises(ValueError, match="rollout_is_weights"):
        call(rollout_logprobs=FLAT, rollout_is_weights=FLAT)


@CALLS
@pytest.mark.parametrize("aggregation", ["token-sum", "none"])
def test_a_normalizer_where_nothing_is_divided(call, aggregation):
    with pytest.raises(ValueError, match="normalizer"):
        call(config=PPOLossConfig(aggregation=aggregation), normalizer=4)


@CALLS
@pytest.mark.parametrize("name", ["rollout_logprobs", "rollout_is_weights"])
@pytest.mark.parametrize(
    ("error", "value"),
    [
        (ValueError, torch.zeros(5)),
        (ValueError, torch.zeros(4, 1)),
        (ValueError, torch.zeros(())),
        (TypeError, [0.0] * 4),
        (TypeError, torch.zeros(4, dtype=torch.long)),
        (TypeError, torch.zeros(4, dtype=torch.complex64)),
        (TypeError, 1.0),
    ],
)
def test_rollout_inputs_are_checked(call, name, error, value):
    with pytest.raises(error, match=name):
        call(**{name: value})


def test_weights_per_sequence_of_the_wrong_number():
    x = torch.zeros(2, 3)
    for wrong in (torch.ones(3), torch.ones(2, 1), torch.ones(1)):
        with pytest.raises(ValueError, match="rollout_is_weights"):
            ppo_loss(x, x, x, rollout_is_weights=wrong)
