"""torch.compile of the linear forms: one graph, and the eager numbers."""

from __future__ import annotations

import pytest
import torch
from checks import assert_close
from torch._subclasses.fake_tensor import FakeTensorMode

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss, logprobs_from_hidden

CONFIG = PPOLossConfig(entropy_coef=0.01, kl_coef=0.1, value_clip=0.2)
MASK = torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.bool)


@pytest.fixture(autouse=True)
def fresh_dynamo(threads):
    threads(1)
    torch._dynamo.reset()


def scores(hidden, weight, bias, tokens, mask):
    lp, h = logprobs_from_hidden(hidden, weight, tokens, mask, bias=bias, return_entropy=True)
    return lp.sum() + 0.1 * h.sum()


def loss(hidden, weight, bias, tokens, mask):
    x = torch.zeros(2, 3) - 3
    values = hidden.sum(-1)
    rest = {"values": values, "old_values": x, "returns": x, "ref_logprobs": x, "config": CONFIG, "bias": bias}
    return fused_linear_ppo_loss(hidden, weight, tokens, x, x + 2, mask, **rest).loss


def run(fn, seed, mask):
    torch.manual_seed(seed)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((2, 3, 5), (33, 5), (33,))]
    result = fn(*leaves, torch.randint(33, (2, 3)), mask)
    result.backward()
    return [result.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("call", [scores, loss])
def test_one_graph_gives_the_eager_numbers_on_any_data(call):
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for seed, mask in ((0, MASK), (1, ~MASK), (2, torch.ones_like(MASK))):  # other counts of valid rows
        for a, b in zip(run(call, seed, mask), run(compiled, seed, mask), strict=True):
            assert_close(b, a, 2e-6, scale=float(a.abs().max()))


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("mask", [None, MASK])
def test_fake_tensors_have_the_shapes_of_real_ones(mask, memory):
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden, weight = torch.randn(2, 3, 5, requires_grad=True), torch.randn(33, 5, requires_grad=True)
        x = torch.zeros(2, 3)
        out = fused_linear_ppo_loss(hidden, weight, torch.zeros(2, 3, dtype=torch.long), x, x, mask, memory=memory)
        out.loss.backward()
    assert (hidden.grad.shape, weight.grad.shape) == (hidden.shape, weight.shape)
    assert out.logprobs.shape == (2, 3)
