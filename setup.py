"""Builds csrc into plain shared libraries, one per instruction-set level; the rest is in pyproject.toml.

The libraries have a C ABI and are loaded with ctypes. They know nothing of Python or torch, so building needs neither's
headers and one wheel serves every version of both. A level that cannot be built is reported and left out: the package
then runs on the levels that were, or on plain PyTorch.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

X86_LEVELS = {
    "v2": ["-march=x86-64-v2"],
    "v3": ["-march=x86-64-v3"],
    # GCC 12's own AVX-512 header sets off -Wuninitialized; the other two levels keep it for the same sources.
    "v4": ["-march=x86-64-v4", "-mprefer-vector-width=512", "-Wno-uninitialized"],
}
LEVELS_OF_MACHINE = {"x86_64": X86_LEVELS, "amd64": X86_LEVELS, "aarch64": {"neon": []}, "arm64": {"neon": []}}
LEVELS = LEVELS_OF_MACHINE.get(platform.machine().lower(), {"generic": []})

# No -fopenmp: the sources declare the few OpenMP entry points they need and find them in torch's own runtime.
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
]
if sys.platform == "darwin":
    FLAGS += ["-undefined", "dynamic_lookup"]


def find_compiler() -> list[str] | None:
    """The C++ compiler as a command: $CXX and nothing else when set, otherwise the first one found."""
    if "CXX" in os.environ:
        candidates = [os.environ["CXX"]]
    else:
        candidates = [sysconfig.get_config_var("CXX") or "", "c++", "g++", "clang++"]
    commands = [shlex.split(candidate) for candidate in candidates]
    return next((command for command in commands if command and shutil.which(command[0])), None)


def build_level(level: str, compiler: list[str] | None, folder: Path) -> str | None:
    """Compiles one level into folder unless it is up to date there. Returns why it could not, or None."""
    library = folder / f"_native_{level}.so"
    sources = sorted(str(path) for path in Path("csrc").glob("*.cpp"))
    inputs = [Path("setup.py"), *Path("csrc").iterdir()] if sources else []
    if inputs and library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return None

    library.unlink(missing_ok=True)  # an older library must not outlive a failed build
    if not sources:
        return "csrc holds no source"
    if compiler is None:
        return f"CXX={os.environ['CXX']} not found" if "CXX" in os.environ else "no C++ compiler found"
    partial = library.with_name(f"{library.name}.{os.getpid()}")  # a half-written library is never visible
    extra = shlex.split(os.environ.get("CXXFLAGS", ""))
    command = [*compiler, *FLAGS, *extra, *LEVELS[level], f'-DPPK_LEVEL="{level}"', *sources, "-o", str(partial)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    sys.stderr.write(result.stdout)
    if result.returncode != 0:
        partial.unlink(missing_ok=True)
        return f"{compiler[0]} failed"
    partial.replace(library)
    return None


class BuildNative(build_ext):
    """`build_ext` that makes the native libraries: in the tree with --inplace or -e, otherwise in the build folder."""

    def run(self) -> None:
        folder = Path("ppo_kernels") if self.inplace else Path(self.build_lib, "ppo_kernels")
        folder.mkdir(parents=True, exist_ok=True)
        compiler = find_compiler()
        with ThreadPoolExecutor(2) as pool:
            reasons = list(pool.map(lambda level: build_level(level, compiler, folder), LEVELS))
        missing = {level: reason for level, reason in zip(LEVELS, reasons, strict=True) if reason}
        built = ", ".join(level for level in LEVELS if level not in missing)
        if missing:
            why = "; ".join(sorted(set(missing.values())))
            where = f"where {built} cannot run" if built else "which is slower"
            print(
                f"ppo_kernels: native level {', '.join(missing)} not built ({why}): "
                f"the reference (plain PyTorch) backend will be used, {where}",
                file=sys.stderr,
            )


class AnyPythonWheel(bdist_wheel):
    """A wheel for one platform and any Python 3: the libraries do not use Python's ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class NativeDistribution(Distribution):
    """Has platform-specific files, although none of them is a Python extension module."""

    def has_ext_modules(self) -> bool:
        return True


setup(distclass=NativeDistribution, cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPythonWheel})
