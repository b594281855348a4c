"""What the test_linear_* files compare with: hidden @ weight.T + bias in float64 under the oracle of logits.

The same product made by F.linear in the inputs' own dtype is what plain PyTorch reaches: it sets the bar where the
rounding of the product, or of its inputs, decides. Only the product differs; softmax, loss and their gradients are the
oracle's.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from checks import assert_close, leaf
from oracle import LossSpec, to_numpy
from torch import Tensor
from torch.nn.functional import linear

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss, logprobs_from_hidden
from ppo_kernels.heads import products_dtype

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
Grads = dict[str, Any]  # the oracle's also say how large the terms are that each is the sum of


def head(shape, width, size=6, dtype=torch.float32, bias=True, scale=2.0) -> dict[str, Tensor]:
    """Hidden states of shape [*shape, size] and a head of `width` tokens; logits of standard deviation `scale`."""
    result = {"hidden": torch.randn(*shape, size), "weight": torch.randn(width, size) * scale / size**0.5}
    if bias:
        result["bias"] = torch.randn(width)
    return {name: x.to(dtype) for name, x in result.items()}


def autocast(inputs: dict[str, Tensor], dtype: torch.dtype | None):
    return torch.autocast(inputs["hidden"].device.type, dtype) if dtype is not None else nullcontext()


def as_multiplied(inputs: dict[str, Tensor], under: torch.dtype | None) -> dict[str, Tensor]:
    """Autocast rounds all but float64, in plain PyTorch too: what is compared is what follows."""
    return {k: x if under is None or x.dtype == torch.float64 else x.to(under) for k, x in inputs.items()}


class Product:
    """The logits, in `dtype` or the inputs' own, and the gradients of what they are made of.

    Rows that do not count and columns that do not exist are left out: they may hold anything.
    """

    def __init__(self, inputs, rows=None, vocab_size=None, dtype=None, under=None):
        self.leaves = {k: x.detach().to(dtype or x.dtype).requires_grad_() for k, x in inputs.items()}
        hidden, weight, bias = (self.leaves.get(k) for k in ("hidden", "weight", "bias"))
        if rows is not None:
            hidden = hidden.masked_fill(~rows[..., None], 0)
        with autocast(inputs, under):
            self.logits = linear(hidden, weight[:vocab_size], None if bias is None else bias[:vocab_size])

    def grads(self, d_logits: np.ndarray) -> Grads:
        upstream = torch.as_tensor(d_logits).to(self.logits)
        found = torch.autograd.grad(self.logits, list(self.leaves.values()), upstream)
        grads = {name: to_numpy(x) for name, x in zip(self.leaves, found, strict=True)}
        hidden, weight = (abs(to_numpy(self.leaves[k])) for k in ("hidden", "weight"))
        d, hidden = abs(d_logits).reshape(-1, d_logits.shape[-1]), hidden.reshape(-1, hidden.shape[-1])
        used = d.any(1)
        terms = {"hidden": d @ weight[: d.shape[1]], "weight": d[used].T @ hidden[used], "bias": d.sum(0)}
        return grads | {f"terms of {k}": float(np.linalg.norm(x)) for k, x in terms.items()}


@dataclass
class Answer:
    logprobs: Any
    entropy: Any
    grads: Grads
    dtype: torch.dtype  # of the product
    loss: Any = None
    rest: Any = None  # the library's output, or the oracle's


def rows_that_count(tokens, mask, shift=False, ignore_index=None):
    """(bool of the scored tokens' shape, bool of hidden's leading shape)."""
    targets = tokens[..., 1:] if shift else tokens
    scored = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask != 0
    if ignore_index is not None:
        scored = scored & (targets != ignore_index)
    return scored, torch.nn.functional.pad(scored, (0, 1)) if shift else scored


def scored_by_oracle(inputs, tokens, mask=None, *, upstream, dtype=torch.float64, under=None, **options) -> Answer:
    shift, width = options.get("shift", False), options.get("vocab_size")
    scored, rows = rows_that_count(tokens, mask, shift, options.get("ignore_index"))
    product = Product(inputs, rows, width, dtype, under)
    scores = oracle.score(
        product.logits,
        tokens,
        scored,
        temperature=options.get("temperature", 1.0),
        softcap=options.get("logit_softcap"),
        scale=options.get("logit_scale", 1.0),
        shift=shift,
    )
    grads = product.grads(scores.d_logits(*(None if u is None else to_numpy(u) for u in upstream)))
    return Answer(scores.logprobs, scores.entropy, grads, product.logits.dtype)


def scored(inputs, tokens, mask=None, *, upstream, under=None, **options) -> Answer:
    """Log-probs, entropy and gradients by the library."""
    leaves = {name: leaf(x) for name, x in inputs.items()}
    with autocast(inputs, under):
        lp, h = logprobs_from_hidden(tokens=tokens, mask=mask, return_entropy=True, **leaves, **options)
    torch.autograd.backward([lp, h], [lp.new_tensor(0).expand_as(lp) if u is None else u for u in upstream])
    return Answer(lp.detach(), h.detach(), {name: x.grad for name, x in leaves.items()}, lp.dtype)


def loss_by_oracle(inputs, tokens, old, advantages, mask=None, *, spec, dtype=torch.float64, under=None, **rest):
    _, rows = rows_that_count(tokens, mask, rest.get("shift", False))
    product = Product(inputs, rows, spec.vocab_size, dtype, under)
    ref, shift = rest.pop("ref_logprobs", None), rest.pop("shift", False)
    names = {"logit_softcap": "softcap", "logit_scale": "scale", "temperature": "temperature"}
    options = {"temperature": spec.temperature} | {to: rest.pop(name) for name, to in names.items() if name in rest}
    scores = oracle.score(product.logits, tokens, mask, shift=shift, **options)
    found = oracle.ppo(scores.logprobs, old, advantages, mask, spec=spec, entropy=scores.entropy, ref=ref, **rest)
    grads = product.grads(scores.d_logits(found.d_logprobs, found.d_entropy))
    if rest.get("values") is not None:
        grads["values"] = found.d_values
    return Answer(scores.logprobs, scores.entropy, grads, product.logits.dtype, found.loss, found)


def lossy(inputs, tokens, old, advantages, mask=None, *, config=None, upstream=1.0, under=None, **rest) -> Answer:
    """The loss and its gradients by the library."""
    leaves = {name: leaf(x) for name, x in inputs.items()}
    if rest.get("values") is not None:
        leaves["values"] = rest["values"] = leaf(rest["values"])
    head_inputs = {name: leaves[name] for name in inputs}
    with autocast(inputs, under):
        out = fused_linear_ppo_loss(
            tokens=tokens,
            old_logprobs=old,
            advantages=advantages,
            mask=mask,
            config=config or PPOLossConfig(),
            **head_inputs,
            **rest,
        )
    (out.loss * upstream).sum().backward()
    return Answer(
        out.logprobs, out.entropy, {k: x.grad for k, x in leaves.items()}, out.logprobs.dtype, out.loss.detach(), out
    )


def distance(got: Any, want: Any) -> float:
    got, want = to_numpy(got), to_numpy(want)
    assert got.shape == want.shape, (got.shape, want.shape)
    return float(np.linalg.norm(got - want))


def luck(dtype: torch.dtype, device: torch.device) -> float:
    """Where products are made in 16 bits, both sides round at random and plain PyTorch may be lucky in a single draw;
    test_linear_precision.py holds the mean of many draws to it."""
    return 2.0 if products_dtype(dtype, device) == dtype else 1.1


def assert_grads(got: Grads, want: Grads, plain: Grads, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Frobenius error. fp32: 2e-6 of the gradient, or twice what fp32 products lose, or, where the terms of a sum
    cancel, two roundings of theirs. bf16, fp16: `luck` times the error of plain PyTorch.

    scale: what the oracle's gradients are multiplied by.
    """
    for name, x in got.items():
        assert x is not None, f"no gradient for {name}"
        exact = want[name] * scale
        assert np.isfinite(to_numpy(x)).all(), name
        error, size, reached = distance(x, exact), float(np.linalg.norm(exact)), distance(plain[name] * scale, exact)
        terms = want.get(f"terms of {name}", 0.0) * abs(scale)
        bar = {
            torch.float64: 1e-12 * size + 4e-16 * terms,
            torch.float32: max(2e-6 * size, 2 * reached, 2.4e-7 * terms),
        }.get(dtype, luck(dtype, x.device) * reached + 2e-6 * size)
        assert error <= bar, f"{name}: error {error:.3g} > {bar:.3g} of {size:.3g}, plain PyTorch {reached:.3g}"


