"""The whole inputs of a case of a vocabulary on several ranks, and what one process makes of them."""

from __future__ import annotations

import zlib
from math import inf, nan
from typing import Any

import oracle
import torch
import variants_oracle
from torch import Tensor
from vocab_parallel_cases import LAYOUTS, LINEAR, LOSSES, Case, H, terms_of


def drawn(case: Case, world: int) -> dict[str, Any]:
    """The whole of a case, the same on every rank: what does not count holds garbage."""
    o, layout = case.options, LAYOUTS[case.layout]
    existing, stored = layout.existing[world], layout.stored[world]
    g = torch.Generator().manual_seed(zlib.crc32(repr((case, world)).encode()))
    whole, shift = o.get("shape", (2, 5)), o.get("shift", False)
    shape = (*whole[:-1], whole[-1] - shift)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=g)

    def garbage(x: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, torch.tensor([nan, inf, -inf, 1e30])[torch.arange(x.numel()) % 4].view(x.shape), x)

    x: dict[str, Any] = {"tokens": torch.randint(existing, whole, generator=g)}
    mask = None
    if o.get("mask"):
        mask = torch.rand(shape, generator=g) < 0.6
        mask.view(-1)[torch.arange(mask.numel()) % 10 < 6] = True  # as many as valid-rows says
        mask.view(-1)[6:10] = False
        mask &= o["mask"] != "none"
    x["mask"] = mask
    valid = torch.ones(shape, dtype=torch.bool) if mask is None else mask.clone()
    if "cu_seqlens" in o:
        x["cu_seqlens"] = torch.tensor(o["cu_seqlens"], dtype=torch.int32)
        inside = torch.zeros(shape, dtype=torch.bool)
        for sequence in variants_oracle.sequences(shape, o["cu_seqlens"], shift):
            inside[sequence] = True
        valid &= inside
    targets = x["tokens"][..., 1:] if shift else x["tokens"]
    targets[~valid] = 10**6
    if "ignore_index" in o.get("rows", {}):
        ignored = torch.rand(shape, generator=g) < 0.3
        targets[ignored] = o["rows"]["ignore_index"]
        valid &= ~ignored
    x["valid"] = valid
    rows = torch.nn.functional.pad(valid, (0, 1)) if shift else valid

    dtype = o.get("dtype", torch.float32)
    if case.entry in LINEAR:
        x["hidden"] = garbage(randn(*whole, H), ~rows[..., None]).to(dtype)
        x["weight"] = garbage(randn(stored, H), (torch.arange(stored) >= existing)[:, None]).to(dtype)
        x["bias"] = garbage(randn(stored), torch.arange(stored) >= existing).to(dtype)
    else:
        missing = ~rows[..., None] | (torch.arange(stored) >= existing)
        x["logits"] = garbage(3 * randn(*whole, stored), missing).to(dtype)
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    if (of := o.get("temperature_of")) is not None:
        x["temperature"] = 0.5 + torch.rand(shape if of == "rows" else shape[:-1], generator=g)
        if of == "rows":
            x["temperature"][~valid] = nan

    if case.entry not in LOSSES:
        x["upstream"] = [randn(*shape).to(accumulate), randn(*shape).to(accumulate)]
        return x
    # Log-ratios are far from every switch of branch, and their means too.
    steps = torch.tensor([-0.6, -0.1, 0.05, 0.1, 0.5, 1.5])[torch.randint(6, shape, generator=g)]
    if terms_of(case).get("ratio_level", "token") != "token":
        steps = 0.1 * steps
    x["scores"] = scores_of(x, case, world)
    logprobs = torch.from_numpy(x["scores"].logprobs)
    x["old_logprobs"] = None if o.get("on_policy") else garbage((logprobs - steps).to(accumulate), ~valid)
    x["ref_logprobs"] = garbage((logprobs + 0.3 * randn(*shape)).to(accumulate), ~valid)
    x["advantages"] = garbage(randn(*shape).to(accumulate), ~valid)
    if o.get("values"):
        x |= {name: garbage(randn(*shape), ~valid) for name in ("values", "returns")}
    none = terms_of(case).get("aggregation") == "none"
    x["upstream"] = randn(*shape).to(accumulate) if none else torch.tensor(0.5, dtype=accumulate)
    return x


def head_of(x: dict[str, Any], case: Case, world: int) -> tuple[Tensor, ...]:
    """(hidden, weight, bias) in float64: rows that count, columns that exist; others are 0."""
    o, existing = case.options, LAYOUTS[case.layout].existing[world]
    rows = torch.nn.functional.pad(x["valid"], (0, 1)) if o.get("shift") else x["valid"]
    hidden = torch.where(rows[..., None], x["hidden"], 0.0).double()
    bias = x["bias"][:existing].double() * ("bias" not in o.get("absent", ()))
    return hidden, x["weight"][:existing].double(), bias


def scores_of(x: dict[str, Any], case: Case, world: int) -> oracle.Scores:
    o, existing = case.options, LAYOUTS[case.layout].existing[world]
    if case.entry in LINEAR:
        hidden, weight, bias = head_of(x, case, world)
        logits = hidden @ weight.T + bias
    else:
        logits = x["logits"][..., :existing]
    temperature = x.get("temperature", torch.tensor(o.get("rows", {}).get("temperature", 1.0)))
    if o.get("temperature_of") == "sequences":
        temperature = temperature[..., None]
    return oracle.score(
        logits,
        x["tokens"],
        x["valid"],
        temperature=temperature,
        shift=o.get("shift", False),
        softcap=o.get("rows", {}).get("logit_softcap"),
        scale=o.get("rows", {}).get("logit_scale", 1.0),
    )
