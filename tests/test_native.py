"""The native library as a binary: levels, threads, versions. Its mathematics is tested in semantics/."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ppo_kernels import logprobs_from_logits, native

pytestmark = pytest.mark.skipif(not native.built_levels(), reason="NOT RUN: the native library is not built")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], env=full, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("level", native.runnable_levels())
def test_each_level_agrees_with_float64(level: str) -> None:
    done = run(
        "from ppo_kernels import doctor; doctor.self_check()", PPO_KERNELS_ISA=level, PPO_KERNELS_BACKEND="native"
    )
    assert done.returncode == 0, done.stderr


def test_best_runnable_level_is_the_default() -> None:
    default = run("from ppo_kernels import native; print(native.level())", PPO_KERNELS_ISA="")
    assert default.stdout.strip() == native.runnable_levels()[0]


def test_a_level_this_cpu_cannot_run_is_refused_by_name() -> None:
    missing = next(level for level in native.LEVELS if level not in native.runnable_levels())
    done = run("import ppo_kernels", PPO_KERNELS_ISA=missing)
    assert f"PPO_KERNELS_ISA={missing} cannot run here" in done.stderr


@pytest.mark.parametrize(
    ("backend", "words"), [("triton", "only with TRITON_INTERPRET=1"), ("cuda", "must be native, triton or")]
)
def test_a_backend_that_cannot_run_says_why(backend: str, words: str) -> None:
    assert words in run("import ppo_kernels", PPO_KERNELS_BACKEND=backend).stderr


def test_without_libraries_it_falls_back_and_says_so_once(tmp_path: Path) -> None:
    package = Path(native.__file__).parent
    copy = tmp_path / "ppo_kernels"
    copy.mkdir()
    for source in package.glob("*.py"):
        (copy / source.name).write_bytes(source.read_bytes())
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from ppo_kernels import ops; print(ops.CPU_BACKEND)"
    done = run(code, PPO_KERNELS_BACKEND="", PPO_KERNELS_ISA="")
    assert done.stdout.strip() == "reference"
    assert done.stderr.count("runs on plain PyTorch, slowly") == 1


def test_the_library_needs_no_openmp_runtime_of_its_own() -> None:
    """A second OpenMP pool would spin beside PyTorch's: the library must neither link one nor load one."""
    library = Path(native.__file__).with_name(f"_native_{native.level()}.so")
    assert not re.search(rb"lib(gomp|iomp5|omp)[.-]", library.read_bytes())
    code = (
        "import torch, ppo_kernels, re, pathlib\n"
        "ppo_kernels.logprobs_from_logits(torch.randn(64, 5000), torch.zeros(64, dtype=torch.long))\n"
        "maps = pathlib.Path('/proc/self/maps').read_text()\n"
        "print(len(set(re.findall(r'\\S*lib(?:gomp|iomp5|omp)[.-]\\S*', maps))))"
    )
    assert run(code).stdout.strip() == "1"
    assert hasattr(ctypes.CDLL(None), "GOMP_parallel")


def test_the_baseline_level_has_no_newer_instructions() -> None:
    baseline = Path(native.__file__).with_name("_native_v2.so")
    if not baseline.exists():
        pytest.skip("NOT RUN: no x86-64 build here")
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(baseline)], capture_output=True, text=True, check=False
    )
    if code.returncode != 0:
        pytest.skip("NOT RUN: objdump is not installed")
    assert not re.search(r"%[yz]mm|\tv[a-z]", code.stdout)


def test_set_num_threads_is_obeyed() -> None:
    """With one thread no OpenMP worker is started by us."""
    code = (
        "import torch, os\ntorch.set_num_threads(1)\nimport ppo_kernels\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "ppo_kernels.logprobs_from_logits(torch.randn(64, 5000), torch.zeros(64, dtype=torch.long))\n"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    assert run(code).stdout.strip() == "0"


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    logits, tokens = torch.randn(300, 700), torch.randint(700, (300,))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = logprobs_from_logits(logits, tokens)
        torch.set_num_threads(4)
        assert torch.equal(one, logprobs_from_logits(logits, tokens))
    finally:
        torch.set_num_threads(threads)