def assert_rows(got: Any, want: np.ndarray, plain: np.ndarray, dtype: torch.dtype, what: str) -> None:
    """fp32: 2e-6 * max(1, |value|) or twice what the product in fp32 loses, each; bf16, fp16: what plain PyTorch loses
    altogether."""
    value = to_numpy(got)
    assert value.shape == want.shape, (what, value.shape, want.shape)
    error, reached = np.abs(value - want), np.abs(plain - want)
    unit = 2e-6 if dtype != torch.float64 else 1e-12
    allowed = unit * np.maximum(1.0, np.abs(want))
    if dtype in (torch.float32, torch.float64):
        allowed = np.maximum(allowed, 2 * reached.max(initial=0.0))
        assert (error <= allowed).all(), f"{what}: {error.max():.3g}, plain PyTorch {reached.max():.3g}"
    else:
        bar = 1.1 * np.linalg.norm(reached) + np.linalg.norm(allowed)
        assert np.linalg.norm(error) <= bar, f"{what}: {np.linalg.norm(error):.3g} > {bar:.3g}"


def check_scores(inputs, tokens, mask=None, *, upstream, under=None, how=None, **options) -> Answer:
    """The library's answer, which is the oracle's. how: what must not matter to the result, such as chunk_bytes."""
    got = scored(inputs, tokens, mask, upstream=upstream, under=under, **options, **(how or {}))
    want = scored_by_oracle(as_multiplied(inputs, under), tokens, mask, upstream=upstream, **options)
    plain = scored_by_oracle(inputs, tokens, mask, upstream=upstream, dtype=None, under=under, **options)
    assert got.logprobs.dtype == (torch.float64 if plain.dtype == torch.float64 else torch.float32)
    assert_rows(got.logprobs, want.logprobs, plain.logprobs, plain.dtype, "logprob")
    assert_rows(got.entropy, want.entropy, plain.entropy, plain.dtype, "entropy")
    assert_grads(got.grads, want.grads, plain.grads, plain.dtype)
    for name, x in inputs.items():
        assert got.grads[name].dtype == x.dtype, name
    return got


