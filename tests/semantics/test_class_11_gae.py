"""Class 11: GAE, returns, reward placement."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from checks import assert_close, same_bits
from oracle import INF, NAN

from ppo_kernels import gae, shape_rewards

MODES = ["skip", "zero", "dense"]


def check(*args, rel=1e-6, scale=1.0, **options):
    got = gae(*args, **options)
    want = oracle.gae(*args, **options)
    for g, w, name in zip(got, want, ("advantages", "returns"), strict=True):
        assert g.dtype == torch.float32
        assert_close(g, w, rel, scale=scale, what=name)
    return got


@pytest.mark.parametrize("padding", [100.0, NAN, INF, -INF])
def test_case_85_a_padded_value_does_not_bootstrap_into_real_tokens(padding):
    r, v, mask = torch.tensor([[0.0, 1, 0]]), torch.tensor([[0.0, 0, padding]]), torch.tensor([[1, 1, 0]])
    out = check(r, v, mask, lam=0.95)
    assert_close(out.advantages, [[0.95, 1, 0]], 5e-7)
    assert_close(out.returns, [[0.95, 1, 0]], 5e-7)
    r[0, 2] = padding
    assert same_bits(gae(r, v, mask, lam=0.95).advantages, out.advantages)
    zero = gae(r, v, mask, lam=0.95, mask_mode="zero")
    assert_close(zero.advantages, [[0.95, 1, 0]], 5e-7)


def test_case_85_left_padding():
    r, v = torch.tensor([[NAN, 0, 1]]), torch.tensor([[NAN, 0.5, 0.25]])
    out = check(r, v, torch.tensor([[0, 1, 1]]), gamma=0.9)
    assert out.advantages[0, 0] == out.returns[0, 0] == 0


@pytest.mark.parametrize("gap", [0.0, NAN])
def test_case_86_a_gap_is_transparent(gap):
    r, v, mask = torch.tensor([[0.0, gap, 1]]), torch.tensor([[0.0, gap, 0]]), torch.tensor([[1, 0, 1]])
    out = check(r, v, mask, gamma=0.5, lam=1.0)
    assert out.advantages.tolist() == [[0.5, 0, 1]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.5, 1.0), (0.9, 0.8), (1.0, 0.0), (0.0, 0.95)])
def test_case_86_skip_equals_the_run_on_the_compacted_sequence(gamma, lam):
    r, v, mask = torch.randn(1, 40), torch.randn(1, 40), torch.rand(1, 40) < 0.6
    full = check(r, v, mask, gamma=gamma, lam=lam, bootstrap_value=torch.tensor([0.7]))
    short = gae(r[mask][None], v[mask][None], gamma=gamma, lam=lam, bootstrap_value=torch.tensor([0.7]))
    assert same_bits(full.advantages[mask], short.advantages[0])
    assert same_bits(full.returns[mask], short.returns[0])
    assert (full.advantages[~mask] == 0).all()
    assert (full.returns[~mask] == 0).all()


def test_case_86_a_reward_on_a_masked_tail_is_not_read():
    r, v, mask = torch.tensor([[0.0, 0, 9]]), torch.zeros(1, 3), torch.tensor([[1, 1, 0]])
    assert (gae(r, v, mask).advantages == 0).all()


def test_case_87_truncation_bootstraps_and_stops_the_trace():
    r, v = torch.ones(1, 4), torch.full((1, 4), 0.5)
    nv, truncated = torch.tensor([[0.5, 2, 0.5, 0.5]]), torch.tensor([[0, 1, 0, 0]])
    out = check(r, v, next_values=nv, truncated=truncated, gamma=0.9, lam=1.0)
    assert_close(out.advantages, [[3.02, 2.3, 1.805, 0.95]], 5e-7)


def test_case_87_truncated_terminated_and_bootstrapped_ends():
    r, v = torch.ones(1, 2), torch.full((1, 2), 0.5)
    assert_close(check(r, v, bootstrap_value=torch.tensor([2.0]), gamma=0.9, lam=1.0).advantages, [[3.02, 2.3]], 5e-7)
    assert_close(check(r, v, terminated=torch.tensor([[0, 1]]), gamma=0.9, lam=1.0).advantages, [[1.4, 0.5]], 5e-7)
    assert_close(
        check(
            r, v, terminated=torch.tensor([[0, 1]]), bootstrap_value=torch.tensor([2.0]), gamma=0.9, lam=1.0
        ).advantages,
        [[1.4, 0.5]],
        5e-7,
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_case_87_advantages_do_not_leak_across_episodes(dtype):
    r, v = torch.randn(2, 6), torch.randn(2, 6)
    ends = torch.tensor([[0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 1, 0]]).to(dtype)
    first = check(r, v, terminated=ends, gamma=0.9)
    r[0, 3:] = 1000.0
    r[1, 2:] = 1000.0
    second = check(r, v, terminated=ends, gamma=0.9, scale=1000.0)
    assert same_bits(first.advantages[0, :3].clone(), second.advantages[0, :3].clone())
    assert same_bits(first.advantages[1, :2].clone(), second.advantages[1, :2].clone())


def test_case_87_the_value_after_a_terminal_step_is_not_used():
    r, v = torch.ones(1, 2), torch.full((1, 2), 0.5)
    out = gae(r, v, terminated=torch.tensor([[0, 1]]), next_values=torch.tensor([[0.5, NAN]]), gamma=0.9, lam=1.0)
    assert_close(out.advantages, [[1.4, 0.5]], 5e-7)
    out = gae(r, v, terminated=torch.tensor([[0, 1]]), bootstrap_value=torch.tensor([NAN]), gamma=0.9, lam=1.0)
    assert_close(out.advantages, [[1.4, 0.5]], 5e-7)


def test_case_88_a_truncated_step_needs_the_value_of_its_final_state():
    r, v = torch.ones(1, 4), torch.full((1, 4), 0.5)
    with pytest.raises(ValueError, match="next_values"):
        gae(r, v, truncated=torch.tensor([[0, 1, 0, 0]]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("flags", ["none", "terminated", "next_values", "both"])
@pytest.mark.parametrize("packed", [False, True])
def test_cases_85_to_88_every_option_against_the_scalar_loop(mode, masked, flags, packed):
    """Flags and next values sit at valid steps only: what they mean at masked steps is nobody's question."""
    shape = (5, 37)
    r, v, boot = torch.randn(shape), torch.randn(shape), torch.randn(5)
    mask = torch.rand(shape) < 0.7 if masked else torch.ones(shape, dtype=torch.bool)
    if masked:
        mask[3] = False
    options = {"gamma": 0.97, "lam": 0.9, "mask_mode": mode, "bootstrap_value": boot}
    if flags in ("terminated", "both"):
        options["terminated"] = (torch.rand(shape) < 0.1) & mask
    if flags in ("next_values", "both"):
        options["next_values"] = torch.randn(shape) * mask
        options["truncated"] = (torch.rand(shape) < 0.1) & mask
    if packed:
        lengths = [0, 37, 0, 1, 100, 47]
        cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        options |= {"cu_seqlens": cu, "bootstrap_value": torch.randn(6)}
        r, v, mask = r.flatten(), v.flatten(), mask.flatten()
        options = {k: x.flatten() if isinstance(x, torch.Tensor) and x.ndim == 2 else x for k, x in options.items()}
    check(r, v, mask if masked else None, rel=2e-6, scale=3.0, **options)


