"""Hidden states, weight and upstream gradients of any strides."""

from __future__ import annotations

import pytest
import torch
from checks import same_bits
from test_linear_oracle import a_batch, assert_grads, head, lossy, scored, scored_by_oracle

from ppo_kernels import fused_linear_ppo_loss, logprobs_from_hidden

B, T, H, V = 2, 4, 6, 29
NAN = float("nan")


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Matrices this small gain nothing from a second thread, and wait for it on a busy machine."""
    threads(1)


def inside(x, how):
    """(a tensor, a view of it with the values of x [..., n])."""
    if how == "transposed":
        base = x.transpose(0, 1).contiguous()
        return base, lambda t: t.transpose(0, 1)
    if how == "columns first":
        base = x.movedim(-1, 0).contiguous()
        return base, lambda t: t.movedim(0, -1)
    if how == "part of wider rows":
        base = torch.nn.functional.pad(x, (2, 3), value=NAN)
        return base, lambda t: t[..., 2:-3]
    if how == "every second column":
        base = torch.stack([x, torch.full_like(x, NAN)], -1).flatten(-2)
        return base, lambda t: t[..., ::2]
    if how == "every second row":
        base = torch.stack([torch.full_like(x, NAN), x], 1).flatten(0, 1)
        return base, lambda t: t[1::2]
    raise AssertionError(how)


HIDDEN = ["transposed", "columns first", "part of wider rows", "every second column", "every second row"]
WEIGHT = ["transposed", "part of wider rows", "every second column", "every second row"]


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize(("name", "how"), [("hidden", h) for h in HIDDEN] + [("weight", h) for h in WEIGHT])
def test_inputs_of_any_strides(name, how, memory):
    inputs, tokens = head((B, T), V, H), torch.randint(V, (B, T))
    up, mask = (torch.randn(B, T), torch.randn(B, T)), torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    base, view = inside(inputs[name], how)
    base.requires_grad_()
    leaves = {k: x.clone().requires_grad_() for k, x in inputs.items()} | {name: base}
    seen = leaves | {name: view(base)}
    assert torch.equal(seen[name].detach(), inputs[name])
    lp, h = logprobs_from_hidden(tokens=tokens, mask=mask, return_entropy=True, memory=memory, **seen)
    torch.autograd.backward([lp, h], up)
    grads = {k: x.grad for k, x in leaves.items()}
    grads[name] = view(grads[name])
    want = scored_by_oracle(inputs, tokens, mask, upstream=up)
    plain = scored_by_oracle(inputs, tokens, mask, upstream=up, dtype=None)
    assert_grads(grads, want.grads, plain.grads, torch.float32)
    untouched = torch.ones_like(base)
    view(untouched).zero_()
    assert (base.grad[untouched == 1] == 0).all()


def test_expanded_hidden_states_get_the_sum_of_their_rows_gradients():
    inputs, tokens, up = head((1,), V, H), torch.randint(V, (5,)), (torch.randn(5), torch.randn(5))
    one = inputs["hidden"][0].clone().requires_grad_()
    lp, h = logprobs_from_hidden(one.expand(5, H), inputs["weight"], tokens, bias=inputs["bias"], return_entropy=True)
    torch.autograd.backward([lp, h], up)
    spelled = inputs | {"hidden": one.detach().expand(5, H).contiguous()}
    want = scored(spelled, tokens, upstream=up).grads["hidden"].sum(0)
    assert (one.grad - want).norm() <= 2e-6 * want.norm()


def test_tokens_mask_and_bias_of_any_strides():
    inputs, tokens, up = head((B, T), V, H), torch.randint(V, (B, T)), (torch.randn(B, T), torch.randn(B, T))
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    want = scored(inputs, tokens, mask, upstream=up)
    strided = inputs | {"bias": torch.stack([inputs["bias"]] * 2, 1)[:, 0]}
    got = scored(strided, tokens.T.contiguous().T, mask.T.contiguous().T, upstream=[u.T.contiguous().T for u in up])
    assert torch.equal(got.logprobs, want.logprobs)
    for name, x in got.grads.items():
        assert torch.equal(x, want.grads[name]), name


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize(
    "kind", ["ones", "expanded", "transposed", "only logprobs", "only entropy", "a slice", "zeros"]
)
def test_upstream_gradients_of_any_kind(kind, memory):
    inputs, tokens = head((B, T), V, H), torch.randint(V, (B, T))
    leaves = {k: x.clone().requires_grad_() for k, x in inputs.items()}
    lp, h = logprobs_from_hidden(tokens=tokens, return_entropy=True, memory=memory, **leaves)
    ones, zeros, mixed = torch.ones(B, T), torch.zeros(B, T), torch.randn(B, T)
    up = {
        "ones": (ones, ones),
        "expanded": (ones * 0.5, ones * -2),
        "transposed": (mixed, ones),
        "only logprobs": (mixed, zeros),
        "only entropy": (zeros, mixed),
        "a slice": (torch.nn.functional.pad(ones[:, 1:], (1, 0)), zeros),
        "zeros": (zeros, zeros),
    }[kind]
    if kind == "ones":
        (lp.sum() + h.sum()).backward()  # stride 0
    elif kind == "expanded":
        torch.autograd.backward([lp, h], [torch.tensor(0.5).expand(B, T), torch.tensor(-2.0).expand(B, T)])
    elif kind == "transposed":
        torch.autograd.backward([lp.T, h], [mixed.T.contiguous(), ones])
    elif kind == "only logprobs":
        (lp * mixed).sum().backward()
    elif kind == "only entropy":
        (h * mixed).sum().backward()
    elif kind == "a slice":
        lp[:, 1:].sum().backward()
    else:
        (lp.sum() * 0 + h.sum() * 0).backward()
    want = scored_by_oracle(inputs, tokens, upstream=up)
    plain = scored_by_oracle(inputs, tokens, upstream=up, dtype=None)
    assert_grads({k: x.grad for k, x in leaves.items()}, want.grads, plain.grads, torch.float32)


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_logprobs_alone_have_the_bits_of_logprobs_with_entropy(memory):
    inputs, tokens, up = head((B, T), V, H), torch.randint(V, (B, T)), torch.randn(B, T)
    both = {k: x.clone().requires_grad_() for k, x in inputs.items()}
    alone = {k: x.clone().requires_grad_() for k, x in inputs.items()}
    lp, _ = logprobs_from_hidden(tokens=tokens, return_entropy=True, memory=memory, **both)
    only = logprobs_from_hidden(tokens=tokens, memory=memory, **alone)
    assert same_bits(lp, only)
    lp.backward(up)
    only.backward(up)
    for name, x in alone.items():
        assert (x.grad - both[name].grad).norm() <= 1e-6 * x.grad.norm()


def test_the_loss_of_inputs_of_any_strides():
    inputs, tokens = head((B, T), V, H), torch.randint(V, (B, T))
    old, advantages = a_batch(inputs, tokens)
    want = lossy(inputs, tokens, old, advantages)
    base, view = inside(inputs["weight"], "transposed")
    states, look = inside(inputs["hidden"], "part of wider rows")
    base.requires_grad_()
    states.requires_grad_()
    swapped = (x.T.contiguous().T for x in (tokens, old, advantages))
    out = fused_linear_ppo_loss(look(states), view(base), *swapped, bias=inputs["bias"])
    out.loss.backward()
    assert (out.loss - want.loss).abs() <= 1e-6
    for got, name in ((view(base.grad), "weight"), (look(states.grad), "hidden")):
        assert (got - want.grads[name]).norm() <= 2e-6 * want.grads[name].norm()
    assert (states.grad[..., :2] == 0).all()


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_each_output_may_be_differentiated_on_its_own(memory):
    inputs, tokens, up = head((B, T), V, H), torch.randint(V, (B, T)), (torch.randn(B, T), torch.randn(B, T))
    leaves = {k: x.clone().requires_grad_() for k, x in inputs.items()}
    lp, h = logprobs_from_hidden(tokens=tokens, return_entropy=True, memory=memory, **leaves)
    lp.backward(up[0], retain_graph=True)
    h.backward(up[1])
    want = scored_by_oracle(inputs, tokens, upstream=up)
    plain = scored_by_oracle(inputs, tokens, upstream=up, dtype=None)
    assert_grads({k: x.grad for k, x in leaves.items()}, want.grads, plain.grads, torch.float32)
