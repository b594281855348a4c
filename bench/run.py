"""`make bench`: runs the benchmark and writes a JSON file, a Markdown table and a picture under bench/results/.

bench/run.py [pytest options]     e.g. -k "N256 and V151936", --no-compile
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
sys.path.insert(0, str(HERE))


def device_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "CPU"


def environment() -> dict[str, Any]:
    import torch

    import ppo_kernels
    from ppo_kernels import native

    return {
        "device": device_name(),
        "threads": torch.get_num_threads(),
        "native_level": native.level() if native.available() else None,
        "torch": torch.__version__,
        "ppo_kernels": ppo_kernels.__version__,
        "command": "python bench/run.py " + " ".join(sys.argv[1:]),
    }


def run_benchmarks(options: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.json"
        command = [sys.executable, "-m", "pytest", str(HERE), "-q", "--benchmark-disable-gc", f"--benchmark-json={raw}"]
        done = subprocess.run([*command, "--benchmark-columns=median,rounds", *options], check=False)
        if not raw.exists() or raw.stat().st_size == 0:
            sys.exit(f"bench/run.py: no results (pytest ended with {done.returncode})")
        benchmarks = json.loads(raw.read_text())["benchmarks"]
    return [{"case": re.sub(r"^test_", "", b["name"]), **b["extra_info"]} for b in benchmarks]


def ratio(row: dict[str, Any], numerator: str, denominator: str) -> str:
    ms = row["median_ms"]
    return f"{ms[numerator] / ms[denominator]:.2f}" if numerator in ms and denominator in ms else ""


def markdown(report: dict[str, Any]) -> str:
    env = report["environment"]
    lines = [
        f"# {env['device']}, {env['threads']} threads, native level {env['native_level']}, torch {env['torch']}",
        "",
        f"Medians of interleaved rounds in one run of `{env['command'].strip()}`. copy: one copy of the logits.",
        "",
        "| case | ours, ms | ours / copy | eager / ours | torch.compile / ours |",
        "|---|---|---|---|---|",
    ]
    for row in report["speed"]:
        ratios = [ratio(row, *pair) for pair in (("ours", "copy"), ("eager", "ours"), ("compile", "ours"))]
        lines.append(f"| {row['case']} | {row['median_ms']['ours']:.2f} | " + " | ".join(ratios) + " |")
    lines += [
        "",
        "Peak memory beyond the inputs, as a fraction of the logits (256 x 151936, forward and backward):",
        "",
    ]
    lines += ["| dtype | entropy bonus | ours, in place | ours, own gradient | eager |", "|---|---|---|---|---|"]
    peaks = {(m["dtype"], m["entropy"], m["contender"]): m["peak_over_logits"] for m in report["memory"]}
    for dtype, entropy in sorted({key[:2] for key in peaks}):
        cells = [f"{peaks[dtype, entropy, c]:.3f}" for c in ("ours", "ours, own gradient", "eager")]
        lines.append(f"| {dtype} | {'yes' if entropy else 'no'} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def picture(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in report["speed"] if r["case"].startswith("ppo_loss") and "masked0" in r["case"]]
    if not rows:
        return
    names = [n for n in ("eager", "compile", "ours") if any(n in r["median_ms"] for r in rows)]
    figure, axis = plt.subplots(figsize=(9, 0.5 * len(rows) + 1.5))
    for i, name in enumerate(names):
        widths = [r["median_ms"].get(name, 0) / r["median_ms"]["copy"] for r in rows]
        places = [y + 0.27 * (1 - i) for y in range(len(rows))]
        bars = axis.barh(places, widths, height=0.25, label=name, color=("#b0b7c3", "#7d8aa0", "#d1495b")[i])
        axis.bar_label(bars, fmt="%.1f", fontsize=7, padding=2)
    axis.set_yticks(range(len(rows)), [re.sub(r"ppo_loss\[|-masked0|\]", "", r["case"]) for r in rows], fontsize=8)
    axis.set_xscale("log")
    axis.axvline(1, color="#444", linewidth=0.8)
    axis.set_xlabel("time of the PPO loss, forward + backward, over the time of copying the logits (log scale)")
    axis.set_title(report["environment"]["device"], fontsize=10)
    axis.legend(loc="lower right", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def main() -> None:
    import memory

    report = {"environment": environment(), "speed": run_benchmarks(sys.argv[1:]), "memory": memory.table()}
    RESULTS.mkdir(exist_ok=True)
    base = RESULTS / ("cpu-" + re.sub(r"[^a-z0-9]+", "-", report["environment"]["device"].lower()).strip("-"))
    base.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    base.with_suffix(".md").write_text(markdown(report))
    picture(report, base.with_suffix(".png"))
    print(markdown(report))
    print(f"written: {base.relative_to(HERE.parent)}.json, .md, .png")


if __name__ == "__main__":
    main()