@pytest.mark.parametrize("mode", MODES)
def test_case_92_packed_segments_equal_padded_rows(mode):
    lengths = [4, 1, 7, 0, 3]
    r, v, mask = torch.randn(5, 7), torch.randn(5, 7), torch.rand(5, 7) < 0.7
    boot = torch.randn(5)
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    packed = [torch.cat([x[b, :n] for b, n in enumerate(lengths)]) for x in (r, v, mask)]
    got = gae(*packed, gamma=0.9, cu_seqlens=cu, bootstrap_value=boot, mask_mode=mode)
    for b, n in enumerate(lengths):
        if n == 0:
            continue
        alone = gae(
            r[b : b + 1, :n],
            v[b : b + 1, :n],
            mask[b : b + 1, :n],
            gamma=0.9,
            bootstrap_value=boot[b : b + 1],
            mask_mode=mode,
        )
        assert same_bits(got.advantages[cu[b] : cu[b + 1]].clone(), alone.advantages[0].clone())
        assert same_bits(got.returns[cu[b] : cu[b + 1]].clone(), alone.returns[0].clone())


def test_a_single_sequence_without_a_batch_axis():
    r, v, mask = torch.randn(9), torch.randn(9), torch.rand(9) < 0.7
    flat, batched = check(r, v, mask, gamma=0.9), gae(r[None], v[None], mask[None], gamma=0.9)
    assert same_bits(flat.advantages, batched.advantages[0].clone())


