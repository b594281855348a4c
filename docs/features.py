"""Writes docs/features.md: every option, its default here, and what each trainer's preset makes of it.

    python docs/features.py

Nothing in the table is typed: it is read from PPOLossConfig and presets.py, which tests/peers and
tests/semantics/test_formula_peers.py compare with the trainers. tests/test_docs.py keeps the file up to date.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from ppo_kernels import PPOLossConfig, gae, masked_whiten
from ppo_kernels.presets import GAE_OPTIONS, WHITEN_OPTIONS, Presets

PAGE = Path(__file__).with_suffix(".md")
INTRODUCTION = """# Every option, and what each trainer does

Written by `python docs/features.py` from `PPOLossConfig` and `ppo_kernels/presets.py`. A blank cell is the
default of the first column; a variant that differs stands in brackets. The presets are compared with the trainers
themselves: those marked \\* with the installed release, by `make test-peers`, the others with their published formulas,
by `make test`.
"""


def trainers() -> dict[str, Any]:
    """name -> preset constructor."""
    return {name: getattr(PPOLossConfig, name) for name, x in vars(Presets).items() if isinstance(x, classmethod)}


def variants(name: str) -> tuple[str, ...]:
    """The variants a preset has ("gspo" of verl ...), its default first; ("",) if it has none."""
    parameters = [
        p for p in inspect.signature(getattr(PPOLossConfig, name)).parameters.values() if p.default is not p.empty
    ]
    if not parameters:
        return ("",)
    try:
        getattr(PPOLossConfig, name)("?")
    except ValueError as error:
        listed = str(error).split("one of ")[1].split(", got")[0].split(", ")
    default = parameters[0].default
    return (default, *(x for x in listed if x != default))


def columns() -> dict[str, dict[str, dict[str, Any]]]:
    """trainer -> variant -> options."""
    found = {}
    for name, make in trainers().items():
        heading = name + (" \\*" if "*" in (make.__doc__ or "") else "")
        needed = {"dr_grpo": {"agg_max_len": 512.0}}
        found[heading] = {
            variant: dataclasses.asdict(make(*([variant] if variant else []), **needed.get(variant, {})))
            for variant in variants(name)
        }
    return found


def cell(option: str, default: Any, variants: dict[str, dict[str, Any]]) -> str:
    """The value of the trainer's default variant, then of those that differ from it; nothing for our own default."""
    values = {variant: options.get(option, default) for variant, options in variants.items()}
    first = next(iter(values.values()))
    text = "" if first == default else show(first)
    different = [f"{name}: {show(x)}" for name, x in values.items() if x != first]
    return f"{text or show(first)} ({', '.join(different)})" if different else text


def table(rows: list[tuple[str, list[str]]], headings: list[str]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    lines += ["| " + " | ".join([name, *cells]) + " |" for name, cells in rows]
    return "\n".join(lines) + "\n"


def show(value: Any) -> str:
    return "off" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def option_table(defaults: dict[str, Any], given: dict[str, dict[str, dict[str, Any]]]) -> str:
    """One row per option, one column per trainer."""
    rows = [
        (f"`{option}`", [show(default), *(cell(option, default, variants) for variants in given.values())])
        for option, default in defaults.items()
    ]
    return table(rows, ["option", "default", *given])


def keywords(function: Any, names: dict[str, dict[str, Any]]) -> dict[str, Any]:
    used = {option for options in names.values() for option in options}
    return {k: p.default for k, p in inspect.signature(function).parameters.items() if k in used}


def page() -> str:
    given, loss = columns(), dataclasses.asdict(PPOLossConfig())
    configs = [options for variants in given.values() for options in variants.values()]
    loss.pop("agg_max_len")  # dr_grpo needs one, whose value is the user's
    different = {k: v for k, v in loss.items() if any(x[k] != v for x in configs)}
    alike = [f"`{k}`" for k in loss if k not in different]
    return "\n".join(
        [
            INTRODUCTION,
            "## The loss: `PPOLossConfig.<trainer>(<variant>)`\n",
            option_table(different, given),
            f"No preset touches {', '.join(alike)}: they are there for all.\n",
            "## Advantages: `gae(..., **GAE_OPTIONS[<trainer>])`\n",
            option_table(keywords(gae, GAE_OPTIONS), {k: {"": v} for k, v in GAE_OPTIONS.items()}),
            "## Whitening: `masked_whiten(..., **WHITEN_OPTIONS[<trainer>])`\n",
            option_table(keywords(masked_whiten, WHITEN_OPTIONS), {k: {"": v} for k, v in WHITEN_OPTIONS.items()}),
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
