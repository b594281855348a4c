"""Random shapes, dtypes, strides, masks and options against the oracle."""

from __future__ import annotations

import numpy as np
import oracle
import torch
from checks import assert_close, assert_logits_grad, assert_logprobs, examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import LossSpec

from ppo_kernels import PPOLossConfig, fused_ppo_loss, gae, masked_whiten

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MASK_DTYPES = [torch.bool, torch.int64, torch.float32, torch.uint8]


def maybe(strategy):
    return st.none() | strategy


@st.composite
def loss_options(draw):
    options = {
        "clip_low": draw(st.sampled_from([0.0, 0.1, 0.2, 0.5])),
        "clip_high": draw(maybe(st.sampled_from([0.15, 0.28, 1.0]))),
        "dual_clip": draw(maybe(st.sampled_from([1.5, 3.0]))),
        "log_ratio_clamp": draw(maybe(st.sampled_from([0.3, 20.0]))),
        "entropy_coef": draw(st.sampled_from([0.0, 0.01, -0.3])),
        "kl_coef": draw(st.sampled_from([0.0, 0.1])),
        "kl_estimator": draw(st.sampled_from(["k1", "k2", "k3", "abs"])),
        "kl_input_clamp": draw(maybe(st.just(0.5))),
        "kl_output_clamp": draw(maybe(st.just(0.4))),
        "value_clip": draw(maybe(st.just(0.3))),
        "vf_coef": draw(st.sampled_from([0.5, 0.1])),
        "value_loss_scale": draw(st.sampled_from([0.5, 1.0])),
        "temperature": draw(st.sampled_from([1.0, 0.6, 1.7])),
        "aggregation": draw(
            st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
        ),
        "agg_include_empty": draw(st.booleans()),
    }
    return options | {"agg_max_len": draw(st.integers(1, 20))}


def strided(x, how):
    """The same values under other strides; the last axis of logits stays dense except for 'gaps'."""
    if how == "plain" or x.ndim < 2:
        return x
    if how == "swapped":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.full((*x.shape[:-1], x.shape[-1] * 2), 1e4).to(x.dtype)
    if how == "slice":
        wide[..., 1 : 1 + x.shape[-1]] = x
        return wide[..., 1 : 1 + x.shape[-1]]
    wide[..., ::2] = x
    return wide[..., ::2]


STRIDES = st.sampled_from(["plain", "swapped", "slice", "gaps"])


@settings(max_examples=examples(300))
@given(
    options=loss_options(),
    rows=st.integers(1, 4),
    length=st.integers(2, 6),
    width=st.sampled_from([1, 2, 3, 7, 16, 33, 130]),
    dtype=st.sampled_from(DTYPES),
    layout=STRIDES,
    token_layout=STRIDES,
    mask_kind=st.sampled_from(["none", "random", "empty row", "empty"]),
    mask_dtype=st.sampled_from(MASK_DTYPES),
    shift=st.booleans(),
    on_policy=st.booleans(),
    with_values=st.booleans(),
    value_mask=st.booleans(),
    weights=st.booleans(),
    per_sequence=st.booleans(),
    inplace=st.booleans(),
    normalizer=maybe(st.sampled_from([1, 7.5])),
    seed=st.integers(0, 2**20),
    padded_vocab=st.booleans(),
    neg_inf=st.booleans(),
)
def test_fused_ppo_loss(
    options,
    rows,
    length,
    width,
    dtype,
    layout,
    token_layout,
    mask_kind,
    mask_dtype,
    shift,
    on_policy,
    with_values,
    value_mask,
    weights,
    per_sequence,
    inplace,
    normalizer,
    seed,
    padded_vocab,
    neg_inf,
):
    torch.manual_seed(seed)
    shape = (rows, length - 1) if shift else (rows, length)
    tokens = torch.randint(width, (rows, length))
    logits = torch.randn(rows, length, width + (3 if padded_vocab else 0)).to(dtype) * 2
    if padded_vocab:
        logits[..., width:] = 50.0
        options["vocab_size"] = width
    if neg_inf and width > 2:
        banned = torch.rand(rows, length, width) < 0.3
        banned.scatter_(-1, (torch.roll(tokens, -1, 1) if shift else tokens)[..., None], False)
        logits[..., :width] = logits[..., :width].masked_fill(banned, -torch.inf)
    mask = None if mask_kind == "none" else torch.rand(shape) < 0.6
    if mask_kind == "empty row":
        mask[0] = False
    if mask_kind == "empty":
        mask[:] = False
    scores = oracle.score(
        logits, tokens, mask, temperature=options["temperature"], vocab_size=options.get("vocab_size"), shift=shift
    )
    lp = torch.from_numpy(scores.logprobs).float().to(logits.device)
    old = None if on_policy else lp + torch.randn(shape) * 0.5
    adv = torch.randn(rows) if per_sequence else torch.randn(shape)
    extra = {"normalizer": normalizer, "token_weights": torch.rand(shape) * 2 if weights else None}
    values = None
    if with_values:
        values = torch.randn(shape)
        extra |= {"returns": torch.randn(shape), "old_values": values + torch.randn(shape) * 0.5}
        if value_mask:
            extra["value_mask"] = torch.rand(shape) < 0.5
    elif options["value_clip"] is not None:
        options["value_clip"] = None
    ref = lp + torch.randn(shape) * 0.5 if options["kl_coef"] else None

    want = oracle.fused(
        logits, tokens, old, adv, mask, spec=LossSpec(**options), shift=shift, ref=ref, values=values, **extra
    )
    assume((on_policy and want.result.margin > 1e-12) or want.result.margin > 2e-5)

    x = strided(logits, layout).detach().requires_grad_()
    inplace = inplace and layout != "gaps"  # refused: the last axis has to be dense
    if values is not None:
        values = values.requires_grad_()
    out = fused_ppo_loss(
        x,
        strided(tokens, token_layout),
        old,
        adv,
        None if mask is None else strided(mask.to(mask_dtype), token_layout),
        config=PPOLossConfig(**options),
        shift=shift,
        ref_logprobs=ref,
        values=values,
        inplace_grad=inplace,
        loss_scale=1.25,
        **extra,
    )
    out.loss.backward()
    assert_logprobs(out.logprobs, want.scores.logprobs)
    size = 1.0 + float(np.abs(oracle.to_numpy(adv)).max()) * 3 * (2 if weights else 1) * (
        length if "sum" in options["aggregation"] else 1
    )
    assert_close(out.loss, want.result.loss * 1.25, 1e-6, scale=size)
    assert_logits_grad(x.grad.contiguous(), want.d_logits * 1.25)
    if values is not None:
        assert_close(values.grad, want.result.d_values * 1.25, 5e-7, scale=float(np.abs(want.result.d_values).max()))