def test_strided_inputs():
    r, v, m = torch.randn(7, 4).t(), torch.randn(4, 14)[:, ::2], torch.ones(1, 7).expand(4, 7)
    a, b = gae(r, v, m, gamma=0.9), gae(r.contiguous(), v.contiguous(), m.contiguous(), gamma=0.9)
    assert same_bits(a.advantages, b.advantages)
    check(torch.randn(4, 1).expand(4, 7), v, gamma=0.9)
    reversed_time = torch.randn(4, 7).flip(1)
    check(reversed_time, v, gamma=0.9)


def test_mask_dtypes_mean_the_same():
    r, v, mask = torch.randn(3, 8), torch.randn(3, 8), torch.rand(3, 8) < 0.6
    want = gae(r, v, mask)
    for dtype in (torch.int64, torch.uint8, torch.float32, torch.bfloat16):
        assert same_bits(gae(r, v, mask.to(dtype)).advantages, want.advantages)


CONTRACT_89 = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("placement", ["last_token", "after_last"])
def test_case_89_the_score_lands_on_the_last_valid_token(placement):
    mask, zeros = torch.tensor(CONTRACT_89), torch.zeros(4, 5)
    rewards = shape_rewards(torch.full((4,), 7.0), zeros, zeros, mask, kl_coef=0.1, placement=placement)
    if placement == "last_token":
        assert rewards.tolist() == [[0, 0, 7, 0, 0], [0, 0, 0, 0, 7], [7, 0, 0, 0, 0], [0] * 5]
    else:
        assert rewards.tolist() == [[0, 0, 0, 7, 0], [0, 0, 0, 0, 7], [0, 7, 0, 0, 0], [0] * 5]


def test_case_89_the_score_reaches_every_token_through_gae():
    mask, zeros = torch.tensor(CONTRACT_89), torch.zeros(4, 5)
    rewards = shape_rewards(torch.full((4,), 7.0), zeros, zeros, mask, kl_coef=0.1)
    assert_close(gae(rewards, zeros, mask, lam=1.0).advantages, 7.0 * mask.double().numpy(force=True), 5e-7)


def test_case_89_gaps_and_left_padding():
    mask, zeros = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 1]]), torch.zeros(2, 5)
    rewards = shape_rewards(torch.tensor([7.0, 5.0]), zeros, zeros, mask, kl_coef=0.1)
    assert rewards.tolist() == [[0, 0, 0, 7, 0], [0, 0, 0, 0, 5]]


def test_case_90_missing_eos_penalty_and_clip():
    scores, has_eos = torch.tensor([0.0, 0.0, 7.0, -7.0]), torch.tensor([False, True, False, True])
    zeros, mask = torch.zeros(4, 3), torch.ones(4, 3)
    options = {"kl_coef": 0.1, "clip": 5.0, "missing_eos_penalty": 1.0, "has_eos": has_eos}
    rewards = shape_rewards(scores, zeros, zeros, mask, **options)
    assert rewards[:, -1].tolist() == [-1, 0, 4, -5]
    assert_close(rewards, oracle.shape_rewards(scores, zeros, zeros, mask, **options), 5e-7)


