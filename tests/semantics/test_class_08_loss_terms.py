"""Class 8: clipping, value loss, dual clip, entropy bonus, the metrics of each."""

from __future__ import annotations

import dataclasses
import math
import pickle

import oracle
import pytest
import torch
from checks import assert_close, leaf
from oracle import LossSpec

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits, ppo_loss, ppo_value_loss


def one_token(ratio, advantage, **options):
    lp = torch.tensor([math.log(ratio)], dtype=torch.float64).float().requires_grad_()
    out = ppo_loss(lp, torch.zeros(1), torch.tensor([float(advantage)]), config=PPOLossConfig(**options))
    out.loss.backward()
    return out.loss.item(), lp.grad.item(), out.metrics.compute()


def one_value(value, old, target, **options):
    v = torch.tensor([float(value)], requires_grad=True)
    out = ppo_loss(
        torch.zeros(1),
        torch.zeros(1),
        torch.zeros(1),
        values=v,
        old_values=None if old is None else torch.tensor([float(old)]),
        returns=torch.tensor([float(target)]),
        config=PPOLossConfig(**({"vf_coef": 1.0} | options)),
    )
    out.loss.backward()
    return out, v.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(1.5, 1, -1.2, 0), (1.5, -1, 1.5, 1.5), (0.5, 1, -0.5, -0.5), (0.5, -1, 0.8, 0)],
)
def test_case_63_clip_range_is_one_minus_to_one_plus_epsilon(ratio, advantage, loss, gradient):
    got, slope, metrics = one_token(ratio, advantage)
    assert got == pytest.approx(loss, rel=5e-7)
    assert slope == pytest.approx(gradient, rel=5e-7)
    bound = gradient == 0
    assert metrics["clip_fraction"] == bound
    assert metrics["clip_fraction_high"] == (bound and ratio > 1)
    assert metrics["clip_fraction_low"] == (bound and ratio < 1)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(1.25, 1, -1.25, -1.25), (1.3, 1, -1.28, 0), (0.79, -1, 0.8, 0), (0.81, -1, 0.81, 0.81)],
)
def test_case_64_asymmetric_clip(ratio, advantage, loss, gradient):
    got, slope, _ = one_token(ratio, advantage, clip_low=0.2, clip_high=0.28)
    assert got == pytest.approx(loss, rel=5e-7)
    assert slope == pytest.approx(gradient, rel=5e-7)


def test_case_64_clip_high_defaults_to_clip_low():
    assert one_token(2.0, 1, clip_low=0.1)[0] == pytest.approx(-1.1, rel=5e-7)


@pytest.mark.parametrize(
    "options", [{"clip_low": -0.1}, {"clip_high": -0.1}, {"clip_low": math.nan}, {"clip_high": math.nan}]
)
def test_case_64_bad_clip_bounds_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        PPOLossConfig(**options)


def test_case_64_clip_low_of_one_or_more_removes_the_lower_bound_or_is_refused():
    try:
        PPOLossConfig(clip_low=1.5)
    except ValueError:
        return
    assert one_token(0.01, -1, clip_low=1.5, clip_high=0.2)[:2] == pytest.approx((0.01, 0.01), rel=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "dual"),
    [(10, -1, 3.0, 0, 1), (10, 1, -1.2, 0, 0), (2.9, -1, 2.9, 2.9, 0), (0.5, -1, 0.8, 0, 0)],
)
def test_case_65_dual_clip_binds_only_for_negative_advantages(ratio, advantage, loss, gradient, dual):
    got, slope, metrics = one_token(ratio, advantage, dual_clip=3.0)
    assert got == pytest.approx(loss, rel=5e-7)
    assert slope == pytest.approx(gradient, rel=5e-7)
    assert metrics["dual_clip_fraction"] == dual


