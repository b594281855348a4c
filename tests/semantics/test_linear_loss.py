"""fused_linear_ppo_loss: what the head adds to the loss. test_linear_draws.py has every kind of loss."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from checks import INTERPRETER, assert_close
from test_linear_oracle import a_batch, check_loss, head, lossy

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss, fused_ppo_loss, logprobs_from_hidden

B, T, H, V = 2, 4, 6, 37
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]])
WAYS = {
    "by default": {},
    "one row at a time": {"chunk_bytes": 1},
    "a ragged last chunk": {"chunk_bytes": 3 * 4 * V},
    "little memory": {"memory": "low"},
    "little memory, a few rows": {"memory": "low", "chunk_bytes": 5 * 4 * B * T},
}
FEW = ["a ragged last chunk", "little memory"] if INTERPRETER else list(WAYS)
ALL_TERMS = {"entropy_coef": 0.1, "kl_coef": 0.2, "temperature": 0.7}


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Matrices this small gain nothing from a second thread, and wait for it on a busy machine."""
    threads(1)


def batch(shape=(B, T), width=V, size=H, **options):
    inputs, tokens = head(shape, width, size, **options), torch.randint(width, shape)
    return inputs, tokens, *a_batch(inputs, tokens)


@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, ALL_TERMS], ids=["policy", "all terms"])
def test_the_loss_and_all_gradients(options, bias, way):
    inputs, tokens, old, advantages = batch(bias=bias)
    rest = {"values": torch.randn(B, T), "returns": torch.randn(B, T), "ref_logprobs": old - 0.2}
    check_loss(inputs, tokens, old, advantages, MASK, options=options, how=WAYS[way], **rest)


@pytest.mark.parametrize("way", FEW)
def test_any_way_of_cutting_gives_the_numbers_of_one_chunk(way):
    inputs, tokens, old, advantages = batch((23,), 41, scale=4.0)
    config, mask = PPOLossConfig(entropy_coef=0.1, vf_coef=1.0), torch.rand(23) < 0.7
    rest = {"config": config, "values": torch.randn(23), "returns": torch.randn(23)}
    a = lossy(inputs, tokens, old, advantages, mask, chunk_bytes=1 << 30, **rest)
    b = lossy(inputs, tokens, old, advantages, mask, **WAYS[way], **rest)
    assert_close(b.loss, a.loss, 2e-6, scale=1.0)
    for name, x in a.grads.items():
        assert (x - b.grads[name]).norm() <= 2e-6 * x.norm(), name


@pytest.mark.parametrize("config", [PPOLossConfig(), PPOLossConfig(ratio_level="sequence", entropy_coef=0.1)])
def test_it_is_the_loss_of_the_logits(config):
    """Every field of the output, next to fused_ppo_loss of F.linear's logits."""
    inputs, tokens, old, advantages = batch()
    values = {"values": torch.randn(B, T), "returns": torch.randn(B, T), "ref_logprobs": old - 0.1}
    out = fused_linear_ppo_loss(
        inputs["hidden"],
        inputs["weight"],
        tokens,
        old,
        advantages,
        MASK,
        bias=inputs["bias"],
        config=config,
        **values,
    )
    logits = torch.nn.functional.linear(*inputs.values())
    want = fused_ppo_loss(logits, tokens, old, advantages, MASK, config=config, **values)
    assert type(out) is type(want)
    for name in ("loss", "logprobs", "entropy", "policy_loss", "value_loss", "kl"):
        assert_close(getattr(out, name), getattr(want, name), 4e-6, scale=1.0, what=name)
    a, b = out.metrics.compute(), want.metrics.compute()
    assert a.keys() == b.keys()
    for name, value in b.items():
        assert math.isclose(a[name], value, rel_tol=4e-6, abs_tol=4e-6), name
    assert not out.logprobs.requires_grad


def test_on_policy_the_ratio_is_one_and_has_a_gradient():
    inputs, tokens, _, advantages = batch()
    got, _ = check_loss(inputs, tokens, None, advantages, MASK)
    metrics = got.rest.metrics.compute()
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1
    assert_close(got.loss, -(advantages * MASK).sum() / MASK.sum(), 1e-6, scale=1.0)


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_the_ratio_to_logprobs_scored_from_hidden_is_one_to_rounding(memory):
    inputs, tokens, _, advantages = batch()
    old = logprobs_from_hidden(**inputs, tokens=tokens, memory=memory)
    out = fused_linear_ppo_loss(**inputs, tokens=tokens, old_logprobs=old, advantages=advantages, memory=memory)
    metrics = out.metrics.compute()
    assert 1 - 1e-5 < metrics["ratio_min"] <= metrics["ratio_max"] < 1 + 1e-5


