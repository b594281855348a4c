"""A vocabulary on several ranks: rows at the edges of fp32, whose ranks differ most, and the bits of a row."""

from __future__ import annotations

from math import inf

import numpy as np
import oracle
import pytest
import ranks
import torch
from checks import assert_close, assert_within, same_bits
from oracle import to_numpy
from torch import Tensor
from vocab_parallel_extremes import (
    EXTREME,
    EXTREME_OPTIONS,
    EXTREME_UPSTREAM,
    HEAD_BIAS,
    NOT_A_NUMBER,
    extreme_head_rows,
    extreme_rows,
)

pytestmark = ranks.MARKS


@pytest.mark.parametrize("option", EXTREME_OPTIONS)
@pytest.mark.parametrize("name", EXTREME)
def test_extreme_rows(vocab_ranks, name, option):
    """Elementwise: what is left beside a sure token keeps its relative precision."""
    i, options = list(EXTREME).index(name), EXTREME_OPTIONS[option]
    results = [got["extreme rows"][option] for got in vocab_ranks]
    logits, tokens = extreme_rows(options.get("copies", 1))
    temperature, softcap = options.get("temperature", 1.0), options.get("logit_softcap")
    row = oracle.score_row(
        np.where((to_numpy(logits[i]) == inf) & (softcap is not None), 1e300, to_numpy(logits[i])),
        int(tokens[i]),
        float(temperature[i]) if isinstance(temperature, Tensor) else temperature,
        softcap=softcap,
    )
    bad = name.startswith(NOT_A_NUMBER) and not (name.startswith("+inf") and softcap)  # which bounds it
    assert bad == np.isnan(row.logprob)
    for got in results:
        assert same_bits(got["logprobs"][i], results[0]["logprobs"][i])
        assert_close(got["logprobs"][i], row.logprob, 1e-6, what="logprob")
        assert_close(got["entropy"][i], row.entropy, 1e-6, scale=0.1, what="entropy")
    grad = torch.cat([got["grad"][i] for got in results])
    if bad:
        assert grad.isnan().any()
        return
    want = EXTREME_UPSTREAM[0] * row.d_logprob + EXTREME_UPSTREAM[1] * row.d_entropy
    if np.isfinite(row.logprob):
        assert_close(grad, want, 5e-6, scale=1e-30, what="gradient")
    else:
        assert_within(grad, want, 2e-6, "gradient")


@pytest.mark.parametrize("bias", HEAD_BIAS)
def test_extreme_rows_of_a_head(vocab_ranks, bias):
    """A bias of -inf takes a column away; one rank's may all be away."""
    hidden, tokens = extreme_head_rows()
    scores = oracle.score(hidden.double() + torch.tensor(HEAD_BIAS[bias], dtype=torch.float64), tokens)
    results = [got["extreme rows of a head"][bias] for got in vocab_ranks]
    for got in results:
        assert_close(got["logprobs"], scores.logprobs, 1e-6, what="logprobs")
        assert_close(got["entropy"], scores.entropy, 1e-6, scale=0.1, what="entropy")
    some = np.isfinite(scores.logprobs)
    d_logits = scores.d_logits(*(u * some for u in EXTREME_UPSTREAM))
    want = {"hidden": d_logits, "weight": d_logits.T @ to_numpy(hidden), "bias": d_logits.sum(0)}
    assert_close(results[0]["hidden"], want["hidden"], 1e-5, scale=1e-6, what="hidden")
    for name in ("weight", "bias"):
        found = torch.cat([got[name] for got in results])
        assert_close(found, want[name], 2e-6, scale=abs(want[name]).max(), what=name)


@pytest.mark.parametrize("where", ["alone", "masked", "in the loss", "ratio of 1"])
def test_a_row_is_the_same_bits_in_any_batch_and_in_the_loss(vocab_ranks, where):
    assert all(got["same bits"][where] for got in vocab_ranks)
