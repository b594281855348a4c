"""A vocabulary on some of the ranks: beside data parallelism, and on a mesh of two dimensions."""

from __future__ import annotations

import pytest
import ranks
import torch
import variants_oracle
from checks import assert_close, leaf
from vocab_parallel_cases import ENTRIES, LINEAR, LOSSES
from vocab_parallel_groups import batch, parts

pytestmark = ranks.MARKS


@pytest.mark.parametrize("entry", ENTRIES)
def test_two_shards_of_the_vocabulary_for_each_of_two_parts_of_the_rows(vocab_4_ranks, entry):
    x = batch()
    tensors = {name: leaf(x[name].double()) for name in (("hidden", "weight") if entry in LINEAR else ("logits",))}
    logits = tensors["hidden"] @ tensors["weight"].T if entry in LINEAR else tensors["logits"]
    log_p = torch.log_softmax(logits[:, :-1], -1)
    lp, h = log_p.gather(-1, x["tokens"][:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    if entry in LOSSES:
        o = variants_oracle.Options(entropy_coef=0.02)
        loss = variants_oracle.loss(lp, x["old_logprobs"], x["advantages"], x["mask"], options=o, entropy=h).loss
    else:
        loss = lp[x["mask"]].mean()
    loss.backward()
    results = [got["tensor and data parallel"][entry] for got in vocab_4_ranks]
    for rank, got in enumerate(results):
        assert_close(got["loss"], loss, 2e-6, scale=1.0)
        rows, columns = parts(rank)
        wants = {"hidden": (rows,), "weight": (columns,), "logits": (rows, columns)}
        for name, grad in got["grads"].items():
            want = tensors[name].grad[wants[name]]
            assert_close(grad, want, 2e-6, scale=float(tensors[name].grad.abs().max()), what=name)


def test_a_mesh_with_copies_over_its_other_dimension(vocab_4_ranks):
    x = batch()
    logits, weight = leaf(x["logits"].double()), leaf(x["weight"].double())
    for scored in (logits, x["hidden"].double() @ weight.T):
        lp = torch.log_softmax(scored, -1).gather(-1, x["tokens"][:, None])[:, 0]
        lp[x["mask"]].sum().backward()
    for rank, got in enumerate(vocab_4_ranks):
        found = got["mesh of two dimensions"]
        assert_close(found["logits"], logits.grad.chunk(2, -1)[rank % 2], 2e-6, scale=1.0)
        assert_close(found["weight"], weight.grad.chunk(2, 0)[rank % 2], 2e-6, scale=1.0)
