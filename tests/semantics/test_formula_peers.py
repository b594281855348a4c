"""Trainers whose packages do not install here: NeMo-RL, slime, AReaL, DeepSpeed-Chat. Their formulas, in float64.

Each formula is written as that trainer states it, in plain PyTorch, and differentiated by autograd. Packages that do
install are in tests/peers.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checks import assert_close, assert_logits_grad, leaf
from oracle import to_numpy
from torch import Tensor

from ppo_kernels import PPOLossConfig, fused_ppo_loss, gae, masked_whiten, ppo_loss, shape_rewards
from ppo_kernels.presets import GAE_OPTIONS, WHITEN_OPTIONS

ROWS, LENGTH, VOCAB = 4, 6, 7
INPUTS = ("old", "ref", "rollout", "advantages", "old_values", "returns")
NEMO_RL, SLIME, AREAL = PPOLossConfig.nemo_rl, PPOLossConfig.slime, PPOLossConfig.areal
DEEPSPEED_CHAT = PPOLossConfig.deepspeed_chat


def draw(spread: float = 0.4, ref_spread: float = 0.4) -> SimpleNamespace:
    """fp32 inputs [ROWS, LENGTH]; lengths 6, 4 with a gap, 1 and 0; ratios on both sides of every clip."""
    x = SimpleNamespace(logits=torch.randn(ROWS, LENGTH, VOCAB), tokens=torch.randint(VOCAB, (ROWS, LENGTH)))
    x.mask = torch.arange(LENGTH) < torch.tensor([6, 4, 1, 0])[:, None]
    x.mask[1, 2] = False
    chosen = x.logits.log_softmax(-1).gather(-1, x.tokens[..., None]).squeeze(-1)
    x.old, x.rollout = (chosen + spread * torch.randn(ROWS, LENGTH) for _ in range(2))
    x.ref = chosen + ref_spread * torch.randn(ROWS, LENGTH)
    x.advantages, x.values, x.returns = (torch.randn(ROWS, LENGTH) for _ in range(3))
    x.old_values = x.values + 0.5 * torch.randn(ROWS, LENGTH)
    return x


def exact(x: SimpleNamespace) -> SimpleNamespace:
    """The same in float64, with leaves logits and values, log-probs l, entropy h, and the mask m as numbers."""
    y = SimpleNamespace(**{name: getattr(x, name).double() for name in INPUTS}, m=x.mask.double(), n=x.mask.sum(-1))
    y.logits, y.values = leaf(x.logits.double()), leaf(x.values.double())
    everything = y.logits.log_softmax(-1)
    y.l, y.h = everything.gather(-1, x.tokens[..., None]).squeeze(-1), -(everything.exp() * everything).sum(-1)
    return y


def compare(config: PPOLossConfig, formula, x: SimpleNamespace, values: bool = False, **given) -> None:
    """Loss and gradient from fp32 logits, the loss from fp64 log-probs too. values: the critic's, else the actor's."""
    y = exact(x)
    want = formula(y)
    want.backward()
    if config.kl_coef != 0:
        given["ref_logprobs"] = x.ref
    if values:
        given |= {"returns": x.returns} | ({"old_values": x.old_values} if config.value_clip is not None else {})
    advantages = torch.zeros_like(x.advantages) if values else x.advantages
    old = given.pop("old_logprobs", x.old)
    logits, value = leaf(x.logits), leaf(x.values)
    critic = {"values": value} if values else {}
    out = fused_ppo_loss(logits, x.tokens, old, advantages, x.mask, config=config, **given, **critic)
    out.loss.backward()
    assert_close(out.loss, want, 1e-6, scale=1.0, what="loss")
    if values:
        assert_close(value.grad, y.values.grad, 1e-6, scale=float(y.values.grad.abs().max()), what="values")
    else:
        assert_logits_grad(logits.grad, to_numpy(y.logits.grad), 2e-6)
    in_fp64 = {name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in given.items()}
    y = exact(x)
    other = ppo_loss(
        y.l,
        None if old is None else old.double(),
        advantages.double(),
        x.mask,
        entropy=y.h,
        config=config,
        **in_fp64,
        **({"values": y.values} if values else {}),
    )
    assert_close(other.loss, want, 5e-8, scale=1.0, what="loss in fp64")  # some add 1e-8 to a denominator


def larger_error(v: Tensor, near: Tensor, returns: Tensor) -> Tensor:
    return torch.maximum((v - returns) ** 2, (near - returns) ** 2)


# -- NeMo-RL ----------------------------------------------------------------------------------------------------------


def nemo_mean(values: Tensor, mask: Tensor, count: Tensor | float | None = None, dim: int | None = None) -> Tensor:
    return (values * mask).sum(dim) / ((mask.sum(dim) if count is None else count) + 1e-8)


def nemo_policy(
    y: SimpleNamespace, low: float, high: float, c: float | None, log_ratio: Tensor | None = None
) -> Tensor:
    ratio = (y.l - y.old if log_ratio is None else log_ratio).exp()
    loss = torch.max(-y.advantages * ratio, -y.advantages * ratio.clamp(1 - low, 1 + high))
    return loss if c is None else torch.where(y.advantages < 0, torch.min(loss, -y.advantages * c), loss)


@pytest.mark.parametrize(
    ("low", "high", "c"), [(0.2, 0.2, None), (0.2, 0.28, None), (0.2, 0.28, 1.5), (0.1, 0.2, 10.0)]
)
def test_nemo_rl_policy_loss_over_a_global_count_of_tokens(low, high, c):
    config = NEMO_RL(kl_coef=0.0, clip_low=low, clip_high=high, dual_clip=c)
    x = draw()
    compare(config, lambda y: nemo_mean(nemo_policy(y, low, high, c), y.m), x)
    compare(config, lambda y: nemo_mean(nemo_policy(y, low, high, c), y.m, 23.0), x, normalizer=23.0)


def test_nemo_rl_policy_loss_per_sequence_over_a_global_count_of_sequences():
    x = draw()
    sample_mask = torch.tensor([1.0, 1, 0, 0])  # of which one sequence is dropped and one is empty
    x.mask = x.mask & (sample_mask[:, None] == 1)

    def formula(y):
        return nemo_mean(nemo_mean(nemo_policy(y, 0.2, 0.2, None), y.m, dim=-1), sample_mask.double(), 5.0)

    compare(NEMO_RL(kl_coef=0.0, aggregation="seq-mean-token-mean"), formula, x, normalizer=5.0)


def test_nemo_rl_sequence_level_ratio():
    def formula(y):
        log_ratio = nemo_mean(y.l - y.old, y.m, dim=-1)[:, None].expand_as(y.l)
        return nemo_mean(nemo_mean(nemo_policy(y, 0.2, 0.2, None, log_ratio), y.m, dim=-1), (y.n > 0).double())

    compare(NEMO_RL(kl_coef=0.0, ratio_level="sequence", aggregation="seq-mean-token-mean"), formula, draw())


def test_nemo_rl_cispo():
    def formula(y):
        ratio = (y.l - y.old).exp().clamp(1 - 0.2, 1 + 0.28).detach()
        return nemo_mean(-y.advantages * ratio * y.l, y.m)

    compare(NEMO_RL(kl_coef=0.0, loss_type="cispo", clip_high=0.28), formula, draw())


def test_nemo_rl_without_a_ratio_and_with_a_ratio_of_1():
    x = draw()
    compare(NEMO_RL(kl_coef=0.0, loss_type="reinforce"), lambda y: nemo_mean(-y.advantages * y.l, y.m), x)

    def on_policy(y):
        return nemo_mean(-y.advantages * (y.l - y.l.detach()).exp(), y.m)

    compare(NEMO_RL(kl_coef=0.0), on_policy, x, old_logprobs=None)


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_nemo_rl_correction_for_the_rollout_engine(kind):
    low, high = 0.8, 1.2

    def formula(y):
        weight = (y.old - y.rollout).exp()
        if kind == "tis":
            weight = weight.clamp(0, high)
        elif kind == "icepop":
            weight = torch.where((weight >= low) & (weight <= high), weight, 0.0)
        else:
            mean = nemo_mean(y.old - y.rollout, y.m, dim=-1).exp()
            weight = torch.where((mean >= low) & (mean <= high), 1.0, 0.0)[:, None] * weight
        return nemo_mean(weight * nemo_policy(y, 0.2, 0.2, None), y.m)

    mode = {"tis": "truncate", "icepop": "mask", "seq-mask-tis": "seq_mask"}[kind]
    bounds = {"rollout_is_min": None if kind == "tis" else low, "rollout_is_max": high}
    x = draw()
    compare(NEMO_RL(kl_coef=0.0, rollout_is_mode=mode, **bounds), formula, x, rollout_logprobs=x.rollout)


def nemo_kl(y: SimpleNamespace, kind: str, input_clamp: float | None, output_clamp: float | None) -> Tensor:
    """Weighted by exp(l - l), whose gradient is that of the sampling probability, but where the input is clamped."""
    d, weight = y.ref - y.l, (y.l - y.l.detach()).exp()
    if input_clamp is not None:
        weight = torch.where(d.abs() > input_clamp, weight.detach(), weight)
        d = d.clamp(-input_clamp, input_clamp)
    kl = weight * {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[kind]
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize(("input_clamp", "output_clamp"), [(20.0, 10.0), (0.3, None), (None, None), (0.3, 10.0)])
def test_nemo_rl_kl_and_its_gradient_with_the_input_clamp(kind, input_clamp, output_clamp):
    def formula(y):
        kl = nemo_mean(nemo_kl(y, kind, input_clamp, output_clamp), y.m, 11.0)
        return nemo_mean(nemo_policy(y, 0.2, 0.2, None), y.m, 11.0) + 0.5 * kl

    config = NEMO_RL(kl_coef=0.5, kl_estimator=kind, kl_input_clamp=input_clamp, kl_output_clamp=output_clamp)
    compare(config, formula, draw(), normalizer=11.0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_nemo_rl_kl_value_beyond_both_clamps(kind):
    x = draw(ref_spread=20.0)
    out = fused_ppo_loss(
        x.logits, x.tokens, x.old, x.advantages, x.mask, config=NEMO_RL(kl_estimator=kind), ref_logprobs=x.ref
    )
    y = exact(x)
    kl = nemo_kl(y, kind, 20.0, 10.0)
    assert (kl.abs()[x.mask] == 10).any()
    assert_close(out.kl, nemo_mean(kl, y.m), 1e-6, scale=10.0)


def test_nemo_rl_kl_gradient_beyond_the_output_clamp():
    """d = 15: k1 is 15, clamped to 10, and then constant."""
    logprobs = torch.tensor([-1.0], requires_grad=True)
    given = {"ref_logprobs": torch.tensor([-16.0]), "config": NEMO_RL(kl_coef=1.0, kl_estimator="k1")}
    ppo_loss(logprobs, torch.tensor([-1.0]), torch.zeros(1), **given).loss.backward()
    assert logprobs.grad.item() == 0


@pytest.mark.parametrize("clip", [None, 0.2])
def test_nemo_rl_value_loss_over_a_global_count_of_tokens(clip):
    def formula(y):
        near = y.values if clip is None else y.old_values + (y.values - y.old_values).clamp(-clip, clip)
        return 0.5 * nemo_mean(larger_error(y.values, near, y.returns), y.m, 19.0)

    compare(NEMO_RL(kl_coef=0.0, value_clip=clip), formula, draw(), values=True, normalizer=19.0)


def skipping(
    x: SimpleNamespace, gamma: float, lam: Tensor | float, after: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """NeMo-RL's and AReaL's recursion: at a masked step the next value and the carried advantage stay as they are."""
    m, lam = x.mask.double(), torch.as_tensor(lam, dtype=torch.float64)
    carry, following = torch.zeros(ROWS, dtype=torch.float64), torch.as_tensor(after, dtype=torch.float64).expand(ROWS)
    columns = []
    for t in reversed(range(x.rewards.shape[1])):
        found = x.rewards[:, t] + gamma * following - x.values[:, t] + gamma * lam * carry
        carry, following = found * m[:, t] + carry * (1 - m[:, t]), x.values[:, t] * m[:, t] + following * (1 - m[:, t])
        columns.insert(0, carry)
    advantages = torch.stack(columns, 1)
    return advantages * m, (advantages + x.values) * m


def steps(dtype: torch.dtype = torch.float64) -> SimpleNamespace:
    x = draw()
    x.rewards, x.values = torch.randn(ROWS, LENGTH, dtype=dtype), torch.randn(ROWS, LENGTH, dtype=dtype)
    return x


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (1.0, 1.0), (0.9, 0.7)])
def test_nemo_rl_gae_skips_masked_steps(gamma, lam, dtype, rel):
    x = steps(dtype)
    got = gae(x.rewards, x.values, x.mask, **{**GAE_OPTIONS["nemo_rl"], "gamma": gamma, "lam": lam})
    for g, w in zip(got, skipping(x, gamma, lam), strict=True):
        assert_close(g, w, rel, scale=1.0)


def test_nemo_rl_gae_with_a_lambda_for_each_row_and_another_for_the_values():
    """VAPO: lambda = 1 - 1 / (alpha n); two scans."""
    x = steps()
    lam = 1 - 1 / (0.5 * x.mask.sum(-1).clamp(min=2).double())
    got = gae(x.rewards, x.values, x.mask, **{**GAE_OPTIONS["nemo_rl"], "lam": lam}, value_lam=1.0)
    assert_close(got.advantages, skipping(x, 1.0, lam)[0], 1e-13, scale=1.0)
    assert_close(got.returns, skipping(x, 1.0, 1.0)[1], 1e-13, scale=1.0)


def nemo_whiten(x: Tensor, mask: Tensor) -> Tensor:
    n, mean = mask.sum(), nemo_mean(x, mask)
    variance = nemo_mean((x - mean) ** 2, mask) * n / (n - 1)
    return torch.where(mask != 0, (x - mean) * (variance + 1e-8).rsqrt(), 0.0)


def test_nemo_rl_whitening_of_valid_tokens():
    x = draw()
    got = masked_whiten(x.advantages.double(), x.mask, **WHITEN_OPTIONS["nemo_rl"])
    assert_close(got, nemo_whiten(x.advantages.double(), x.mask.double()), 1e-8, scale=1.0)


def test_nemo_rl_whitening_of_one_token_is_nan_and_ours_is_0():
    x, mask = torch.tensor([0.7, 5.0]), torch.tensor([1, 0])
    assert nemo_whiten(x, mask.float())[0].isnan()
    assert masked_whiten(x, mask, **WHITEN_OPTIONS["nemo_rl"]).tolist() == [0.0, 0.0]


def test_nemo_rl_reward_on_the_last_valid_token():
    x, scores = draw(), torch.randn(ROWS)
    want = torch.zeros(ROWS, LENGTH)
    for row, valid in enumerate(x.mask):
        if valid.any():
            want[row, int(valid.nonzero().max())] = scores[row]
    got = shape_rewards(scores, x.old, x.ref, x.mask, kl_coef=0.0)
    assert_close(got, want, 0)


# -- slime ------------------------------------------------------------------------------------------------------------


def slime_mean_of_samples(values: Tensor, y: SimpleNamespace, samples: float = ROWS) -> Tensor:
    """Every sample counts, an empty one as 0."""
    return sum((v * m).sum() / max(float(m.sum()), 1) for v, m in zip(values, y.m, strict=True)) / samples


def slime_policy(y: SimpleNamespace, low: float, high: float, c: float | None, ppo_kl: Tensor | None = None) -> Tensor:
    ratio = (-(y.old - y.l if ppo_kl is None else ppo_kl)).exp()
    loss = torch.maximum(-ratio * y.advantages, -ratio.clamp(1 - low, 1 + high) * y.advantages)
    return loss if c is None else torch.where(y.advantages < 0, torch.min(-c * y.advantages, loss), loss)


@pytest.mark.parametrize(("low", "high", "c"), [(0.2, 0.2, None), (0.2, 0.28, 1.5)])
def test_slime_policy_loss_as_the_mean_of_means_of_samples(low, high, c):
    x, config = draw(), SLIME(clip_low=low, clip_high=high, dual_clip=c)
    compare(config, lambda y: slime_mean_of_samples(slime_policy(y, low, high, c), y), x)
    compare(config, lambda y: slime_mean_of_samples(slime_policy(y, low, high, c), y, 9.0), x, normalizer=9.0)


def test_slime_policy_loss_per_token():
    """calculate_per_token_loss: sums, which Megatron divides by the tokens of the step."""
    config = SLIME(aggregation="token-mean")
    compare(config, lambda y: (slime_policy(y, 0.2, 0.2, None) * y.m).sum() / 31.0, draw(), normalizer=31.0)


def test_slime_sequence_level_ratio():
    def formula(y):
        per_sample = ((y.old - y.l) * y.m).sum(-1) / y.n.clamp(min=1)
        return slime_mean_of_samples(slime_policy(y, 0.2, 0.2, None, per_sample[:, None].expand_as(y.l)), y)

    compare(SLIME(ratio_level="sequence"), formula, draw())


def test_slime_cispo():
    def formula(y):
        return slime_mean_of_samples(-(y.l - y.old).exp().clamp(0.8, 1.2).detach() * y.advantages * y.l, y)

    compare(SLIME(loss_type="cispo"), formula, draw())


@pytest.mark.parametrize("icepop", [False, True])
def test_slime_truncated_importance_sampling_of_the_rollout(icepop):
    def formula(y):
        weight = (y.old - y.rollout).exp()
        inside = torch.where((weight >= 0.8) & (weight <= 1.3), weight, 0.0)
        return slime_mean_of_samples((inside if icepop else weight.clamp(0, 2)) * slime_policy(y, 0.2, 0.2, None), y)

    options = {"rollout_is_mode": "mask", "rollout_is_min": 0.8, "rollout_is_max": 1.3} if icepop else {}
    x = draw(spread=0.8)
    compare(SLIME(**options), formula, x, rollout_logprobs=x.rollout)


def test_slime_entropy_bonus():
    def formula(y):
        return slime_mean_of_samples(slime_policy(y, 0.2, 0.2, None), y) - 0.05 * slime_mean_of_samples(y.h, y)

    compare(SLIME(entropy_coef=0.05), formula, draw())


def slime_kl(y: SimpleNamespace, kind: str, unbiased: bool = False) -> Tensor:
    d = y.l - y.ref
    kl = {"k1": d, "k2": d**2 / 2}.get(kind, (-d).exp() - 1 + d)
    kl = (y.l - y.old).exp() * kl if unbiased else kl
    return kl.clamp(-10, 10) if kind == "low_var_kl" else kl


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_slime_kl_loss_and_its_gradient(kind, unbiased):
    def formula(y):
        return slime_mean_of_samples(slime_policy(y, 0.2, 0.2, None) + 0.3 * slime_kl(y, kind, unbiased), y)

    options = {"kl_estimator": "k3", "kl_output_clamp": 10.0} if kind == "low_var_kl" else {"kl_estimator": kind}
    gradient = "is_weighted" if unbiased else "autograd"
    compare(SLIME(kl_coef=0.3, kl_gradient=gradient, **options), formula, draw())


def test_slime_low_var_kl_beyond_its_clamp():
    def formula(y):
        return slime_mean_of_samples(slime_policy(y, 0.2, 0.2, None) + 0.3 * slime_kl(y, "low_var_kl"), y)

    x = draw(ref_spread=8.0)
    assert (slime_kl(exact(x), "low_var_kl")[x.mask] == 10).any()
    compare(SLIME(kl_coef=0.3, kl_estimator="k3", kl_output_clamp=10.0), formula, x)


def test_slime_value_loss_without_a_half():
    def formula(y):
        near = y.old_values + (y.values - y.old_values).clamp(-0.2, 0.2)
        return slime_mean_of_samples(larger_error(y.values, near, y.returns), y, 9.0)

    compare(SLIME(), formula, draw(), values=True, normalizer=9.0)


def dense(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """[T]: every step counts, nothing follows the last."""
    carry, found = 0.0, []
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(rewards) else 0.0
        carry = rewards[t] + gamma * following - values[t] + gamma * lam * carry
        found.insert(0, carry)
    return torch.stack(found), torch.stack(found) + values


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95)])
def test_slime_gae_of_every_sample_by_its_own_length_packed_and_padded(gamma, lam):
    lengths = [5, 1, 7, 3]
    rewards, values = ([torch.randn(n, dtype=torch.float64) for n in lengths] for _ in range(2))
    want = [dense(r, v, gamma, lam) for r, v in zip(rewards, values, strict=True)]
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed = gae(torch.cat(rewards), torch.cat(values), gamma=gamma, lam=lam, cu_seqlens=cu_seqlens)
    padded = [torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (rewards, values)]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rows = gae(*padded, mask, gamma=gamma, lam=lam)
    for k in range(2):
        for row, (n, w) in enumerate(zip(lengths, want, strict=True)):
            assert_close(packed[k][int(cu_seqlens[row]) :][:n], w[k], 1e-13, scale=1.0)
            assert_close(rows[k][row, :n], w[k], 1e-13, scale=1.0)


def test_slime_gae_counts_tool_tokens_like_ours_in_dense_mode():
    x = steps()
    x.mask[0, 2] = False  # in the middle of the row
    got = gae(x.rewards, x.values, x.mask, **{**GAE_OPTIONS["slime"], "gamma": 0.9, "lam": 0.8})
    want = torch.stack([dense(r, v, 0.9, 0.8)[0] for r, v in zip(x.rewards, x.values, strict=True)])
    assert_close(got.advantages, want * x.mask, 1e-13, scale=1.0)


def slime_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """From fp32 sums of x and x^2, as it reduces them over ranks."""
    n, total, squares = mask.sum(), (x * mask).sum(), (x**2 * mask).sum()
    mean = total / n
    variance = squares / n - mean**2
    return (x - mean) * ((variance * n / (n - 1) if n >= 2 else variance) + 1e-8).rsqrt()


def test_slime_whitening_over_the_batch():
    x = draw()
    got = masked_whiten(x.advantages.double(), x.mask, **WHITEN_OPTIONS["slime"])
    assert_close(got, slime_whiten(x.advantages.double(), x.mask.double()) * x.mask, 1e-12, scale=1.0)


def test_slime_whitening_far_from_0_is_nan_and_ours_is_right():
    """Mean 100, deviation 1e-3: the difference of two fp32 numbers near 1e4 is below -1e-8 in a quarter of draws."""
    failed = 0
    for _ in range(40):
        x = 100 + 1e-3 * torch.randn(4096)
        failed += int(slime_whiten(x, torch.ones(4096)).isnan().all())
        y = x.double()
        assert_close(
            masked_whiten(x, **WHITEN_OPTIONS["slime"]), (y - y.mean()) * (y.var() + 1e-8).rsqrt(), 1e-6, scale=1.0
        )
    assert failed > 0


def slime_rewards(scores: Tensor, kl: Tensor, kl_coef: float) -> Tensor:
    """KL of every token, and the score at the end of the response, whatever the mask is there."""
    rewards = -kl_coef * kl
    rewards[:, -1] += scores
    return rewards


def test_slime_reward_of_a_response_without_masked_tokens():
    x, scores = draw(), torch.randn(ROWS)
    got = shape_rewards(scores, x.old, x.ref, torch.ones(ROWS, LENGTH), kl_coef=0.1)
    assert_close(got, slime_rewards(scores.double(), x.old.double() - x.ref.double(), 0.1), 1e-6, scale=1.0)


def test_slime_reward_counts_the_kl_of_tool_tokens_and_may_sit_on_one_and_ours_does_not():
    logprobs, ref, mask = torch.tensor([[-1.0, -5.0]]), torch.tensor([[-1.0, -1.0]]), torch.tensor([[1, 0]])
    assert slime_rewards(torch.tensor([7.0]), logprobs - ref, 0.5).tolist() == [[0.0, 9.0]]
    assert shape_rewards(torch.tensor([7.0]), logprobs, ref, mask, kl_coef=0.5).tolist() == [[7.0, 0.0]]


# -- AReaL ------------------------------------------------------------------------------------------------------------


def areal_policy(y: SimpleNamespace, low: float, high: float, c: float | None) -> Tensor:
    ratio = torch.where(y.m != 0, (y.l - y.old).exp(), 0.0)
    loss = torch.max(-y.advantages * ratio, -y.advantages * ratio.clamp(1 - low, 1 + high))
    return loss if c is None else torch.min(loss, c * y.advantages.abs())


@pytest.mark.parametrize(("low", "high", "c"), [(0.2, 0.2, None), (0.2, 0.28, 1.5), (0.2, 0.2, 3.0)])
def test_areal_policy_loss_over_the_batch_and_over_a_global_count(low, high, c):
    """A global mean is its local mean times the local share of the tokens."""
    x, config = draw(), AREAL(clip_low=low, clip_high=high, dual_clip=c)

    def local(y):
        return (areal_policy(y, low, high, c) * y.m).sum() / (y.m.count_nonzero() or 1)

    compare(config, local, x)
    compare(config, lambda y: local(y) * y.m.sum() / 40.0, x, normalizer=40.0)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("action", ["mask", "clamp"])
def test_areal_rejection_keeps_rejected_tokens_in_the_denominator(action, level):
    """upper: 5 is the default; here 1.2, so that something is above it."""

    def formula(y):
        log_weight = y.old - y.rollout
        if level == "sequence":
            log_weight = ((log_weight * y.m).sum(-1) / y.n.clamp(min=1))[:, None].expand_as(log_weight)
        weight = log_weight.exp()
        weight = weight.clamp(0, 1.2) if action == "clamp" else torch.where(weight <= 1.2, weight, 0.0)
        return (areal_policy(y, 0.2, 0.2, None) * weight * y.m).sum() / y.m.sum()

    options = {"rollout_is_mode": "truncate"} if action == "clamp" else {}
    options |= {"rollout_is_level": "sequence_geomean"} if level == "sequence" else {}
    x = draw()
    compare(AREAL(rollout_is_max=1.2, **options), formula, x, rollout_logprobs=x.rollout)


def test_areal_default_rejects_tokens_whose_ratio_is_above_5():
    """RejectionSamplingConfig: level token, action mask, metric ratio, upper 5, no lower bound."""
    one = torch.tensor([0.0])
    for log_weight, kept in ((1.5, True), (1.7, False), (-9.0, True)):
        given = {"config": AREAL(), "rollout_logprobs": torch.tensor([-log_weight])}
        loss = ppo_loss(one, one, torch.ones(1), **given).loss
        assert_close(loss, -torch.tensor([log_weight]).double().exp()[0] if kept else 0.0, 1e-6)


def test_areal_sequence_level_ratio_with_the_mean_advantage_of_the_sequence():
    """Every token counts once, so that long sequences weigh more."""
    x = draw()
    x.advantages = ((x.advantages * x.mask).sum(-1) / x.mask.sum(-1).clamp(min=1))[:, None].expand_as(x.mask).clone()

    def formula(y):
        log_ratio = ((y.l - y.old) * y.m).sum(-1) / y.n.clamp(min=1)
        ratio = torch.where(y.m != 0, log_ratio[:, None].exp(), 0.0)
        loss = torch.max(-y.advantages * ratio, -y.advantages * ratio.clamp(0.8, 1.2))
        return (loss * y.m).sum() / y.m.count_nonzero()

    compare(AREAL(ratio_level="sequence"), formula, x)


def test_areal_sapo():
    def formula(y):
        tau = torch.where(y.advantages > 0, 1.0, torch.full_like(y.l, 1.05))
        gate = torch.sigmoid(tau * ((y.l - y.old).exp() - 1)) * 4 / tau
        return (-gate * y.advantages * y.m).sum() / y.m.count_nonzero()

    compare(AREAL(loss_type="sapo"), formula, draw())


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_areal_value_loss(kind):
    x = draw()
    x.returns = x.returns * 15  # on both sides of Huber's 10

    def of(error):
        return 0.5 * error**2 if kind == "mse" else torch.nn.functional.huber_loss(error, 0 * error, "none", delta=10.0)

    def formula(y):
        near = y.old_values + (y.values - y.old_values).clamp(-0.5, 0.5)
        loss = torch.max(of(y.values - y.returns), of(near - y.returns))
        return (loss * y.m).sum() / y.m.count_nonzero()

    compare(AREAL(value_loss_type=kind, huber_delta=10.0), formula, x, values=True)


def test_areal_value_loss_of_no_token_is_nan_and_ours_is_0():
    nothing = torch.zeros(1, 3)
    assert (nothing.sum() / nothing.count_nonzero()).isnan()
    given = {"values": nothing, "old_values": nothing, "returns": nothing, "config": AREAL()}
    assert ppo_loss(nothing, nothing, nothing, nothing, **given).loss.item() == 0


def test_areal_gae_bootstraps_rows_without_an_end():
    """The last column is no step: its value follows a row that fills the width, which is taken for cut off."""
    x = steps()
    cut_off = torch.tensor([True, False, False, False])
    last, width = x.values[:, -1], LENGTH - 1
    x.rewards, x.values, x.mask = x.rewards[:, :width], x.values[:, :width], x.mask[:, :width]
    bootstrap = torch.where(cut_off, last, 0.0)
    got = gae(x.rewards, x.values, x.mask, **{**GAE_OPTIONS["areal"], "lam": 0.9}, bootstrap_value=bootstrap)
    for g, w in zip(got, skipping(x, 1.0, 0.9, bootstrap), strict=True):
        assert_close(g, w, 1e-13, scale=1.0)


@pytest.mark.parametrize("unbiased", [True, False])
def test_areal_whitening_with_1e_5_added_to_the_deviation(unbiased):
    x = draw()
    for scale in (1.0, 1e-5):
        y, m = x.advantages.double() * scale, x.mask.double()
        mean = (y * m).sum() / m.sum()
        variance = ((y - mean) ** 2 * m).sum() / (m.sum() - int(unbiased))
        got = masked_whiten(y, x.mask, **{**WHITEN_OPTIONS["areal"], "unbiased": unbiased})
        assert_close(got, (y - mean) * m / (variance.sqrt() + 1e-5), 1e-12, scale=1.0)


def test_areal_rewards_clip_the_score_at_20_and_the_kl_at_10():
    x, scores = draw(ref_spread=15.0), torch.tensor([30.0, -25.0, 3.0, 4.0])
    assert ((x.old - x.ref)[x.mask].abs() > 10).any()
    want = -0.1 * (x.old.double() - x.ref.double()).clamp(-10, 10) * x.mask
    for row, valid in enumerate(x.mask):
        if valid.any():
            want[row, int(valid.nonzero().max())] += scores[row].clamp(-20, 20)
    got = shape_rewards(scores, x.old, x.ref, x.mask, kl_coef=0.1, clip=20.0, kl_output_clamp=10.0)
    assert_close(got, want, 1e-6, scale=1.0)


# -- DeepSpeed-Chat ---------------------------------------------------------------------------------------------------


def test_deepspeed_chat_policy_loss_over_the_batch():
    def formula(y):
        ratio = ((y.l - y.old) * y.m).exp()
        loss = torch.max(-y.advantages * ratio, -y.advantages * ratio.clamp(1 - 0.2, 1 + 0.2))
        return (loss * y.m).sum() / y.m.sum()

    compare(DEEPSPEED_CHAT(), formula, draw())


def test_deepspeed_chat_value_loss_over_the_batch():
    def formula(y):
        near = torch.clamp(y.values, y.old_values - 0.2, y.old_values + 0.2)
        return 0.5 * (larger_error(y.values, near, y.returns) * y.m).sum() / y.m.sum()

    compare(DEEPSPEED_CHAT(), formula, draw(), values=True)


def test_deepspeed_chat_loss_of_no_token_is_nan_and_ours_is_0():
    nothing = torch.zeros(1, 3)
    assert (nothing.sum() / nothing.sum()).isnan()
    assert ppo_loss(nothing, nothing, nothing, nothing, config=DEEPSPEED_CHAT()).loss.item() == 0


def deepspeed_rewards(scores: Tensor, logprobs: Tensor, ref: Tensor, mask: Tensor, start: int) -> Tensor:
    """KL everywhere up to one past the last token, where the score is; nothing after it."""
    rewards = -0.1 * (logprobs - ref)
    ends = start + mask[:, start:].sum(1) + 1
    for row, end in enumerate(ends.tolist()):
        rewards[row, start:end][-1] += scores[row].clamp(-5, 5)
        rewards[row, end:] = 0
    return rewards


PROMPT = 3  # columns before the response's first token, which is scored by the last of them
RESPONSES = [4, 2, 1]  # of which the first fills the row


def responses() -> SimpleNamespace:
    width = PROMPT + max(RESPONSES)
    x = SimpleNamespace(start=PROMPT, scores=torch.tensor([9.0, -0.5, 2.0], dtype=torch.float64))
    x.mask = torch.arange(width) < PROMPT + torch.tensor(RESPONSES)[:, None]
    x.logprobs, x.values = (torch.randn(3, width, dtype=torch.float64) for _ in range(2))
    x.ref = torch.where(x.mask, x.logprobs + torch.randn(3, width, dtype=torch.float64), x.logprobs)
    return x


def test_deepspeed_chat_rewards_one_past_the_last_token():
    x = responses()
    want = deepspeed_rewards(x.scores, x.logprobs, x.ref, x.mask, x.start)[:, x.start :]
    given = (x.scores, x.logprobs[:, x.start :], x.ref[:, x.start :], x.mask[:, x.start :])
    assert_close(shape_rewards(*given, kl_coef=0.1, clip=5.0, placement="after_last"), want, 1e-13, scale=1.0)


def test_deepspeed_chat_reward_counts_the_kl_of_the_padding_token_after_the_last_and_ours_does_not():
    logprobs, ref, mask = torch.tensor([[-1.0, -9.0, 0.0]]), torch.tensor([[-1.0, 0.0, 0.0]]), torch.tensor([[1, 0, 0]])
    assert_close(deepspeed_rewards(torch.tensor([2.0]), logprobs, ref, mask, 0), [[0.0, 2.9, 0.0]], 1e-6)
    got = shape_rewards(torch.tensor([2.0]), logprobs, ref, mask, kl_coef=0.1, clip=5.0, placement="after_last")
    assert got.tolist() == [[0.0, 2.0, 0.0]]


def test_deepspeed_chat_rewards_an_empty_response_and_ours_does_not():
    nothing = torch.zeros(1, 3)
    assert deepspeed_rewards(torch.tensor([2.0]), nothing, nothing, nothing.long(), 0).tolist() == [[2.0, 0.0, 0.0]]
    got = shape_rewards(torch.tensor([2.0]), nothing, nothing, nothing, kl_coef=0.1, placement="after_last")
    assert got.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.7)])
def test_deepspeed_chat_gae_from_the_start_of_the_response(gamma, lam):
    """Values and rewards are 0 after the slot that has the score; steps of the prompt do not exist."""
    x = responses()
    rewards = deepspeed_rewards(x.scores, x.logprobs, x.ref, x.mask, x.start)[:, x.start :]
    scored = torch.arange(rewards.shape[1]) <= torch.tensor(RESPONSES)[:, None]
    values = x.values[:, x.start :] * scored
    want = [
        torch.stack(rows)
        for rows in zip(*(dense(r, v, gamma, lam) for r, v in zip(rewards, values, strict=True)), strict=True)
    ]
    for mode in ("dense", "zero", "skip"):
        mask = None if mode == "dense" else scored
        got = gae(rewards, values, mask, gamma=gamma, lam=lam, mask_mode=mode)
        for g, w in zip(got, want, strict=True):
            assert_close(g, w, 1e-13, scale=1.0, what=mode)
