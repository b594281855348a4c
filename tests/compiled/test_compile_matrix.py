"""Every kernel as compiled for NVIDIA and AMD GPUs, without one: no spills, 128-bit loads, no barriers in hot loops,
and the budgets of instructions and registers within which the kernels stay bound by memory.

TRITON_CACHE_DIR says where the compiled kernels are kept. Not with TRITON_INTERPRET, which replaces the compiler.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("NOT RUN: TRITON_INTERPRET is set, nothing is compiled", allow_module_level=True)
triton = pytest.importorskip("triton", reason="NOT RUN: triton is not installed")

import triton.language as tl  # noqa: E402

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

from compiled import (  # noqa: E402
    AMD,
    NVIDIA,
    TARGETS,
    Code,
    Launch,
    Loop,
    compile_for,
    loss_params,
    mask,
    recording,
    resident_warps,
    row_fused_loss,
    row_grad,
    row_stats,
    token_inputs,
)

from ppo_kernels import triton_kernels  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
VOCAB = 151936


# ---- every variant that the operators launch ------------------------------------------------------------------------


def token_loss(entropy: bool, optional: bool, values: bool) -> None:
    logprobs = torch.empty(1000)
    given = (*token_inputs(1000, optional, values), loss_params(0.01))
    triton_kernels.token_loss(logprobs, torch.empty(1000) if entropy else None, *given)


def gae(rows: int, steps: int, mask_mode: str = "none", ends: bool = False, next_values: bool = False) -> None:
    n = rows * steps
    rewards, values, following = (torch.empty(n) if given else None for given in (True, True, next_values))
    ended = mask(n, ends)
    inputs = (mask(n, mask_mode != "none"), torch.empty(rows) if ends else None, following, ended, ended)
    segments = torch.arange(rows + 1) * steps
    triton_kernels.gae(rewards, values, *inputs, segments, 0.99, 0.95, mask_mode)


def whiten(masked: bool) -> None:
    triton_kernels.whiten(torch.empty(100_000), mask(100_000, masked), True, False, 1e-8, "var")


def scale(dtype: torch.dtype) -> None:
    triton_kernels.scale_(torch.empty(16, VOCAB, dtype=dtype), torch.empty(()))


call = functools.partial
EVERYWHERE: dict[str, Callable[[], None]] = {
    "row_stats bf16": call(row_stats, BF16, VOCAB),
    "row_stats bf16 entropy": call(row_stats, BF16, VOCAB, True),
    "row_grad bf16": call(row_grad, BF16, VOCAB),
    "row_grad bf16 entropy": call(row_grad, BF16, VOCAB, True),
    "row_fused bf16 V=32000 entropy": call(row_fused_loss, BF16, 32000, True),
    "token_loss everything": call(token_loss, True, True, True),
}
ONCE: dict[str, Callable[[], None]] = {
    "row_stats bf16 entropy unaligned": call(row_stats, BF16, VOCAB, True, aligned=False),
    "row_stats bf16 V=50257 entropy unaligned masked": call(row_stats, BF16, 50257, True, aligned=False, masked=True),
    "row_stats bf16 V=32000 entropy": call(row_stats, BF16, 32000, True),
    "row_stats bf16 V=1000 entropy": call(row_stats, BF16, 1000, True),
    "row_stats bf16 V=1000 unaligned": call(row_stats, BF16, 1000, aligned=False),
    "row_stats bf16 V=8 entropy": call(row_stats, BF16, 8, True),
    "row_stats fp16 entropy": call(row_stats, FP16, VOCAB, True),
    "row_stats fp16 entropy unaligned": call(row_stats, FP16, VOCAB, True, aligned=False),
    "row_stats fp32 entropy": call(row_stats, FP32, VOCAB, True),
    "row_stats fp32 entropy unaligned": call(row_stats, FP32, VOCAB, True, aligned=False),
    "row_stats fp32 V=8": call(row_stats, FP32, 8),
    "row_grad bf16 in place": call(row_grad, BF16, VOCAB, in_place=True),
    "row_grad bf16 unaligned masked": call(row_grad, BF16, VOCAB, aligned=False, masked=True),
    "row_grad bf16 entropy unaligned in place": call(row_grad, BF16, 50257, True, aligned=False, in_place=True),
    "row_grad bf16 V=1000 entropy": call(row_grad, BF16, 1000, True),
    "row_grad bf16 V=8 entropy": call(row_grad, BF16, 8, True),
    "row_grad fp16 entropy": call(row_grad, FP16, VOCAB, True),
    "row_grad fp32 entropy": call(row_grad, FP32, VOCAB, True),
    "row_grad fp32 V=8": call(row_grad, FP32, 8),
    "row_stats bf16 entropy, a temperature a row": call(row_stats, BF16, VOCAB, True, per_row=True),
    "row_grad bf16 entropy, a temperature a row": call(row_grad, BF16, VOCAB, True, per_row=True),
    "row_fused bf16 V=32000 entropy, a temperature a row": call(row_fused_loss, BF16, 32000, True, per_row=True),
    "row_stats bf16 V=8 entropy, a temperature a row": call(row_stats, BF16, 8, True, per_row=True),
    "row_stats bf16 entropy, softcap": call(row_stats, BF16, VOCAB, True, softcap=30.0),
    "row_stats fp32 entropy, softcap": call(row_stats, FP32, VOCAB, True, softcap=30.0),
    "row_grad bf16 entropy, softcap": call(row_grad, BF16, VOCAB, True, softcap=30.0),
    "row_grad fp32, softcap": call(row_grad, FP32, VOCAB, softcap=30.0),
    "row_fused bf16 V=8 entropy, softcap": call(row_fused_loss, BF16, 8, True, softcap=30.0),
    "row_fused bf16 V=32000": call(row_fused_loss, BF16, 32000),
    "row_fused bf16 V=32000 entropy everything": call(row_fused_loss, BF16, 32000, True, optional=True),
    "row_fused bf16 V=32000 unaligned in place": call(row_fused_loss, BF16, 32000, aligned=False, in_place=True),
    "row_fused bf16 all of V=151936 entropy": call(row_fused_loss, BF16, VOCAB, True, always=True),
    "row_fused bf16 V=1000": call(row_fused_loss, BF16, 1000),
    "row_fused bf16 V=8": call(row_fused_loss, BF16, 8),
    "row_fused fp16 V=32000": call(row_fused_loss, FP16, 32000),
    "row_fused bf16 V=8 entropy everything": call(row_fused_loss, BF16, 8, True, optional=True),
    "row_fused fp32 V=16000 entropy": call(row_fused_loss, FP32, 16000, True),
    "token_loss nothing": call(token_loss, False, False, False),
    "gae short": call(gae, 1000, 16),
    "gae skip": call(gae, 500, 4000, "skip"),
    "gae skip ends next_values": call(gae, 500, 4000, "skip", True, True),
    "gae zero ends": call(gae, 500, 4000, "zero", True),
    "gae dense": call(gae, 500, 4000, "dense"),
    "gae long": call(gae, 8, 65536),
    "gae long skip ends": call(gae, 8, 65536, "skip", True),
    "whiten": call(whiten, False),
    "whiten masked": call(whiten, True),
    "scale_ bf16": call(scale, BF16),
    "scale_ fp32": call(scale, FP32),
}
CASES = EVERYWHERE | ONCE
MATRIX = [(case, target) for target in TARGETS for case in (CASES if target in ("sm_90", "gfx942") else EVERYWHERE)]
LOOPS = {"row_stats_kernel": (False,), "row_grad_kernel": (True,), "row_fused_kernel": (False, True)}  # by stores


@functools.cache
def launches(case: str) -> list[Launch]:
    with recording() as recorded:
        CASES[case]()
    return recorded


@functools.cache
def code(case: str, target: str, kernel: str) -> Code:
    return compile_for(next(x for x in launches(case) if x.name == kernel), target)


def hot_loops(case: str, target: str, kernel: str) -> list[Loop]:
    found = [code(case, target, kernel).streaming(stores)[:1] for stores in LOOPS.get(kernel, ())]
    assert all(found) or "V=1000" in case, "no loop over logits"
    return [loop for loops in found for loop in loops]


@pytest.mark.parametrize(("case", "target"), MATRIX)
def test_no_spills_and_hot_loops_without_barriers_or_fp64(case: str, target: str) -> None:
    for kernel in {x.name for x in launches(case)}:
        assert code(case, target, kernel).local == 0, kernel
        for loop in hot_loops(case, target, kernel):
            assert loop.float64() == 0, kernel
            # A gradient that lies to 16 bytes as its logits do not is laid out anew in shared memory.
            assert loop.barriers() == 0 or case == "row_grad bf16 unaligned masked", kernel
            assert loop.lane_moves() < len(loop.ops) / 64, kernel
            assert 0.99 < loop.exp2_per_logit() < 1.3 or "V=1000" in case, "logits are counted wrongly"


@pytest.mark.parametrize(
    ("case", "target"), [(c, t) for c, t in MATRIX if c.startswith("row") and not re.search("V=(8|1000)|unaligned", c)]
)
def test_aligned_rows_move_in_128_bits(case: str, target: str) -> None:
    if case == "row_grad fp32 entropy" and target in AMD:
        pytest.skip("NOT CHECKED: each access is in a loop of its own (readfirstlane), and none streams")
    for kernel in LOOPS.keys() & {x.name for x in launches(case)}:
        for loop in hot_loops(case, target, kernel):
            assert loop.widths() == {16}, kernel
            assert not loop.stores or loop.widths(load=False) == {16}, kernel


@pytest.mark.parametrize("target", AMD)
@pytest.mark.parametrize(
    ("case", "kernel"), [("row_stats bf16", "row_stats_kernel"), ("row_grad bf16", "row_grad_kernel")]
)
def test_tensors_over_2_gb_move_in_128_bits(case: str, kernel: str, target: str) -> None:
    """AMD addresses smaller ones by 32-bit offsets. Triton asks a tensor's ptr_range, if it has one, for its size."""
    with recording() as recorded:
        CASES[case]()
    launch = next(x for x in recorded if x.name == kernel)
    for x in launch.args[:2]:
        x.ptr_range = lambda: 2**32
    large = compile_for(launch, target)
    for stores in LOOPS[kernel]:
        assert large.local == 0
        assert large.hot_loop(stores).widths() == {16}


