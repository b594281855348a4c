"""Predicts the time of the row kernels on GPUs from their compiled code alone: `python bench/static.py`, without a GPU.

Writes bench/results/static.json and static.md. These are bounds, not measurements: the slowest of memory, issue slots
and MUFU (the unit of exponentials) at published rates, as if each ran at full speed all the time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from compiled import Code, Launch, compile_for, recording, row_fused_loss, row_grad, row_stats

RESULTS = Path(__file__).parent / "results"
ROWS, RECORDED = 8192, 16  # rows of a prediction, and of the launch that is recorded for it
BF16 = torch.bfloat16
ISSUE, MUFU = (
    4,
    16,
)  # a clock and multiprocessor: warp instructions; lanes (CUDA C++ Programming Guide, throughput table)


class Chip(NamedTuple):
    target: str
    processors: int
    ghz: float
    tb_per_s: float


# NVIDIA's data sheets for the SXM modules. The boost clock is the one behind their fp32 rate, 128 FMA a clock and
# multiprocessor: 67 TFLOP/s for H100 and H200, 75 for B200.
CHIPS = {
    "H100": Chip("sm_90", 132, 1.98, 3.35),
    "H200": Chip("sm_90", 132, 1.98, 4.8),
    "B200": Chip("sm_100", 148, 1.98, 8.0),
}


class Case(NamedTuple):
    kernel: str
    call: Callable[[], None]
    vocab: int
    bytes_per_logit: int  # through HBM
    loops: tuple[bool, ...]  # those that stream logits, by whether they store


call = functools.partial
V = 151936
CASES = {
    "row_stats": Case("row_stats_kernel", call(row_stats, BF16, V), V, 2, (False,)),
    "row_stats, entropy": Case("row_stats_kernel", call(row_stats, BF16, V, True), V, 2, (False,)),
    "row_stats, entropy, rows unaligned": Case(
        "row_stats_kernel", call(row_stats, BF16, V, True, aligned=False), V, 2, (False,)
    ),
    "row_grad": Case("row_grad_kernel", call(row_grad, BF16, V), V, 4, (True,)),
    "row_grad, entropy": Case("row_grad_kernel", call(row_grad, BF16, V, True), V, 4, (True,)),
    "row_fused, entropy, V=32000": Case(
        "row_fused_kernel", call(row_fused_loss, BF16, 32000, True), 32000, 4, (False, True)
    ),
    "row_fused, entropy, second read from L2": Case(
        "row_fused_kernel", call(row_fused_loss, BF16, V, True, always=True), V, 4, (False, True)
    ),
}


def outside(case: Case, recorded: Launch, code: Code) -> float:
    """Instructions a logit besides those of hot loops, at most: everything in no loop once a program, and the blocks
    with the target and the end of a row at the price of the loop with masks."""
    total = code.parts[1] * recorded.programs / RECORDED
    for stores in case.loops:
        hot, *masked = code.streaming(stores)
        block = hot.logits * code.warps * 32
        blocks = 1 + (case.vocab % block != 0)
        total += blocks * max((len(x.ops) for x in masked), default=0)
        total -= len(hot.ops) * (1 + case.vocab % block / block)  # which these blocks would have taken there
    return total * code.warps * 32 / case.vocab


def predict(case: Case, chip: Chip) -> dict[str, Any]:
    with recording() as launches:
        case.call()
    recorded = next(x for x in launches if x.name == case.kernel)
    code = compile_for(recorded, chip.target)
    loops = [code.hot_loop(stores) for stores in case.loops]
    instructions, mufu = sum(x.per_logit() for x in loops), sum(x.mufu_per_logit() for x in loops)
    extra = outside(case, recorded, code)
    logits, clocks = ROWS * case.vocab, chip.processors * chip.ghz * 1e6  # a millisecond
    times = {
        "memory": logits * case.bytes_per_logit / (chip.tb_per_s * 1e9),
        "issue": logits * (instructions + extra) / 32 / (ISSUE * clocks),
        "MUFU": logits * mufu / (MUFU * clocks),
    }
    bound = max(times, key=lambda name: times[name])
    return {
        "vocab": case.vocab,
        "instructions_per_logit": round(instructions, 2),
        "outside_per_logit": round(extra, 2),
        "mufu_per_logit": round(mufu, 2),
        "registers": code.registers,
        "resident_warps": code.resident_warps(),
        "ms": {name: round(ms, 3) for name, ms in times.items()},
        "bound": bound,
        "predicted_ms": round(times[bound], 3),
    }


def markdown(table: list[dict[str, Any]]) -> str:
    lines = [
        f"# Predicted from compiled code, not measured (Triton {triton.__version__})",
        "",
        f"bf16, {ROWS} rows, V={V} unless stated. Each time is what one resource alone would take at its published",
        "rate; the longest is the prediction. A copy reaches about 90% of the published bandwidth.",
        "in loops: instructions per logit in the hot loops, of which MUFU; outside: all others per logit, at most.",
        "warps: resident on a multiprocessor at once.",
        "",
        "| kernel | chip | in loops | outside | MUFU | registers | warps | memory ms | issue ms | MUFU ms | bound |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        cells = [row["kernel"], row["chip"]]
        cells += [f"{row[key]:.2f}" for key in ("instructions_per_logit", "outside_per_logit", "mufu_per_logit")]
        cells += [str(row["registers"]), str(row["resident_warps"])]
        cells += [f"{row['ms'][key]:.2f}" for key in ("memory", "issue", "MUFU")]
        cells.append(f"{row['bound']}, {row['predicted_ms']:.2f} ms")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    table = [
        {"kernel": name, "chip": chip, **predict(case, CHIPS[chip])} for name, case in CASES.items() for chip in CHIPS
    ]
    report = {
        "predicted_not_measured": True,
        "triton": triton.__version__,
        "rows": ROWS,
        "chips": {name: chip._asdict() for name, chip in CHIPS.items()},
        "predictions": table,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "static.json").write_text(json.dumps(report, indent=1) + "\n")
    (RESULTS / "static.md").write_text(markdown(table))
    print(markdown(table))


if __name__ == "__main__":
    main()