@pytest.mark.parametrize("way", FEW)
def test_padded_vocabulary(way):
    inputs, tokens = head((B, T), V, H), torch.randint(V - 5, (B, T))
    inputs["weight"][V - 5 :], inputs["bias"][V - 5 :] = torch.nan, torch.nan
    good = {name: x if name == "hidden" else x[: V - 5] for name, x in inputs.items()}
    options = {"vocab_size": V - 5, "entropy_coef": 0.1}
    got, _ = check_loss(inputs, tokens, *a_batch(good, tokens), MASK, options=options, how=WAYS[way])
    for name in ("weight", "bias"):
        assert (got.grads[name][V - 5 :] == 0).all()


def test_aggregation_none_takes_a_gradient_per_token():
    inputs, tokens, old, advantages = batch()
    config = PPOLossConfig(aggregation="none", entropy_coef=0.1)
    for how, up in itertools.product((WAYS[way] for way in FEW), (torch.randn(B, T), torch.eye(4)[1].expand(B, T))):
        got = lossy(inputs, tokens, old, advantages, MASK, config=config, upstream=up, **how)
        assert got.loss.shape == (B, T)
        assert (got.loss[MASK == 0] == 0).all()
        leaves = {k: x.double().requires_grad_() for k, x in inputs.items()}
        logits = torch.nn.functional.linear(leaves["hidden"], leaves["weight"], leaves["bias"])
        want = fused_ppo_loss(logits, tokens, old.double(), advantages.double(), MASK, config=config)
        (want.loss * up).sum().backward()
        assert_close(got.loss, want.loss, 3e-6, scale=1.0)
        for name, x in got.grads.items():
            assert (x - leaves[name].grad).norm() <= 2e-6 * x.norm(), name
        assert (got.grads["hidden"][(up == 0) | (MASK == 0)] == 0).all()


PER_ROW = torch.linspace(0.4, 2.0, B * T).view(B, T)
OPTIONS = {
    "a temperature for all": {"temperature": torch.tensor(0.7)},
    "a temperature per row": {"temperature": PER_ROW},
    "softcap": {"model": {"logit_softcap": 3.0}},
    "scale": {"model": {"logit_scale": 0.5}},
    "all of them": {"temperature": PER_ROW, "model": {"logit_softcap": 5.0, "logit_scale": 0.5}},
}


@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("option", list(OPTIONS)[:: 4 if INTERPRETER else 1])
def test_options_of_the_head(option, way):
    inputs, tokens, _, advantages = batch()
    check_loss(inputs, tokens, None, advantages, MASK, options={"entropy_coef": 0.1}, how=WAYS[way], **OPTIONS[option])


def test_a_temperature_per_sequence():
    inputs, tokens, _, advantages = batch()
    temperature = torch.tensor([0.5, 1.5])
    for how in (WAYS[way] for way in FEW):
        got = lossy(inputs, tokens, None, advantages, MASK, temperature=temperature, **how)
        want = lossy(inputs, tokens, None, advantages, MASK, temperature=temperature[:, None].expand(B, T), **how)
        assert_close(got.loss, want.loss, 1e-6, scale=1.0)
        assert all((x - want.grads[name]).norm() <= 1e-6 * x.norm() for name, x in got.grads.items())


def test_no_entropy_when_it_is_not_wanted():
    inputs, tokens, old, advantages = batch()
    for how in (WAYS[way] for way in FEW):
        got, _ = check_loss(inputs, tokens, old, advantages, options={}, how=how)
        config = PPOLossConfig(return_entropy=False)
        without = lossy(inputs, tokens, old, advantages, config=config, **how)
        assert without.entropy is None
        assert_close(without.loss, got.loss, 1e-6, scale=1.0)


@pytest.mark.parametrize(("shape", "width", "size"), [((5,), 2, 3), ((5,), 1, 3), ((7,), 13, 1), ((3, 5), 67, 11)])
@pytest.mark.parametrize("way", FEW[:1] if INTERPRETER else FEW)
def test_any_shape(way, shape, width, size):
    inputs, tokens, old, advantages = batch(shape, width, size)
    check_loss(inputs, tokens, old, advantages, options={"entropy_coef": 0.1}, how=WAYS[way])


THOUSANDS = [{"chunk_bytes": 2 * 4 * 5003}, {"memory": "low", "chunk_bytes": 40_000}]


@pytest.mark.parametrize("how", THOUSANDS[: 1 if INTERPRETER else 2], ids=str)
def test_a_vocabulary_of_thousands(how):
    inputs, tokens, old, advantages = batch((5,), 5003, 8)
    mask = torch.tensor([1, 0, 1, 1, 1])
    check_loss(inputs, tokens, old, advantages, mask, options={"entropy_coef": 0.1}, how=how)


def test_alone_there_is_nothing_to_reduce():
    given = batch()
    a, b = lossy(*given), lossy(*given, reduce_hidden_grad=False)
    assert all(torch.equal(x, b.grads[name]) for name, x in a.grads.items())
