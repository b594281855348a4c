"""The cases of a vocabulary on several ranks: a function, how the columns are cut, and its options."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ppo_kernels import fused_linear_ppo_loss, fused_ppo_loss, logprobs_from_hidden, logprobs_from_logits

WORLDS = (2, 4)
H = 6
ENTRIES = {
    "logits": logprobs_from_logits,
    "loss": fused_ppo_loss,
    "hidden": logprobs_from_hidden,
    "linear": fused_linear_ppo_loss,
}
LINEAR, LOSSES = ("hidden", "linear"), ("loss", "linear")


class Ranks(NamedTuple):
    """Where this rank is: of a group, and of a mesh of the same ranks."""

    rank: int
    world: int
    group: Any
    mesh: Any


class Layout(NamedTuple):
    """How many columns exist of how many that are stored, by the number of ranks; DTensors may be cut unevenly."""

    existing: dict[int, int]
    stored: dict[int, int]
    dtensor: bool = False

    def part(self, rank: int, world: int) -> slice:
        """As Megatron cuts, and as torch.chunk."""
        stored = self.stored[world]
        width = -(-stored // world)
        return slice(min(rank * width, stored), min((rank + 1) * width, stored))


LAYOUTS = {
    "even": Layout({2: 12, 4: 12}, {2: 12, 4: 12}),
    "padded": Layout({2: 11, 4: 11}, {2: 12, 4: 12}),
    "a-rank-of-padding": Layout({2: 5, 4: 8}, {2: 12, 4: 12}),
    "one-token": Layout({2: 1, 4: 1}, {2: 2, 4: 4}),
    "a-column-each": Layout({2: 2, 4: 4}, {2: 2, 4: 4}),
    "wide": Layout({2: 4777, 4: 4777}, {2: 4800, 4: 4800}),
    "dtensor": Layout({2: 11, 4: 11}, {2: 11, 4: 11}, True),
    "dtensor-padded": Layout({2: 10, 4: 10}, {2: 11, 4: 11}, True),
    "dtensor-a-rank-without-columns": Layout({2: 1, 4: 5}, {2: 1, 4: 5}, True),
    "dtensor-of-three": Layout({2: 3, 4: 3}, {2: 3, 4: 3}, True),
    "dtensor-wide": Layout({2: 301, 4: 301}, {2: 301, 4: 301}, True),
}

# for: these functions alone. rows: how logits are read. config: what the loss is. call: arguments as they are. twice: a
# second backward of the same graph, with 2 as its factor.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"rows": {"temperature": 0.7}},
    "temperature-of-rows": {"temperature_of": "rows"},
    "temperature-of-sequences": {"temperature_of": "sequences", "mask": True},
    "softcap": {"rows": {"logit_softcap": 3.0}},
    "scale": {"rows": {"logit_scale": 1.7}},
    "scale-softcap-temperature-of-rows": {
        "rows": {"logit_softcap": 3.0, "logit_scale": 0.6},
        "temperature_of": "rows",
        "mask": True,
    },
    "mask": {"mask": True},
    "nothing-valid": {"mask": "none"},
    "no-rows": {"shape": (0, 5)},
    "no-tokens": {"shape": (2, 1), "shift": True},
    "one-dimension": {"shape": (7,)},
    "shift": {"shift": True},
    "shift-mask": {"shift": True, "mask": True, "rows": {"temperature": 1.3}},
    "ignore-index": {"rows": {"ignore_index": -100}},
    "shift-ignore-index-mask": {"rows": {"ignore_index": -100}, "mask": True, "shift": True},
    "twice": {"twice": True, "mask": True},
    "no-grad": {"no_grad": True, "mask": True},
    "fp64": {"dtype": torch.float64, "mask": True},
    "bf16": {"dtype": torch.bfloat16, "mask": True},
    "fp16": {"dtype": torch.float16},
    # log-probs alone
    "without-entropy": {"for": ("logits", "hidden"), "entropy": False, "mask": True},
    "entropy-alone": {"for": ("logits", "hidden"), "upstream": "entropy"},
    "log-prob-alone": {"for": ("logits", "hidden"), "upstream": "logprobs"},
    # the loss
    "loss-without-entropy": {"for": LOSSES, "config": {"entropy_coef": 0.0}, "call_config": {"return_entropy": False}},
    "loss-on-policy": {"for": LOSSES, "on_policy": True, "mask": True},
    "loss-sequence": {
        "for": LOSSES,
        "config": {"ratio_level": "sequence", "aggregation": "seq-mean-token-mean"},
        "mask": True,
    },
    "loss-sequence-token": {"for": LOSSES, "config": {"ratio_level": "sequence_token"}, "mask": True},
    "loss-none": {"for": LOSSES, "config": {"aggregation": "none"}, "mask": True},
    "loss-none-nothing-valid": {"for": LOSSES, "config": {"aggregation": "none"}, "mask": "none"},
    "loss-sum": {"for": LOSSES, "config": {"aggregation": "token-sum"}, "mask": True},
    "loss-packed": {"for": LOSSES, "shape": (12,), "cu_seqlens": [0, 4, 4, 9, 12], "mask": True},
    "loss-packed-shift": {
        "for": LOSSES,
        "shape": (12,),
        "cu_seqlens": [0, 4, 4, 9, 12],
        "shift": True,
        "config": {"aggregation": "seq-mean-token-sum"},
    },
    "loss-cispo": {"for": LOSSES, "config": {"loss_type": "cispo", "dual_clip": None}},
    "loss-values": {"for": LOSSES, "values": True, "mask": True},
    "loss-mask-nonfinite": {"for": LOSSES, "config": {"nonfinite": "mask"}, "mask": True},
    "loss-scaled": {"for": LOSSES, "call": {"loss_scale": 3.0, "normalizer": 7.0}},
    # over the logits
    "inplace": {"for": ("logits", "loss"), "call": {"inplace_grad": True}, "mask": True},
    "inplace-bf16": {"for": ("logits", "loss"), "call": {"inplace_grad": True}, "dtype": torch.bfloat16},
    # the head
    "parts": {"for": LINEAR, "call": {"reduce_hidden_grad": False}, "mask": True},
    "parts-twice": {"for": LINEAR, "call": {"reduce_hidden_grad": False}, "twice": True},
    "parts-low": {"for": LINEAR, "call": {"reduce_hidden_grad": False, "memory": "low", "chunk_bytes": 1}},
    "chunks": {"for": LINEAR, "call": {"chunk_bytes": 60}, "mask": True},
    "chunks-of-a-row": {"for": LINEAR, "call": {"chunk_bytes": 1}, "mask": True, "shift": True},
    "chunks-temperature-of-rows": {"for": LINEAR, "call": {"chunk_bytes": 60}, "mask": True, "temperature_of": "rows"},
    "chunks-bf16": {"for": LINEAR, "call": {"chunk_bytes": 60}, "mask": True, "dtype": torch.bfloat16},
    "low": {"for": LINEAR, "call": {"memory": "low", "chunk_bytes": 1}, "mask": True},
    "valid-rows": {"for": LINEAR, "call": {"valid_rows": 6}, "mask": True},
    "without-bias": {"for": LINEAR, "absent": ("bias",)},
    "frozen-weight": {"for": LINEAR, "frozen": ("weight", "bias"), "mask": True},
    "frozen-hidden": {"for": LINEAR, "frozen": ("hidden",), "mask": True},
    "frozen-weight-twice": {"for": LINEAR, "frozen": ("weight", "bias"), "twice": True},
    "frozen-weight-low": {"for": LINEAR, "frozen": ("weight",), "call": {"memory": "low"}},
    "autocast": {"for": LINEAR, "autocast": torch.bfloat16, "mask": True},
    "loss-on-a-graph": {"for": LINEAR, "not_leaves": True},
}
EVERY_OPTION_ON = {2: ("padded", tuple(ENTRIES)), 4: ("a-rank-of-padding", ("logits", "linear"))}
DTENSOR = (
    "mask",
    "shift-mask",
    "bf16",
    "fp64",
    "inplace",
    "twice",
    "parts",
    "chunks",
    "low",
    "frozen-weight",
    "no-rows",
)
SOME_OPTIONS_ON = {
    "padded": ("mask", "shift-ignore-index-mask", "scale-softcap-temperature-of-rows", "loss-sequence", "chunks"),
    "a-rank-of-padding": ("mask", "shift", "inplace", "fp64", "low", "chunks", "twice"),
    "one-token": ("fp64", "inplace", "shift"),
    "wide": ("mask", "scale-softcap-temperature-of-rows", "bf16", "inplace", "chunks", "low", "parts-low"),
    "dtensor": (*DTENSOR, "temperature-of-rows", "loss-packed-shift", "loss-sequence", "no-tokens", "one-dimension"),
    "dtensor-a-rank-without-columns": DTENSOR,
}


class Case(NamedTuple):
    entry: str
    layout: str
    option: str

    def __str__(self) -> str:
        return "-".join(self)

    @property
    def options(self) -> dict[str, Any]:
        return OPTIONS[self.option]

    def tensors(self) -> tuple[str, ...]:
        """The differentiable inputs that have a vocabulary axis or are multiplied with it."""
        names = ("hidden", "weight", "bias") if self.entry in LINEAR else ("logits",)
        return tuple(name for name in names if name not in self.options.get("absent", ()))


def cases(world: int) -> list[Case]:
    every, entries = EVERY_OPTION_ON[world]
    found = []
    for layout in LAYOUTS:
        for option, chosen in OPTIONS.items():
            some = option == "plain" or option in SOME_OPTIONS_ON.get(layout, ())
            on = ENTRIES if some else entries if layout == every else ()
            found += [Case(entry, layout, option) for entry in on if entry in chosen.get("for", ENTRIES)]
    return found


TERMS = {"entropy_coef": 0.02, "kl_coef": 0.1, "dual_clip": 3.0}


def terms_of(case: Case) -> dict[str, Any]:
    return TERMS | case.options.get("config", {})
