"""`make gpu`: the tests on CUDA, then the benchmark, in one time budget; needs torch, triton, numpy and pytest.

Writes bench/results/gpu-<device>.json and .md as it goes, and to the folder $OUT too where that is set, with the logs.
--dry runs all of it but the timing, on a CPU, into a temporary folder.

    gpu_tests.py   the tests, in parts          gpu_cases.py   what is measured, in a process of its own
    gpu_report.py  targets and tables           gpu_work.py, gpu_peers.py, gpu_timer.py   its parts
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import gpu_report
from gpu_cases import RESTART_ME, Case, cases
from gpu_tests import CHILDREN, HERE, TREE, run_tests, start, stop, suite, wait

WRITING = 12  # seconds kept for the end
MAX_STARTS = 25

DRY_TESTS = """
import time
def test_passes(): pass
def test_fails(): assert "this" == "fails on purpose"
def test_never_ends(): time.sleep(600)
"""


class Stopped(BaseException):
    """SIGTERM."""


def build(log: Path, dry: bool) -> str:
    """The native library, for the tests that compare with it; without one they compare with plain PyTorch."""
    arguments = ["--help-commands"] if dry else ["--quiet", "build_ext", "--inplace"]
    with log.open("wb") as file:
        child = start(["setup.py", *arguments], file)
        for late in wait([child], 150):
            stop(late)
    code = child.returncode
    if code == 0:
        return "left as it is (dry run)" if dry else "built"
    return f"not built ({code}): {' '.join(log.read_text(errors='replace').split()[-40:])}"


# ---- benchmark ------------------------------------------------------------------------------------------------------


def benchmark(run: Run, deadline: float, only: str) -> None:
    """Lets gpu_cases.py measure; starts it again after the case that killed it, hung, or could not be captured."""
    listed, first = cases(run.dry, only), 0
    no_graph: set[str] = set()
    for _ in range(MAX_STARTS):
        output = run.folder / f"cases-{len(CHILDREN)}.jsonl"
        arguments = ["--output", str(output), "--first", str(first), "--deadline", str(deadline), "--only", only]
        arguments += ["--no-graph", ",".join(sorted(no_graph)), *(["--dry"] if run.dry else [])]
        with (run.folder / "cases.log").open("ab") as log:
            child = start([str(HERE / "gpu_cases.py"), *arguments], log)
        unfinished = follow(run, child, output, deadline, no_graph)
        messages = read_messages(output)
        first = max([first, *(message["case"] + 1 for message in messages if message["event"] == "begin")])
        stopped_at = next((message["case"] for message in messages if message["event"] == "budget"), None)
        if stopped_at is None and time.time() > deadline:
            stopped_at = first - (unfinished is not None)
        if stopped_at is not None:
            run.report["not_reached"] = len(listed) - stopped_at
            run.report["notes"].append(f"The budget ended before {run.report['not_reached']} of {len(listed)} cases.")
        elif unfinished is not None:
            case = listed[unfinished["case"]]
            why = f"the process ended with {child.returncode} in it, or was killed after {unfinished['seconds']:.0f} s"
            run.add({"kind": case.kind, **case._asdict(), "error": why})
        elif child.returncode not in (0, RESTART_ME):
            run.report["notes"].append(f"gpu_cases.py ended with {child.returncode}: {run.tail('cases.log')}")
            return
        if stopped_at is not None or child.returncode == 0:
            return
    run.report["notes"].append(f"gpu_cases.py was given up after {MAX_STARTS} starts.")


def read_messages(output: Path) -> list[dict[str, Any]]:
    """The complete lines."""
    return [json.loads(line) for line in output.read_text().split("\n")[:-1]] if output.exists() else []


def follow(
    run: Run, child: subprocess.Popen[bytes], output: Path, deadline: float, no_graph: set[str]
) -> dict[str, Any] | None:
    """Takes what it measures into the report until it ends. Returns the case it did not finish."""
    seen, limit, alive = 0, time.time() + 120, True
    unfinished: dict[str, Any] | None = None
    while alive:
        alive = child.poll() is None  # looked at before the last messages are
        messages = read_messages(output)
        for message in messages[seen:]:
            event = message.pop("event")
            if event == "ceiling":
                run.report["ceiling"] = message
            elif event == "begin":
                unfinished, limit = message, time.time() + message["seconds"]
            elif event == "record":
                unfinished = None
                run.add(message)
                if "not_captured" in message.get("graph", {}):
                    no_graph.add(message["kind"])
                    run.report["notes"].append(f"{message['kind']} not captured: {message['graph']['not_captured']}")
        seen = len(messages)
        if alive and time.time() > min(limit, deadline + 5):
            stop(child)
        time.sleep(0.1)
    return unfinished


class Run:
    """One run's report, where it is written, and the clock."""

    def __init__(self, dry: bool, device: str, environment: dict[str, Any]) -> None:
        self.dry, self.began, self.written = dry, time.time(), 0.0
        self.folder = Path(tempfile.mkdtemp(prefix="ppo-kernels-gpu-"))
        name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        self.name = "gpu-dry" if dry else f"gpu-{name.removeprefix('nvidia-')}"
        self.targets = [self.folder if dry else HERE / "results"]
        if os.environ.get("OUT"):
            self.targets.append(Path(os.environ["OUT"]))
        self.report: dict[str, Any] = {
            "dry": dry,
            "device": device,
            "environment": environment,
            "command": " ".join(["python", "bench/gpu.py", *sys.argv[1:]]),
            "notes": [],
            "rows": [],
        }

    def tail(self, log: str) -> str:
        path = self.folder / log
        return path.read_text(errors="replace")[-600:] if path.exists() else ""

    def add(self, row: dict[str, Any]) -> None:
        self.report["rows"].append(row)
        problem = next((f"{key}: {row[key]}" for key in ("skipped", "error", "wrong") if key in row), "")
        name = Case(**{field: row[field] for field in Case._fields}).name
        print(f"{time.time() - self.began:5.0f} s  {name:48} {problem[:140]}", flush=True)
        if time.time() - self.written > 2:
            self.write()

    def write(self) -> None:
        """All files, each at once or not at all."""
        self.report["targets"] = gpu_report.judge(self.report)
        for suffix, text in (
            (".json", lambda report: json.dumps(report, indent=1) + "\n"),
            (".md", gpu_report.markdown),
        ):
            for target in self.targets:
                target.mkdir(parents=True, exist_ok=True)
                partial = target / f"{self.name}{suffix}.partial"
                partial.write_text(text(self.report))
                partial.replace(target / f"{self.name}{suffix}")
        for log in ("tests.log", "cases.log"):
            if len(self.targets) > 1 and (self.folder / log).exists():
                shutil.copyfile(self.folder / log, self.targets[-1] / f"{self.name}-{log}")
        self.written = time.time()


