"""verl 0.9.1: the same losses, gradients, metrics and weights, through its own entry points."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import draws
import pytest
import torch
import verl.utils.torch_functional as verl_F
from draws import FP32, INF, NAN, close, close_grads, draw
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import FSDPActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils import losses

from ppo_kernels import PPOLossConfig, fused_ppo_loss, gae, masked_whiten, ppo_loss
from ppo_kernels.integrations import verl as ours

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
# What the engine sets; the counts need not be those of this micro-batch.
GLOBAL = {"dp_size": 4, "batch_num_tokens": 123, "global_batch_size": 17, "loss_scale_factor": None}
LOCAL = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None, "loss_scale_factor": 50}
BAR = {torch.float32: FP32, torch.float64: 1e-7}  # verl adds 1e-8 to some denominators


def actor_config(info, **options):
    config = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
    config.global_batch_info.update(info)
    return config


def registered(mode):
    return core_algos.get_policy_loss_fn("ppo_kernels" if mode == "vanilla" else f"ppo_kernels_{mode}")


def compare_policy_loss(mode, d, mask, config, aggregation, weights=None, rel=FP32):
    arguments = (d.old, d.logprobs, d.advantages, mask, aggregation, config, weights)
    want, want_metrics = core_algos.get_policy_loss_fn(mode)(*arguments)
    got, metrics = registered(mode)(*arguments)
    close_grads(got, want, d.logprobs, rel)
    assert list(metrics) == list(want_metrics)
    for name, value in want_metrics.items():
        close(metrics[name], torch.tensor(value), FP32, name)


@pytest.mark.parametrize("info", [{}, LOCAL, GLOBAL], ids=["no_info", "local", "global"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", ours.LOSS_MODES)
def test_policy_loss_of_every_mode_and_aggregation(mode, aggregation, info):
    for dtype, kind in ((torch.float32, "holes"), (torch.float32, "lengths_int"), (torch.float64, "lengths")):
        for weighted in (False, True):
            d, mask = draw(dtype), draws.mask(kind)
            weights = (d.old - d.rollout).exp().clamp(max=1.5) * (torch.rand(mask.shape) > 0.2) if weighted else None
            compare_policy_loss(mode, d, mask, actor_config(info), aggregation, weights, BAR[dtype])


@pytest.mark.parametrize("mode", ours.LOSS_MODES)
@pytest.mark.parametrize(
    "options",
    [
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.35, "clip_ratio_c": 1.5},
        {"clip_ratio": 0.05, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 10.0},
        {"tau_pos": 2.0, "tau_neg": 0.5},
    ],
)
@pytest.mark.parametrize("kind", ["all", "one"])
def test_policy_loss_honours_the_actors_options(mode, options, kind):
    compare_policy_loss(mode, draw(), draws.mask(kind), actor_config({}, **options), "token-mean")


@pytest.mark.parametrize("mode", ours.LOSS_MODES)
def test_policy_loss_with_log_ratios_beyond_every_clamp(mode):
    d, mask = draw(torch.float64, spread=15.0), draws.mask("holes")
    assert (d.logprobs - d.old).abs().max() > 20
    compare_policy_loss(mode, d, mask, actor_config({}), "token-mean", rel=1e-12)


def test_global_counts_are_demanded_as_verl_demands_them():
    d, mask = draw(), draws.mask("all")
    for aggregation in AGGREGATIONS:
        for mode in ("vanilla", "ppo_kernels"):
            arguments = (d.old, d.logprobs, d.advantages, mask, aggregation, actor_config({"dp_size": 2}))
            if aggregation == "token-sum":
                core_algos.get_policy_loss_fn(mode)(*arguments)
            else:
                with pytest.raises(ValueError, match=r"batch|global"):
                    core_algos.get_policy_loss_fn(mode)(*arguments)


def test_metrics_are_tensors_that_verls_collector_takes():
    d, mask = draw(), draws.mask("lengths")
    _, metrics = registered("vanilla")(d.old, d.logprobs, d.advantages, mask, "token-mean", actor_config({}))
    assert all(isinstance(x, torch.Tensor) and x.shape == () and not x.requires_grad for x in metrics.values())
    collected = Metric.from_dict(metrics, aggregation=AggregationType.MEAN)
    assert collected["actor/ppo_kl"].aggregate() == pytest.approx(float(metrics["actor/ppo_kl"]))


def response_batch(d, mask):
    """The engine's micro-batch: a prompt of one token, then the response; the model's outputs are for each input."""
    attention = torch.cat([torch.ones(mask.shape[0], 1), torch.ones(mask.shape)], 1).long()
    data = {
        "prompts": torch.zeros(mask.shape[0], 1, dtype=torch.int64),
        "responses": torch.zeros(mask.shape, dtype=torch.int64),
        "attention_mask": attention,
        "response_mask": mask,
        "old_log_probs": d.old,
        "advantages": d.advantages,
        "ref_log_prob": d.ref,
        "values": d.old_values,
        "returns": d.returns,
    }
    batch = TensorDict(data, batch_size=mask.shape[0])
    for name, value in {"dp_size": 2, "batch_num_tokens": 99, "global_batch_size": 11}.items():
        batch.set_non_tensor(name, value)
    return batch


def per_input(x):
    return torch.nn.functional.pad(x, (0, 1)).reshape(-1)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_engines_whole_actor_loss_and_fused_ppo_loss_agree(aggregation):
    d, mask, logits, tokens = draw(), draws.mask("holes"), *rows()
    options = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.3, "loss_agg_mode": aggregation}

    def engine(mode):
        config = actor_config({}, policy_loss=PolicyLossConfig(loss_mode=mode), **options)
        logprobs = verl_F.logprobs_from_logits(logits, tokens)
        output = {"log_probs": per_input(logprobs), "entropy": per_input(verl_F.entropy_from_logits(logits))}
        return losses.ppo_loss(config, output, response_batch(d, mask))

    (want, _), (got, metrics) = engine("vanilla"), engine("ppo_kernels")
    close_grads(got, want, logits)
    close(metrics["actor/pg_loss"].aggregate(), engine("vanilla")[1]["actor/pg_loss"].aggregate())
    config = PPOLossConfig.verl(
        aggregation=aggregation, agg_max_len=mask.shape[1], entropy_coef=0.1, kl_coef=0.3, kl_estimator="k3"
    )
    normalizer = {"token-mean": 99, "token-sum": None}.get(aggregation, 11)
    out = fused_ppo_loss(
        logits,
        tokens,
        d.old,
        d.advantages,
        mask,
        config=config,
        ref_logprobs=d.ref,
        normalizer=normalizer,
        loss_scale=2,
    )
    close_grads(out.loss, want, logits)


def rows(dtype=torch.float32, deviation=2.0):
    logits = (deviation * torch.randn(draws.BATCH, draws.LENGTH, draws.VOCAB, dtype=torch.float64)).to(dtype)
    return logits.requires_grad_(), torch.randint(draws.VOCAB, (draws.BATCH, draws.LENGTH))


# -- KL

KINDS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


@pytest.mark.parametrize("spread", [0.3, 3.0, 15.0])
@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("kind", KINDS)
def test_kl_penalty_of_every_kind_with_its_straight_through_form(kind, plus, spread):
    d = draw(torch.float64)
    ref = d.logprobs.detach() + spread * torch.randn(d.ref.shape, dtype=torch.float64)
    want = core_algos.kl_penalty(d.logprobs, ref, kind + plus)
    clamps = {} if KINDS[kind] == "k3" else {"kl_input_clamp": None, "kl_output_clamp": None}
    config = PPOLossConfig.verl(
        kl_coef=1.0,
        kl_estimator=KINDS[kind],
        kl_gradient="k2" if plus else "autograd",
        aggregation="none",
        **clamps,
    )
    out = ppo_loss(d.logprobs, None, torch.zeros_like(d.old), config=config, ref_logprobs=ref)
    close_grads(out.loss, want, d.logprobs, 1e-12)


def test_k3_of_a_small_log_ratio_is_negative_in_verl_and_not_here():
    logprobs = torch.tensor([-1.0])
    ref = logprobs + 3e-4
    config = PPOLossConfig.verl(kl_coef=1.0, aggregation="none")
    got = ppo_loss(logprobs, None, torch.zeros(1), config=config, ref_logprobs=ref).loss
    want = math.expm1(float((ref - logprobs).double())) - float((ref - logprobs).double())
    theirs = core_algos.kl_penalty(logprobs, ref, "k3")
    assert abs(float(theirs) / want - 1) > 0.1
    assert abs(float(got) / want - 1) < 1e-3


# -- values

VALUE_AGGREGATIONS = [(a, i) for a in AGGREGATIONS for i in (LOCAL, GLOBAL)]


@pytest.mark.parametrize("clip", [0.2, 0.5, 100.0])
@pytest.mark.parametrize(("aggregation", "info"), VALUE_AGGREGATIONS)
def test_value_loss_and_clip_fraction(aggregation, info, clip):
    for dtype, kind in ((torch.float32, "holes"), (torch.float64, "lengths_int")):
        d, mask = draw(dtype), draws.mask(kind)
        arguments = (d.values, d.returns, d.old_values, mask, clip, aggregation)
        want, want_fraction = core_algos.compute_value_loss(*arguments, **info)
        got, fraction = ours.compute_value_loss(*arguments, **info)
        close_grads(got, want, d.values, BAR[dtype])
        close(fraction, want_fraction)


# -- advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.97, 0.9)])
@pytest.mark.parametrize("kind", ["all", "lengths_int", "holes"])
def test_gae_skips_the_tokens_that_are_not_the_policys(kind, gamma, lam):
    for dtype, rel in ((torch.float32, FP32), (torch.float64, 2e-8)):
        d, mask = draw(dtype), draws.mask(kind)
        rewards, values = d.returns * mask, d.old_values
        theirs = mask.to(dtype)  # of an integer mask verl makes a Bessel correction in fp32
        want, want_returns = core_algos.compute_gae_advantage_return(rewards, values, theirs, gamma, lam)
        got, returns = ours.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
        valid = mask != 0
        close(got[valid], want[valid], rel, "advantages")
        close(returns[valid], want_returns[valid], rel, "returns")
        assert (got[~valid] == 0).all()
        assert (returns[~valid] == 0).all()


@pytest.mark.parametrize("shift_mean", [True, False])
def test_masked_whiten(shift_mean):
    for dtype, rel in ((torch.float32, FP32), (torch.float64, 1e-8)):
        x, mask = 3 + torch.randn(draws.BATCH, draws.LENGTH, dtype=dtype), draws.mask("holes")
        want = verl_F.masked_whiten(x, mask.to(dtype), shift_mean)
        close(masked_whiten(x, mask, shift_mean=shift_mean, unbiased=True)[mask], want[mask], rel)


def test_whitening_one_token_is_refused_by_verl_and_0_here():
    mask = draws.mask("one")
    d = draw()
    with pytest.raises(ValueError, match="sum of the mask is one"):
        core_algos.compute_gae_advantage_return(d.returns, d.old_values, mask.long(), 1.0, 0.95)
    got, returns = ours.compute_gae_advantage_return(d.returns, d.old_values, mask, 1.0, 0.95)
    assert (got == 0).all()
    assert returns.isfinite().all()


def test_gae_with_nan_at_a_padded_position_is_nan_everywhere_in_verl_and_untouched_here():
    rewards, values = torch.tensor([[1.0, 2.0, NAN]]), torch.tensor([[0.5, 0.25, NAN]])
    mask = torch.tensor([[1, 1, 0]])
    theirs, _ = core_algos.compute_gae_advantage_return(rewards, values, mask, 1.0, 1.0)
    assert theirs.isnan().all()
    got = gae(rewards, values, mask, gamma=1.0, lam=1.0).advantages
    close(got, torch.tensor([[2.5, 1.75, 0.0]]))


# -- rollout correction


@pytest.mark.parametrize(("level", "spread"), [("token", 0.7), ("token", 15.0), ("sequence", 0.7)])
@pytest.mark.parametrize("threshold", [2.0, "0.5_2.0"])
@pytest.mark.parametrize("normalize", [False, True])
def test_rollout_weights_and_the_loss_they_give(level, spread, threshold, normalize):
    d, mask = draw(torch.float64), draws.mask("holes")
    rollout = d.old - spread * torch.randn(mask.shape, dtype=torch.float64)
    weights, _ = compute_rollout_correction_weights(d.old - rollout, mask, level, threshold, normalize)
    options = {"rollout_is_max": 2.0}
    if isinstance(threshold, str):
        options |= {"rollout_is_min": 0.5, "rollout_is_mode": "mask"}
    config = PPOLossConfig.verl(rollout_is_level=level, per_token_outputs=("rollout_is_weights",), **options)
    out = ppo_loss(d.logprobs, d.old, d.advantages, mask, config=config, rollout_logprobs=rollout)
    got = out.per_token["rollout_is_weights"]
    arguments = (d.old, d.logprobs, d.advantages, mask, "token-mean", actor_config({}), weights)
    want_loss, _ = core_algos.compute_policy_loss_vanilla(*arguments)
    if normalize:  # over the batch of all ranks, so verl's weights are given: rollout_is_weights
        out = ppo_loss(d.logprobs, d.old, d.advantages, mask, config=config, rollout_is_weights=weights)
    else:
        close(got, weights * mask, 2e-8)  # verl's smallest weight is exp(-20)
    close_grads(out.loss, want_loss, d.logprobs, 1e-8)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_nan_rollout_logprob_of_padding_poisons_verls_loss_and_not_ours(aggregation):
    d, mask = draw(), draws.mask("lengths")
    rollout = d.rollout.masked_fill(~mask, NAN)
    weights, _ = compute_rollout_correction_weights(d.old - rollout, mask, "token")
    assert weights[~mask].isnan().all()
    arguments = (d.old, d.logprobs, d.advantages, mask, aggregation, actor_config({}))
    assert core_algos.compute_policy_loss_vanilla(*arguments, weights)[0].isnan()
    got = registered("vanilla")(*arguments, weights)[0]
    close(got, core_algos.compute_policy_loss_vanilla(*arguments, weights.nan_to_num(0))[0])


# -- where verl is wrong


@pytest.mark.parametrize("aggregation", [a for a in AGGREGATIONS if a != "token-sum"])
def test_a_micro_batch_without_a_valid_token_is_nan_in_verl_and_0_here(aggregation):
    d, mask = draw(), torch.zeros(draws.BATCH, draws.LENGTH, dtype=torch.bool)
    arguments = (d.old, d.logprobs, d.advantages, mask, aggregation, actor_config({}))
    assert core_algos.compute_policy_loss_vanilla(*arguments)[0].isnan()
    loss, _ = registered("vanilla")(*arguments)
    assert loss == 0
    assert (torch.autograd.grad(loss, d.logprobs)[0] == 0).all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nan_under_the_mask_gives_verl_a_nan_gradient_and_ours_none(aggregation):
    d, mask = draw(), draws.mask("lengths")
    advantages = d.advantages.masked_fill(~mask, NAN)
    arguments = (d.old, d.logprobs, advantages, mask, aggregation, actor_config({}))
    theirs, _ = core_algos.compute_policy_loss_vanilla(*arguments)
    assert theirs.isnan() == (aggregation.startswith("seq"))
    assert torch.autograd.grad(theirs, d.logprobs)[0].isnan().any()
    got, _ = registered("vanilla")(*arguments)
    clean, _ = core_algos.compute_policy_loss_vanilla(*arguments[:2], d.advantages, *arguments[3:])
    close_grads(got, clean, d.logprobs)


def test_a_logprob_of_minus_infinity_with_advantage_0_is_nan_in_verls_gpg_and_0_here():
    logprobs, zeros = torch.tensor([[-INF, -1.0]], requires_grad=True), torch.zeros(1, 2)
    arguments = (zeros, logprobs, torch.tensor([[0.0, 2.0]]), torch.ones(1, 2), "token-mean", actor_config({}))
    assert core_algos.compute_policy_loss_gpg(*arguments)[0].isnan()
    close(registered("gpg")(*arguments)[0], torch.tensor(1.0))


# -- rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_and_entropy_from_logits(dtype):
    logits, tokens = rows(dtype)
    exact = logits.detach().double().requires_grad_()
    want, want_entropy = verl_F.logprobs_from_logits(exact, tokens), verl_F.entropy_from_logits(exact)
    got, entropy = ours.logprobs_from_logits(logits, tokens), ours.entropy_from_logits(logits)
    rel = 1e-12 if dtype == torch.float64 else FP32
    close(got, want, rel)
    close(entropy, want_entropy, rel)
    assert got.dtype == entropy.dtype == torch.promote_types(dtype, torch.float32)
    upstream = torch.randn(2, *tokens.shape, dtype=torch.float64)
    grad_want = torch.autograd.grad((want, want_entropy), exact, tuple(upstream))[0]
    grad = torch.autograd.grad((got, entropy), logits, tuple(upstream.to(got.dtype)))[0]
    close(grad, grad_want, rel if dtype in (torch.float64, torch.float32) else 2 * torch.finfo(dtype).eps)


def test_bf16_logprobs_are_bf16_in_verl_and_fp32_here():
    logits, tokens = rows(torch.bfloat16, 4.0)
    exact = torch.log_softmax(logits.detach().double(), -1).gather(-1, tokens[..., None])[..., 0]
    theirs = verl_F.logprobs_from_logits(logits, tokens)
    assert theirs.dtype == torch.bfloat16
    assert (theirs - exact).abs().max() > 1e-2
    close(ours.logprobs_from_logits(logits, tokens), exact)


def test_a_banned_token_makes_verls_entropy_nan_and_not_ours():
    logits = torch.tensor([[0.0, -INF, 1.0]], requires_grad=True)
    assert verl_F.entropy_from_logits(logits).isnan().all()
    without = verl_F.entropy_from_logits(torch.tensor([[0.0, 1.0]]))
    close(ours.entropy_from_logits(logits), without)
    assert torch.autograd.grad(ours.entropy_from_logits(logits).sum(), logits)[0].isfinite().all()


def test_logits_far_from_0_cost_verl_digits_and_ours_none():
    logits = torch.tensor([[0.0, 1.0, 2.0]]) + 2.0**14
    token = torch.tensor([1])
    exact = torch.log_softmax(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64), -1)
    assert (verl_F.logprobs_from_logits(logits, token) - exact[1]).abs() > 1e-4
    close(ours.logprobs_from_logits(logits, token), exact[1:2], 2e-6)
    close(ours.entropy_from_logits(logits), -(exact.exp() * exact).sum(-1, keepdim=True), 2e-6)


def test_inplace_backward_when_asked_gives_the_logits_memory_to_their_gradient():
    leaf, tokens = rows()
    logits = leaf * 1.0
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    out = ours.logprobs_from_logits(logits, tokens, inplace_backward=True)
    upstream = torch.randn(tokens.shape)
    got = torch.autograd.grad(out, leaf, upstream)[0]
    assert seen == [logits.data_ptr()]
    close(got, torch.autograd.grad(verl_F.logprobs_from_logits(leaf, tokens), leaf, upstream)[0])


def test_inplace_backward_with_another_use_of_the_logits_is_an_error_not_garbage():
    leaf, tokens = rows()
    logits = leaf * 1.0
    other = logits.square().sum()
    out = ours.logprobs_from_logits(logits, tokens, inplace_backward=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (out + other).backward()


def test_verls_default_leaves_the_logits_to_their_other_uses():
    leaf, tokens = rows()
    logits = leaf * 1.0
    got = ours.logprobs_from_logits(logits, tokens).sum() + ours.entropy_from_logits(logits).sum()
    want = verl_F.logprobs_from_logits(leaf, tokens).sum() + verl_F.entropy_from_logits(leaf).sum()
    close_grads(got, want, leaf)


# -- install


@pytest.fixture
def installed():
    ours.install()
    yield
    ours.uninstall()


def test_install_replaces_every_name_and_uninstall_puts_them_back():
    before = losses.compute_value_loss, verl_F.logprobs_from_logits
    ours.install()
    ours.install()
    assert losses.compute_value_loss is core_algos.compute_value_loss is ours.compute_value_loss
    assert verl_F.entropy_from_logits_with_chunking is ours.entropy_from_logits_with_chunking
    ours.uninstall()
    assert (losses.compute_value_loss, verl_F.logprobs_from_logits) == before
    assert core_algos.compute_value_loss is before[0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_engines_value_loss_after_install(aggregation, monkeypatch):
    class Config:
        cliprange_value, loss_agg_mode, loss_scale_factor = 0.3, aggregation, None

    d, mask = draw(), draws.mask("holes")
    want, want_metrics = losses.value_loss(Config, {"values": per_input(d.values)}, response_batch(d, mask))
    ours.install()
    try:
        got, metrics = losses.value_loss(Config, {"values": per_input(d.values)}, response_batch(d, mask))
    finally:
        ours.uninstall()
    close_grads(got, want, d.values)
    assert metrics["critic/vf_clipfrac"] == pytest.approx(want_metrics["critic/vf_clipfrac"])


def test_another_signature_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(core_algos, "compute_value_loss", lambda vpreds, returns, novelty: None)
    with pytest.raises(RuntimeError, match=r"core_algos.compute_value_loss takes .*novelty.*tested with verl >=0.9.1"):
        ours.install()
    ours.uninstall()


def test_compiled_entropy_as_the_engine_compiles_it(installed):
    logits, _ = rows()
    compiled = torch.compile(verl_F.entropy_from_logits, dynamic=True, backend="aot_eager", fullgraph=True)
    got = compiled(logits)
    close(got, ours.entropy_from_logits(logits))
    close(*(torch.autograd.grad(x.sum(), logits)[0] for x in (got, ours.entropy_from_logits(logits))))


def test_verls_environment_variable_registers_the_losses():
    code = (
        "import verl; from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as r; print('ppo_kernels_gspo' in r)"
    )
    env = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "ppo_kernels.integrations.verl"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert run.stdout.strip().endswith("True"), run.stderr