@pytest.mark.parametrize("placement", ["last_token", "after_last"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_shaped_rewards_match_the_oracle(estimator, placement):
    lp, ref, mask = -torch.rand(6, 9), -torch.rand(6, 9), torch.rand(6, 9) < 0.6
    mask[2] = False
    options = {"kl_coef": 0.2, "kl_estimator": estimator, "placement": placement, "clip": 1.0}
    scores = torch.randn(6) * 2
    rewards = shape_rewards(scores, lp, ref, mask, **options)
    assert_close(rewards, oracle.shape_rewards(scores, lp, ref, mask, **options), 5e-7, scale=1.0)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.95)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_91_long_sequences_keep_their_precision(gamma, lam, dtype):
    r, v = (torch.randn(2, 4096) + 0.1).to(dtype), torch.randn(2, 4096).to(dtype)
    got, (adv, ret) = gae(r, v, gamma=gamma, lam=lam), oracle.gae(r, v, gamma=gamma, lam=lam)
    assert got.advantages.dtype == got.returns.dtype == torch.float32
    # an advantage is a sum of terms of both signs: the bar is relative to the largest partial sum
    assert_close(got.advantages, adv, 5e-7, scale=float(np.abs(adv).max()))
    assert_close(got.returns, ret, 5e-7, scale=float(np.abs(ret).max()))


def test_case_91_very_long_sequence_does_not_collapse():
    r, v = torch.randn(1, 32768), torch.randn(1, 32768)
    got, (adv, _) = gae(r, v, gamma=1.0, lam=1.0), oracle.gae(r, v, gamma=1.0, lam=1.0)
    assert_close(got.advantages, adv, 5e-7, scale=float(np.abs(adv).max()))


def test_case_91_returns_are_advantages_plus_values_exactly():
    r, v, mask = torch.randn(3, 50), torch.randn(3, 50), torch.rand(3, 50) < 0.7
    out = gae(r, v, mask, gamma=0.9)
    assert same_bits(torch.where(mask, out.advantages + v, 0.0), out.returns)


def test_gae_results_are_constants():
    out = gae(torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True))
    assert not out.advantages.requires_grad
    assert not out.returns.requires_grad


@pytest.mark.parametrize("packed", [False, True])
def test_one_lambda_per_sequence(packed):
    """As in VAPO: a sequence's advantages are those it would have alone under its own lambda."""
    r, v, mask = torch.randn(4, 33), torch.randn(4, 33), torch.rand(4, 33) < 0.8
    lam = torch.tensor([0.0, 0.5, 0.95, 1.0])
    options = {"gamma": 0.97, "bootstrap_value": torch.randn(4)}
    if packed:
        got = gae(r.view(-1), v.view(-1), mask.view(-1), lam=lam, cu_seqlens=torch.arange(5) * 33, **options)
    else:
        got = gae(r, v, mask, lam=lam, **options)
    for i in range(4):
        own = {"gamma": 0.97, "bootstrap_value": options["bootstrap_value"][i : i + 1]}
        want = gae(r[i : i + 1], v[i : i + 1], mask[i : i + 1], lam=float(lam[i]), **own)
        assert_close(got.advantages.view(4, 33)[i], want.advantages[0], 1e-6, scale=1.0)
        assert_close(got.returns.view(4, 33)[i], want.returns[0], 1e-6, scale=1.0)


def test_returns_may_have_a_lambda_of_their_own():
    """Decoupled GAE: advantages by one lambda, the critic's targets by another."""
    r, v, mask = torch.randn(3, 20), torch.randn(3, 20), torch.rand(3, 20) < 0.8
    both = gae(r, v, mask, gamma=0.99, lam=0.8, value_lam=1.0)
    assert same_bits(both.advantages, gae(r, v, mask, gamma=0.99, lam=0.8).advantages)
    assert same_bits(both.returns, gae(r, v, mask, gamma=0.99, lam=1.0).returns)
    per_sequence = torch.tensor([1.0, 0.5, 0.9])
    both = gae(r, v, mask, lam=per_sequence, value_lam=per_sequence)
    assert same_bits(both.returns, gae(r, v, mask, lam=per_sequence).returns)
