"""One batch that all ranks can draw, its shares, the call on a part of it, and the oracle on the whole of it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import variants_oracle
from checks import assert_close, assert_logits_grad, leaf

from ppo_kernels import PPOLossConfig, fused_ppo_loss, ppo_loss

B, T, V, H = 8, 8, 11, 6
TERMS = {"entropy_coef": 0.02, "kl_coef": 0.1, "value_clip": 0.2, "dual_clip": 3.0}
AGGREGATIONS = {
    "token-mean": {},
    "token-sum": {},
    "seq-mean-token-mean": {},
    "seq-mean-token-sum": {},
    "seq-mean-token-sum-norm": {"agg_max_len": 16},
}
ANY_AGGREGATION = pytest.mark.parametrize("aggregation", AGGREGATIONS)
ENTRIES = ("fused", "ppo")
ANY_ENTRY = pytest.mark.parametrize("entry", ENTRIES)

# Rows of the batch on each rank. Row 7 has no valid token: the last rank has rows of which none counts, rank 1 of 4 has
# no rows at all.
ROWS = {2: [slice(0, 7), slice(7, 8)], 4: [slice(0, 4), slice(4, 4), slice(4, 7), slice(7, 8)]}
SHARES = {
    "unequal": [slice(0, 6), slice(6, 8)],
    "one-without-a-valid-token": ROWS[2],
    "one-without-a-row": [slice(0, 8), slice(8, 8)],
}


@cache
def batch() -> dict[str, torch.Tensor]:
    """The whole batch [B, T]: rows of 6, 1, 0 and other numbers of valid tokens, and two columns of padding."""
    g = torch.Generator().manual_seed(20)
    x = {name: torch.randn(B, T, generator=g) for name in ("advantages", "returns")}
    x["hidden"] = torch.randn(B, T, H, generator=g)
    x["weight"], x["value_weight"] = torch.randn(V, H, generator=g), torch.randn(1, H, generator=g)
    x["logits"], x["values"] = x["hidden"] @ x["weight"].T, (x["hidden"] @ x["value_weight"].T)[..., 0]
    x["tokens"] = torch.randint(V, (B, T), generator=g)
    logprobs = torch.log_softmax(x["logits"], -1).gather(-1, x["tokens"][..., None])[..., 0]
    x["old_logprobs"] = logprobs + 0.3 * torch.randn(B, T, generator=g)
    x["ref_logprobs"] = logprobs + 0.3 * torch.randn(B, T, generator=g)
    x["old_values"] = x["values"] + 0.3 * torch.randn(B, T, generator=g)
    x["mask"] = torch.rand(B, T, generator=g) < 0.6
    x["mask"][0], x["mask"][1] = True, torch.arange(T) == 2
    x["mask"][7], x["mask"][:, 6:] = False, False
    x["value_mask"] = x["mask"] & (torch.rand(B, T, generator=g) < 0.6)
    return x


PER_TOKEN = ("old_logprobs", "advantages", "mask")
TERMS_PER_TOKEN = ("ref_logprobs", "old_values", "returns")


def config_of(aggregation: str) -> PPOLossConfig:
    return PPOLossConfig(**TERMS, aggregation=aggregation, **AGGREGATIONS.get(aggregation, {}))


def call(entry: str, logits: torch.Tensor, index: object, values: torch.Tensor | None, **arguments: object):
    """fused_ppo_loss, or ppo_loss of log-probs and entropies that plain PyTorch makes; index: which of the batch."""
    x = {name: batch()[name][index] for name in ("tokens", *PER_TOKEN, *TERMS_PER_TOKEN)}
    tokens = x.pop("tokens")
    if values is None:
        del x["old_values"], x["returns"]
    else:
        x["values"] = values
    if entry == "fused":
        return fused_ppo_loss(logits, tokens, **x, **arguments)
    log_p = torch.log_softmax(logits, -1)
    logprobs = log_p.gather(-1, tokens[..., None])[..., 0]
    return ppo_loss(logprobs, entropy=-(log_p.exp() * log_p).sum(-1), **x, **arguments)


class Whole:
    """The oracle's loss, gradients and metrics of the whole batch in one process."""

    def __init__(self, values: bool = True, value_mask: bool = False, **options: object) -> None:
        x = {k: v.double() if v.is_floating_point() else v for k, v in batch().items()}
        logits, v = leaf(batch()["logits"].double()), leaf(x["values"])
        o = variants_oracle.Options(**options)
        logprobs, entropy = variants_oracle.score(logits, x["tokens"], x["mask"], o)
        rest = {"entropy": entropy, "ref_logprobs": x["ref_logprobs"]}
        if values:
            rest |= {"values": v, "old_values": x["old_values"], "returns": x["returns"]}
        if value_mask:
            rest["value_mask"] = x["value_mask"]
        found = variants_oracle.loss(logprobs, x["old_logprobs"], x["advantages"], x["mask"], options=o, **rest)
        assert found.margin > 1e-4  # or fp32 could take another branch than the oracle
        found.loss.backward()
        self.loss = found.loss.item()
        self.terms = [self.loss, found.policy_loss, found.value_loss, found.kl]
        self.metrics, self.logits = found.metrics, logits.grad.numpy()
        self.values = None if v.grad is None else v.grad.numpy()


@cache
def whole(aggregation: str) -> Whole:
    return Whole(**TERMS, aggregation=aggregation, **AGGREGATIONS[aggregation])


def assert_same_scalars(results: list[dict], want: Whole) -> None:
    for got in results:
        assert_close(got["terms"], want.terms, 5e-7, scale=1.0, what="terms")
        for name, value in got["metrics"].items():
            assert_close(value, want.metrics[name], 1e-6, scale=1.0, what=name)


def assert_same(results: list[dict], want: Whole, assemble) -> None:
    """Scalars on every rank, and the gradients put together."""
    assert_same_scalars(results, want)
    assert_logits_grad(assemble([got["logits"] for got in results]), want.logits)
    if want.values is not None:
        values = assemble([got["values"] for got in results])
        assert_close(values, want.values, 1e-6, scale=abs(want.values).max(), what="values")


def columns_of(results: list[dict], order: str):
    """Puts together what the ranks have of each sequence."""
    place = torch.cat([got[order, "columns"] for got in results]).argsort()
    return lambda parts: torch.cat(parts, 1)[:, place]
