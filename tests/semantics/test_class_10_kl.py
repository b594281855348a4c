"""Class 10: KL estimators, their clamps, adaptive KL."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from checks import assert_close, leaf
from oracle import INF, LossSpec

from ppo_kernels import AdaptiveKLController, FixedKLController, PPOLossConfig, fused_ppo_loss, ppo_loss, shape_rewards

ESTIMATORS = ["k1", "k2", "k3", "abs"]


def kl_only(new, ref, **options):
    """Loss and gradient of one token whose advantage is zero."""
    lp = torch.tensor([float(new)], requires_grad=True)
    out = ppo_loss(
        lp,
        lp.detach(),
        torch.zeros(1),
        ref_logprobs=torch.tensor([float(ref)]),
        config=PPOLossConfig(kl_coef=1.0, **options),
    )
    out.loss.backward()
    return out.kl.item(), lp.grad.item()


def test_case_79_output_clamp_of_an_overflowing_k3():
    assert kl_only(-100, 0, kl_output_clamp=10.0) == (10, 0)


def test_case_79_input_clamp_comes_before_the_exponential():
    value, slope = kl_only(-100, 0, kl_input_clamp=20.0)
    assert value == pytest.approx(math.exp(20) - 1 - 20, rel=1e-6)
    assert slope == 0
    assert kl_only(-100, 0, kl_input_clamp=20.0, kl_output_clamp=10.0) == (10, 0)


def test_case_79_unclamped_overflow_is_inf_not_nan():
    value, slope = kl_only(-100, 0)
    assert value == INF
    assert slope == -INF


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("new", [-1.3, -0.6, 0.5, 3.0])
def test_case_79_clamps_of_every_estimator(estimator, new):
    for options in (
        {"kl_input_clamp": 0.55},
        {"kl_output_clamp": 0.4},
        {"kl_input_clamp": 2.0, "kl_output_clamp": 0.9},
    ):
        value, slope, margin = oracle.kl_term(new, 0.0, LossSpec(kl_estimator=estimator, **options))
        assert margin > 1e-3
        got = kl_only(new, 0, kl_estimator=estimator, **options)
        assert got == pytest.approx((value, slope), rel=1e-6)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", 1.0, 1.0), ("k2", 0.5, 1.0), ("k3", math.exp(-1), 1 - math.exp(-1)), ("abs", 1.0, 1.0)],
)
def test_case_80_estimators_by_hand(estimator, value, slope):
    assert kl_only(-1, -2, kl_estimator=estimator) == pytest.approx((value, slope), rel=1e-6)


@pytest.mark.parametrize(("delta", "value"), [(0.1, 0.0051709), (-0.1, 0.0048374)])
def test_case_80_k3_by_hand(delta, value):
    """delta = ref - new."""
    assert kl_only(-1.0, -1.0 + delta)[0] == pytest.approx(value, rel=3e-5)
    assert kl_only(-1.0, -1.0 + delta)[0] == pytest.approx(oracle.kl_value(0.0, -1.0 + delta + 1.0, "k3")[0], rel=1e-5)


def test_case_80_shaped_reward_is_minus_beta_times_k1():
    rewards = shape_rewards(
        torch.zeros(1), torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.ones(1, 1), kl_coef=0.1
    )
    assert_close(rewards, [[-0.1]], 5e-7)


def test_case_81_k1_may_be_negative():
    value, _ = kl_only(-2, -1, kl_estimator="k1")
    assert value == -1
    for estimator in ("k2", "k3", "abs"):
        assert kl_only(-2, -1, kl_estimator=estimator)[0] > 0


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_case_84_kl_of_masked_tokens_stays_out_of_the_rewards(estimator):
    logprobs, ref = torch.tensor([[1.0, 1.0, 1.0]]), torch.zeros(1, 3)
    mask = torch.tensor([[1, 0, 1]])
    rewards = shape_rewards(torch.ones(1), logprobs, ref, mask, kl_coef=0.1, kl_estimator=estimator)
    assert rewards.dtype == torch.float32
    assert_close(rewards, oracle.shape_rewards([1.0], logprobs, ref, mask, kl_coef=0.1, kl_estimator=estimator), 5e-7)
    if estimator in ("k1", "abs"):
        assert_close(rewards, [[-0.1, 0.0, 0.9]], 5e-7)
    logprobs[0, 1] = math.nan
    ref[0, 1] = -math.inf
    again = shape_rewards(torch.ones(1), logprobs, ref, mask, kl_coef=0.1, kl_estimator=estimator)
    assert torch.equal(again, rewards)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_in_the_fused_loss_reaches_the_logits(estimator):
    logits, tokens = leaf(torch.randn(4, 21)), torch.randint(21, (4,))
    ref, old, adv = torch.full((4,), -2.0), torch.full((4,), -3.0), torch.zeros(4)
    options = {"kl_coef": 0.3, "kl_estimator": estimator}
    out = fused_ppo_loss(logits, tokens, old, adv, ref_logprobs=ref, config=PPOLossConfig(**options))
    out.loss.backward()
    want = oracle.fused(logits, tokens, old, adv, spec=LossSpec(**options), ref=ref)
    assert want.result.margin > 1e-4
    assert_close(out.kl, want.result.kl, 5e-7, scale=0.3)
    assert_close(logits.grad, want.d_logits, 5e-7, scale=float(abs(want.d_logits).max()))
    assert out.metrics.compute()["ref_kl"] == pytest.approx(want.result.metrics["ref_kl"], rel=3e-6)


def test_kl_coefficient_needs_reference_logprobs():
    with pytest.raises(ValueError, match="ref_logprobs"):
        ppo_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), config=PPOLossConfig(kl_coef=0.1))


def test_an_unknown_estimator_names_the_choices():
    with pytest.raises(ValueError, match="kl_estimator") as error:
        PPOLossConfig(kl_estimator="k4")
    assert "k3" in str(error.value)
    with pytest.raises(ValueError, match="kl_estimator"):
        shape_rewards(
            torch.zeros(1), torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), kl_coef=0.1, kl_estimator="full"
        )


def test_fixed_controller_never_moves():
    controller = FixedKLController(0.05)
    controller.update(3.0, 100)
    assert controller.value == 0.05
    other = FixedKLController(0.1)
    other.load_state_dict(controller.state_dict())
    assert other.value == 0.05


@pytest.mark.parametrize("kl", [0.0, 3.0, 5.5, 6.0, 6.6, 7.2, 30.0, -4.0])
def test_adaptive_controller_follows_the_paper(kl):
    controller = AdaptiveKLController(0.2, target=6.0, horizon=10000)
    expected = 0.2
    for n_steps in (256, 64):
        controller.update(kl, n_steps)
        expected = oracle.adaptive_kl(expected, kl, 6.0, n_steps, 10000)
        assert controller.value == pytest.approx(expected, rel=1e-12)


def test_adaptive_controller_state_round_trips():
    controller = AdaptiveKLController(0.2, target=6.0, horizon=1000)
    controller.update(12.0, 256)
    state = controller.state_dict()
    other = AdaptiveKLController(0.9, target=6.0, horizon=1000)
    other.load_state_dict(state)
    assert other.value == controller.value
    controller.update(1.0, 256)
    other.update(1.0, 256)
    assert other.value == controller.value
    assert state == AdaptiveKLController(state_value(state), 6.0, 1000).state_dict()  # a snapshot, not a view


def state_value(state):
    (value,) = [v for k, v in state.items() if "value" in k or "kl_coef" in k]
    return value


@pytest.mark.parametrize(
    "options", [{"target": 0.0, "horizon": 100}, {"target": -1.0, "horizon": 100}, {"target": 6.0, "horizon": 0}]
)
def test_adaptive_controller_refuses_a_bad_target_or_horizon(options):
    name = "target" if options["target"] <= 0 else "horizon"
    with pytest.raises(ValueError, match=name):
        AdaptiveKLController(0.2, **options)


def test_rewards_clamp_the_difference_then_the_estimate():
    logprobs, ref, mask = torch.tensor([[30.0, -30.0, -2.0]]), torch.zeros(1, 3), torch.ones(1, 3)
    shaped = [
        shape_rewards(torch.zeros(1), logprobs, ref, mask, kl_coef=1.0, kl_estimator=kind, **clamps)
        for kind, clamps in (
            ("k1", {"kl_output_clamp": 10.0}),
            ("k3", {"kl_input_clamp": 20.0, "kl_output_clamp": 10.0}),
        )
    ]
    assert_close(shaped[0], [[-10, 10, 2]], 5e-7)
    assert_close(shaped[1], [[-10, -10, -(math.exp(2) - 1 - 2)]], 5e-7)
