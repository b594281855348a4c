"""What only a CUDA device can show; where a test means something on a CPU too, a small form of it runs there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ppo_kernels import PPOLossConfig, fused_ppo_loss, gae, logprobs_from_logits, masked_whiten, ppo_loss, shape_rewards

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_cuda = pytest.mark.parametrize("device", [CUDA])
on_both = pytest.mark.parametrize("device", [CUDA, "cpu"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
in_place_or_not = pytest.mark.parametrize("inplace", [False, True], ids=["own-gradient", "in-place"])
WITH_ENTROPY = PPOLossConfig(entropy_coef=0.01)


class Batch:
    """Random logits [N, V] and everything per token, on one device."""

    def __init__(self, rows: int, vocab: int, dtype: torch.dtype, device: str, masked: float = 0.3) -> None:
        self.logits = torch.randn(rows, vocab, dtype=dtype, device=device).mul_(2).requires_grad_()
        self.tokens = torch.randint(vocab, (rows,), device=device)
        self.old, self.advantages = torch.randn(2, rows, device=device).unbind()
        self.mask = torch.rand(rows, device=device) >= masked
        self.mask[0] = True
        with torch.no_grad():
            self.old = logprobs_from_logits(self.logits, self.tokens) + 0.1 * self.old

    def copy(self, device: str) -> Batch:
        other = object.__new__(Batch)
        vars(other).update({name: x.detach().to(device, copy=True) for name, x in vars(self).items()})
        other.logits.requires_grad_()
        return other

    def copy_(self, other: Batch) -> None:
        for name, x in vars(self).items():
            x.detach().copy_(getattr(other, name).detach())

    def step(self, inplace: bool = False, config: PPOLossConfig = WITH_ENTROPY) -> tuple[Tensor, ...]:
        """(loss, logprobs, gradient of the logits); in place, the logits are lost."""
        given = (self.tokens, self.old, self.advantages, self.mask)
        out = fused_ppo_loss(self.logits, *given, config=config, inplace_grad=inplace)
        return out.loss.detach(), out.logprobs, torch.autograd.grad(out.loss, self.logits)[0]


def exact(logits: Tensor, tokens: Tensor, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropies, gradient of the logits) of some rows, by float64 autograd."""
    x = logits.detach().double().requires_grad_()
    logp = torch.log_softmax(x, -1)
    logprobs = logp.gather(-1, tokens[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    (gradient,) = torch.autograd.grad((by_logprob.double() * logprobs + by_entropy.double() * entropy).sum(), x)
    return logprobs.detach(), entropy.detach(), gradient


def assert_scores(got: Tensor, want: Tensor) -> None:
    assert ((got.double() - want.double()).abs() <= 2e-6 * want.double().abs().clamp(min=1)).all()


def assert_gradient(got: Tensor, want: Tensor) -> None:
    """fp32: relative Frobenius error 2e-6; bf16: one unit in the last place plus 1e-6 of the row's largest."""
    want, value = want.double(), got.double()
    if got.dtype == torch.float32:
        assert (value - want).norm() <= 2e-6 * want.norm()
    else:
        rounded = want.to(got.dtype).double()
        assert ((value - rounded).abs() <= rounded.abs() * 2**-7 + 1e-6 * want.abs().amax(-1, keepdim=True)).all()


def same_bits(a: Tensor, b: Tensor) -> bool:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    return a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


# ---- sizes ----------------------------------------------------------------------------------------------------------


@on_both
@in_place_or_not
def test_more_than_two_to_the_31_logits(device: str, inplace: bool) -> None:
    rows, vocab = (16400, 131200) if device == "cuda" else (50, 1000)
    batch = Batch(rows, vocab, torch.bfloat16, device, masked=0.0)
    at = torch.tensor([0, 1, rows // 2, min(2**31 // vocab, rows - 3), rows - 2, rows - 1], device=device)
    kept = batch.logits.detach()[at].clone()
    logprobs = logprobs_from_logits(batch.logits.detach(), batch.tokens)
    _, fused_logprobs, gradient = batch.step(inplace)
    assert same_bits(logprobs, fused_logprobs)
    lp = logprobs[at].double().requires_grad_()
    ratio, advantages = (lp - batch.old[at].double()).exp(), batch.advantages[at].double()
    surrogate = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).sum() / rows
    (by_logprob,) = torch.autograd.grad(surrogate, lp)
    want = exact(kept, batch.tokens[at], by_logprob, torch.full_like(by_logprob, -WITH_ENTROPY.entropy_coef / rows))
    assert_scores(logprobs[at], want[0])
    assert_gradient(gradient[at], want[2])


@on_both
@both_dtypes
@pytest.mark.parametrize("vocab", [3, 8, 33])
def test_seventy_thousand_rows_of_a_small_vocabulary(device: str, dtype: torch.dtype, vocab: int) -> None:
    rows = 70_000 if device == "cuda" else 700
    batch = Batch(rows, vocab, dtype, device)
    by_logprob, by_entropy = torch.randn(2, rows, device=device).unbind()
    logprobs, entropy = logprobs_from_logits(batch.logits, batch.tokens, return_entropy=True)
    (gradient,) = torch.autograd.grad((by_logprob * logprobs + by_entropy * entropy).sum(), batch.logits)
    want = exact(batch.logits, batch.tokens, by_logprob, by_entropy)
    assert_scores(logprobs.detach(), want[0])
    assert_scores(entropy.detach(), want[1])
    assert_gradient(gradient, want[2])
    fused = batch.step()
    assert same_bits(fused[1], torch.where(batch.mask, logprobs.detach(), 0.0))
    assert (fused[2][~batch.mask] == 0).all()


@pytest.mark.gpu
def test_the_second_device_while_the_first_is_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NOT RUN: needs two CUDA devices")
    first = Batch(64, 50257, torch.bfloat16, "cuda:0")
    second = first.copy("cuda:1")
    assert torch.cuda.current_device() == 0
    for a, b in zip(first.step(), second.step(), strict=True):
        assert b.device == torch.device("cuda:1")
        assert same_bits(a, b.to("cuda:0"))
    a, b = (gae(x.advantages[None], x.old[None], x.mask[None]) for x in (first, second))
    assert b.returns.device == torch.device("cuda:1")
    assert same_bits(a.returns, b.returns.to("cuda:0"))


# ---- graphs and compilation -----------------------------------------------------------------------------------------


@on_cuda
@in_place_or_not
@pytest.mark.parametrize("vocab", [8, 50257])
def test_a_captured_loss_step_gives_new_answers_for_new_inputs(device: str, inplace: bool, vocab: int) -> None:
    static = Batch(96, vocab, torch.bfloat16, device)
    graph, results = captured(lambda: static.step(inplace))
    for _ in range(2):
        fresh = Batch(96, vocab, torch.bfloat16, device)
        static.copy_(fresh)
        graph.replay()
        for got, want in zip(results, fresh.step(inplace), strict=True):
            assert same_bits(got, want)


@on_cuda
def test_captured_advantages_give_new_answers_for_new_inputs(device: str) -> None:
    rewards, values = torch.randn(2, 33, 700, device=device).unbind()
    mask = torch.rand(33, 700, device=device) < 0.7
    graph, results = captured(lambda: gae(rewards, values, mask, gamma=0.99))
    for _ in range(2):
        rewards.normal_()
        values.normal_()
        mask.logical_not_()
        graph.replay()
        for got, want in zip(results, gae(rewards, values, mask, gamma=0.99), strict=True):
            assert same_bits(got, want)


def captured(run):
    """(graph, results) after a warm-up on another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


@on_both
@both_dtypes
def test_a_compiled_loss_step_gives_the_eager_answers(device: str, dtype: torch.dtype) -> None:
    batch = Batch(48, 50257 if device == "cuda" else 257, dtype, device)
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"

    @torch.compile(fullgraph=True, backend=backend)
    def loss(logits: Tensor, tokens: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return 2.0 * fused_ppo_loss(logits, tokens, old, advantages, mask, config=WITH_ENTROPY).loss

    compiled = loss(batch.logits, batch.tokens, batch.old, batch.advantages, batch.mask)
    (gradient,) = torch.autograd.grad(compiled, batch.logits)
    want = batch.step()
    torch.testing.assert_close(compiled, 2.0 * want[0], rtol=2e-6, atol=1e-6)
    assert_gradient(gradient, 2.0 * want[2])


# ---- memory and synchronisation -------------------------------------------------------------------------------------


@on_cuda
@both_dtypes
@pytest.mark.parametrize("config", [WITH_ENTROPY, PPOLossConfig(return_entropy=False)], ids=["entropy", "plain"])
@pytest.mark.parametrize(("inplace", "bar"), [(True, 0.01), (False, 1.01)], ids=["in-place", "own-gradient"])
def test_no_temporary_of_the_size_of_the_logits(
    device: str, dtype: torch.dtype, config: PPOLossConfig, inplace: bool, bar: float
) -> None:
    Batch(8, 151936, dtype, device).step(inplace, config)  # what is allocated once is not counted
    batch = Batch(1024, 151936, dtype, device)
    size = batch.logits.numel() * batch.logits.element_size()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    batch.step(inplace, config)
    assert torch.cuda.max_memory_allocated() - before <= bar * size


@on_cuda
@pytest.mark.parametrize("vocab", [8, 50257])
@in_place_or_not
def test_no_host_synchronisation(device: str, vocab: int, inplace: bool) -> None:
    first, second = Batch(64, vocab, torch.bfloat16, device), Batch(64, vocab, torch.bfloat16, device)
    rewards = torch.randn(2, 64, 100, device=device)

    cu_seqlens = torch.tensor([0, 20, 64], dtype=torch.int32, device=device)
    numbers = {"normalizer": torch.tensor(7.0), "loss_scale": torch.tensor(0.5, device=device)}
    options = PPOLossConfig(entropy_coef=0.01, kl_coef=0.1, value_clip=0.2, aggregation="seq-mean-token-mean")

    def everything(batch: Batch) -> None:
        values = dict.fromkeys(("values", "old_values", "returns", "ref_logprobs"), batch.old)
        packed = {"cu_seqlens": cu_seqlens, "config": options, **numbers, **values}
        logits, tokens, mask = batch.logits, batch.tokens, batch.mask
        out = fused_ppo_loss(logits, tokens, batch.old, batch.advantages[:2], mask, **packed)
        torch.autograd.grad(out.loss, logits)
        padded = (logits.view(2, 32, -1), tokens.view(2, 32), batch.old.view(2, 32)[:, 1:], batch.advantages[:2])
        torch.autograd.grad(fused_ppo_loss(*padded, shift=True, config=WITH_ENTROPY).loss, logits)
        grid = (batch.old.view(2, 32), batch.advantages.view(2, 32), mask.view(2, 32))
        shape_rewards(batch.old[:2], *grid, kl_coef=0.1, missing_eos_penalty=1.0, has_eos=mask[:2])
        gae(batch.old, batch.old, mask, cu_seqlens=cu_seqlens, lam=batch.mask[:2].float())
        lp, entropy = logprobs_from_logits(batch.logits, batch.tokens, batch.mask, return_entropy=True)
        given = (batch.old, batch.advantages, batch.mask)
        torch.autograd.grad(ppo_loss(lp, *given, entropy=entropy, config=WITH_ENTROPY).loss, batch.logits)
        batch.step(inplace)
        gae(rewards[0], rewards[1], rewards[0] > 0)
        masked_whiten(batch.advantages, batch.mask)

    everything(first)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything(second)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- answers --------------------------------------------------------------------------------------------------------


@on_cuda
@both_dtypes
@pytest.mark.parametrize("vocab", [8, 1000, 50257])
def test_a_bad_token_is_nan_for_that_token_alone(device: str, dtype: torch.dtype, vocab: int) -> None:
    batch = Batch(12, vocab, dtype, device)
    bad = torch.tensor([1, 4, 7, 11], device=device)
    tokens = batch.tokens.clone()
    tokens[bad] = torch.tensor([vocab, -1, 2**40, -(2**63)], device=device)
    good = torch.ones(12, dtype=torch.bool, device=device)
    good[bad] = False
    ones = torch.ones(12, device=device)
    logprobs, entropy = logprobs_from_logits(batch.logits, tokens, return_entropy=True)
    (gradient,) = torch.autograd.grad((logprobs + entropy)[good].sum(), batch.logits)
    torch.cuda.synchronize()
    want = exact(batch.logits, batch.tokens, ones, ones)
    assert logprobs[bad].isnan().all()
    assert_scores(logprobs.detach()[good], want[0][good])
    assert_scores(entropy.detach()[good], want[1][good])
    assert_gradient(gradient[good], want[2][good])
    batch.tokens, batch.mask = tokens, good
    loss, masked_logprobs, gradient = batch.step()
    torch.cuda.synchronize()
    assert loss.isfinite()
    assert same_bits(masked_logprobs, torch.where(good, logprobs.detach(), 0.0))
    assert (gradient[bad] == 0).all()
    batch.mask = torch.ones_like(good)
    assert batch.step()[0].isnan()


@on_both
@both_dtypes
@in_place_or_not
def test_two_runs_give_the_same_bits(device: str, dtype: torch.dtype, inplace: bool) -> None:
    batch = Batch(700, 50257, dtype, device) if device == "cuda" else Batch(7, 5025, dtype, device)
    runs = [batch.copy(device).step(inplace) for _ in range(4)]
    for run in runs[1:]:
        assert all(same_bits(a, b) for a, b in zip(runs[0], run, strict=True))
    rewards, values = torch.randn(2, 50, 3000, device=device).unbind()
    assert same_bits(gae(rewards, values).advantages, gae(rewards, values).advantages)


@on_both
@both_dtypes
@pytest.mark.parametrize("vocab", [8, 1000, 50257])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(
    device: str, dtype: torch.dtype, vocab: int, same_bits_promised: None
) -> None:
    """With an odd vocabulary rows of 16 bits start at odd addresses in a batch, and at an even one alone."""
    rows = 301 if device == "cuda" else 11
    batch = Batch(rows, vocab, dtype, device)
    upstream = torch.randn(rows, device=device)

    def scores(at: slice) -> tuple[Tensor, ...]:
        x = batch.logits.detach()[at].clone().requires_grad_()
        logprobs, entropy = logprobs_from_logits(x, batch.tokens[at], return_entropy=True)
        (gradient,) = torch.autograd.grad((upstream[at] * (logprobs + 0.1 * entropy)).sum(), x)
        return logprobs.detach(), entropy.detach(), gradient

    whole = scores(slice(None))
    for at in (slice(0, 1), slice(5, 6), slice(rows - 1, rows), slice(3, 9)):
        for part, one in zip(scores(at), whole, strict=True):
            assert same_bits(part, one[at])


@on_both
@both_dtypes
@pytest.mark.parametrize("vocab", [8, 50257])
def test_the_device_agrees_with_the_cpu(device: str, dtype: torch.dtype, vocab: int) -> None:
    """Both are within the bar of float64, so they are within twice the bar of each other; here within one."""
    batch = Batch(24, vocab, dtype, "cpu")
    other = batch.copy(device)
    loss, logprobs, gradient = (x.cpu() for x in other.step())
    want = batch.step()
    assert_scores(logprobs, want[1])
    assert_gradient(gradient, want[2])
    torch.testing.assert_close(loss, want[0], rtol=2e-6, atol=2e-6)
    rewards, values = torch.randn(2, 9, 3000, device="cpu").unbind()
    mask = rewards > -1
    on_cpu = gae(rewards, values, mask, gamma=0.99)
    on_device = gae(rewards.to(device), values.to(device), mask.to(device), gamma=0.99)
    for a, b in zip(on_device, on_cpu, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=2e-5)
    whitened = masked_whiten(rewards.to(device), mask.to(device)).cpu()
    torch.testing.assert_close(whitened, masked_whiten(rewards, mask), rtol=2e-6, atol=2e-6)
