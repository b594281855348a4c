"""The autograd of logprobs_from_hidden and fused_linear_ppo_loss: who gets a gradient, and how often."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from checks import leaf, same_bits
from oracle import LossSpec
from test_linear_oracle import a_batch, assert_grads, distance, head, loss_by_oracle, scored_by_oracle

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss, logprobs_from_hidden

SHAPE, H, V = (2, 3), 5, 33
CALLS = ["logprobs", "logprobs, little memory", "loss", "loss of log-probs", "loss, little memory"]
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Matrices this small gain nothing from a second thread, and wait for it on a busy machine."""
    threads(1)


class Problem:
    """One call as a scalar function of hidden, weight and bias, and the oracle's gradients of it."""

    def __init__(self, call, dtype=torch.float32):
        self.memory = "low" if "little" in call else "fast"
        self.loss = call.startswith("loss")
        # A loss that looks at whole sequences first makes the gradient in backward.
        self.config = PPOLossConfig(ratio_level="sequence_token" if "log-probs" in call else "token")
        self.inputs = {name: x.to(dtype) for name, x in head(SHAPE, V, H).items()}
        self.tokens = torch.randint(V, SHAPE)
        self.old, self.advantages = a_batch(self.inputs, self.tokens)
        if "log-probs" in call:  # the mean ratio is then 1, so that the token's formula is the sequence's
            self.old = None
        self.up = torch.randn(SHAPE)

    def __call__(self, hidden, weight, bias=None):
        given = (hidden, weight, self.tokens)
        if self.loss:
            out = fused_linear_ppo_loss(
                *given, self.old, self.advantages, MASK, bias=bias, config=self.config, memory=self.memory
            )
            return out.loss
        lp, h = logprobs_from_hidden(*given, MASK, bias=bias, return_entropy=True, memory=self.memory)
        return (lp * self.up).sum() + h.sum()

    def leaves(self):
        return [leaf(x) for x in self.inputs.values()]

    def oracle(self, dtype=torch.float64):
        if self.loss:
            given = (self.inputs, self.tokens, self.old, self.advantages, MASK)
            return loss_by_oracle(*given, spec=LossSpec(), dtype=dtype).grads
        up = (self.up, torch.ones(SHAPE))
        return scored_by_oracle(self.inputs, self.tokens, MASK, upstream=up, dtype=dtype).grads

    def check(self, grads, scale=1.0):
        """grads: of hidden, weight and bias, or None for one that is not looked at."""
        named = {name: x for name, x in zip(self.inputs, grads, strict=True) if x is not None}
        assert_grads(named, self.oracle(), self.oracle(None), torch.float32, scale)


@pytest.fixture(params=CALLS)
def problem(request):
    return Problem(request.param)


def test_every_call_of_this_file_has_the_oracles_gradient(problem):
    leaves = problem.leaves()
    problem(*leaves).backward()
    problem.check([x.grad for x in leaves])


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias", "hidden weight", "hidden bias", "weight bias"])
def test_only_who_wants_a_gradient_gets_one(problem, wanted):
    """A frozen head, as with LoRA; a frozen body; a bias alone."""
    leaves = [leaf(x) if name in wanted else x.clone() for name, x in problem.inputs.items()]
    problem(*leaves).backward()
    for name, x in zip(problem.inputs, leaves, strict=True):
        assert (x.grad is not None) == (name in wanted), name
    problem.check([x.grad for x in leaves])


def test_nobody_wants_a_gradient(problem):
    wanted = problem(*problem.leaves())
    loss = problem(*problem.inputs.values())
    assert not loss.requires_grad
    assert (loss - wanted).abs() <= 1e-6 * (1 + wanted.abs())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_gives_the_same_number_and_no_graph(problem, mode):
    wanted = problem(*problem.leaves())
    with mode():
        loss = problem(*problem.leaves())
    assert not loss.requires_grad
    assert (loss - wanted).abs() <= 1e-6 * (1 + wanted.abs())


def test_values_alone_get_theirs():
    p = Problem("loss")
    values = torch.randn(SHAPE, requires_grad=True)
    rest = {"values": values, "returns": torch.zeros(SHAPE), "bias": p.inputs["bias"]}
    hidden, weight = p.inputs["hidden"], p.inputs["weight"]
    fused_linear_ppo_loss(hidden, weight, p.tokens, p.old, p.advantages, MASK, **rest).loss.backward()
    given = (p.inputs, p.tokens, p.old, p.advantages, MASK)
    want = loss_by_oracle(*given, spec=LossSpec(), values=values, returns=torch.zeros(SHAPE)).grads["values"]
    assert abs(values.grad.double().cpu().numpy() - want).max() <= 1e-6
    assert hidden.grad is None
    assert weight.grad is None


def test_constants_get_no_gradient():
    p = Problem("loss")
    names = ("old_logprobs", "advantages", "returns", "old_values", "ref_logprobs", "token_weights")
    constants = {name: torch.full(SHAPE, 0.5, requires_grad=True) for name in names}
    leaves = p.leaves()
    config = PPOLossConfig(value_clip=0.2, kl_coef=0.1)
    out = fused_linear_ppo_loss(
        *leaves[:2], p.tokens, bias=leaves[2], values=leaf(p.old), config=config, mask=MASK, **constants
    )
    out.loss.backward()
    assert all(x.grad is None for x in constants.values())
    assert not out.logprobs.requires_grad
    assert not out.policy_loss.requires_grad


