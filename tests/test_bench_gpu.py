"""`make gpu` without a GPU: its dry run writes everything and claims nothing."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

TREE = Path(__file__).parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str, set[str]]:
    """(report, its Markdown, what was printed, files under bench/results before and after)."""
    out, results = tmp_path_factory.mktemp("out"), TREE / "bench" / "results"
    before = {(path.name, path.stat().st_mtime_ns) for path in results.glob("gpu*")}
    command = [sys.executable, str(TREE / "bench" / "gpu.py"), "--dry"]
    done = subprocess.run(
        command, env=os.environ | {"OUT": str(out)}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert before == {(path.name, path.stat().st_mtime_ns) for path in results.glob("gpu*")}
    names = {path.name for path in out.iterdir()}
    report = json.loads((out / "gpu-dry.json").read_text())
    return report, (out / "gpu-dry.md").read_text(), done.stdout, names


def test_every_quantity_and_contender_is_there(dry) -> None:
    rows = [row for row in dry[0]["rows"] if "plain" in row]
    vocabulary = {"stats", "grad", "grad_", "fused", "fused_", "split"}
    linear = {"linear", "linear_low", "linear_scores"}
    assert {row["quantity"] for row in rows} == vocabulary | linear | {"scores", "token_loss", "gae", "whiten"}
    assert {row["contender"] for row in rows} >= {"ours", "eager", "compile", "products"}
    peers = {row["contender"] for row in dry[0]["rows"]}
    assert peers == {"ours", "eager", "compile", "products", "liger", "trl"}
    for row in rows:
        if row["quantity"] in linear:
            assert row["flops"] > 0
            assert ("logprob_error" in row) == (row["contender"] in ("ours", "eager"))
            assert ("weight_gradient_error" in row) == ("logprob_error" in row and row["quantity"] != "linear_scores")
    for key in ("masked", "entropy", "dtype"):
        assert len({row[key] for row in rows}) == 2
    for row in rows:
        assert row["ideal_bytes"] > 0
        assert "wrong" not in row, row
        assert {"ms", "ms_p20", "ms_p80", "repetitions"} <= row["plain"].keys()


def test_nothing_claims_to_be_measured_on_a_gpu(dry) -> None:
    report, markdown, printed, _ = dry
    assert report["dry"]
    assert report["device"] == "no device (dry run)"
    assert {row["clock"] for row in report["rows"] if "plain" in row} == {"host clock, dry run"}
    assert {target["verdict"] for target in report["targets"]} == {"not measured"}
    assert {target["value"] for target in report["targets"]} == {None}
    for text in (markdown, printed):
        assert "TB/s" not in text
        cells = [cell.strip() for line in text.splitlines() if line.startswith("| 4 | 24") for cell in line.split("|")]
        assert cells.count("dry") >= 6
    assert len(printed[printed.index("# no device") :]) < 12000


def test_what_goes_wrong_is_rehearsed(dry) -> None:
    report, _, printed, files = dry
    assert report["stopped"] == "Stopped: SIGTERM"
    rehearsed = report["rehearsed_tests"]
    assert rehearsed["capped"]
    assert (rehearsed["passed"], rehearsed["failed"], rehearsed["unfinished"]) == (1, 1, 1)
    assert rehearsed["failures"][0]["id"].endswith("::test_fails")
    assert "fails on purpose" in rehearsed["failures"][0]["message"]
    assert "fails on purpose" in printed
    assert {row["quantity"] for row in report["rows"] if "error" in row} == {"hangs", "dies"}
    assert any("not_captured" in row.get("graph", {}) for row in report["rows"])
    assert report["not_reached"] == 1
    assert files == {"gpu-dry.json", "gpu-dry.md", "gpu-dry-tests.log", "gpu-dry-cases.log"}
    assert report["tests"]["passed"] > 0
    assert report["tests"]["failed"] == report["tests"]["errors"] == 0
    assert any("CUDA" in reason for reason in report["tests"]["skips"])


def test_without_a_device_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    done = subprocess.run(
        ["make", "gpu", f"PYTHON={sys.executable}"], cwd=TREE, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "needs a CUDA device" in done.stdout


@pytest.fixture
def bench_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TREE / "bench")


def test_the_stand_in_has_the_calls_of_torch_cuda(bench_modules) -> None:
    from gpu_timer import DryCuda

    for name, value in vars(DryCuda).items():
        if name.startswith("_") or name == "captures_until_failure":
            continue
        real = getattr(torch.cuda, name)
        for method in vars(value) if inspect.isclass(value) else ():
            assert method.startswith("_") or hasattr(real, method)


def test_cases_are_ordered_by_importance_and_complete(bench_modules) -> None:
    from gpu_cases import VOCABULARY, cases

    listed = cases(dry=False)
    assert len(set(listed)) == len(listed)
    assert {case.quantity for case in listed[:6]} == set(VOCABULARY)
    assert {(case.rows, case.columns, case.dtype, case.masked) for case in listed[:6]} == {(8192, 151936, "bf16", 0.0)}
    shapes = {case[1:6] for case in listed if case.quantity == "fused"}
    for rows in (64, 256, 1024, 8192):
        for vocab in (8, 1000, 32000, 50257, 128256, 151643, 151936, 262144):
            for dtype in ("bf16", "fp32"):
                for masked in (0.0, 0.5):
                    assert {(rows, vocab, dtype, masked, entropy) for entropy in (False, True)} <= shapes
    linear = [listed.index(case) for case in listed if case.quantity == "linear" and case.columns == 151936]
    assert {listed[i].contender for i in linear} == {"ours", "products", "eager", "liger"}
    assert {(listed[i].contender, listed[i].masked) for i in linear} >= {("ours", 0.5), ("products", 0.5)}
    own = [i for i in linear if listed[i].contender in ("ours", "products")]
    assert max(own) < listed.index(next(case for case in listed if case.columns == 50257))
    assert cases(False, "^gae 512x4096") == [case for case in listed if case[1:3] == (512, 4096)]


def test_targets_are_judged(bench_modules) -> None:
    """On made-up times: a bandwidth of 1e12 bytes a second, and rows that take twice their bytes, or 1.05 times."""
    import gpu_report
    from gpu_cases import cases

    def report(slowness: float, **changes: Any) -> dict[str, Any]:
        rows = []
        for case in cases(dry=False)[:250]:
            slower = 1.0 if case.contender == "products" else slowness
            kept = 1 - case.masked if case.quantity == "linear" else 1.0
            times = {"ms": 1e3 * slower * kept * case.rows * case.columns / 1e12}
            sizes = {"ideal_bytes": case.rows * case.columns, "logits_bytes": 2**20, "peak_bytes": 2**12}
            sizes |= {"flops": 1e9, "gradient_bytes": 2**11, "chunk_and_fp32_bytes": 2**11}
            times = {"plain": times, "graph": {"not_captured": ""} if case.quantity == "split" else times}
            rows.append({"kind": case.kind, **case._asdict(), **sizes, **times})
        ceiling = {"bytes_per_s": 1e12, "gigabytes": 8.0}
        versions = dict.fromkeys(("torch", "triton", "python", "ppo_kernels"), "")
        full = {"dry": False, "device": "made up", "rows": rows, "ceiling": ceiling, "environment": versions}
        return full | {"command": "", "notes": [], "tests": None} | changes

    verdicts = {t["target"]: t["verdict"] for t in gpu_report.judge(report(1.05))}
    assert verdicts.pop("[65536, 8], own gradient: time over eager PyTorch") == "met"
    assert set(verdicts.values()) == {"met"}
    slow = {t["target"]: t["verdict"] for t in gpu_report.judge(report(2.5))}
    assert {verdict for name, verdict in slow.items() if "copy bandwidth" in name or "its" in name} >= {"missed"}
    assert slow["peak memory in place, of the logits"] == "met"
    assert {name.split(": ")[1]: verdict for name, verdict in slow.items() if name.startswith("linear")} == {
        "time over its three products": "missed",
        "time over that of all": "met",
        "peak memory beyond gradients, of a chunk and an fp32 gradient": "met",
    }
    wrong = report(1.0)
    wrong["rows"][0]["wrong"] = "off by 1"
    assert gpu_report.judge(wrong)[0]["verdict"] == "missed: wrong result"
    nothing = gpu_report.judge(report(1.0, ceiling=None))
    assert {t["verdict"] for t in nothing} == {"not measured"}
    failing = {"id": "tests.test_x::test_y", "message": "E   boom"}
    tests = dict.fromkeys(("passed", "failed", "errors", "skipped", "unfinished"), 1)
    tests |= {"device": "cuda", "seconds": 3.0, "failures": [failing] * 50}
    text = gpu_report.markdown(report(1.05, tests=tests), limit=24)
    assert "95%" in text
    assert "Copy: 1.00 TB/s" in text
    assert "0.39%" in gpu_report.markdown(report(1.05))
    assert "95%*" in text  # split was not captured
    assert "| linear | [8192, 151936] | bf16 |" in text
    assert len(text) < 12000
