"""logprobs_from_hidden: values and gradients for every option, shape, layout and way of cutting the work."""

from __future__ import annotations

import pytest
import torch
from checks import INTERPRETER
from oracle import to_numpy
from test_linear_oracle import assert_grads, check_scores, head, scored, scored_by_oracle

from ppo_kernels import logprobs_from_hidden

B, T, H, V = 2, 4, 6, 37
WAYS = {
    "by default": {},
    "one row at a time": {"chunk_bytes": 1},
    "a ragged last chunk": {"chunk_bytes": 3 * 4 * V},
    "one chunk": {"chunk_bytes": 1 << 80},
    "little memory": {"memory": "low"},
    "little memory, one row at a time": {"memory": "low", "chunk_bytes": 1},
    "little memory, a few rows": {"memory": "low", "chunk_bytes": 5 * 4 * B * T},
}
FEW = ["a ragged last chunk", "little memory"] if INTERPRETER else list(WAYS)


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Matrices this small gain nothing from a second thread, and wait for it on a busy machine."""
    threads(1)


def draw(shape=(B, T), width=V, size=H, **options):
    return head(shape, width, size, **options), torch.randint(width, shape)


def upstream(shape=(B, T)):
    return torch.randn(shape), torch.randn(shape)


@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("bias", [True, False])
def test_any_way_of_cutting_the_work_gives_the_numbers(bias, way):
    inputs, tokens = draw(bias=bias)
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1]])
    check_scores(inputs, tokens, mask, upstream=upstream(), how=WAYS[way])


@pytest.mark.parametrize("way", FEW)
def test_any_way_of_cutting_gives_the_numbers_of_one_chunk(way):
    inputs, tokens = draw((23,), 41, scale=4.0)
    up, mask = upstream((23,)), torch.rand(23) < 0.7
    a = scored(inputs, tokens, mask, upstream=up, chunk_bytes=1 << 30)
    b = scored(inputs, tokens, mask, upstream=up, **WAYS[way])
    for x, y in ((a.logprobs, b.logprobs), (a.entropy, b.entropy)):
        assert ((x - y).abs() <= 2e-6 * x.abs().clamp(min=1.0)).all()
    for name, x in a.grads.items():
        assert (x - b.grads[name]).norm() <= 2e-6 * x.norm(), name


OPTIONS = {
    "temperature": {"temperature": 0.6},
    "a temperature for all": {"temperature": torch.tensor(1.7)},
    "a temperature per row": {"temperature": torch.linspace(0.4, 2.0, B * T).view(B, T)},
    "a temperature per sequence": {"temperature": torch.tensor([[0.5], [2.0]])},
    "softcap": {"logit_softcap": 3.0},
    "scale": {"logit_scale": 0.25},
    "softcap of scaled, tempered logits": {"logit_softcap": 5.0, "logit_scale": 1.5, "temperature": 0.7},
    "padded vocabulary": {"vocab_size": V - 4},
    "ignored tokens": {"ignore_index": 0},
}


@pytest.mark.parametrize(
    "way", FEW[:1] if INTERPRETER else ["by default", "one row at a time", "little memory, a few rows"]
)
@pytest.mark.parametrize("option", list(OPTIONS)[:: 3 if INTERPRETER else 1])
def test_options_of_the_head(option, way):
    inputs = head((B, T), V, H)
    tokens = torch.randint(V - 4, (B, T))
    tokens[0, 1] = 0
    options = dict(OPTIONS[option])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    how = dict(WAYS[way])
    if option == "a temperature per sequence":  # the oracle wants them spelled out
        got = scored(inputs, tokens, mask, upstream=(u := upstream()), temperature=torch.tensor([0.5, 2.0]), **how)
        want = scored_by_oracle(inputs, tokens, mask, upstream=u, **options)
        plain = scored_by_oracle(inputs, tokens, mask, upstream=u, dtype=None, **options)
        assert_grads(got.grads, want.grads, plain.grads, torch.float32)
        return
    got = check_scores(inputs, tokens, mask, upstream=upstream(), how=how, **options)
    if "vocab_size" in options:
        assert (got.grads["weight"][V - 4 :] == 0).all()
        assert (got.grads["bias"][V - 4 :] == 0).all()


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_columns_beyond_the_vocabulary_may_hold_anything(memory):
    inputs, tokens = draw()
    tokens = tokens.clamp(max=V - 5)
    inputs["weight"][V - 4 :] = torch.nan
    inputs["bias"][V - 4 :] = torch.inf
    got = check_scores(inputs, tokens, upstream=upstream(), vocab_size=V - 4, how={"memory": memory})
    assert (got.grads["weight"][V - 4 :] == 0).all()


@pytest.mark.parametrize("way", FEW)
def test_shift_scores_the_next_token(way):
    inputs, tokens = draw()
    got = check_scores(inputs, tokens, upstream=upstream((B, T - 1)), shift=True, how=WAYS[way])
    assert got.logprobs.shape == (B, T - 1)
    assert (got.grads["hidden"][:, -1] == 0).all()


def test_shift_with_mask_and_ignored_tokens_and_a_last_row_of_nan():
    inputs, tokens = draw()
    tokens[:, 0], tokens[1, 2] = -100, -100  # the first is never scored
    inputs["hidden"][:, -1] = torch.nan
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    got = check_scores(inputs, tokens, mask, upstream=upstream((B, T - 1)), shift=True, ignore_index=-100)
    assert (got.logprobs == 0).tolist() == [[False, True, False], [False, True, False]]


@pytest.mark.parametrize(
    ("shape", "width", "size"),
    [
        ((), 7, 3),
        ((1,), 7, 3),
        ((2, 3, 2), 11, 5),
        ((5,), 2, 4),  # a binary choice
        ((5,), 1, 4),  # no choice: log-prob and entropy 0, and so is every gradient
        ((5,), 13, 1),  # one feature
        ((9,), 64, 8),
        ((3,), 67, 31),
        ((24,), 70, 16),
    ],
    ids=str,
)
@pytest.mark.parametrize("memory", ["fast"] if INTERPRETER else ["fast", "low"])
def test_any_shape(memory, shape, width, size):
    inputs, tokens = draw(shape, width, size)
    got = check_scores(inputs, tokens, upstream=upstream(shape), how={"memory": memory})
    if width == 1:
        assert (got.logprobs == 0).all()
        assert all((x == 0).all() for x in got.grads.values())


THOUSANDS = [{"chunk_bytes": 2 * 4 * 5003}, {"memory": "low", "chunk_bytes": 40_000}]


@pytest.mark.parametrize("how", THOUSANDS[: 1 if INTERPRETER else 2], ids=str)
def test_a_vocabulary_of_thousands_in_two_threads(how, threads):
    threads(2)
    inputs, tokens = draw((5,), 5003, 8)
    check_scores(inputs, tokens, torch.tensor([1, 0, 1, 1, 1]), upstream=upstream((5,)), how=how)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_no_rows(memory, shape):
    inputs, tokens = draw(shape)
    got = scored(inputs, tokens, upstream=upstream(shape), memory=memory)
    assert got.logprobs.shape == got.entropy.shape == shape
    for name, x in got.grads.items():
        assert x.shape == inputs[name].shape
        assert (x == 0).all()


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_sequences_of_one_token_have_nothing_to_shift_to(memory):
    inputs, tokens = draw((3, 1))
    got = scored(inputs, tokens, upstream=upstream((3, 0)), shift=True, memory=memory)
    assert got.logprobs.shape == (3, 0)
    assert all((x == 0).all() for x in got.grads.values())


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_all_rows_masked(memory):
    inputs, tokens = draw()
    inputs["hidden"].fill_(torch.nan)
    got = scored(inputs, tokens, torch.zeros(B, T), upstream=upstream(), memory=memory)
    for x in (got.logprobs, got.entropy, *got.grads.values()):
        assert (x == 0).all()


@pytest.mark.parametrize("garbage", [torch.nan] if INTERPRETER else [torch.nan, torch.inf, -torch.inf, 1e38])
@pytest.mark.parametrize("way", FEW if INTERPRETER else ["by default", "one row at a time", "little memory"])
def test_masked_rows_may_hold_anything(way, garbage):
    inputs, tokens = draw()
    mask = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 1]], dtype=torch.bool)
    up = upstream()
    clean = scored(inputs, tokens, mask, upstream=up, **WAYS[way])
    inputs["hidden"][~mask] = garbage
    tokens = torch.where(mask, tokens, 10**9)
    spoilt_up = tuple(torch.where(mask, u, torch.nan) for u in up)
    got = scored(inputs, tokens, mask, upstream=spoilt_up, **WAYS[way])
    for name, x in got.grads.items():
        assert torch.equal(x, clean.grads[name]), name
    assert torch.equal(got.logprobs, clean.logprobs)
    assert torch.equal(got.entropy, clean.entropy)
    assert (got.grads["hidden"][~mask] == 0).all()
    assert (got.logprobs[~mask] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.float64])
def test_a_mask_of_any_dtype(dtype):
    inputs, tokens = draw()
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]])
    up = upstream()
    want = scored(inputs, tokens, mask, upstream=up)
    got = scored(inputs, tokens, mask.to(dtype), upstream=up)
    assert torch.equal(got.logprobs, want.logprobs)
    assert all(torch.equal(x, want.grads[name]) for name, x in got.grads.items())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_tokens_of_any_integer_dtype(dtype):
    inputs, tokens = draw()
    want = scored(inputs, tokens, upstream=(up := upstream()))
    assert torch.equal(scored(inputs, tokens.to(dtype), upstream=up).logprobs, want.logprobs)


def test_the_count_of_valid_rows_may_be_given():
    inputs, tokens = draw()
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]])
    for m, count in ((mask, 6), (None, 8), (mask * 0, 0)):
        want = scored(inputs, tokens, m, upstream=(up := upstream()))
        got = scored(inputs, tokens, m, upstream=up, valid_rows=count)
        assert torch.equal(got.logprobs, want.logprobs)
        assert all(torch.equal(x, want.grads[name]) for name, x in got.grads.items())


@pytest.mark.parametrize("way", ["by default", "little memory"])
def test_a_token_banned_by_a_bias_of_minus_infinity_has_no_probability_and_no_gradient(way):
    inputs, tokens = draw()
    inputs["bias"][[0, 5, V - 1]] = -torch.inf
    tokens = tokens.clamp(1, 4)
    got = check_scores(inputs, tokens, upstream=upstream(), how=WAYS[way])
    assert (got.grads["bias"][[0, 5, V - 1]] == 0).all()
    assert (got.grads["weight"][[0, 5, V - 1]] == 0).all()


def test_a_row_of_nan_that_counts_is_nan_alone():
    inputs, tokens = draw()
    want = logprobs_from_hidden(**inputs, tokens=tokens)
    inputs["hidden"][0, 1] = torch.nan
    for how in ({"memory": "fast"}, {"memory": "low"}, {"chunk_bytes": 1}):
        got = logprobs_from_hidden(**inputs, tokens=tokens, **how)
        assert got.isnan().nonzero().tolist() == [[0, 1]]
        rest = torch.arange(B * T).view(B, T) != 1
        assert (got - want)[rest].abs().max() <= 2e-6 * 10


def test_logits_of_many_nats():
    """A row's maximum is subtracted before the exponential: hidden states 30 times as long change nothing but it."""
    inputs, tokens = draw(scale=60.0)
    got = scored(inputs, tokens, upstream=(up := upstream()))
    want = scored_by_oracle(inputs, tokens, upstream=up)
    size = abs(to_numpy(inputs["hidden"])) @ abs(to_numpy(inputs["weight"])).T
    assert (abs(to_numpy(got.logprobs) - want.logprobs) <= 2e-6 * size.max(-1)).all()


@pytest.mark.parametrize("way", FEW if INTERPRETER else ["by default", "one row at a time", "little memory"])
def test_permuted_rows_give_permuted_results(way):
    inputs, tokens = draw((11,))
    order, up = torch.randperm(11), upstream((11,))
    mask = torch.rand(11) < 0.7
    a = scored(inputs, tokens, mask, upstream=up, **WAYS[way])
    moved = inputs | {"hidden": inputs["hidden"][order]}
    b = scored(moved, tokens[order], mask[order], upstream=tuple(u[order] for u in up), **WAYS[way])
    assert (a.logprobs[order] - b.logprobs).abs().max() <= 2e-6 * a.logprobs.abs().max()
    assert (a.grads["hidden"][order] - b.grads["hidden"]).norm() <= 2e-6 * b.grads["hidden"].norm()
    assert (a.grads["weight"] - b.grads["weight"]).norm() <= 2e-6 * a.grads["weight"].norm()