def test_a_tied_embedding_gets_the_sum_of_both_gradients(problem):
    """Hidden states made from the head's own weight."""
    ids = torch.randint(V, SHAPE)
    weight = leaf(problem.inputs["weight"])
    problem.inputs["hidden"] = problem.inputs["weight"][ids]
    if problem.old is not None:
        problem.old, problem.advantages = a_batch(problem.inputs, problem.tokens)
    problem(weight[ids], weight, problem.inputs["bias"]).backward()
    want = problem.oracle()
    np.add.at(want["weight"], ids.flatten().tolist(), want["hidden"].reshape(-1, H))
    assert distance(weight.grad, want["weight"]) <= 2e-6 * np.linalg.norm(want["weight"])


def test_another_consumer_of_hidden_and_weight_gets_its_gradient_too(problem):
    leaves = problem.leaves()
    hidden, weight = leaves[0] * 1, leaves[1] * 1
    (problem(hidden, weight, leaves[2]) + hidden.square().sum() + weight.square().sum()).backward()
    minus = [leaves[0].grad - 2 * leaves[0].detach(), leaves[1].grad - 2 * leaves[1].detach()]
    for got, name in zip(minus, ("hidden", "weight"), strict=True):
        assert distance(got, problem.oracle()[name]) <= 1e-5  # the sum's own rounding


def test_gradients_accumulate_over_two_calls(problem):
    leaves = problem.leaves()
    for _ in range(2):
        problem(*leaves).backward()
    problem.check([x.grad for x in leaves], scale=2.0)


def test_retain_graph_gives_the_same_gradients_again_and_scaled(problem):
    leaves = problem.leaves()
    loss = problem(*leaves)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [x.clone() for x in first]
    scaled = torch.autograd.grad(loss * 4, leaves, retain_graph=True)
    for a, b in zip(first, scaled, strict=True):
        assert (a * 4 - b).norm() <= 1e-6 * b.norm()
        b.fill_(7.0)
    for a, b in zip(first, kept, strict=True):
        assert same_bits(a, b)  # what was given out is the caller's
        a.zero_()
    second = torch.autograd.grad(loss, leaves)
    for a, b in zip(second, kept, strict=True):
        assert same_bits(a, b)
    problem.check(second)


def test_a_second_backward_without_retain_graph_is_an_error(problem):
    leaves = problem.leaves()
    loss = problem(*leaves)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"second time|retain_graph"):
        loss.backward()


@pytest.mark.parametrize("scale", [3.0, 1 / 7, -1.0, 65536.0, 0.0])
def test_upstream_scale_multiplies_the_gradients(problem, scale):
    leaves = problem.leaves()
    (problem(*leaves) * scale).backward()
    if scale == 0:
        assert all((x.grad == 0).all() for x in leaves)
    problem.check([x.grad for x in leaves], scale)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_a_second_derivative_is_an_error(problem, wanted):
    leaves = problem.leaves()
    (grad,) = torch.autograd.grad(problem(*leaves) + leaves[wanted].square().sum(), leaves[wanted], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once.differentiable|differentiate twice|trying to differentiate"):
        torch.autograd.grad(grad.sum(), leaves[wanted])


def test_create_graph_alone_is_harmless(problem):
    leaves = problem.leaves()
    problem.check([x.detach() for x in torch.autograd.grad(problem(*leaves), leaves, create_graph=True)])


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_an_input_changed_before_backward_is_noticed_or_harmless(problem, changed):
    """An optimiser's step between forward and backward."""
    leaves = problem.leaves()
    seen = [x * 1 for x in leaves]
    loss = problem(*seen)
    with torch.no_grad():
        seen[changed].mul_(2)
    try:
        loss.backward()
        noticed = ""
    except RuntimeError as error:
        noticed = str(error)
    if noticed:
        assert "inplace" in noticed
    else:
        problem.check([x.grad for x in leaves])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("call", CALLS)
def test_no_input_is_modified(call, dtype):
    problem = Problem(call, dtype)
    leaves = problem.leaves()
    others = [x for x in (problem.tokens, problem.old, problem.advantages, problem.up, MASK) if x is not None]
    kept = [x.clone() for x in others]
    problem(*leaves).backward()
    for x, before in zip(leaves, problem.inputs.values(), strict=True):
        assert same_bits(x.detach(), before)
    assert all(same_bits(a, b) for a, b in zip(others, kept, strict=True))
    assert all(x._version == 0 for x in (*leaves, problem.tokens, MASK)), "written to"
    assert all(x.grad.dtype == dtype for x in leaves)


def test_activation_checkpointing_recomputes_the_call(problem):
    leaves = problem.leaves()
    torch.utils.checkpoint.checkpoint(lambda *x: problem(*(y * 1 for y in x)), *leaves, use_reentrant=False).backward()
    problem.check([x.grad for x in leaves])


def test_without_a_bias(problem):
    leaves = problem.leaves()[:2]
    del problem.inputs["bias"]
    if problem.old is not None:
        problem.old, problem.advantages = a_batch(problem.inputs, problem.tokens)
    problem(*leaves).backward()
    problem.check([x.grad for x in leaves])


def test_hooks_see_whole_gradients_once(problem):
    """Data-parallel wrappers reduce a weight's gradient in a hook, which must not run once per chunk."""
    leaves, seen = problem.leaves(), []
    for x in leaves:
        x.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.clone()))
    problem(*leaves).backward()
    assert len(seen) == 3
    problem.check([next(g for g in seen if g.shape == x.shape) for x in leaves])


def test_two_calls_in_flight_do_not_share_memory(problem):
    leaves, others = problem.leaves(), [leaf(-x) for x in problem.inputs.values()]
    first = problem(*leaves)
    problem(*others).backward()
    first.backward()
    problem.check([x.grad for x in leaves])
