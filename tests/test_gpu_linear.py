"""The linear forms where only a CUDA device can show it; where a test means something on a CPU, a small form runs
there."""

from __future__ import annotations

import contextlib

import pytest
import torch
from test_gpu import captured, on_both, on_cuda, same_bits
from torch import Tensor

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss, logprobs_from_hidden

H = 64
WITH_ENTROPY = PPOLossConfig(entropy_coef=0.01)
PLAIN = PPOLossConfig(return_entropy=False)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
memories = pytest.mark.parametrize("memory", ["fast", "low"])


class Batch:
    """hidden [N, H], weight [V, H], bias [V] and everything per token, on one device."""

    def __init__(self, rows: int, vocab: int, dtype: torch.dtype, device: str, hidden: int = H) -> None:
        self.hidden = torch.randn(rows, hidden, dtype=dtype, device=device).requires_grad_()
        self.weight = torch.randn(vocab, hidden, dtype=dtype, device=device).mul_(2 * hidden**-0.5).requires_grad_()
        self.bias = torch.randn(vocab, dtype=dtype, device=device).requires_grad_()
        self.tokens = torch.randint(vocab, (rows,), device=device)
        self.advantages, noise = torch.randn(2, rows, device=device).unbind()
        self.mask = torch.arange(rows, device=device) % 3 != 1
        with torch.no_grad():
            self.old = logprobs_from_hidden(self.hidden, self.weight, self.tokens, bias=self.bias).float()
            self.old += 0.02 * noise  # no ratio is clipped

    @property
    def valid_rows(self) -> int:
        return len(self.mask) - (len(self.mask) + 1) // 3

    @property
    def head(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias

    def copy(self, device: str, dtype: torch.dtype | None = None) -> Batch:
        other = object.__new__(Batch)
        vars(other).update({name: x.detach().to(device, copy=True) for name, x in vars(self).items()})
        for name in ("hidden", "weight", "bias"):
            x = getattr(other, name)
            setattr(other, name, x.to(dtype or x.dtype).requires_grad_())
        return other

    def copy_(self, other: Batch) -> None:
        for name, x in vars(self).items():
            x.detach().copy_(getattr(other, name).detach())

    def out(self, mask: Tensor | None, config: PPOLossConfig = WITH_ENTROPY, **how):
        """loss_scale: sums, whose gradients fp16 can hold."""
        given = (self.hidden, self.weight, self.tokens, self.old, self.advantages, mask)
        scale = float(len(self.tokens))
        return fused_linear_ppo_loss(*given, bias=self.bias, config=config, loss_scale=scale, **how)

    def step(self, mask: Tensor | None, config: PPOLossConfig = WITH_ENTROPY, **how) -> tuple[Tensor, ...]:
        """(loss, logprobs, gradients of hidden, weight and bias)."""
        out = self.out(mask, config, **how)
        return out.loss.detach(), out.logprobs, *torch.autograd.grad(out.loss, self.head)

    def scores(self, mask: Tensor | None, **how) -> tuple[Tensor, ...]:
        """(logprobs, entropy, gradients of hidden, weight and bias)."""
        given = (self.hidden, self.weight, self.tokens, mask)
        logprobs, entropy = logprobs_from_hidden(*given, bias=self.bias, return_entropy=True, **how)
        upstream = torch.where(self.mask, self.advantages, 0.0)
        gradients = torch.autograd.grad((upstream * (logprobs + 0.1 * entropy)).sum(), self.head)
        return logprobs.detach(), entropy.detach(), *gradients

    def eager(self) -> tuple[Tensor, ...]:
        """`step` of the mask in plain PyTorch, in the head's dtype with a softmax of at least fp32."""
        logits = self.hidden @ self.weight.T + self.bias
        logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
        logprobs = logp.gather(-1, self.tokens[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        ratio, advantages = (logprobs - self.old).exp(), self.advantages
        surrogate = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        terms = torch.where(self.mask, surrogate - WITH_ENTROPY.entropy_coef * entropy, 0.0)
        loss = terms.sum() / self.mask.sum() * len(self.tokens)
        logprobs = torch.where(self.mask, logprobs.detach(), 0.0)
        return loss.detach(), logprobs, *torch.autograd.grad(loss, self.head)


def relative(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want.double()).norm() / want.double().norm())


def assert_as_exact_as(plain: tuple[Tensor, ...], got: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    """The loss is a sum, whose errors cancel by chance: for it there is a bound of its own."""
    for a, b, c in zip(got[1:], plain[1:], exact[1:], strict=True):
        assert relative(a, c) <= 1.25 * relative(b, c) + 2e-6
    rounding = 8 * torch.finfo(got[-1].dtype).eps + 1e-5
    assert abs(got[0].double() - exact[0]) <= rounding * len(got[1]) ** 0.5


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """In bf16 two products of other shapes may round a logit to either neighbour."""
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert a.isfinite().all()
        bar = 1e-5 if b.dtype == torch.float32 and got[-1].dtype == torch.float32 else 1e-2
        torch.testing.assert_close(a.double(), b.double(), rtol=bar, atol=bar * float(b.double().abs().max()))


# ---- answers --------------------------------------------------------------------------------------------------------


@on_both
@dtypes
@pytest.mark.parametrize("how", [{}, {"memory": "low"}, {"chunk_bytes": 40_000}], ids=["one-chunk", "low", "chunks"])
def test_loss_and_gradients_are_as_exact_as_those_of_plain_pytorch(device: str, dtype: torch.dtype, how: dict) -> None:
    batch = Batch(150, 5003 if device == "cuda" else 301, dtype, device)
    got = batch.step(batch.mask, **how)
    assert [x.dtype for x in got] == [torch.float32, torch.float32, dtype, dtype, dtype]
    assert_as_exact_as(batch.eager(), got, batch.copy(device, torch.float64).eager())
    assert (got[2][~batch.mask] == 0).all()


@on_both
@dtypes
@memories
def test_the_device_agrees_with_the_cpu(device: str, dtype: torch.dtype, memory: str) -> None:
    batch = Batch(60, 1000, dtype, "cpu")
    other = batch.copy(device)
    got = tuple(x.cpu() for x in other.step(other.mask, memory=memory))
    for a, b in zip(got, batch.step(batch.mask, memory=memory), strict=True):
        assert relative(a, b) <= {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    for a, b in zip(other.scores(other.mask, memory=memory), batch.scores(batch.mask, memory=memory), strict=True):
        assert relative(a.cpu(), b) <= {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]


@on_both
@dtypes
def test_more_rows_than_a_chunk_holds(device: str, dtype: torch.dtype) -> None:
    """The weight's gradient is added up in fp32 over chunks, of which the last is small."""
    rows, vocab = (4096, 1000) if device == "cuda" else (18, 50)
    batch = Batch(2 * rows + 5, vocab, dtype, device)
    batch.mask.fill_(True)
    got = batch.step(None, chunk_bytes=rows * vocab * dtype.itemsize)
    assert_as_exact_as(batch.eager(), got, batch.copy(device, torch.float64).eager())


@on_cuda
@dtypes
@memories
def test_a_bad_token_is_nan_for_that_token_alone(device: str, dtype: torch.dtype, memory: str) -> None:
    batch = Batch(12, 1000, dtype, device)
    bad = torch.tensor([0, 2, 5, 11], device=device)
    batch.mask.fill_(True)
    batch.mask[bad] = False
    clean = batch.scores(None, memory=memory)
    masked = batch.step(batch.mask, memory=memory)
    batch.tokens[bad] = torch.tensor([1000, -1, 2**40, -(2**63)], device=device)
    logprobs, entropy, *gradients = batch.scores(None, memory=memory)
    torch.cuda.synchronize()
    assert logprobs[bad].isnan().all()
    for a, b in zip((logprobs, entropy), clean, strict=False):
        assert_same((a[batch.mask],), (b[batch.mask],))
    assert_same(tuple(gradients), clean[2:])
    for a, b in zip(batch.step(batch.mask, memory=memory), masked, strict=True):
        assert same_bits(a, b)
    assert batch.out(None, memory=memory).loss.isnan()
    torch.cuda.synchronize()


@on_cuda
@memories
@pytest.mark.parametrize("error", [-5, 1])
def test_a_wrong_number_of_valid_rows_is_nan(device: str, memory: str, error: int) -> None:
    batch = Batch(90, 1000, torch.bfloat16, device)
    how = {"memory": memory, "valid_rows": batch.valid_rows + error}
    loss, logprobs, by_hidden, by_weight, _ = batch.step(batch.mask, **how)
    assert loss.isnan()
    assert logprobs[batch.mask].isnan().all()
    assert by_hidden.isnan().any()
    assert by_weight.isnan().any()
    assert batch.scores(batch.mask, **how)[0].isnan().any()


@on_both
@dtypes
@memories
def test_two_runs_give_the_same_bits(device: str, dtype: torch.dtype, memory: str) -> None:
    batch = Batch(700 if device == "cuda" else 20, 5003 if device == "cuda" else 301, dtype, device)
    how = {"memory": memory, "chunk_bytes": batch.weight.shape[0] * 2 * 256}
    runs = [batch.step(batch.mask, **how) + batch.scores(batch.mask, **how) for _ in range(4)]
    for run in runs[1:]:
        assert all(same_bits(a, b) for a, b in zip(runs[0], run, strict=True))


# ---- synchronisation, graphs and compilation ------------------------------------------------------------------------


@contextlib.contextmanager
def no_synchronisation(device: str):
    """Waiting for the device is an error."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def all_losses(batch: Batch, mask: Tensor | None, **how) -> None:
    known = {} if mask is None else {"valid_rows": batch.valid_rows}
    batch.step(mask, **known, **how)
    batch.step(mask, PLAIN, **known, **how)
    values = dict.fromkeys(("old_values", "returns", "ref_logprobs"), batch.old)
    numbers = {"values": batch.old.clone().requires_grad_(), "temperature": batch.old.abs() + 0.5}
    several = PPOLossConfig(entropy_coef=0.01, kl_coef=0.1, value_clip=0.2, logit_softcap=30.0, return_entropy=True)
    batch.step(mask, several, **values, **numbers, **known, **how)


def all_scores(batch: Batch, mask: Tensor | None, **how) -> None:
    known = {} if mask is None else {"valid_rows": batch.valid_rows}
    with torch.no_grad():
        logprobs_from_hidden(batch.hidden, batch.weight, batch.tokens, mask, **known, **how)
    batch.scores(mask, **known, **how)
    batch.scores(mask, logit_softcap=30.0, temperature=batch.old.abs() + 0.5, **known, **how)


def sequences(batch: Batch, mask: Tensor | None, **how) -> None:
    """Ratios of sequences, one position later."""
    shape, known = (3, len(batch.tokens) // 3), {}
    kept = None
    if mask is not None:
        kept = torch.ones(3, shape[1] - 1, dtype=torch.bool, device=mask.device)
        kept[:, 1] = False
        known = {"valid_rows": 3 * (shape[1] - 2)}
    states, tokens, old = batch.hidden.view(*shape, -1), batch.tokens.view(shape), batch.old.view(shape)[:, 1:]
    config = PPOLossConfig(ratio_level="sequence", aggregation="seq-mean-token-mean")
    given = (states, batch.weight, tokens, old, batch.advantages[:3], kept)
    out = fused_linear_ppo_loss(*given, config=config, shift=True, **known, **how)
    torch.autograd.grad(out.loss, (batch.hidden, batch.weight))


@on_both
@memories
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "valid-rows"])
@pytest.mark.parametrize("call", [all_losses, all_scores, sequences])
def test_no_host_synchronisation(device: str, memory: str, masked: bool, call) -> None:
    first, second = (Batch(24, 5003 if device == "cuda" else 50, torch.bfloat16, device) for _ in range(2))
    how = {"memory": memory, "chunk_bytes": len(first.weight) * 4 * 10}
    call(first, first.mask if masked else None, **how)  # compiles
    with no_synchronisation(device):
        call(second, second.mask if masked else None, **how)


class Again:
    """A CUDA graph's stand-in on a CPU."""

    def __init__(self, run, results) -> None:
        self.run, self.results = run, results

    def replay(self) -> None:
        for x, new in zip(self.results, self.run(), strict=True):
            x.copy_(new)


@on_both
@memories
@pytest.mark.parametrize("call", [Batch.step, Batch.scores], ids=["loss", "scores"])
@pytest.mark.parametrize("kind", ["no-mask", "mask", "valid-rows"])
def test_a_captured_call_gives_new_answers_for_new_inputs(device: str, memory: str, call, kind: str) -> None:
    """Without the count all rows are computed, and the masked ones may hold NaN."""
    rows, vocab = (90, 5003) if device == "cuda" else (30, 50)
    static = Batch(rows, vocab, torch.bfloat16, device)
    how = {"memory": memory} | ({"valid_rows": static.valid_rows} if kind == "valid-rows" else {})

    def run(batch: Batch = static) -> tuple[Tensor, ...]:
        return call(batch, None if kind == "no-mask" else batch.mask, **how)

    graph, results = captured(run) if device == "cuda" else (Again(run, first := run()), first)
    for seed in range(2):
        fresh = Batch(rows, vocab, torch.bfloat16, device)
        fresh.mask = fresh.mask.roll(seed + 1)
        if kind != "no-mask":
            with torch.no_grad():
                fresh.hidden[~fresh.mask] = torch.nan
        static.copy_(fresh)
        graph.replay()
        assert_same(results, run(fresh))


@on_both
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
def test_a_compiled_call_gives_the_eager_answers(device: str, masked: bool) -> None:
    batch = Batch(48, 5003 if device == "cuda" else 50, torch.bfloat16, device)
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"

    @torch.compile(fullgraph=True, backend=backend)
    def both(hidden: Tensor, weight: Tensor, tokens: Tensor, old: Tensor, advantages: Tensor, mask: Tensor | None):
        out = fused_linear_ppo_loss(hidden, weight, tokens, old, advantages, mask, config=WITH_ENTROPY, loss_scale=48.0)
        return out.loss + logprobs_from_hidden(hidden, weight, tokens, mask).sum()

    head = (batch.hidden, batch.weight)
    given = (*head, batch.tokens, batch.old, batch.advantages, batch.mask if masked else None)
    results = []
    for call in (both, both._torchdynamo_orig_callable):
        result = call(*given)
        results.append((result.detach(), *torch.autograd.grad(result, head)))
    assert_same(*results)


# ---- memory ---------------------------------------------------------------------------------------------------------

SLACK = 40 << 20  # what the matrix products allocate for themselves, and what is of size N


@on_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("call", ["loss", "low", "scores", "scores without gradient"])
def test_no_temporary_beyond_a_chunk_and_a_gradient(device: str, dtype: torch.dtype, masked: bool, call: str) -> None:
    rows, vocab, chunk = 2048, 151936, 128 << 20
    memory = "low" if call == "low" else "fast"

    def run(batch: Batch) -> tuple[Tensor, ...]:
        mask, how = batch.mask if masked else None, {"memory": memory, "chunk_bytes": chunk}
        how |= {"valid_rows": batch.valid_rows} if masked else {}
        if call in ("loss", "low"):
            return batch.step(mask, PLAIN, **how)
        if call == "scores":
            return batch.scores(mask, **how)
        with torch.no_grad():
            return (logprobs_from_hidden(batch.hidden, batch.weight, batch.tokens, mask, bias=batch.bias, **how),)

    run(Batch(8, vocab, dtype, device))  # what is allocated once is not counted
    batch = Batch(rows, vocab, dtype, device, hidden=256)
    allowed = chunk + SLACK + (4 * batch.weight.numel() if call in ("loss", "scores") else 0)
    assert allowed < rows * vocab * dtype.itemsize
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = run(batch)
    assert torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in results) <= allowed
