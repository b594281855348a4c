"""Temperatures as a tensor: one for each row, for each sequence, or for all."""

from __future__ import annotations

import oracle
import pytest
import torch
from checks import assert_entropy, assert_logits_grad, assert_logprobs, leaf, same_bits

from ppo_kernels import logprobs_from_logits, ops

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
cpu_only = pytest.mark.cpu_only("a GPU cannot raise without a synchronisation")


def upstream(like):
    weight = torch.linspace(-1, 2, like.numel()).view(like.shape)
    return weight, weight.flip(-1).contiguous()


def everything(logits, tokens, mask=None, **options):
    """log-probs, entropy and the gradient of a fixed mix of both."""
    x = leaf(logits)
    lp, h = logprobs_from_logits(x, tokens, mask, return_entropy=True, **options)
    torch.autograd.backward([lp, h], upstream(lp))
    return lp.detach(), h.detach(), x.grad


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("width", [1, 6, 64, 65, 1031])
@pytest.mark.parametrize("shift", [False, True])
def test_every_output_and_gradient(shift, width, dtype):
    logits, tokens = torch.randn(2, 4, width).to(dtype), torch.randint(width, (2, 4))
    temperature = torch.tensor([[0.01, 0.3, 0.7, 1.0], [1.3, 5.0, 100.0, 1.0]])[:, : 4 - shift]
    mask = torch.ones(2, 4 - shift)
    mask[1, 0] = 0
    lp, h, grad = everything(logits, tokens, mask, shift=shift, temperature=temperature)
    want = oracle.score(logits, tokens, mask, shift=shift, temperature=temperature)
    assert_logprobs(lp, want.logprobs)
    assert_entropy(h, want.entropy)
    assert_logits_grad(grad, want.d_logits(*map(oracle.to_numpy, upstream(lp))))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [8, 70, 1031, 33000])
def test_a_row_has_the_bits_of_a_batch_at_its_temperature(width, dtype):
    logits, tokens = torch.randn(2, 3, width).to(dtype), torch.randint(width, (2, 3))
    temperature = torch.tensor([[1.0, 0.7, 2.0], [0.7, 1.0, 0.1]])
    got = everything(logits, tokens, temperature=temperature)
    for value in temperature.unique():
        want = everything(logits, tokens, temperature=value.item())
        for a, b in zip(got, want, strict=True):
            assert same_bits(a[temperature == value], b[temperature == value])


@pytest.mark.parametrize("width", [8, 70])
@pytest.mark.parametrize("shift", [False, True])
def test_one_for_each_sequence_or_for_all(shift, width):
    logits, tokens = torch.randn(2, 3, 4, width), torch.randint(width, (2, 3, 4))
    shape = (2, 3, 4 - shift)
    for given in (torch.rand(shape) + 0.5, torch.rand(2, 3) + 0.5, torch.tensor(0.7)):
        rows = given[(...,) + (None,) * (3 - given.dim())].expand(shape) if given.dim() < 3 else given
        got = everything(logits, tokens, shift=shift, temperature=given)
        for a, b in zip(got, everything(logits, tokens, shift=shift, temperature=rows.contiguous()), strict=True):
            assert same_bits(a, b)
        want = oracle.score(logits, tokens, shift=shift, temperature=rows)
        assert_logprobs(got[0], want.logprobs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_temperature_of_any_floating_dtype_is_taken_as_it_is(dtype):
    """fp64 keeps its digits: 0.7 is then what the number 0.7 is."""
    logits, tokens, temperature = torch.randn(3, 70), torch.randint(70, (3,)), torch.full((3,), 0.7, dtype=dtype)
    got = everything(logits, tokens, temperature=temperature)
    for a, b in zip(got, everything(logits, tokens, temperature=temperature[0].item()), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("width", [8, 70])
@pytest.mark.parametrize("bad", [torch.nan, 0.0, -1.0, torch.inf])
def test_a_masked_row_may_have_any_temperature(bad, width):
    logits, tokens, mask = torch.randn(4, width), torch.randint(width, (4,)), torch.tensor([1, 0, 1, 1])
    temperature = torch.tensor([0.5, 1.0, 2.0, 0.5])
    want = everything(logits, tokens, mask, temperature=temperature)
    temperature[1] = bad
    for a, b in zip(everything(logits, tokens, mask, temperature=temperature), want, strict=True):
        assert same_bits(a, b)


@cpu_only
@pytest.mark.parametrize("bad", [torch.nan, 0.0, -1.0, torch.inf, 1e-40, 1e35])
def test_a_bad_temperature_of_a_scored_row_is_refused(bad):
    temperature = torch.tensor([1.0, bad])
    with pytest.raises(ValueError, match="temperature holds"):
        logprobs_from_logits(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), temperature=temperature)


@pytest.mark.parametrize("width", [8, 70])
@pytest.mark.parametrize("bad", [torch.nan, 0.0, -1.0, torch.inf, 1e-40])
def test_where_nothing_can_raise_a_bad_temperature_makes_its_own_row_nan(bad, width):
    logits, tokens = torch.randn(4, width), torch.randint(width, (4,))
    outputs = []
    for second in (1.0, bad):
        options = (1.0, torch.tensor([0.5, second, 2.0, 0.5]), torch.inf, width, False)
        logprobs, entropy, *stats = ops.row_stats(logits, tokens, None, *options, True)
        grad = ops.row_grad(logits, tokens, None, *options, logprobs, *stats, torch.ones(4), torch.ones(4))
        outputs.append((logprobs, entropy, grad))
    good = [0, 2, 3]
    for a, b in zip(*outputs, strict=True):
        assert same_bits(a[good], b[good])
        assert b[1].isnan().all()


def test_the_temperature_is_a_constant():
    logits, tokens = leaf(torch.randn(3, 9)), torch.zeros(3, dtype=torch.long)
    temperature = torch.ones(3, requires_grad=True)
    logprobs_from_logits(logits, tokens, temperature=temperature).sum().backward()
    assert temperature.grad is None


def test_changing_the_temperature_before_backward_is_autograds_error():
    logits, tokens, temperature = leaf(torch.randn(3, 9)), torch.zeros(3, dtype=torch.long), torch.ones(3)
    lp = logprobs_from_logits(logits, tokens, temperature=temperature)
    temperature.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        lp.sum().backward()


@pytest.mark.parametrize("shape", [(2,), ()])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_compiled(shape, softcap, not_interpreted):
    torch._dynamo.reset()
    logits, tokens, temperature = torch.randn(2, 3, 33), torch.randint(33, (2, 3)), torch.rand(shape) + 0.5
    tokens[1, 2] = -100

    def f(x, temperature):
        options = {"logit_softcap": softcap, "ignore_index": -100, "return_entropy": True}
        lp, h = logprobs_from_logits(x, tokens, temperature=temperature, **options)
        return lp.sum() + h.square().sum()

    grads = []
    for run in (f, torch.compile(f, fullgraph=True)):
        x = leaf(logits)
        run(x, temperature).backward()
        grads.append(x.grad)
    assert torch.allclose(*grads, rtol=1e-6, atol=1e-7)


def test_an_empty_batch():
    for shape in ((0, 3), (2, 0)):
        logits, tokens = torch.randn(*shape, 9), torch.zeros(shape, dtype=torch.long)
        for given in (torch.ones(shape), torch.ones(shape[:1]), torch.ones(())):
            assert logprobs_from_logits(logits, tokens, temperature=given, logit_softcap=2.0).shape == shape