@pytest.mark.parametrize("target", NVIDIA)
@pytest.mark.parametrize("case", [case for case in EVERYWHERE if case.startswith(("row_stats", "row_grad"))])
def test_registers_allow_16_resident_warps(case: str, target: str) -> None:
    assert code(case, target, case.split()[0] + "_kernel").resident_warps() >= 16


# Instructions a logit. Memory is the limit up to about 14 where a logit's 2 bytes are only read, and about 28 where
# they are read and written; the budgets are what the kernels reach, so that it shows when one gets worse.
BUDGETS = {
    ("row_stats bf16", "row_stats_kernel"): [8.5],
    ("row_stats bf16 entropy", "row_stats_kernel"): [9.0],
    ("row_stats bf16 entropy unaligned", "row_stats_kernel"): [14.0],
    ("row_grad bf16", "row_grad_kernel"): [9.0],
    ("row_grad bf16 in place", "row_grad_kernel"): [9.0],
    ("row_grad bf16 entropy", "row_grad_kernel"): [9.0],
    ("row_fused bf16 V=32000 entropy", "row_fused_kernel"): [10.0, 10.0],
}


@pytest.mark.parametrize(("case", "kernel"), BUDGETS)
def test_instruction_budget_on_sm_90(case: str, kernel: str) -> None:
    for loop, budget in zip(hot_loops(case, "sm_90", kernel), BUDGETS[case, kernel], strict=True):
        assert loop.per_logit() <= budget
        assert loop.mufu_per_logit() < 2


