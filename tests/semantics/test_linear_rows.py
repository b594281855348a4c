"""fused_linear_ppo_loss: which rows count, and that the others change nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
from checks import INTERPRETER, assert_close
from test_linear_oracle import a_batch, check_loss, head, lossy

from ppo_kernels import PPOLossConfig

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


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Matrices this small gain nothing from a second thread, and wait for it on a busy machine."""
    threads(1)


def batch(shape=(B, T), width=V, size=H, **options):
    inputs, tokens = head(shape, width, size, **options), torch.randint(width, shape)
    return inputs, tokens, *a_batch(inputs, tokens)


@pytest.mark.parametrize("way", FEW)
def test_rows_whose_loss_is_flat_get_a_gradient_of_exactly_zero(way):
    """Clipped above and below, held by the dual clip, of no advantage; the others as if those rows were not there."""
    inputs, tokens = head((6,), V, H), torch.randint(V, (6,))
    new = a_batch(inputs, tokens, spread=0.0)[0] + 0.013
    old = new - torch.tensor([1.0, -1.0, 2.0, 0.5, 0.1, -0.1])
    advantages = torch.tensor([1.0, -1.0, -1.0, 0.0, 1.0, 2.0])
    got, _ = check_loss(inputs, tokens, old, advantages, options={"dual_clip": 3.0}, how=WAYS[way])
    assert (got.grads["hidden"][:4] == 0).all()
    assert (got.grads["hidden"][4:] != 0).all()
    rest = torch.arange(6) >= 4
    alone = lossy(inputs, tokens, old, advantages, rest, normalizer=6, **WAYS[way])
    for name in ("weight", "bias"):
        assert (got.grads[name] - alone.grads[name]).norm() <= 2e-6 * alone.grads[name].norm()


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_no_advantage_at_all(memory):
    inputs, tokens, old, _ = batch()
    got = lossy(inputs, tokens, old, torch.zeros(B, T), memory=memory)
    assert got.loss == 0
    assert all((x == 0).all() for x in got.grads.values())


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("shape", [(B, T), (0,), (2, 0), (0, 3)], ids=["all masked", "[0]", "[2, 0]", "[0, 3]"])
def test_without_a_valid_token_the_loss_is_zero_and_so_are_the_gradients(shape, memory):
    inputs, tokens = head(shape, V, H), torch.randint(V, shape)
    inputs["hidden"].fill_(torch.nan)
    x, values = torch.full(shape, torch.nan), torch.randn(shape)
    config = PPOLossConfig(entropy_coef=0.1)
    got = lossy(inputs, tokens, x, x, torch.zeros(shape), values=values, returns=x, config=config, memory=memory)
    assert got.loss == 0
    for name, grad in got.grads.items():
        assert grad is not None, name
        assert (grad == 0).all(), name
    assert got.rest.metrics.compute()["tokens"] == 0


