"""Random inputs for the losses of other trainers, the same call to the library and to the oracle, and their comparison.

The inputs are away from every switch of branch; masked slots of all of them hold NaN and infinities.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import variants_oracle as oracle
from checks import assert_close, assert_entropy, assert_logits_grad, assert_logprobs, assert_within
from oracle import to_numpy
from torch import Tensor

from ppo_kernels import PPOLossConfig, fused_ppo_loss, ppo_loss
from ppo_kernels.config import PER_TOKEN_OUTPUTS

EPSILON = {torch.float32: 5e-7, torch.float64: 1e-13}
GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30)
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "none",
)


def draw_options(rng: random.Random, fused: bool) -> dict[str, Any]:
    """Any combination that PPOLossConfig accepts; rollout_* and value_* are there whether or not they are used."""

    def maybe(*choices: Any) -> Any:
        return rng.choice((None, *choices))

    options: dict[str, Any] = {
        "loss_type": rng.choice(("ppo", "cispo", "reinforce", "sapo")),
        "ratio_level": rng.choice(("token", "sequence", "sequence_token")),
        "clip_low": rng.choice((0.05, 0.2)),
        "clip_high": maybe(0.28),
        "log_ratio_clamp": maybe(0.3, 20.0),
        "entropy_coef": rng.choice((0.0, 0.02)),
        "kl_coef": rng.choice((0.0, 0.1)),
        "kl_estimator": rng.choice(("k1", "k2", "k3", "abs")),
        "kl_gradient": rng.choice(("autograd", "k2", "is_weighted", "score")),
        "value_clip": maybe(0.3),
        "vf_coef": rng.choice((0.5, 1.0)),
        "value_loss_scale": rng.choice((0.5, 1.0)),
        "value_loss_type": rng.choice(("mse", "huber")),
        "huber_delta": 0.7,
        "aggregation": rng.choice(AGGREGATIONS),
        "agg_max_len": 9.0,
        "agg_include_empty": rng.random() < 0.5,
        "rollout_is_level": rng.choice(("token", "sequence", "sequence_geomean")),
        "rollout_is_mode": rng.choice(("truncate", "mask", "seq_mask")),
        "rollout_is_min": maybe(0.6),
        "rollout_is_max": maybe(1.5),
        "rollout_mask_in_denominator": rng.random() < 0.5,
        "nonfinite": rng.choice(("propagate", "mask")),
        "sapo_tau_pos": rng.choice((1.0, 2.5)),
        "temperature": rng.choice((1.0, 0.7)) if fused else 1.0,
        "vocab_size": rng.choice((None, 11)) if fused else None,
    }
    if rng.random() < 0.4:
        options |= {"kl_input_clamp": maybe(0.5), "kl_output_clamp": maybe(0.3)}
    if options["loss_type"] == "ppo":
        options["dual_clip"] = maybe(1.5)
    if options["loss_type"] == "cispo":
        options |= {"cispo_ratio_min": maybe(0.9), "cispo_ratio_max": maybe(1.1)}
    return options


@dataclass
class Case:
    """One call. `scores`: the differentiable inputs; `given`: all others, by the names of fused_ppo_loss."""

    options: dict[str, Any]
    scores: dict[str, Tensor]
    given: dict[str, Any]
    mask: Tensor | None = None
    shift: bool = False
    upstream: Any = 1.0
    inplace: bool = False
    want: Any = field(default=None, repr=False)
    want_grads: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def is_clear(self) -> bool:
        """Whether fp32 takes the branches that fp64 takes."""
        return self.want.margin > 3e-5

    def ask_the_oracle(self) -> None:
        wide = {name: oracle.constant(x).requires_grad_() for name, x in self.scores.items()}
        inputs = {k: v for k, v in self.given.items() if k != "tokens"} | {"shift": self.shift, "mask": self.mask}
        o = oracle.Options(**self.options)
        if "logits" in wide:
            tokens, cu_seqlens = self.given["tokens"], self.given.get("cu_seqlens")
            logprobs, entropy = oracle.score(wide["logits"], tokens, self.mask, o, cu_seqlens, self.shift)
        else:
            logprobs, entropy = wide["logprobs"], wide.get("entropy")
        self.scored = logprobs.detach(), entropy if entropy is None else entropy.detach()
        self.want = oracle.loss(logprobs, entropy=entropy, values=wide.get("values"), options=o, **inputs)
        upstream = self.upstream
        if isinstance(upstream, Tensor):
            upstream = oracle.constant(upstream)
        found = torch.autograd.grad((self.want.loss * upstream).sum(), list(wide.values()), allow_unused=True)
        for name, grad in zip(wide, found, strict=True):
            self.want_grads[name] = np.zeros(wide[name].shape) if grad is None else grad.numpy()

    def run(self) -> tuple[Any, dict[str, Tensor | None]]:
        """(the library's output, the gradients of `scores`)."""
        leaves = {name: x.clone().requires_grad_() for name, x in self.scores.items()}
        inputs = dict(leaves)
        config = PPOLossConfig(**self.options, per_token_outputs=PER_TOKEN_OUTPUTS)
        if "logits" in leaves:
            inputs["logits"] = leaves["logits"] * 1 if self.inplace else leaves["logits"]
            inputs |= {"shift": self.shift, "inplace_grad": self.inplace}
        call = fused_ppo_loss if "logits" in leaves else ppo_loss
        out = call(mask=self.mask, config=config, **inputs, **self.given)
        (out.loss * self.upstream).sum().backward()
        return out, {name: x.grad for name, x in leaves.items()}


def draw(seed: int, fused: bool, dtype: torch.dtype, **fixed: Any) -> Case:
    """A case with `fixed` options whose nearest switch of branch is far enough for fp32."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(100):
        case = attempt(rng, fused, dtype, fixed)
        if case.is_clear:
            return case
    raise AssertionError("every draw came too near a switch of branch")


def attempt(rng: random.Random, fused: bool, dtype: torch.dtype, fixed: dict[str, Any]) -> Case:
    options = draw_options(rng, fused) | fixed
    packed, shift = rng.random() < 0.4, fused and rng.random() < 0.4
    lengths = (
        [rng.randint(0, 5) for _ in range(rng.randint(1, 4))] if packed else [rng.randint(1, 5)] * rng.randint(1, 4)
    )
    if packed:
        lengths += [5, 3]  # more tokens than sequences: [N] and [B] are told apart by their size
        shape: tuple[int, ...] = (sum(lengths),)
    else:
        shape = (len(lengths), lengths[0])
    whole = (*shape[:-1], shape[-1] + shift)
    if packed:
        lengths[-1] += shift
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32

    def noise(size: float) -> Tensor:
        return torch.randn(shape, dtype=accumulate) * size

    mask = torch.rand(shape) < 0.75 if rng.random() < 0.8 else None
    given: dict[str, Any] = {}
    if packed:
        given["cu_seqlens"] = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    scores: dict[str, Tensor] = {}
    if fused:
        width = 13
        given["tokens"] = torch.randint(11, whole)
        scores["logits"] = (torch.randn(*whole, width) * 2).to(dtype)
        new, _ = oracle.score(
            scores["logits"].double().cpu(),
            given["tokens"],
            mask,
            oracle.Options(**options),
            given.get("cu_seqlens"),
            shift,
        )
        new = new.to(scores["logits"].device, accumulate)
    else:
        new = scores["logprobs"] = noise(1.0) - 2
        if options["entropy_coef"] or rng.random() < 0.5:
            scores["entropy"] = torch.rand(shape, dtype=accumulate)

    per_token: dict[str, Tensor] = {}
    old = new
    given["old_logprobs"] = None
    if rng.random() < 0.8:
        old = given["old_logprobs"] = per_token["old_logprobs"] = new - noise(0.4)
    each = rng.random() < 0.4
    sequence_shape = (len(lengths),)
    given["advantages"] = torch.randn(sequence_shape, dtype=accumulate) if each else noise(1.0)
    if not each:
        per_token["advantages"] = given["advantages"]
    if options["kl_coef"] or rng.random() < 0.5:
        given["ref_logprobs"] = per_token["ref_logprobs"] = new + noise(0.5)
    correction = rng.choice(("none", "logprobs", "logprobs", "weights"))
    if correction == "logprobs":
        given["rollout_logprobs"] = per_token["rollout_logprobs"] = old - noise(0.4)
    if correction == "weights":
        each = rng.random() < 0.5
        weights = torch.rand(sequence_shape if each else shape, dtype=accumulate) * 2
        given["rollout_is_weights"] = torch.where(weights < 0.5, 0.0, weights)
        if not each:
            per_token["rollout_is_weights"] = given["rollout_is_weights"]
    if rng.random() < 0.3:
        given["token_weights"] = per_token["token_weights"] = torch.rand(shape, dtype=accumulate) * 2
    value_mask = mask
    if rng.random() < 0.5:
        scores["values"] = noise(1.0)
        given["returns"], given["old_values"] = noise(1.0), scores["values"] + noise(0.4)
        if rng.random() < 0.5:
            value_mask = given["value_mask"] = torch.rand(shape) < 0.7
    else:
        options["value_clip"] = None
    if options["aggregation"] not in ("token-sum", "none") and rng.random() < 0.3:
        given["normalizer"] = rng.choice((5, torch.tensor(7.5)))
    given["loss_scale"] = rng.choice((1.0, 1.25))

    if options["nonfinite"] == "mask":
        for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs", "rollout_is_weights"):
            if name in per_token and rng.random() < 0.5:
                per_token[name].masked_fill_(torch.rand(shape) < 0.2, rng.choice(GARBAGE[:3]))
    # What no one may read: masked slots of everything.
    for x in per_token.values():
        spoil(x, mask, rng)
    for name in ("values", "returns", "old_values"):
        spoil(scores.get(name, given.get(name)), value_mask, rng)
    if fused and mask is not None:
        rows = scores["logits"][..., :-1, :] if shift else scores["logits"]
        rows[~mask] = rng.choice(GARBAGE[:3])
        if options["vocab_size"]:
            scores["logits"][..., options["vocab_size"] :] = float("nan")
    elif mask is not None:
        spoil(scores["logprobs"], mask, rng)
        spoil(scores.get("entropy"), mask, rng)

    upstream: Any = rng.choice((1.0, -2.0, 0.5))
    if options["aggregation"] == "none":
        upstream = torch.randn(shape, dtype=accumulate)
    inplace = fused and rng.random() < 0.4
    case = Case(options, scores, given, mask, shift, upstream, inplace)
    case.ask_the_oracle()
    return case


def spoil(x: Tensor | None, mask: Tensor | None, rng: random.Random) -> None:
    if x is not None and mask is not None and x.shape == mask.shape:
        x.masked_fill_(~mask, rng.choice(GARBAGE))


def tokens(
    entry: str, new: list[float], old: list[float], A: list[float], **options: Any
) -> tuple[list[float], list[float], Any]:
    """(policy loss, dL/dlogprob, output) of sequences of one token each, summed: any ratio_level gives the same.

    entry "logits": from two logits per token; what reaches them is divided by dlogprob/dlogit.
    """
    logprobs = torch.tensor(new).view(-1, 1)
    others = torch.tensor(old).view(-1, 1), torch.tensor(A).view(-1, 1)
    config = PPOLossConfig(**{"aggregation": "token-sum", "per_token_outputs": PER_TOKEN_OUTPUTS} | options)
    if entry == "logprobs":
        x = logprobs.requires_grad_()
        out = ppo_loss(x, *others, config=config)
        out.loss.backward()
        grad = x.grad
    else:
        rest = torch.log1p(-logprobs.double().exp()).float()
        x = torch.stack([logprobs, rest], -1).requires_grad_()
        out = fused_ppo_loss(x, torch.zeros(len(new), 1, dtype=torch.long), *others, config=config)
        out.loss.backward()
        sums = x.grad.sum(-1)[x.grad.isfinite().all(-1)]
        assert_close(sums, np.zeros(len(sums)), 1e-6, scale=1 + float(x.grad[x.grad.isfinite()].abs().max()))
        grad = x.grad[..., 0] / -torch.expm1(logprobs)
    return out.per_token["policy_loss"].flatten().tolist(), grad.flatten().tolist(), out


def assert_gradient(got: Tensor, want: np.ndarray, epsilon: float, size: float, what: str) -> None:
    """Relative Frobenius error; where the terms of a gradient cancel, `size` is what they are."""
    value = to_numpy(got)
    assert value.shape == want.shape, f"{what}: {value.shape} != {want.shape}"
    error = np.linalg.norm(value - want)  # NaN fails below
    norm = max(float(np.linalg.norm(want)), size)
    assert error <= epsilon * norm, f"{what}: error {error:.3g} of {norm:.3g}"


def check(case: Case) -> None:
    """The library's answer is the oracle's: loss, its parts, gradients, metrics, per-token outputs."""
    out, grads = case.run()
    want, dtype = case.want, next(iter(case.scores.values())).dtype
    epsilon = EPSILON[torch.float64 if dtype == torch.float64 else torch.float32]
    fused = "logits" in case.scores
    if fused:  # the log-probs themselves are rounded, by up to 5e-7
        epsilon *= 2
    assert_close(out.loss, want.loss.detach(), 2 * epsilon, scale=want.size or 1e-30, what="loss")
    for name, coefficient in (("policy_loss", 1.0), ("value_loss", 0.5), ("kl", case.options["kl_coef"] or 0.01)):
        scale = 0.1 + want.size / coefficient
        assert_close(getattr(out, name), getattr(want, name), 2 * epsilon, scale=scale, what=name)
    logprobs, entropy = case.scored
    if fused:
        assert_logprobs(out.logprobs, torch.where(want.valid, logprobs, 0.0))
        assert_entropy(out.entropy, torch.where(want.valid, entropy, 0.0))

    scale = abs(case.upstream) if isinstance(case.upstream, float) else 1.0
    for name, grad in grads.items():
        expected = case.want_grads[name]
        if grad is None:
            assert not expected.any(), name
        elif name == "logits" and dtype in (torch.bfloat16, torch.float16):
            assert_logits_grad(grad, expected)
        else:
            assert_gradient(grad, expected, 2 * epsilon, want.size * scale * 0.1, name)

    metrics = out.metrics.compute()
    absent = {"entropy"} - set(want.metrics)
    assert set(metrics) == set(want.metrics) | ({"entropy"} & set(metrics) & absent)
    rejected = bool((want.per_token["rollout_is_weights"][want.valid] == 0).any())
    rejected &= case.options["loss_type"] == "cispo"  # which counts them: its bounds do not look at A
    for name, value in want.metrics.items():
        if not (rejected and "clip_fraction" in name and name != "value_clip_fraction"):
            assert abs(metrics[name] - value) <= 2e-6 * max(abs(value), 1.0), (name, metrics[name], value)
    assert set(out.per_token) == set(PER_TOKEN_OUTPUTS)
    for name, x in out.per_token.items():
        assert x.shape == logprobs.shape, name
        assert not x.requires_grad
        if not name.endswith("mask"):
            assert x.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), name
            value = to_numpy(want.per_token[name])
            assert_within(x, value, 4 * epsilon * np.maximum(1.0, np.abs(value)), name)
        else:
            assert x.dtype == torch.bool
            if not rejected:
                assert_within(x, want.per_token[name], 0.0, name)
