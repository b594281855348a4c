"""The vocabulary on 2 and 4 ranks gives what one process gives: the same numbers on every rank, and each rank the
gradient of its own columns.

Every rank draws the same cases and keeps its part of the vocabulary; the reference is the oracle on all of it. One
launch of 2 and one of 4 ranks run all the cases (importing torch is most of a launch), and the tests look at what came
back. Padding, and rows that do not count, hold NaN and infinities.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ranks
import torch
import variants_oracle
from checks import assert_close, assert_logits_grad, leaf, same_bits
from oracle import to_numpy
from vocab_parallel_cases import LAYOUTS, LINEAR, LOSSES, WORLDS, Case, H, cases, terms_of
from vocab_parallel_inputs import drawn, head_of, scores_of

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss

pytestmark = ranks.MARKS


# Relative errors of log-probs, and of gradients: the product's rounding decides where there is a head.
LOGITS_BARS = {torch.float64: (1e-12, 1e-12)}
LINEAR_BARS = {
    torch.float32: (2e-6, 2e-6),
    torch.float64: (1e-12, 1e-12),
    torch.bfloat16: (3e-2, 3e-2),
    torch.float16: (4e-3, 4e-3),
}


@pytest.mark.parametrize(("world", "case"), [(world, case) for world in WORLDS for case in cases(world)], ids=str)
def test_a_spread_vocabulary_gives_what_one_process_gives(request, world, case):
    check(case, [got[str(case)] for got in request.getfixturevalue(f"vocab_{world}_ranks")])


def test_the_group_still_works_after_errors_on_every_rank(vocab_ranks):
    check(Case("linear", "padded", "chunks"), [got["and then"] for got in vocab_ranks])


def check(case: Case, results: list[dict[str, Any]]) -> None:
    o, world = case.options, len(results)
    x = drawn(case, world)
    scores = x.get("scores") or scores_of(x, case, world)
    dtype = o.get("autocast", o.get("dtype", torch.float32))
    values, bar = LINEAR_BARS[dtype] if case.entry in LINEAR else LOGITS_BARS.get(dtype, (5e-7, 1e-6))
    for got in results:
        for name in ("logprobs", "entropy", "loss", "terms", "metrics"):
            if results[0].get(name) is not None:
                assert same_bits(got[name], results[0][name]), f"{name} differs from rank to rank"
    first = results[0]
    assert_close(first["logprobs"], scores.logprobs, values, scale=1.0, what="logprobs")
    if o.get("entropy", True) and "call_config" not in o:
        assert_close(first["entropy"], scores.entropy, 2 * values, scale=1.0, what="entropy")
    else:
        assert first["entropy"] is None
    upstream, d_values = upstream_of(x, case, scores, first, values)
    if not o.get("no_grad"):
        check_grads(case, results, x, scores.d_logits(*upstream), bar)
    if d_values is not None:
        for got in results:
            assert_close(got["grads"]["values"], d_values, 1e-6, scale=abs(d_values).max())


def upstream_of(x, case, scores, got, bar) -> tuple[tuple[np.ndarray, np.ndarray | None], np.ndarray | None]:
    """What flows into (log-probs, entropy), and into values; the loss is compared on the way."""
    o = case.options
    factor = 3 if o.get("twice") else 1
    if case.entry not in LOSSES:
        c, e = (factor * to_numpy(u) for u in x["upstream"])
        if o.get("upstream") == "entropy":
            c = np.zeros_like(c)
        return (c, None if not o.get("entropy", True) or o.get("upstream") == "logprobs" else e), None
    lp, h = (torch.from_numpy(s).requires_grad_() for s in (scores.logprobs, scores.entropy))
    values = leaf(x["values"].double()) if o.get("values") else None
    found = variants_oracle.loss(
        lp,
        x["old_logprobs"],
        x["advantages"],
        x["valid"],
        options=variants_oracle.Options(**terms_of(case)),
        entropy=h,
        values=values,
        returns=x.get("returns"),
        ref_logprobs=x["ref_logprobs"],
        cu_seqlens=x.get("cu_seqlens"),
        shift=o.get("shift", False),
        **{name: o["call"][name] for name in ("loss_scale", "normalizer") if name in o.get("call", {})},
    )
    if bar < 1e-4:
        assert found.margin > 1e-3 or not x["valid"].any()  # or fp32 could take another branch than the oracle
    size = max(found.size, 1.0)
    assert_close(got["loss"], found.loss, 2 * bar, scale=size, what="loss")
    assert_close(got["terms"], [found.policy_loss, found.value_loss, found.kl], 4 * bar, scale=size, what="terms")
    assert got["metrics"][0] == x["valid"].sum()
    leaves = [lp, h] if values is None else [lp, h, values]
    weight = factor * x["upstream"].double()
    grads = torch.autograd.grad((found.loss * weight).sum(), leaves, allow_unused=True, materialize_grads=True)
    return (grads[0].numpy(), grads[1].numpy()), None if values is None else grads[2].numpy()


def check_grads(case: Case, results, x, d_logits: np.ndarray, bar: float) -> None:
    o, layout, world = case.options, LAYOUTS[case.layout], len(results)
    existing = layout.existing[world]
    frozen = o.get("frozen", ())
    for name in case.tensors():
        if name in frozen:
            assert all(got["grads"][name] is None for got in results)
    grads = {name: [got["grads"][name] for got in results] for name in case.tensors() if name not in frozen}
    for name, parts in grads.items():
        assert {part.dtype for part in parts} == {x[name].dtype}
        if name != "hidden":
            axis = -1 if name == "logits" else 0
            widths = [part.shape[axis] for part in parts]
            cuts = [layout.part(rank, world) for rank in range(world)]
            assert widths == [cut.stop - cut.start for cut in cuts]
            whole = torch.cat(parts, axis)
            padding = whole[..., existing:] if name == "logits" else whole[existing:]
            assert (padding == 0).all(), f"the gradient of padding is {padding}"
            grads[name] = whole[..., :existing] if name == "logits" else whole[:existing]
    if case.entry not in LINEAR:
        assert_logits_grad(grads["logits"], d_logits, 2 * bar if case.layout == "wide" else bar)
        return
    hidden, weight, _ = (t.numpy() for t in head_of(x, case, world))
    flat = d_logits.reshape(-1, existing)
    want = {"hidden": d_logits @ weight, "weight": flat.T @ hidden.reshape(-1, H), "bias": flat.sum(0)}
    absolute = {
        "hidden": abs(d_logits) @ abs(weight),
        "weight": abs(flat).T @ abs(hidden).reshape(-1, H),
        "bias": abs(flat).sum(0),
    }
    if "hidden" in grads:
        parts = grads["hidden"]
        if o.get("call", {}).get("reduce_hidden_grad", True):
            assert all(same_bits(part, parts[0]) for part in parts)
            grads["hidden"] = parts[0]
        else:
            grads["hidden"] = sum(part.double() for part in parts)
            if existing > 1 and flat.any():
                assert not all(same_bits(part, parts[0]) for part in parts)
    for name, found in grads.items():
        error = np.linalg.norm(to_numpy(found) - want[name])
        size = np.linalg.norm(absolute[name])
        assert error <= bar * size, f"{name}: error {error:.3g} of {size:.3g}"


def test_the_code_of_the_page_gives_what_one_process_gives(vocab_2_ranks):
    """Three calls of one loss, whose gradients add up in the weight."""
    pages = [got["page"] for got in vocab_2_ranks]
    x = pages[0]
    hidden, weight = leaf(x["hidden"]), leaf(torch.cat([page["weight"] for page in pages]))
    config = PPOLossConfig(vocab_size=99, entropy_coef=0.01)
    given = {"old_logprobs": x["old_logprobs"], "advantages": x["advantages"], "config": config}
    fused_linear_ppo_loss(hidden, weight, x["tokens"], **given).loss.backward()
    found = torch.cat([page["weight.grad"] for page in pages])
    assert_logits_grad(found, 3 * to_numpy(weight.grad))
    assert_logits_grad(torch.cat([page["mine.grad"] for page in pages]), to_numpy(hidden.grad))
    for page in pages:
        assert_logits_grad(page["hidden.grad"], to_numpy(hidden.grad))
