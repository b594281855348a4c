"""The package is built from a copy of the tree whose csrc is a stand-in of a few lines, so that compiling is quick."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytest.importorskip("setuptools", minversion="77.0.3")

ROOT = Path(__file__).parents[1]
X86 = platform.machine().lower() in ("x86_64", "amd64")
LEVELS = ["v2", "v3", "v4"] if X86 else ["neon"] if platform.machine().lower() in ("aarch64", "arm64") else ["generic"]
LIBRARIES = [f"ppo_kernels/_native_{level}.so" for level in LEVELS]
NO_COMPILER = {"CXX": "/nonexistent"}

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")

HEADER = '#define EXPORT extern "C" __attribute__((visibility("default")))\n'
SOURCE = '#include "standin.h"\nEXPORT const char* ppk_level(void) { return PPK_LEVEL; }\n'


@pytest.fixture
def tree(tmp_path):
    """A copy of what a build reads, without libraries, with the stand-in as csrc."""
    tree = tmp_path / "tree"
    skip = shutil.ignore_patterns("*.so", "*.so.*", "__pycache__")
    shutil.copytree(ROOT / "ppo_kernels", tree / "ppo_kernels", ignore=skip)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, tree)
    (tree / "csrc").mkdir()
    (tree / "csrc/standin.h").write_text(HEADER)
    (tree / "csrc/standin.cpp").write_text(SOURCE)
    return tree


def setup(tree, *arguments, env=None):
    """Runs setup.py in the tree, expects success, returns what the project itself said."""
    command = [sys.executable, "setup.py", "--quiet", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS")} | (env or {})
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return [line for line in (result.stdout + result.stderr).splitlines() if line.startswith("ppo_kernels:")]


def wheel(tree, **options):
    """Builds a wheel. Returns its path, the names in it, and what the project said."""
    said = setup(tree, "bdist_wheel", **options)
    [path] = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return path, archive.namelist(), said


@needs_compiler
def test_wheel_holds_every_level_and_fits_any_python(tree, tmp_path):
    path, names, said = wheel(tree)
    assert said == []
    assert path.name.startswith("ppo_kernels-0.1.0-py3-none-")
    assert not path.name.endswith("-any.whl")
    assert sorted(name for name in names if name.endswith(".so")) == LIBRARIES
    assert "ppo_kernels/py.typed" in names
    assert not any(name.startswith(("csrc", "tests")) for name in names)

    with zipfile.ZipFile(path) as archive:
        library = ctypes.CDLL(archive.extract(LIBRARIES[0], tmp_path))
    library.ppk_level.restype = ctypes.c_char_p
    assert library.ppk_level() == LEVELS[0].encode()


def test_without_a_compiler_the_build_succeeds_and_says_so_in_one_line(tree):
    _, names, said = wheel(tree, env=NO_COMPILER)
    assert not any(name.endswith(".so") for name in names)
    assert "ppo_kernels/py.typed" in names
    [line] = said
    assert line == (
        f"ppo_kernels: native level {', '.join(LEVELS)} not built (CXX=/nonexistent not found): "
        "the reference (plain PyTorch) backend will be used, which is slower"
    )


@needs_compiler
@pytest.mark.skipif(not X86, reason="this architecture has one level")
def test_a_level_that_does_not_compile_leaves_the_others(tree):
    with (tree / "csrc/standin.cpp").open("a") as source:
        source.write("#ifdef __AVX512F__\n#error not today\n#endif\n")
    (tree / LIBRARIES[-1]).touch()
    os.utime(tree / LIBRARIES[-1], (0, 0))  # a library of an older source
    [line] = setup(tree, "build_ext", "--inplace")
    assert line.startswith("ppo_kernels: native level v4 not built (")
    assert line.endswith("the reference (plain PyTorch) backend will be used, where v2, v3 cannot run")
    assert sorted(str(path.relative_to(tree)) for path in tree.glob("ppo_kernels/*.so*")) == LIBRARIES[:-1]


@needs_compiler
def test_libraries_are_compiled_again_only_when_a_source_is_newer(tree):
    def built():
        assert setup(tree, "build_ext", "--inplace") == []
        return [(tree / library).stat().st_mtime_ns for library in LIBRARIES]

    first = built()
    assert built() == first
    assert setup(tree, "build_ext", "--inplace", env=NO_COMPILER) == []
    os.utime(tree / "csrc/standin.h")
    assert all(again > before for again, before in zip(built(), first, strict=True))


def test_sdist_holds_the_native_sources(tree):
    setup(tree, "sdist", "--formats=zip")
    [path] = (tree / "dist").glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.namelist()}
    assert {"csrc/standin.cpp", "csrc/standin.h", "setup.py", "constraints.txt", "ppo_kernels/py.typed"} <= names


@needs_compiler
def test_every_level_of_the_real_sources_is_built_in_this_tree():
    assert [library for library in LIBRARIES if not (ROOT / library).exists()] == []


def test_each_dependency_is_pinned_once_inside_its_range(tree):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    pinned = {pin.name.lower(): str(pin.specifier).removeprefix("==") for pin in pins}
    assert len(pinned) == len(pins)

    setup(tree, "egg_info")
    ranges = [Requirement(line) for line in PathDistribution(tree / "ppo_kernels.egg-info").requires]
    ranges = [r for r in ranges if r.name.replace("-", "_") != "ppo_kernels"]
    assert {r.name.lower() for r in ranges} == set(pinned)
    assert [f"{r.name}=={pinned[r.name.lower()]}" for r in ranges if pinned[r.name.lower()] not in r.specifier] == []