def check_loss(inputs, *args, options=None, upstream=1.0, under=None, how=None, model=None, **rest):
    """(the library's answer, the oracle's), which agree. model: logit_softcap and logit_scale."""
    options, model = options or {}, model or {}
    got = lossy(
        inputs, *args, config=PPOLossConfig(**options, **model), upstream=upstream, under=under, **rest, **(how or {})
    )
    want, plain = (
        loss_by_oracle(x, *args, spec=LossSpec(**options), dtype=dtype, under=u, **rest, **model)
        for x, dtype, u in ((as_multiplied(inputs, under), torch.float64, None), (inputs, None, under))
    )
    assert want.rest.margin > 1e-4, "an input too near a switch of branch"
    assert_rows(got.logprobs, want.logprobs, plain.logprobs, plain.dtype, "logprob")
    if got.entropy is not None:
        assert_rows(got.entropy, want.entropy, plain.entropy, plain.dtype, "entropy")
    moved = abs(want.rest.d_logprobs * (to_numpy(got.logprobs) - want.logprobs)).sum()
    if got.entropy is not None:
        moved += abs(want.rest.d_entropy * (to_numpy(got.entropy) - want.entropy)).sum()
    error = abs(float(got.loss) - want.loss)  # what the errors of log-probs and entropy make it, and no more
    assert error <= 3e-6 * (1 + abs(want.loss)) + 1.2 * moved, (float(got.loss), want.loss, moved)
    assert_grads(got.grads, want.grads, plain.grads, plain.dtype, scale=upstream)
    return got, want


def a_batch(inputs, tokens, spread=0.1, shift=False):
    """(old log-probs at a ratio near 1 but not 1, advantages) for these tokens."""
    zero = torch.zeros(()).expand(rows_that_count(tokens, None, shift)[0].shape)
    new = scored_by_oracle(inputs, tokens, upstream=(zero, None), shift=shift).logprobs
    new = torch.as_tensor(new).float().to(tokens.device)
    step = torch.linspace(-1, 1, new.numel()).view(new.shape) * spread + 0.013
    advantages = torch.randn(new.shape)
    return new - step, torch.where(advantages.abs() < 0.05, 0.5, advantages)


@pytest.mark.cpu_only("float64 on the CPU both times")
def test_the_products_gradients_are_those_written_out():
    inputs, tokens = head((3, 4), 9, dtype=torch.float64), torch.randint(9, (3, 4))
    up = torch.randn(3, 4, dtype=torch.float64)
    want = scored_by_oracle(inputs, tokens, upstream=(up, None))
    p = torch.softmax(inputs["hidden"] @ inputs["weight"].T + inputs["bias"], -1)
    d = up[..., None] * (torch.nn.functional.one_hot(tokens, 9) - p)
    assert_close(want.grads["hidden"], d @ inputs["weight"], 1e-12, scale=1.0)
    assert_close(want.grads["weight"], torch.einsum("btv,bth->vh", d, inputs["hidden"]), 1e-12, scale=1.0)
    assert_close(want.grads["bias"], d.sum((0, 1)), 1e-12, scale=1.0)