def test_case_65_dual_clip_survives_an_overflowing_ratio():
    lp = torch.tensor([100.0], requires_grad=True)
    out = ppo_loss(lp, torch.zeros(1), torch.tensor([-1.0]), config=PPOLossConfig(dual_clip=3.0))
    out.loss.backward()
    assert out.loss == 3
    assert lp.grad == 0


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, 0.0, -3.0, math.nan])
def test_case_65_dual_clip_must_exceed_one(dual_clip):
    with pytest.raises(ValueError, match="dual_clip"):
        PPOLossConfig(dual_clip=dual_clip)


@pytest.mark.parametrize("name", ["clip_ratio_c", "clip_eps", "dualclip", "beta", "loss_agg_mode", "epsilon_high"])
def test_case_66_unknown_names_are_a_type_error(name):
    with pytest.raises(TypeError, match=name):
        PPOLossConfig(**{name: 3})
    with pytest.raises(TypeError, match=name):
        ppo_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), **{name: 3})
    with pytest.raises(TypeError, match=name):
        fused_ppo_loss(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), torch.zeros(1), torch.zeros(1), **{name: 3})


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [(1, 5, 10, 40.5, -9.0, 0), (5, 1, 10, 38.72, 0.0, 1), (1.1, 1, 10, 0.5 * 8.9**2, -8.9, 0), (1, 1, 1, 0.0, 0.0, 0)],
)
def test_case_67_value_loss_takes_the_larger_square(value, old, target, loss, gradient, clipped):
    out, slope = one_value(value, old, target, value_clip=0.2)
    assert out.loss.item() == pytest.approx(loss, rel=5e-7)
    assert out.value_loss.item() == pytest.approx(loss, rel=5e-7)
    assert slope == pytest.approx(gradient, rel=5e-7)
    metrics = out.metrics.compute()
    assert metrics["value_tokens"] == 1
    if (value, old) != (1, 5):  # moved past the clip but the unclipped square is larger: peers count it or not
        assert metrics["value_clip_fraction"] == clipped


def test_case_67_value_loss_without_clipping_and_its_factors():
    out, slope = one_value(3, None, 1, vf_coef=0.1)
    assert out.value_loss.item() == pytest.approx(2.0)
    assert out.loss.item() == pytest.approx(0.2)
    assert slope == pytest.approx(0.2)
    out, slope = one_value(3, None, 1, vf_coef=0.1, value_loss_scale=1.0)
    assert out.loss.item() == pytest.approx(0.4)
    assert slope == pytest.approx(0.4)


def test_case_67_value_clip_needs_old_values():
    with pytest.raises(ValueError, match="old_values"):
        ppo_loss(
            torch.zeros(1),
            torch.zeros(1),
            torch.zeros(1),
            values=torch.zeros(1),
            returns=torch.zeros(1),
            config=PPOLossConfig(value_clip=0.2),
        )


def test_case_68_values_are_aligned_with_tokens_not_shifted():
    """values[t] is the value before token t; returns at the masked last slot must not be looked at."""
    v = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    out = ppo_loss(
        torch.zeros(1, 3),
        torch.zeros(1, 3),
        torch.zeros(1, 3),
        torch.tensor([[1, 1, 0]]),
        values=v,
        returns=torch.tensor([[5.0, 5.0, 99.0]]),
        config=PPOLossConfig(vf_coef=1.0),
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.5 * (16 + 9) / 2)
    assert v.grad.tolist() == [[-2.0, -1.5, 0.0]]