@settings(max_examples=examples(300))
@given(
    rows=st.integers(1, 5),
    length=st.integers(1, 70),
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.3, 0.0]),
    mode=st.sampled_from(["skip", "zero", "dense"]),
    masked=st.booleans(),
    mask_dtype=st.sampled_from(MASK_DTYPES),
    layout=STRIDES,
    bootstrap=st.booleans(),
    terminated=st.booleans(),
    next_values=st.booleans(),
    truncated=st.booleans(),
    packed=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
)
def test_gae(
    rows,
    length,
    gamma,
    lam,
    mode,
    masked,
    mask_dtype,
    layout,
    bootstrap,
    terminated,
    next_values,
    truncated,
    packed,
    dtype,
    seed,
):
    torch.manual_seed(seed)
    shape = (rows, length)
    r, v = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    mask = torch.rand(shape) < 0.7 if masked else None
    live = torch.ones(shape, dtype=torch.bool) if mask is None else mask
    options = {"gamma": gamma, "lam": lam, "mask_mode": mode}
    if mode == "skip" and masked:  # never read
        r[~mask], v[~mask] = float("nan"), float("inf")
    if terminated:
        options["terminated"] = (torch.rand(shape) < 0.2) & live
    if next_values:
        options["next_values"] = torch.randn(shape) * live
        if truncated:
            options["truncated"] = (torch.rand(shape) < 0.2) & live
    if packed:
        cuts = sorted(np.random.default_rng(seed).integers(0, rows * length + 1, rows).tolist())
        options["cu_seqlens"] = torch.tensor([0, *cuts, rows * length], dtype=torch.int32)
        r, v, mask = r.flatten(), v.flatten(), None if mask is None else mask.flatten()
        options = {k: x.flatten() if isinstance(x, torch.Tensor) and x.ndim == 2 else x for k, x in options.items()}
    if bootstrap:
        options["bootstrap_value"] = torch.randn(rows + 1 if packed else rows)
    got = gae(
        strided(r, layout),
        strided(v, layout),
        None if mask is None else strided(mask.to(mask_dtype), layout),
        **options,
    )
    want = oracle.gae(r, v, mask, **options)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, 5e-7, scale=max(1.0, float(np.abs(w).max())))


@settings(max_examples=examples(60))
@given(
    shape=st.sampled_from([(1,), (5,), (3, 7), (2, 1, 9)]),
    masked=st.booleans(),
    shift_mean=st.booleans(),
    unbiased=st.booleans(),
    offset=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**20),
)
def test_masked_whiten(shape, masked, shift_mean, unbiased, offset, seed):
    torch.manual_seed(seed)
    x, mask = torch.randn(shape) + offset, torch.rand(shape) < 0.6 if masked else None
    options = {"shift_mean": shift_mean, "unbiased": unbiased}
    assert_close(masked_whiten(x, mask, **options), oracle.whiten(x, mask, **options), 5e-7, scale=1.0)