@pytest.mark.parametrize("garbage", [torch.nan] if INTERPRETER else [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("way", FEW)
def test_masked_rows_may_hold_anything(way, garbage):
    inputs, tokens, old, advantages = batch()
    mask = MASK.bool()
    clean = lossy(inputs, tokens, old, advantages, mask, **WAYS[way])
    inputs["hidden"][~mask] = garbage
    spoilt = [x.masked_fill(~mask, garbage) for x in (old, advantages)]
    got = lossy(inputs, tokens.masked_fill(~mask, -5), *spoilt, mask, **WAYS[way])
    assert torch.equal(got.loss, clean.loss)
    for name, x in got.grads.items():
        assert torch.equal(x, clean.grads[name]), name
    assert (got.grads["hidden"][~mask] == 0).all()


@pytest.mark.parametrize("way", FEW)
def test_value_mask_counts_values_of_tokens_that_are_masked(way):
    inputs, tokens, old, advantages = batch()
    inputs["hidden"][MASK == 0] = torch.nan
    value_mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    rest = {"values": torch.randn(B, T), "returns": torch.randn(B, T), "old_values": torch.randn(B, T)}
    options = {"value_clip": 0.2}
    got, _ = check_loss(
        inputs, tokens, old, advantages, MASK, options=options, value_mask=value_mask, how=WAYS[way], **rest
    )
    assert (got.grads["values"][value_mask == 0] == 0).all()


@pytest.mark.parametrize("way", FEW)
def test_shift_scores_the_next_token(way):
    inputs, tokens = head((B, T), V, H), torch.randint(V, (B, T))
    old, advantages = a_batch(inputs, tokens, shift=True)
    inputs["hidden"][:, -1] = torch.inf  # it has no next token
    got, _ = check_loss(inputs, tokens, old, advantages, MASK[:, 1:], shift=True, how=WAYS[way])
    assert (got.grads["hidden"][:, -1] == 0).all()


@pytest.mark.parametrize("boundaries", [[0, 0, 3, 3, 8], [0, 3, 8], [0, 1, 2, 8]][: 1 if INTERPRETER else 3], ids=str)
@pytest.mark.parametrize("way", FEW)
def test_packed_sequences_with_shift_are_each_sequence_alone(way, boundaries):
    inputs, tokens = head((8,), V, H), torch.randint(V, (8,))
    old, advantages = a_batch(inputs, tokens, shift=True)
    config = PPOLossConfig(aggregation="seq-mean-token-sum")
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    packed = lossy(inputs, tokens, old, advantages, shift=True, cu_seqlens=cu_seqlens, config=config, **WAYS[way])
    kept = [(a, b) for a, b in itertools.pairwise(boundaries) if b - a > 1]
    losses, hidden = [], torch.zeros(8, H)
    for a, b in kept:
        alone = lossy(
            inputs | {"hidden": inputs["hidden"][a : b - 1]}, tokens[a + 1 : b], old[a : b - 1], advantages[a : b - 1]
        )
        losses.append(alone.loss * (b - a - 1))
        hidden[a : b - 1] = alone.grads["hidden"] * (b - a - 1) / len(kept)
    assert_close(packed.loss, torch.stack(losses).mean(), 2e-6, scale=1.0)
    assert (packed.grads["hidden"] - hidden).norm() <= 2e-6 * hidden.norm()
    assert (packed.grads["hidden"][[b - 1 for _, b in kept]] == 0).all()


@pytest.mark.parametrize("options", [{}, {"shift": True}], ids=["rows", "shift"])
def test_ignored_tokens_are_masked(options):
    inputs, tokens = head((B, T), V, H), torch.randint(V, (B, T))
    old, advantages = a_batch(inputs, tokens, shift="shift" in options)
    tokens[0, 1], tokens[1, 3] = -100, -100
    targets = tokens[:, 1:] if options else tokens
    want = lossy(inputs, tokens.clamp(min=0), old, advantages, targets != -100, **options)
    got = lossy(inputs, tokens, old, advantages, config=PPOLossConfig(ignore_index=-100), **options)
    assert_close(got.loss, want.loss, 1e-6, scale=1.0)
    for name, x in got.grads.items():
        assert (x - want.grads[name]).norm() <= 1e-6 * x.norm(), name


@pytest.mark.parametrize("broken", ["old_logprobs", "token banned by the bias", "hidden"])
@pytest.mark.parametrize("way", FEW)
def test_nonfinite_mask_drops_a_token_whose_logprob_is_no_number(way, broken):
    """It adds nothing to any gradient, and still counts in the denominator."""
    inputs, tokens, old, advantages = batch()
    tokens[0, 1], tokens[tokens == 3] = 3, 4
    tokens[0, 1] = 3
    old, advantages = a_batch(inputs, tokens)
    rest = torch.arange(B * T).view(B, T) != 1
    if broken == "token banned by the bias":
        inputs["bias"][3] = -torch.inf
    want = lossy(inputs, tokens, old, advantages, rest, normalizer=B * T, **WAYS[way])
    if broken == "old_logprobs":
        old[0, 1] = torch.nan
    if broken == "hidden":
        inputs["hidden"][0, 1] = torch.nan
    got = lossy(inputs, tokens, old, advantages, config=PPOLossConfig(nonfinite="mask"), **WAYS[way])
    assert_close(got.loss, want.loss, 2e-6, scale=1.0)
    assert (got.grads["hidden"][0, 1] == 0).all()
    for name, x in want.grads.items():
        assert (x - got.grads[name]).norm() <= 2e-6 * x.norm(), name
    assert got.rest.metrics.compute()["nonfinite"] == 1


def test_the_count_of_valid_rows_may_be_given():
    inputs, tokens, old, advantages = batch()
    for mask, count in ((MASK, 6), (None, 8), (MASK * 0, 0)):
        want = lossy(inputs, tokens, old, advantages, mask)
        got = lossy(inputs, tokens, old, advantages, mask, valid_rows=count)
        assert torch.equal(got.loss, want.loss)
        assert all(torch.equal(x, want.grads[name]) for name, x in got.grads.items())


@pytest.mark.parametrize("way", FEW)
def test_permuted_rows_give_permuted_results(way):
    inputs, tokens, old, advantages = batch((11,))
    order, mask = torch.randperm(11), torch.rand(11) < 0.7
    a = lossy(inputs, tokens, old, advantages, mask, **WAYS[way])
    moved = inputs | {"hidden": inputs["hidden"][order]}
    b = lossy(moved, tokens[order], old[order], advantages[order], mask[order], **WAYS[way])
    assert_close(a.loss, b.loss, 2e-6, scale=1.0)
    assert (a.grads["hidden"][order] - b.grads["hidden"]).norm() <= 2e-6 * b.grads["hidden"].norm()
    assert (a.grads["weight"] - b.grads["weight"]).norm() <= 2e-6 * a.grads["weight"].norm()


def test_micro_batches_with_one_normalizer_add_up():
    inputs, tokens, old, advantages = batch((12,))
    whole = lossy(inputs, tokens, old, advantages)
    parts = [
        lossy(inputs | {"hidden": inputs["hidden"][rows]}, tokens[rows], old[rows], advantages[rows], normalizer=12)
        for rows in (slice(0, 5), slice(5, 12))
    ]
    assert_close(sum(p.loss for p in parts), whole.loss, 2e-6, scale=1.0)
    for name in ("weight", "bias"):
        total = sum(p.grads[name] for p in parts)
        assert (total - whole.grads[name]).norm() <= 2e-6 * total.norm()
