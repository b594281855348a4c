"""OpenRLHF 0.11.2: the same losses, gradients, metrics, log-probs and advantages, side by side with its own classes.

Its packages import flash_attn, vllm and deepspeed in their __init__; the modules compared need none of them, and are
loaded under their own names without those. So what is not tested here is the trainer around them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import draws
import pytest
import torch
from draws import FP32, INF, NAN, close, close_grads, draw

from ppo_kernels import (
    AdaptiveKLController,
    PPOLossConfig,
    gae,
    logprobs_from_logits,
    masked_whiten,
    ppo_loss,
    shape_rewards,
)
from ppo_kernels.integrations import openrlhf as ours
from ppo_kernels.presets import GAE_OPTIONS, WHITEN_OPTIONS

ROOT = Path(importlib.util.find_spec("openrlhf").origin).parent
PACKAGES = ("models", "utils", "trainer", "trainer.ppo_utils", "trainer.ray")
MAKER = "openrlhf.trainer.ppo_utils.experience_maker"


def bare(name: str, **names: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module
    return module


def load_openrlhf() -> None:
    """Its modules without the __init__ of its packages, and without two names that only the trainer calls."""
    import openrlhf  # noqa: F401

    for name in PACKAGES:
        bare(f"openrlhf.{name}", __path__=[str(ROOT.joinpath(*name.split(".")))])
    bare("openrlhf.trainer.ray.launcher", RayActorGroup=object)
    if importlib.util.find_spec("deepspeed") is None:
        bare("deepspeed")


load_openrlhf()
peer = importlib.import_module("openrlhf.models.loss")
utils = importlib.import_module("openrlhf.models.utils")
maker = importlib.import_module(MAKER)
kl_controller = importlib.import_module("openrlhf.trainer.ppo_utils.kl_controller")
if sys.modules["deepspeed"].__spec__ is None:
    del sys.modules["deepspeed"]  # others ask whether it is installed

COUNTS = (
    {},
    {"dp_size": 4, "batch_num_tokens": torch.tensor(123.0), "global_batch_size": torch.tensor(17.0)},
    {"dp_size": 2, "batch_num_tokens": 50.5, "global_batch_size": 3.5},  # divided by the accumulation steps
)
BAR = {torch.float32: FP32, torch.float64: 1e-7}  # OpenRLHF adds 1e-8 to lengths


def compare_policy_loss(d, mask, options, counts=COUNTS[0], rel=FP32, rollout=None):
    rollout = d.rollout if rollout is None else rollout
    arguments = (d.logprobs, d.old, d.advantages, mask, rollout)
    want, got = (cls(**options)(*arguments, **counts) for cls in (peer.PolicyLoss, ours.PolicyLoss))
    close_grads(got[0], want[0], d.logprobs, rel)
    for name, a, b in zip(("clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio"), got[1:], want[1:], strict=True):
        assert (a is None) == (b is None), name
        if a is not None and (name != "is_filter_ratio" or mask.any(-1).all()):  # empty sequences: below
            close(a, b, FP32, name)


@pytest.mark.parametrize("counts", COUNTS, ids=["local", "global", "accumulated"])
@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("dual_clip", [None, 1.5, 4.0])
@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_policy_loss(kind, dual_clip, token_level, counts):
    options = {
        "policy_loss_type": kind,
        "dual_clip": dual_clip,
        "token_level_loss": token_level,
        "clip_eps_low": 0.1,
        "clip_eps_high": 0.3,
    }
    for dtype, masked in ((torch.float32, "holes"), (torch.float32, "lengths_int"), (torch.float64, "lengths")):
        d, mask = draw(dtype), draws.mask(masked)
        compare_policy_loss(d, mask, options, counts, BAR[dtype])
        compare_policy_loss(d, mask.to(dtype), options, counts, BAR[dtype])


def test_policy_loss_of_advantages_that_differ_within_a_sequence_is_gspos_with_one_gradient_per_sequence():
    d, mask = draw(torch.float64), draws.mask("all")
    loss = ours.PolicyLoss(policy_loss_type="gspo")(d.logprobs, d.old, d.advantages, mask)[0]
    grad = torch.autograd.grad(loss, d.logprobs)[0]
    close(grad, grad[:, :1].expand_as(grad), 1e-15)
    compare_policy_loss(d, mask, {"policy_loss_type": "gspo"}, rel=BAR[torch.float64])


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_log_ratios_beyond_the_clamp(kind):
    d, mask = draw(torch.float64, spread=15.0), draws.mask("holes")
    assert (d.logprobs - d.old).abs().max() > 20
    compare_policy_loss(d, mask, {"policy_loss_type": kind}, rel=BAR[torch.float64])


CORRECTIONS = [
    {"is_correction_level": level, "is_correction_mode": mode, "is_correction_gating": gating, **threshold}
    for level, mode, gating, threshold in (
        ("token", "mask", "ratio", {}),
        ("token", "clip", "ratio", {}),
        ("seq", "mask", "ratio", {}),
        ("token", "mask", "ratio", {"is_correction_threshold": (0.0, 1.2)}),
        ("seq", "mask", "ratio", {"is_correction_threshold": [0.9, 1.1]}),
        ("token", "clip", "ratio", {"is_correction_threshold": [0.9, 1.1]}),
        ("token", "mask", "binary_kl", {"is_correction_threshold": [0.0, 0.02]}),
        ("seq", "mask", "binary_kl", {"is_correction_threshold": [0.0, 0.05]}),
        ("token", "mask", "tv", {"is_correction_threshold": [0.0, 0.1]}),
        ("seq", "mask", "tv", {"is_correction_threshold": [0.0, 0.1]}),
    )
]


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: "-".join(str(x) for x in c.values()))
def test_every_rollout_correction(correction, kind):
    for dtype, masked in ((torch.float32, "all"), (torch.float32, "holes"), (torch.float64, "lengths_int")):
        d = draw(dtype)
        for token_level in (True, False):
            options = {"policy_loss_type": kind, "token_level_loss": token_level, "dual_clip": 2.0, **correction}
            compare_policy_loss(d, draws.mask(masked), options, COUNTS[1], BAR[dtype])


@pytest.mark.parametrize(
    ("correction", "options"),
    [
        ({"is_correction_level": "token"}, {}),
        ({"is_correction_level": "token", "is_correction_mode": "clip"}, {"rollout_is_mode": "truncate"}),
        ({"is_correction_level": "seq"}, {"rollout_is_mode": "seq_mask"}),
    ],
)
def test_the_presets_rollout_options_are_the_ratio_gates(correction, options):
    d, mask = draw(torch.float64), draws.mask("lengths")
    rollout = d.old - 1.5 * torch.randn(d.old.shape, dtype=torch.float64)
    want = peer.PolicyLoss(**correction)(d.logprobs, d.old, d.advantages, mask, rollout)[0]
    config = PPOLossConfig.openrlhf(**options)
    got = ppo_loss(d.logprobs, d.old, d.advantages, mask, config=config, rollout_logprobs=rollout).loss
    close_grads(got, want, d.logprobs, 1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"is_correction_level": "sequence"},
        {"is_correction_mode": "drop"},
        {"is_correction_gating": "kl"},
        {"is_correction_level": "seq", "is_correction_mode": "clip"},
        {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_gating": "tv"},
        {"is_correction_level": "token", "is_correction_gating": "tv"},
    ],
)
def test_options_that_openrlhf_refuses_are_refused(options):
    for cls in (peer.PolicyLoss, ours.PolicyLoss):
        with pytest.raises(ValueError, match=r"is_correction_|level"):
            cls(**options)


def test_options_that_openrlhf_refuses_later_are_refused_at_once():
    with pytest.raises(ValueError, match="policy_loss_type"):
        ours.PolicyLoss(policy_loss_type="grpo")
    with pytest.raises(ValueError, match="dual_clip"):
        ours.PolicyLoss(dual_clip=0.5)
    d = draw()
    with pytest.raises(ValueError, match="rollout_log_probs"):
        ours.PolicyLoss(is_correction_level="token")(d.logprobs, d.old, d.advantages)


@pytest.mark.parametrize("counts", COUNTS, ids=["local", "global", "accumulated"])
@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("clip", [None, 0.2, 100.0])
def test_value_loss(clip, token_level, counts):
    for dtype, masked in ((torch.float32, "holes"), (torch.float64, "lengths_int")):
        d, mask = draw(dtype), draws.mask(masked)
        want, got = (
            cls(clip, token_level)(d.values, d.old_values, d.returns, mask, **counts)
            for cls in (peer.ValueLoss, ours.ValueLoss)
        )
        close_grads(got, want, d.values, BAR[dtype])


@pytest.mark.parametrize("counts", COUNTS, ids=["local", "global", "accumulated"])
@pytest.mark.parametrize("token_level", [True, False])
def test_aggregate_loss(token_level, counts):
    """Of any loss: here of the log-probs themselves, by a reinforce loss with advantage -1."""
    d, mask = draw(torch.float64), draws.mask("lengths")
    want = peer.aggregate_loss(d.logprobs, mask, token_level, **counts)
    aggregation = "token-mean" if token_level else "seq-mean-token-mean"
    config = PPOLossConfig(loss_type="reinforce", aggregation=aggregation)
    normalizer = counts.get("batch_num_tokens" if token_level else "global_batch_size")
    scale = {"normalizer": normalizer, "loss_scale": counts["dp_size"]} if counts else {}
    got = ppo_loss(d.logprobs, None, -torch.ones_like(d.old), mask, config=config, **scale).loss
    close_grads(got, want, d.logprobs, BAR[torch.float64])


# -- KL


@pytest.mark.parametrize("spread", [0.3, 3.0, 60.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gradient", ["autograd", "k2"])
def test_approx_kl_with_its_clamp_and_unbiased_gradient(estimator, gradient, spread):
    d = draw(torch.float64)
    logprobs = d.logprobs.detach().float().requires_grad_()  # it computes in fp32
    ref = logprobs.detach() + spread * torch.randn(logprobs.shape)
    value = utils.compute_approx_kl(logprobs, ref, kl_estimator=estimator)
    slope = utils.compute_approx_kl(logprobs, ref, kl_estimator=estimator, unbiased_gradient=gradient == "k2")
    config = PPOLossConfig.openrlhf(kl_coef=1.0, kl_estimator=estimator, kl_gradient=gradient, aggregation="none")
    out = ppo_loss(logprobs, None, torch.zeros_like(ref), config=config, ref_logprobs=ref)
    close(out.loss, value)
    got, want = (torch.autograd.grad(x, logprobs, torch.ones_like(ref))[0] for x in (out.loss, slope))
    close(got, want)


def test_unbiased_gradient_off_policy_is_that_of_the_weighted_k3_unless_the_ratio_exceeds_10():
    d = draw(torch.float32)
    want = utils.compute_approx_kl(d.logprobs, d.ref, d.old, "k3", unbiased_gradient=True)
    options = {"kl_estimator": "k3", "kl_output_clamp": None, "kl_gradient": "is_weighted", "aggregation": "none"}
    config = PPOLossConfig.openrlhf(kl_coef=1.0, **options)
    out = ppo_loss(d.logprobs, d.old, torch.zeros_like(d.old), config=config, ref_logprobs=d.ref)
    ones = torch.ones_like(d.old)
    assert (d.logprobs - d.old).exp().max() < 10
    close(*(torch.autograd.grad(x, d.logprobs, ones)[0] for x in (out.loss, want)))


def test_reward_of_a_score_and_a_kl():
    d, mask, score = draw(), draws.mask("lengths"), 20 * torch.randn(draws.BATCH)
    kl = utils.compute_approx_kl(d.old, d.ref) * mask
    want = utils.compute_reward(score, 0.05, kl, mask, (-10, 10))
    got = shape_rewards(score, d.old, d.ref, mask, kl_coef=0.05, kl_output_clamp=10.0, clip=10.0)
    full = mask.any(-1)
    close(got[full], want[full])


def test_the_reward_of_an_empty_sequence_lands_on_padding_in_openrlhf_and_nowhere_here():
    score, zeros, mask = torch.tensor([3.0]), torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.int64)
    assert utils.compute_reward(score, 0.0, zeros, mask).tolist() == [[0.0, 0.0, 0.0, 3.0]]
    assert (shape_rewards(score, zeros, zeros, mask, kl_coef=0.0) == 0).all()


def test_adaptive_kl_controller():
    theirs, mine = kl_controller.AdaptiveKLController(0.1, 6.0, 1e4), AdaptiveKLController(0.1, 6.0, 1e4)
    for kl in (3.0, 6.5, 90.0, 0.0):
        theirs.update(kl, 128)
        mine.update(kl, 128)
        assert mine.value == pytest.approx(theirs.value, rel=1e-12)


# -- rows


def rows(dtype=torch.float32):
    logits = (3 * torch.randn(draws.BATCH, draws.LENGTH, draws.VOCAB, dtype=torch.float64)).to(dtype)
    return logits.requires_grad_(), torch.randint(draws.VOCAB, (draws.BATCH, draws.LENGTH))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_log_probs_and_entropy_from_logits(dtype, temperature):
    logits, labels = rows(dtype)
    rel = 1e-12 if dtype == torch.float64 else FP32
    want = utils.log_probs_from_logits(logits * 1.0, labels, temperature)
    close_grads(ours.log_probs_from_logits(logits, labels, temperature), want, logits, rel)
    scaled = (logits / temperature).detach()  # OpenRLHF's entropy of it is exact in float64 only
    exact, mine = scaled.double().requires_grad_(), scaled.requires_grad_()
    with torch.compiler.set_stance("force_eager"):
        want = utils.compute_entropy(exact)
    got = ours.compute_entropy(mine)
    close(got, want, rel)
    close(torch.autograd.grad(got.sum(), mine)[0], torch.autograd.grad(want.sum(), exact)[0], rel)


def test_log_probs_divides_the_callers_logits_in_openrlhf_and_leaves_them_here():
    logits, labels = rows()
    theirs, mine = logits.detach().clone(), logits.detach().clone()
    utils.log_probs_from_logits(theirs, labels, 0.5)
    ours.log_probs_from_logits(mine, labels, 0.5)
    assert torch.equal(theirs, logits * 2)
    assert torch.equal(mine, logits)


def test_a_banned_token_makes_openrlhfs_entropy_nan_and_not_ours():
    logits = torch.tensor([[[0.0, -INF, 1.0]]])
    with torch.compiler.set_stance("force_eager"):
        assert utils.compute_entropy(logits).isnan().all()
        want = utils.compute_entropy(logits[..., [0, 2]])
    close(ours.compute_entropy(logits), want)


# -- advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.97, 0.9)])
@pytest.mark.parametrize("kind", ["all", "lengths_int", "holes"])
def test_gae_discounts_over_masked_tokens(kind, gamma, lam):
    for dtype, rel in ((torch.float32, FP32), (torch.float64, 1e-12)):
        d, mask = draw(dtype), draws.mask(kind)
        arguments = (None, d.old_values, d.returns, mask, gamma, lam)
        want, want_returns = maker.RemoteExperienceMaker.get_advantages_and_returns(*arguments)
        got, returns = ours.get_advantages_and_returns(*arguments)
        valid = mask != 0
        close(got[valid], want[valid], rel, "advantages")
        close(returns[valid], want_returns[valid], rel, "returns")
        assert (got[~valid] == 0).all()


@pytest.mark.parametrize("no_std_norm", [False, True])
def test_the_whole_way_from_scores_to_whitened_advantages(no_std_norm):
    """RemoteExperienceMaker.compute_advantages_and_returns over two micro-batches, and our functions over all."""
    d, masks = draw(), draws.mask("lengths")
    masks[0, 0] = True
    scores, kl = torch.randn(draws.BATCH), (d.old - d.ref) * masks
    advantage = SimpleNamespace(estimator="gae", gamma=0.99, lambd=0.95, no_std_norm=no_std_norm)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        rollout=SimpleNamespace(n_samples_per_prompt=1),
        reward=SimpleNamespace(
            clip_range=(-1, 1), overlong_buffer_len=None, stop_properly_penalty_coef=None, overlong_penalty_factor=None
        ),
    )
    experiences = [
        SimpleNamespace(
            index=list(range(a, b)),
            rewards=scores[a:b],
            values=d.old_values[a:b],
            action_mask=masks[a:b].long(),
            kl=kl[a:b],
            info={},
        )
        for a, b in ((0, 2), (2, draws.BATCH))
    ]
    one = SimpleNamespace(
        strategy=SimpleNamespace(args=args),
        kl_ctl=SimpleNamespace(value=0.1),
        advantage_estimator="gae",
        get_advantages_and_returns=lambda *a: maker.RemoteExperienceMaker.get_advantages_and_returns(None, *a),
    )
    maker.RemoteExperienceMaker.compute_advantages_and_returns(one, experiences)
    rewards = shape_rewards(scores, d.old, d.ref, masks, kl_coef=0.1, clip=1.0)
    found = gae(rewards, d.old_values, masks, **{**GAE_OPTIONS["openrlhf"], "gamma": 0.99, "lam": 0.95})
    close(found.returns[masks], torch.cat([x.returns for x in experiences])[masks])
    want = torch.cat([x.advantages for x in experiences])[masks]
    if no_std_norm:
        close((found.advantages - found.advantages[masks].mean())[masks], want)
    else:
        close(masked_whiten(found.advantages, masks, **WHITEN_OPTIONS["openrlhf"])[masks], want)


def test_nan_at_a_padded_position_spreads_through_openrlhfs_gae_and_not_ours():
    rewards, values, mask = torch.tensor([[1.0, 2.0, NAN]]), torch.tensor([[0.5, 0.25, NAN]]), torch.tensor([[1, 1, 0]])
    theirs, _ = maker.RemoteExperienceMaker.get_advantages_and_returns(None, values, rewards, mask, 1.0, 1.0)
    assert theirs.isnan().all()
    close(ours.get_advantages_and_returns(None, values, rewards, mask, 1.0, 1.0)[0], torch.tensor([[2.5, 1.75, 0.0]]))


# -- where OpenRLHF is wrong


@pytest.mark.parametrize("token_level", [True, False])
def test_a_micro_batch_without_a_valid_token_is_nan_in_openrlhf_and_0_here(token_level):
    d, mask = draw(), torch.zeros(draws.BATCH, draws.LENGTH)
    options, arguments = {"token_level_loss": token_level}, (d.logprobs, d.old, d.advantages, mask)
    assert peer.PolicyLoss(**options)(*arguments)[0].isnan()
    loss, *metrics = ours.PolicyLoss(**options)(*arguments)
    assert loss == 0
    assert [float(x) for x in metrics[:2]] == [0.0, 0.0]
    assert (torch.autograd.grad(loss, d.logprobs)[0] == 0).all()
    assert peer.ValueLoss(0.2, token_level)(d.values, d.old_values, d.returns, mask).isnan()
    assert ours.ValueLoss(0.2, token_level)(d.values, d.old_values, d.returns, mask) == 0


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
def test_nan_under_the_mask_is_nan_in_openrlhf_and_untouched_here(kind):
    d, mask = draw(), draws.mask("lengths")
    arguments = (d.logprobs, d.old.masked_fill(~mask, NAN), d.advantages.masked_fill(~mask, NAN), mask)
    assert peer.PolicyLoss(policy_loss_type=kind)(*arguments)[0].isnan()
    clean = peer.PolicyLoss(policy_loss_type=kind)(d.logprobs, d.old, d.advantages, mask)[0]
    close_grads(ours.PolicyLoss(policy_loss_type=kind)(*arguments)[0], clean, d.logprobs)


def test_gspo_with_advantage_0_and_a_ratio_that_overflows_is_nan_in_openrlhf_and_0_here():
    logprobs, old = torch.zeros(1, 2, requires_grad=True), torch.full((1, 2), -200.0)
    arguments = (logprobs, old, torch.zeros(1, 2), torch.ones(1, 2))
    assert peer.PolicyLoss(policy_loss_type="gspo")(*arguments)[0].isnan()
    loss = ours.PolicyLoss(policy_loss_type="gspo")(*arguments)[0]
    assert loss == 0
    assert (torch.autograd.grad(loss, logprobs)[0] == 0).all()


def test_a_token_that_the_rollout_engine_found_impossible_is_dropped():
    d, mask = draw(), draws.mask("all")
    rollout = d.rollout.clone()
    rollout[2, 3] = -INF
    options, arguments = {"is_correction_level": "token"}, (d.logprobs, d.old, d.advantages, mask)
    close_grads(
        ours.PolicyLoss(**options)(*arguments, rollout)[0],
        peer.PolicyLoss(**options)(*arguments, rollout)[0],
        d.logprobs,
    )


def test_an_empty_sequence_counts_as_filtered_in_openrlhf_and_not_here():
    d, mask = draw(), draws.mask("all")
    mask[0] = 0
    options = {"is_correction_level": "seq", "is_correction_threshold": (0.0, 1e9)}
    arguments = (d.logprobs, d.old, d.advantages, mask, d.rollout)
    assert peer.PolicyLoss(**options)(*arguments)[4] == pytest.approx(1 / draws.BATCH)
    assert ours.PolicyLoss(**options)(*arguments)[4] == 0


def test_k3_of_a_small_log_ratio_is_negative_in_openrlhf_and_not_here():
    logprobs = torch.tensor([-1.0])
    ref = logprobs - 1e-4 * torch.arange(1, 9)[:, None]
    theirs = utils.compute_approx_kl(logprobs, ref, kl_estimator="k3")
    config = PPOLossConfig.openrlhf(kl_coef=1.0, kl_estimator="k3", aggregation="none")
    got = ppo_loss(logprobs.expand(8, 1), None, torch.zeros(8, 1), config=config, ref_logprobs=ref).loss
    d = (logprobs - ref).double()
    want = torch.expm1(-d) + d
    assert (theirs <= 0).any()
    assert ((got - want).abs() < 1e-3 * want).all()


# -- install


@pytest.fixture
def fresh(monkeypatch):
    """OpenRLHF as if not imported yet; put back afterwards."""
    for name in ("openrlhf.models.loss", "openrlhf.models.utils", MAKER, "openrlhf.trainer.ray.ppo_actor"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if importlib.util.find_spec("deepspeed") is None:
        monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    yield
    ours.uninstall()


def test_install_replaces_what_is_loaded_and_every_import_by_name():
    importer = bare("openrlhf.trainer.ray.ppo_actor", PolicyLoss=peer.PolicyLoss)
    theirs = peer.PolicyLoss, peer.ValueLoss, utils.compute_entropy
    ours.install()
    ours.install()
    assert importer.PolicyLoss is peer.PolicyLoss is ours.PolicyLoss
    assert utils.log_probs_from_logits is ours.log_probs_from_logits
    assert maker.RemoteExperienceMaker.get_advantages_and_returns is ours.get_advantages_and_returns
    ours.uninstall()
    assert importer.PolicyLoss is theirs[0]
    assert (peer.PolicyLoss, peer.ValueLoss, utils.compute_entropy) == theirs
    del sys.modules["openrlhf.trainer.ray.ppo_actor"]


def test_the_ray_hook_imports_nothing_and_replaces_after_import(fresh):
    ours.worker_setup_hook()
    assert "openrlhf.models.loss" not in sys.modules
    loss, made = importlib.import_module("openrlhf.models.loss"), importlib.import_module(MAKER)
    assert loss.PolicyLoss is ours.PolicyLoss
    assert sys.modules["openrlhf.models.utils"].compute_entropy is ours.compute_entropy
    assert made.RemoteExperienceMaker.get_advantages_and_returns is ours.get_advantages_and_returns


def test_another_signature_is_refused_by_name(monkeypatch):
    class Changed(peer.PolicyLoss):
        def forward(self, log_probs, novelty):
            return log_probs

    monkeypatch.setattr(peer, "PolicyLoss", Changed)
    with pytest.raises(RuntimeError, match=r"PolicyLoss.forward takes .*novelty.*tested with openrlhf >=0.11.2"):
        ours.install()
    ours.uninstall()


def test_actor_log_probs_through_the_replaced_names_match_the_fused_path():
    logits, labels = rows()
    close(ours.log_probs_from_logits(logits, labels), logprobs_from_logits(logits, labels), 0.0)