def test_case_68_value_mask_of_its_own():
    v = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    out = ppo_loss(
        torch.zeros(1, 3),
        torch.zeros(1, 3),
        -torch.ones(1, 3),
        torch.tensor([[1, 1, 0]]),
        values=v,
        returns=torch.zeros(1, 3),
        value_mask=torch.tensor([[0, 1, 1]]),
        config=PPOLossConfig(vf_coef=1.0),
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(1.0 + 0.5 * (4 + 9) / 2)
    assert v.grad.tolist() == [[0.0, 1.0, 1.5]]
    assert out.metrics.compute()["value_tokens"] == 2


@pytest.mark.parametrize("fused", [False, True])
def test_case_69_entropy_bonus_lowers_the_loss(fused):
    logits = torch.zeros(1, 4, requires_grad=True)
    config, zero = PPOLossConfig(entropy_coef=0.01), torch.zeros(1)
    if fused:
        out = fused_ppo_loss(logits, torch.tensor([0]), zero, zero, config=config)
    else:
        lp, h = logprobs_from_logits(logits, torch.tensor([0]), return_entropy=True)
        out = ppo_loss(lp, zero, zero, entropy=h, config=config)
    assert_close(out.loss, -0.01 * math.log(4), 5e-7)
    assert out.metrics.compute()["entropy"] == pytest.approx(math.log(4), rel=5e-7)


def test_case_69_the_bonus_pushes_towards_uniform():
    logits = torch.tensor([[2.0, 0.0]], requires_grad=True)
    fused_ppo_loss(
        logits, torch.tensor([0]), None, torch.zeros(1), config=PPOLossConfig(entropy_coef=1.0)
    ).loss.backward()
    assert logits.grad[0, 0] > 0  # a descent step lowers the larger logit
    assert_close(logits.grad, -oracle.score(logits, torch.tensor([0])).rows[(0,)].d_entropy[None], 5e-7)


def test_case_70_parts_are_reported_apart():
    adv, v = torch.tensor([1.0]), torch.tensor([2.0])
    out = ppo_loss(
        torch.zeros(1),
        torch.zeros(1),
        adv,
        values=v,
        returns=torch.zeros(1),
        ref_logprobs=torch.tensor([-1.0]),
        config=PPOLossConfig(vf_coef=0.1, kl_coef=0.5, kl_estimator="k1"),
    )
    assert out.policy_loss.item() == -1
    assert out.value_loss.item() == 2
    assert out.kl.item() == 1
    assert out.loss.item() == pytest.approx(-1 + 0.2 + 0.5)
    for part in (out.policy_loss, out.value_loss, out.kl):
        assert part.shape == ()
        assert not part.requires_grad


def test_case_73_the_same_allowed_token_mask_on_both_sides_gives_ratio_one():
    logits, tokens = torch.randn(4, 10), torch.tensor([0, 2, 4, 6])
    allowed = torch.zeros(10, dtype=torch.bool)
    allowed[::2] = True
    masked = logits.masked_fill(~allowed, -math.inf)
    old = logprobs_from_logits(masked, tokens)
    x = leaf(masked)
    out = fused_ppo_loss(x, tokens, old, torch.ones(4))
    out.loss.backward()
    assert out.metrics.compute()["ratio_min"] == out.metrics.compute()["ratio_max"] == 1
    assert (x.grad[:, ~allowed] == 0).all()
    raw = fused_ppo_loss(logits, tokens, old, torch.ones(4)).metrics.compute()
    assert raw["ratio_max"] < 1


def test_the_output_is_the_documented_tuple():
    logits = torch.randn(2, 4, 9, dtype=torch.bfloat16, requires_grad=True)
    out = fused_ppo_loss(logits, torch.ones(2, 4, dtype=torch.long), torch.zeros(2, 3), torch.ones(2, 3), shift=True)
    assert out._fields[:6] == ("loss", "logprobs", "entropy", "policy_loss", "value_loss", "kl")
    assert "metrics" in out._fields
    assert out.loss.shape == out.policy_loss.shape == out.value_loss.shape == out.kl.shape == ()
    assert out.logprobs.shape == (2, 3)
    for x in (out.loss, out.logprobs, out.policy_loss, out.value_loss, out.kl):
        assert x.dtype == torch.float32
    assert out.loss.requires_grad
    assert not any(x.requires_grad for x in (out.logprobs, out.policy_loss, out.value_loss, out.kl))
    assert out.value_loss == out.kl == 0  # without values, without ref_logprobs
    if out.entropy is not None:
        assert out.entropy.shape == (2, 3)
        assert not out.entropy.requires_grad


def test_config_is_a_value():
    config = PPOLossConfig(clip_low=0.1, entropy_coef=0.01)
    assert config == PPOLossConfig(clip_low=0.1, entropy_coef=0.01) != PPOLossConfig()
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, clip_low=0.2).clip_low == 0.2
    assert hash(config) == hash(PPOLossConfig(clip_low=0.1, entropy_coef=0.01))


