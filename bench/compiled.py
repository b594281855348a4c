"""What the kernels compile to for a named GPU, which needs no GPU: the launches of a call, and the code of each.

    with recording() as launches:
        row_stats(torch.bfloat16, 151936)
    code = compile_for(launches[0], "sm_90")
    loop = code.hot_loop()
    loop.per_logit(), loop.exp2_per_logit(), code.registers, code.resident_warps()

NVIDIA code is read with the nvdisasm and cuobjdump inside Triton's own package, AMD code as Triton's assembly text.
TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from ppo_kernels import PPOLossConfig, triton_kernels
from ppo_kernels.triton_kernels import launch

NVIDIA = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100, 120)}
AMD = {arch: GPUTarget("hip", arch, 64) for arch in ("gfx942", "gfx950")}
TARGETS = NVIDIA | AMD

# Of one multiprocessor: warps, programs, bytes of shared memory (CUDA C++ Programming Guide, "Compute Capabilities").
RESIDENT = {
    "sm_80": (64, 32, 164 * 1024),
    "sm_90": (64, 32, 228 * 1024),
    "sm_100": (64, 32, 228 * 1024),
    "sm_120": (48, 24, 100 * 1024),
}


# ---- what a call launches -------------------------------------------------------------------------------------------


class Launch(NamedTuple):
    """One call of ppo_kernels.triton_kernels.launch.run."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    num_warps: int  # of 32 threads
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Inside, kernels are not launched but added to the list."""
    launches: list[Launch] = []

    def record(kernel: Any, programs: int, args: Any, *, num_warps: int, device: Any, **constants: Any) -> None:
        launches.append(Launch(kernel, programs, tuple(args), num_warps, constants))

    with mock.patch.object(launch, "run", record):
        yield launches


def logits(dtype: torch.dtype, vocab: int, aligned: bool = True, rows: int = 16) -> tuple[Tensor, Tensor]:
    """[rows, vocab] whose rows start at multiples of 16 bytes or do not, and a token for each. Nothing is written."""
    width = -(-vocab // 8) * 8 + (not aligned)
    return torch.empty(rows, width, dtype=dtype, device="cpu")[:, :vocab], torch.zeros(rows, dtype=torch.int64)


def mask(n: int, given: bool) -> Tensor | None:
    return torch.ones(n, dtype=torch.bool, device="cpu") if given else None


def options(rows: int, vocab: int, per_row: bool, softcap: float) -> tuple[Any, ...]:
    """temperature, row_temperature, softcap, vocab_size, shift."""
    return 1.0, torch.ones(rows, device="cpu") if per_row else None, softcap, vocab, False


def row_stats(
    dtype: torch.dtype, vocab: int, entropy: bool = False, aligned: bool = True, rows: int = 16, masked: bool = False,
    per_row: bool = False, softcap: float = math.inf,
) -> None:  # fmt: skip
    x, tokens = logits(dtype, vocab, aligned, rows)
    triton_kernels.row_stats(x, tokens, mask(rows, masked), *options(rows, vocab, per_row, softcap), entropy)


def row_grad(
    dtype: torch.dtype, vocab: int, entropy: bool = False, aligned: bool = True, rows: int = 16, masked: bool = False,
    in_place: bool = False, per_row: bool = False, softcap: float = math.inf,
) -> None:  # fmt: skip
    x, tokens = logits(dtype, vocab, aligned, rows)
    operator = triton_kernels.row_grad_ if in_place else triton_kernels.row_grad
    logprobs, row_max, row_sum, row_mean, c, e = (torch.empty(rows, device="cpu") for _ in range(6))
    coefficients = (logprobs, row_max, row_sum, row_mean if entropy else None, c, e if entropy else None)
    operator(x, tokens, mask(rows, masked), *options(rows, vocab, per_row, softcap), *coefficients)


def token_inputs(n: int, optional: bool, values: bool) -> tuple[Tensor | None, ...]:
    """ppo_kernels.loss_terms.TokenInputs, with everything that may be left out or without."""
    given = (optional, True, optional, True, optional, values, values and optional, values, values and optional, values)
    return tuple(
        torch.ones(n, dtype=torch.bool if i in (2, 8) else torch.float32, device="cpu") if here else None
        for i, here in enumerate(given)
    )


def loss_params(entropy_coef: float) -> list[float]:
    """Kernels take them at run time, so that only entropy_coef == 0 matters."""
    return list(PPOLossConfig(entropy_coef=entropy_coef).params())


def row_fused_loss(
    dtype: torch.dtype, vocab: int, entropy: bool = False, aligned: bool = True, rows: int = 16, optional: bool = False,
    in_place: bool = False, always: bool = False, per_row: bool = False, softcap: float = math.inf,
) -> None:  # fmt: skip
    """always: one visit, even if the vocabulary is one for which separate kernels are faster."""
    x, tokens = logits(dtype, vocab, aligned, rows)
    operator = triton_kernels.row_fused_ if in_place else triton_kernels.row_fused
    given = (*token_inputs(rows, optional, optional), loss_params(0.01 if entropy else 0.0))
    with mock.patch.object(launch, "one_visit_wins", return_value=True) if always else contextlib.nullcontext():
        operator(x, tokens, *options(rows, vocab, per_row, softcap), entropy, *given)


# ---- compilation ----------------------------------------------------------------------------------------------------


def compile_for(recorded: Launch, target: str, **more_options: Any) -> Code:
    """What Triton would compile at this launch on this GPU: its own code binds and specialises the arguments."""
    kernel, gpu = recorded.kernel, TARGETS[target]
    warps = recorded.num_warps if gpu.warp_size == 32 else max(1, recorded.num_warps // 2)
    backend = make_backend(gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given, specialization, _ = bind(*recorded.args, **recorded.constants)
    types = [kind for kind, _ in specialization]
    constants = {
        path: get_iterable_path(list(given.values()), path)
        for path in find_paths_if(types, lambda _, kind: kind == "constexpr")
    }
    known = ["" if kind == "constexpr" else value for kind, value in specialization]
    attributes = {
        path: backend.parse_attr(get_iterable_path(known, path))
        for path in find_paths_if(known, lambda _, value: isinstance(value, str))
    }
    signature = dict(zip((p.name for p in kernel.params), types, strict=True))
    options = {"num_warps": warps, "enable_fp_fusion": False, **more_options}
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=gpu, options=options)
    # The sums of a row that does not start at a multiple of 16 bytes read every chunk twice (rows.py).
    twice = recorded.constants.get("ALIGNED") is False and "LANES" in recorded.constants
    return Code(compiled, target, recorded.args[0].element_size(), 1 + twice)


# ---- machine code ---------------------------------------------------------------------------------------------------

WIDTHS = {"ubyte": 1, "ushort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}  # AMD
WIDTHS |= {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}  # NVIDIA; nothing is 4


def moved(op: str, load: bool = True) -> int:
    """Bytes a thread loads from (or stores to) global memory by this instruction, 0 for any other."""
    if op.startswith("LDG" if load else "STG"):
        return next((WIDTHS[part] for part in op.split(".") if part in WIDTHS), 4)
    kind = "load" if load else "store"
    m = re.match(rf"(?:global|buffer|flat)_{kind}_(dwordx\d|[a-z]+)", op)
    return {**WIDTHS, "byte": 1}[m.group(1)] if m else 0


EXP2 = "MUFU.EX2|v_exp_"


class Loop:
    """The instructions between a label and the last branch back to it."""

    def __init__(self, ops: list[str], itemsize: int, reads: int) -> None:
        self.ops, self.itemsize, self.reads = ops, itemsize, reads

    def count(self, pattern: str) -> int:
        return sum(re.match(pattern, op) is not None for op in self.ops)

    def widths(self, load: bool = True) -> set[int]:
        return {moved(op, load) for op in self.ops} - {0}

    @property
    def logits(self) -> float:
        """Logits that a thread takes in one turn."""
        return sum(map(moved, self.ops)) / self.itemsize / (1 if self.stores else self.reads)

    @property
    def stores(self) -> bool:
        return bool(self.widths(load=False))

    def per_logit(self, pattern: str = "") -> float:
        return self.count(pattern) / self.logits

    def mufu_per_logit(self) -> float:
        return self.per_logit("MUFU|v_(exp|log|rcp|rsq|sqrt)_")

    def exp2_per_logit(self) -> float:
        return self.per_logit(EXP2)

    def barriers(self) -> int:
        return self.count("BAR|s_barrier")

    def lane_moves(self) -> int:
        """AMD: scalar registers spilled into lanes of vector registers and fetched from there."""
        return self.count("v_(writelane|readlane)")

    def float64(self) -> int:
        return self.count(r"D(ADD|MUL|FMA|SETP|MNMX)|F2F.*F64|I2F.*F64|F2I.*F64|v_\w*f64")


class Code:
    """A compiled kernel. local: bytes of memory a thread has of its own, where registers are spilled to.

    AMD's scalar registers are spilled into lanes of vector ones instead: Loop.lane_moves().
    """

    def __init__(self, compiled: Any, target: str, itemsize: int, reads: int) -> None:
        self.compiled, self.target, self.itemsize, self.reads = compiled, target, itemsize, reads
        self.shared, self.warps = compiled.metadata.shared, compiled.metadata.num_warps
        if target in NVIDIA:
            usage = run_tool("cuobjdump", compiled.asm["cubin"], "--dump-resource-usage")
            self.registers, self.local = number(usage, "REG"), number(usage, "STACK") + number(usage, "LOCAL")
        else:
            text = compiled.asm["amdgcn"]
            self.registers = number(text, r"\.vgpr_count")
            self.local = number(text, r"\.private_segment_fixed_size") + number(text, r"\.vgpr_spill_count")

    @functools.cached_property
    def parts(self) -> tuple[list[Loop], int]:
        """The innermost loops, and how many instructions are in no loop."""
        if self.target in NVIDIA:
            text, label = run_tool("nvdisasm", self.compiled.asm["cubin"], "-c"), r"\s*(\.L_x_\d+):"
            instruction = r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*);"
        else:
            text, label = self.compiled.asm["amdgcn"], r"(\.LBB\w+):"
            instruction = r"\t((?:[sv]|global|buffer|flat|scratch|ds)_\w+)(.*)"
        loops, straight = parse(text, label, instruction)
        return [Loop(ops, self.itemsize, self.reads) for ops in loops], straight

    def streaming(self, stores: bool = False) -> list[Loop]:
        """Loops that read logits and take their exponentials, without stores or with; the densest first."""
        found = [x for x in self.parts[0] if x.logits and x.stores == stores and x.count(EXP2)]
        return sorted(found, key=lambda x: x.count(EXP2) / len(x.ops), reverse=True)

    def hot_loop(self, stores: bool = False) -> Loop:
        return self.streaming(stores)[0]

    def resident_warps(self) -> int:
        return resident_warps(self.target, self.registers, self.shared, self.warps)


def resident_warps(target: str, registers: int, shared: int, warps: int) -> int:
    """Warps on a multiprocessor at once, of programs of `warps`, as registers and NVIDIA's shared memory allow."""
    if target in AMD:  # a compute unit: four SIMDs of up to 8 warps and 512 registers, given out by 8
        return min(8, 512 // (-(-registers // 8) * 8)) * 4 // warps * warps
    most, programs, bytes_shared = RESIDENT[target]
    by_registers = 16384 // (-(-registers * 32 // 256) * 256) * 4  # four parts of 16384 registers
    return min(min(most, by_registers) // warps, programs, bytes_shared // (shared + 1024)) * warps


def parse(text: str, label: str, instruction: str) -> tuple[list[list[str]], int]:
    """The instructions of each innermost loop, and how many there are outside of all loops."""
    ops: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in text.splitlines():
        if m := re.match(label, line):
            labels[m.group(1)] = len(ops)
        elif m := re.match(instruction, line):
            if re.match("BRA|s_c?branch", m.group(1)) and (to := re.search(r"\.L\w+", m.group(2))):
                branches.append((len(ops), to.group()))
            ops.append(m.group(1))
    ends = {labels[to]: i + 1 for i, to in branches if labels[to] < i}  # of loops, by their start: the last jump back
    loops = [range(*pair) for pair in ends.items()]
    inner = [a for a in loops if not any(b is not a and b.start >= a.start and b.stop <= a.stop for b in loops)]
    straight = sum(op != "NOP" and not any(i in loop for loop in loops) for i, op in enumerate(ops))
    return [ops[loop.start : loop.stop] for loop in inner], straight


def number(text: str, key: str) -> int:
    m = re.search(rf"{key}: *(\d+)", text)
    assert m, f"{key} is missing"
    return int(m.group(1))


def run_tool(name: str, cubin: bytes, option: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