def test_every_kernel_that_is_launched_is_in_the_matrix() -> None:
    sources = [p.read_text() for p in Path(triton_kernels.__file__).parent.glob("*.py")]
    launched = {name for s in sources for name in re.findall(r"(?:launch\.run|_launch)\(\s*(\w+),", s)}
    defined = {name for s in sources for name in re.findall(r"^@triton\.jit.*\ndef (\w+)\(", s, re.MULTILINE)}
    assert launched & defined == {x.name for case in CASES for x in launches(case)}


# ---- the checks themselves: each sees the fault it is for -----------------------------------------------------------


@triton.jit
def sum_exp2(x, out, n, SIZE: tl.constexpr, FAULT: tl.constexpr):
    column = tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    for start in range(0, n, SIZE):
        e = tl.exp2(tl.load(x + start + column).to(tl.float32))
        if FAULT == "barrier":
            e = e / tl.sum(e, 0)
        elif FAULT == "fp64":
            e = (e.to(tl.float64) * 3 + 1).to(tl.float32)
        total += e
    tl.store(out + column, total)


def faulty(target: str, fault: str) -> Code:
    """The spill: 64 sums a thread in fewer registers."""
    size, options = (
        (8192, {"maxnreg": 32} if target in NVIDIA else {"waves_per_eu": 8}) if fault == "spill" else (1024, {})
    )
    x = torch.empty(4096, dtype=BF16)[1 if fault == "narrow" else 0 :]
    launch = Launch(sum_exp2, 1, (x, torch.empty(size), 4096), 4, {"SIZE": size, "FAULT": fault})
    return compile_for(launch, target, **options)


def faults(found: Code) -> list[str]:
    loop = found.hot_loop()
    seen = {"barrier": loop.barriers(), "narrow": loop.widths() != {16}, "fp64": loop.float64(), "spill": found.local}
    return [fault for fault, yes in seen.items() if yes]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("fault", ["none", "barrier", "narrow", "fp64", "spill"])
def test_a_fault_is_seen(fault: str, target: str) -> None:
    assert faults(faulty(target, fault)) == [fault] * (fault != "none")


def test_more_registers_leave_fewer_warps() -> None:
    """65536 registers on a multiprocessor: 32 warps of 64 each, of up to 64 warps."""
    assert [resident_warps("sm_90", n, 64, 8) for n in (32, 64, 65, 255)] == [64, 32, 24, 8]
    assert resident_warps("sm_90", 32, 100 * 1024, 8) == 16  # 228 KiB of shared memory
    assert resident_warps("gfx942", 128, 64, 4) == 16