@pytest.mark.parametrize("shape", [(7,), (3, 5)])
def test_all_metrics_match_the_oracle(shape):
    new = -torch.rand(shape) - 0.5
    delta = torch.tensor([0.0, 0.05, -0.1, 0.4, -0.5, 2.0, -30.0, 1.0, -1.0, 0.1, 0.3, -0.3, 3.0, 0.02, -0.02])[
        : new.numel()
    ].view(shape)
    adv = torch.where(torch.arange(new.numel()).view(shape) % 3 == 0, -1.0, 1.0) * (torch.rand(shape) + 0.5)
    mask = torch.rand(shape) < 0.8
    values = torch.randn(shape)
    old_values, returns, ref, entropy = (
        values + torch.randn(shape),
        torch.randn(shape),
        new + torch.randn(shape) * 0.3,
        torch.rand(shape),
    )
    options = {
        "dual_clip": 5.0,
        "log_ratio_clamp": 20.0,
        "entropy_coef": 0.1,
        "kl_coef": 0.2,
        "value_clip": 0.3,
        "clip_high": 0.28,
    }
    out = ppo_loss(
        new,
        new - delta,
        adv,
        mask,
        entropy=entropy,
        values=values,
        old_values=old_values,
        returns=returns,
        ref_logprobs=ref,
        config=PPOLossConfig(**options),
    )
    want = oracle.ppo(
        new,
        new - delta,
        adv,
        mask,
        spec=LossSpec(**options),
        entropy=entropy,
        values=values,
        old_values=old_values,
        returns=returns,
        ref=ref,
    )
    metrics = out.metrics.compute()
    assert set(metrics) == set(want.metrics)
    for name, value in want.metrics.items():
        assert isinstance(metrics[name], float), name
        if name != "value_clip_fraction":  # two definitions among peers; pinned where they agree, in row 67
            assert metrics[name] == pytest.approx(value, rel=2e-6, abs=1e-7), name


def test_metrics_add_up_over_micro_batches():
    """Sums and counts travel, not means: two unequal halves make the metrics of the whole."""
    new, old, adv, values = -torch.rand(8), -torch.rand(8), torch.randn(8), torch.randn(8)

    def metrics(rows):
        v = values[rows]
        return ppo_loss(new[rows], old[rows], adv[rows], entropy=-new[rows], values=v, returns=v + 1).metrics

    whole, parts = metrics(slice(None)).compute(), [metrics(slice(0, 3)), metrics(slice(3, 8))]
    for total in (parts[0] + parts[1], parts[1] + parts[0]):
        assert total.packed.dtype == torch.float32
        for name, value in total.compute().items():
            assert value == pytest.approx(whole[name], rel=1e-6, abs=1e-7), name


@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.1, "kl_coef": 0.1}, {"value_loss_type": "huber"}], ids=str)
def test_a_critic_apart_has_the_value_term_alone(options):
    torch.manual_seed(0)
    v, old, target = leaf(torch.randn(3, 4) * 8), torch.randn(3, 4), torch.randn(3, 4) * 8
    mask = torch.arange(4) < torch.tensor([4, 2, 0])[:, None]
    config = PPOLossConfig(value_clip=0.5, vf_coef=0.3, aggregation="seq-mean-token-mean", **options)
    out = ppo_value_loss(v, target, mask, old_values=old, config=config, loss_scale=2.0)
    out.loss.backward()
    joint = leaf(v.detach())
    nothing = torch.zeros(3, 4)
    only = dataclasses.replace(config, entropy_coef=0.0, kl_coef=0.0)
    given = {"values": joint, "old_values": old, "returns": target, "loss_scale": 2.0}
    want = ppo_loss(nothing, None, nothing, mask, config=only, **given)
    want.loss.backward()
    assert out.loss.item() == want.loss.item() != 0
    assert torch.equal(v.grad, joint.grad)
    assert out.metrics.compute()["value_tokens"] == 6