def environment(dry: bool) -> tuple[str, dict[str, Any]]:
    """(device, versions)."""
    import torch

    sys.path.insert(0, str(TREE))
    import ppo_kernels

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "absent"

    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    found |= {"triton": version("triton"), "ppo_kernels": ppo_kernels.__version__}
    if dry:
        return "no device (dry run)", found
    device = torch.cuda.get_device_properties(0)
    return device.name, found | {"multiprocessors": device.multi_processor_count, "memory": device.total_memory}


def everything(run: Run, options: argparse.Namespace) -> None:
    run.report["build"] = build(run.folder / "build.log", run.dry)
    print(f"gpu: native library {run.report['build']}", flush=True)
    end = run.began + options.budget - WRITING
    if not options.no_tests:
        device = "cpu" if run.dry else "cuda"
        try:
            run.report["tests"] = run_tests(suite(run.dry), run.folder, device, min(options.tests, end - time.time()))
            run.report["notes"] += run.report["tests"]["notes"]
        except Exception as error:
            traceback.print_exc()
            run.report["notes"].append(f"The tests could not be run or read: {type(error).__name__}: {error}")
        print(gpu_report.tests_line(run.report.get("tests")), flush=True)
        run.write()
    benchmark(run, end, options.only)
    if run.dry:
        rehearse(run)


def rehearse(run: Run) -> None:
    """A dry run's own: a test that fails, one that never ends, and SIGTERM."""
    path = run.folder / "test_rehearsal.py"
    path.write_text(DRY_TESTS)
    run.report["rehearsed_tests"] = run_tests([([str(path), f"--rootdir={run.folder}"], "0/1")], run.folder, "cpu", 10)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=540, help="seconds for everything")
    parser.add_argument("--tests", type=float, default=240, help="seconds for the tests at most")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--only", default="", help="regular expression: cases to measure, e.g. 'stats.*151936|gae'")
    parser.add_argument("--dry", action="store_true", help="everything but the timing, on a CPU")
    options = parser.parse_args()

    if options.dry:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        import torch
    except ImportError as error:
        print(f"make gpu needs a Python with PyTorch ({error}): make gpu PYTHON=...")
        return 2
    if not options.dry and not torch.cuda.is_available():
        print(f"make gpu needs a CUDA device and torch {torch.__version__} sees none; ARGS=--dry tries it without.")
        return 2
    run = Run(options.dry, *environment(options.dry))

    def on_signal(number: int, frame: Any) -> None:
        raise Stopped(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        everything(run, options)
    except BaseException as error:
        run.report["stopped"] = f"{type(error).__name__}: {error}"
        run.report["notes"].append(f"Stopped by {run.report['stopped']}.")
        if not isinstance(error, Stopped):
            traceback.print_exc()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    for child in CHILDREN:
        stop(child)
    run.write()
    print("\n" + gpu_report.markdown(run.report, limit=30), end="")
    if os.environ.get("OUT"):
        shutil.rmtree(run.folder, ignore_errors=True)  # its logs are in $OUT
    kept = [target for target in (*run.targets, run.folder) if target.exists()]
    print(f"written: {run.name}.json and .md; see " + ", ".join(dict.fromkeys(map(str, kept))))
    if options.dry:
        return 0 if run.report.get("stopped") == "Stopped: SIGTERM" else 1
    tests = run.report.get("tests") or {}
    failed = any(tests.get(key) for key in ("failed", "errors", "unfinished"))
    ours = [row for row in run.report["rows"] if row["contender"] == "ours"]
    wrong = any("wrong" in row or "error" in row for row in ours)
    return int(failed or wrong or "stopped" in run.report)


if __name__ == "__main__":
    sys.exit(main())
