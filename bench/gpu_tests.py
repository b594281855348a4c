"""The tests of `make gpu`: pytest in several processes under one cap, its reports read, its output kept."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
TREE = HERE.parent
OUTCOMES = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
SUITE = ["tests/semantics", "tests/test_ops.py"]
CHILDREN: list[subprocess.Popen[bytes]] = []
OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"preexec_fn": os.setpgrp}


def start(command: list[str], log: IO[bytes], **environment: str) -> subprocess.Popen[bytes]:
    """In a process group of its own, so that it can be stopped with whatever it started."""
    paths = [str(TREE), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"} | environment
    child = subprocess.Popen(
        [sys.executable, *command], cwd=TREE, env=env, stdout=log, stderr=subprocess.STDOUT, **OWN_GROUP
    )
    CHILDREN.append(child)
    return child


def stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def wait(children: list[subprocess.Popen[bytes]], seconds: float) -> list[subprocess.Popen[bytes]]:
    """Those that still run then."""
    end = time.time() + seconds
    while any(child.poll() is None for child in children) and time.time() < end:
        time.sleep(0.1)
    return [child for child in children if child.poll() is None]


def suite(dry: bool) -> list[tuple[list[str], str]]:
    """(arguments of pytest, shard): the suite in parts, and what is marked gpu elsewhere."""
    inside = [TREE / path for path in SUITE]
    marked = [
        str(path.relative_to(TREE))
        for path in sorted((TREE / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text() and not any(path == p or p in path.parents for p in inside)
    ]
    elsewhere = [([*marked, "-m", "gpu"], "0/1")] if marked else []
    if dry:
        return [(["tests/test_ops.py", "-k", "in_place_operator"], "0/1"), *elsewhere]
    shards = max(1, min(6, (os.cpu_count() or 1) // 2))
    return [*elsewhere, *((SUITE, f"{i}/{shards}") for i in range(shards))]


def run_tests(parts: list[tuple[list[str], str]], folder: Path, device: str, cap: float) -> dict[str, Any]:
    """All parts at once; interrupted, then killed, at the cap. What they printed is kept in tests.log."""
    began = time.time()
    threads = str(max(1, (os.cpu_count() or 1) // len(parts)))
    running = []
    for arguments, shard in parts:
        xml, log = (folder / f"tests-{len(CHILDREN)}.{kind}" for kind in ("xml", "log"))
        options = ["-v", "--tb=short", "--color=no", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        with log.open("wb") as file:
            environment = {"PPO_KERNELS_TEST_DEVICE": device, "PPO_KERNELS_TEST_SHARD": shard}
            command = ["-m", "pytest", *options, f"--junitxml={xml}", *arguments]
            child = start(command, file, OMP_NUM_THREADS=threads, **environment)
        running.append((child, xml, log))
    late = wait([child for child, _, _ in running], cap)
    for child in late:
        os.killpg(child.pid, signal.SIGINT)  # pytest then writes its report
    for child in wait(late, 8):
        stop(child)

    total: dict[str, Any] = dict.fromkeys(("passed", "failed", "errors", "skipped", "unfinished"), 0)
    total |= {"device": device, "seconds": time.time() - began, "capped": bool(late)}
    total |= {"failures": [], "skips": {}, "notes": []}
    with (folder / "tests.log").open("a") as together:
        for child, xml, log in running:
            text = log.read_text(errors="replace")
            together.write(f"==== {' '.join(map(str, child.args[3:]))}\n{text}\n")  # type: ignore[index]
            read_results(total, xml, text)
            if child not in late and child.returncode not in (0, 1, 2, 5):
                total["errors"] += 1
                total["failures"].append({"id": f"process ended with {child.returncode}", "message": text[-1500:]})
            if child.returncode not in (0, 5):
                print(f"---- end of the output of tests that ended with {child.returncode}:", text[-2500:], sep="\n")
    return total


def read_results(total: dict[str, Any], xml: Path, text: str) -> None:
    """Adds one part's results: counted in its output, which a killed process leaves too; messages from its XML."""
    messages = {}
    for case in testcases(xml):
        for found in case:
            if found.tag == "skipped":
                reason = found.get("message", "")[:200]
                total["skips"][reason] = total["skips"].get(reason, 0) + 1
            elif found.tag in ("failure", "error"):
                lines = (found.text or found.get("message", "")).strip().splitlines()
                name = f"{(case.get('classname') or '').split('.')[-1]}::{case.get('name')}"
                messages[name] = "\n".join(lines[-12:])[-1500:]
    names = {"ERROR": "errors", "XFAIL": "skipped", "XPASS": "failed"}
    seen = set()
    for test, outcome in re.findall(rf"^(\S+::.+?) ({OUTCOMES})\b", text, re.MULTILINE):
        seen.add(test)
        total[names.get(outcome, outcome.lower())] += 1
        if outcome in ("FAILED", "ERROR", "XPASS"):
            own = [message for name, message in messages.items() if test.replace(".py::", "::").endswith(name)]
            total["failures"].append({"id": test, "message": "\n".join(own) or "no report: see the log"})
    chosen = re.search(r"(\d+) selected", text) or re.search(r"collected (\d+) item", text)
    if chosen is None or re.search(r"^ERROR collecting|^_+ ERROR collecting", text, re.MULTILINE):
        total["errors"] += 1
        total["failures"].append({"id": "collection", "message": text[-1500:]})
    left = int(chosen[1]) - len(seen) if chosen else 0
    if left > 0:
        total["unfinished"] += left
        last = re.findall(r"^\S+::.+$", text, re.MULTILINE)
        total["notes"].append(f"{left} tests unfinished after {last[-1].strip() if last else 'none'}")
    total["notes"] += [line.strip() for line in text.splitlines() if line.startswith("NOT RUN: ")]


def testcases(xml: Path) -> list[ElementTree.Element]:
    """None where pytest was killed before, or while, it wrote them."""
    try:
        return list(ElementTree.parse(xml).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return []
