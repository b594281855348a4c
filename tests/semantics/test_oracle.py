"""The oracle itself, against float64 autograd of the textbook expressions and against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
from oracle import INF, LossSpec


def ratio_term(ratio, advantage, **options):
    term = oracle.policy_term(math.log(ratio), 0.0, advantage, LossSpec(**options))
    return term.loss, term.d_new


def test_rows_match_float64_autograd():
    logits = torch.randn(6, 50, dtype=torch.float64) * 3
    logits[1, 10:20] = -INF
    logits.requires_grad_()
    tokens = torch.randint(0, 10, (6,))
    logp = torch.log_softmax(logits / 0.7, -1)
    p = logp.exp()
    entropy = -(p * torch.where(p > 0, logp, 0.0)).sum(-1)
    up_lp, up_h = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    torch.autograd.backward([logp.gather(-1, tokens[:, None])[:, 0], entropy], [up_lp, up_h])
    scores = oracle.score(logits, tokens, temperature=0.7)
    np.testing.assert_allclose(scores.logprobs, logp.gather(-1, tokens[:, None])[:, 0].detach(), rtol=1e-13)
    np.testing.assert_allclose(scores.entropy, entropy.detach(), rtol=1e-12)
    live = np.isfinite(oracle.to_numpy(logits))
    np.testing.assert_allclose(
        scores.d_logits(up_lp.numpy(), up_h.numpy())[live], logits.grad.numpy()[live], rtol=1e-9, atol=1e-14
    )


def test_softcap_scale_and_a_temperature_for_each_row_match_float64_autograd():
    logits, tokens = torch.randn(6, 50, dtype=torch.float64, requires_grad=True), torch.randint(50, (6,))
    temperature = torch.rand(6, dtype=torch.float64) + 0.5
    logp = torch.log_softmax(1.5 * torch.tanh(2 * logits / 1.5) / temperature[:, None], -1)
    up_lp, up_h = torch.randn(2, 6, dtype=torch.float64)
    entropy = -(logp.exp() * logp).sum(-1)
    torch.autograd.backward([logp.gather(-1, tokens[:, None])[:, 0], entropy], [up_lp, up_h])
    scores = oracle.score(logits, tokens, temperature=temperature, softcap=1.5, scale=2.0)
    np.testing.assert_allclose(scores.entropy, oracle.to_numpy(entropy), rtol=1e-12)
    want = oracle.to_numpy(logits.grad)
    np.testing.assert_allclose(scores.d_logits(*map(oracle.to_numpy, (up_lp, up_h))), want, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(1.5, 1, -1.2, 0), (1.5, -1, 1.5, 1.5), (0.5, 1, -0.5, -0.5), (0.5, -1, 0.8, 0), (1.0, 1, -1, -1)],
)
def test_policy_term_by_hand(ratio, advantage, loss, gradient):
    assert ratio_term(ratio, advantage) == pytest.approx((loss, gradient), rel=1e-12)


def test_dual_clip_by_hand():
    assert ratio_term(10, -1, dual_clip=3) == (3, 0)
    assert ratio_term(10, 1, dual_clip=3) == pytest.approx((-1.2, 0))


def test_value_term_by_hand():
    assert oracle.value_term(1, 5, 10, LossSpec(value_clip=0.2))[:3] == (40.5, -9.0, False)
    loss, gradient, clipped, _ = oracle.value_term(5, 1, 10, LossSpec(value_clip=0.2))
    assert (loss, gradient, clipped) == (pytest.approx(38.72), 0.0, True)


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_whole_loss_matches_float64_autograd(aggregation):
    spec = LossSpec(
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
        entropy_coef=0.02,
        kl_coef=0.1,
        value_clip=0.3,
        vf_coef=0.4,
        aggregation=aggregation,
        agg_max_len=9,
    )
    shape = (4, 7)
    new, entropy, values = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    old, ref = new.detach() + torch.randn(shape), new.detach() + torch.randn(shape)
    adv, returns = torch.randn(2, *shape, dtype=torch.float64)
    old_values = values.detach() + torch.randn(shape)
    mask = torch.rand(shape) < 0.7
    mask[2] = False

    ratio = (new - old).exp()
    policy = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.28))
    policy = torch.where(adv < 0, torch.minimum(policy, -3.0 * adv), policy)
    kl = (ref - new).exp() - 1 - (ref - new)
    clipped = old_values + (values - old_values).clamp(-0.3, 0.3)
    value = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)

    def agg(x):
        x = torch.where(mask, x, 0.0)
        n, rows = mask.sum(-1), (mask.sum(-1) > 0).sum()
        return {
            "token-mean": x.sum() / n.sum(),
            "seq-mean-token-mean": (x.sum(-1) / n.clamp_min(1)).sum() / rows,
            "seq-mean-token-sum": x.sum() / rows,
            "seq-mean-token-sum-norm": x.sum() / rows / 9,
        }[aggregation]

    loss = 1.7 * (agg(policy) - 0.02 * agg(entropy) + 0.1 * agg(kl) + 0.4 * agg(value))
    loss.backward()
    got = oracle.ppo(
        new,
        old,
        adv,
        mask,
        spec=spec,
        entropy=entropy,
        values=values,
        old_values=old_values,
        returns=returns,
        ref=ref,
        loss_scale=1.7,
    )
    assert got.loss == pytest.approx(loss.item(), rel=1e-12)
    np.testing.assert_allclose(got.d_logprobs, new.grad, rtol=1e-10, atol=1e-15)
    np.testing.assert_allclose(got.d_entropy, entropy.grad, rtol=1e-10, atol=1e-15)
    np.testing.assert_allclose(got.d_values, values.grad, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_kl_derivatives_match_finite_differences(estimator):
    for d in (-2.0, -0.3, 0.4, 1.5):
        value, slope, _ = oracle.kl_term(d, 0.0, LossSpec(kl_estimator=estimator))
        step = 1e-6
        above, below = (oracle.kl_value(d + s, 0.0, estimator)[0] for s in (step, -step))
        assert slope == pytest.approx((above - below) / (2 * step), rel=1e-6)
        assert estimator == "k1" or value >= 0


def test_aggregation_by_hand():
    losses = np.array([[1.0, 1, 1, 1], [4, 0, 0, 0], [9, 9, 9, 9]])
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]) != 0

    def total(**options):
        return float(np.dot(oracle.aggregation_weights(mask, LossSpec(**options)), losses.reshape(-1)))

    assert total(aggregation="token-mean") == pytest.approx(1.6)
    assert total(aggregation="seq-mean-token-mean") == pytest.approx(2.5)
    assert total(aggregation="seq-mean-token-mean", agg_include_empty=True) == pytest.approx(5 / 3)
    assert total(aggregation="seq-mean-token-sum") == pytest.approx(4.0)
    assert total(aggregation="seq-mean-token-sum-norm", agg_max_len=4) == pytest.approx(1.0)


def test_gae_by_hand():
    """Row 87: a truncated step bootstraps from its own next value and lets nothing through from the next episode."""
    options = {"gamma": 0.9, "lam": 1.0}
    adv, _ = oracle.gae([1.0] * 4, [0.5] * 4, next_values=[0.5, 2, 0.5, 0.5], truncated=[0, 1, 0, 0], **options)
    np.testing.assert_allclose(adv, [3.02, 2.3, 1.805, 0.95], rtol=1e-12)
    assert oracle.gae([1.0, 1], [0.5] * 2, bootstrap_value=[2.0], **options)[0] == pytest.approx([3.02, 2.3])
    assert oracle.gae([1.0, 1], [0.5] * 2, terminated=[0, 1], **options)[0] == pytest.approx([1.4, 0.5])


def test_gae_mask_modes_by_hand():
    r, v, mask = [0.0, 0, 1], [0.0, 0, 0], [1, 0, 1]
    assert oracle.gae(r, v, mask, gamma=0.5, lam=1.0)[0] == pytest.approx([0.5, 0, 1])
    assert oracle.gae(r, v, mask, gamma=0.5, lam=1.0, mask_mode="zero")[0] == pytest.approx([0.25, 0, 1])
    assert oracle.gae([0.0, 4, 1], v, mask, gamma=0.5, lam=1.0, mask_mode="dense")[0] == pytest.approx([2.25, 0, 1])
