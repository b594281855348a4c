"""The summary of `make gpu`: targets judged, and tables. A dry run shows where figures would be, and none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gpu_cases import LINEAR, VOCABULARY

Row = dict[str, Any]
LARGE = {"rows": [8192], "columns": [151936], "dtype": ["bf16"], "masked": [0.0], "contender": ["ours"]}


def milliseconds(row: Row) -> float:
    """On the device: replays of a captured call where that works, otherwise plain calls."""
    return float(max(row["graph"].get("ms", row["plain"]["ms"]), 1e-6))


def fraction(row: Row, report: Row) -> float:
    """Of the copy bandwidth measured in the same run."""
    return float(row["ideal_bytes"] / (milliseconds(row) * 1e-3) / report["ceiling"]["bytes_per_s"])


def over_limit(row: Row, report: Row) -> float:
    return 1 / fraction(row, report)


def extra_memory(row: Row, report: Row) -> float:
    return float(row["peak_bytes"] / row["logits_bytes"])


def beyond_gradients(row: Row, report: Row) -> float:
    """Peak memory of a linear form but for the gradients it returns, over a chunk of logits and an fp32 gradient."""
    return float((row["peak_bytes"] - row["gradient_bytes"]) / row["chunk_and_fp32_bytes"])


def over(match: Row) -> Callable[[Row, Row], float]:
    """Time over that of the first row of another selection."""

    def value(row: Row, report: Row) -> float:
        others = [r for r in selected(report, match) if r["entropy"] == row["entropy"]]
        return milliseconds(row) / milliseconds(others[0]) if others else float("nan")

    return value


class Target(NamedTuple):
    """Every selected row must meet it; `least` is a lower bound, `most` an upper one."""

    text: str
    match: Row
    value: Callable[[Row, Row], float]
    least: float = float("-inf")
    most: float = float("inf")


SMALL = {"rows": [65536], "columns": [8], "dtype": ["bf16"], "masked": [0.0]}
TARGETS = [
    Target("stats, 8192 x 151936 bf16: copy bandwidth", LARGE | {"quantity": ["stats"]}, fraction, least=0.92),
    Target("grad, 8192 x 151936 bf16: copy bandwidth", LARGE | {"quantity": ["grad"]}, fraction, least=0.92),
    Target("one pass, in place: time over its 4 bytes", LARGE | {"quantity": ["fused_"]}, over_limit, most=1.25),
    Target("one pass, own gradient: time over its 4 bytes", LARGE | {"quantity": ["fused"]}, over_limit, most=1.25),
    *(
        Target(f"{q}, {n} rows of 151936: copy bandwidth", LARGE | {"quantity": [q], "rows": [n]}, fraction, least=0.75)
        for q in ("stats", "grad")
        for n in (64, 256)
    ),
    *(
        Target(f"{q}, odd V {v}: copy bandwidth", LARGE | {"quantity": [q], "columns": [v]}, fraction, least=0.75)
        for q in ("stats", "grad")
        for v in (50257, 151643)
    ),
    Target(
        "gae [512, 4096]: time over its bytes",
        {"quantity": ["gae"], "rows": [512], "columns": [4096]},
        over_limit,
        most=2.0,
    ),
    Target(
        "gae [8, 65536]: time over that of [512, 4096], 4 times its size",
        {"quantity": ["gae"], "rows": [8], "columns": [65536], "masked": [0.0]},
        over({"quantity": ["gae"], "rows": [512], "columns": [4096], "masked": [0.0]}),
        most=1.0,
    ),
    Target(
        "[65536, 8], own gradient: time over eager PyTorch",
        SMALL | {"quantity": ["fused"], "contender": ["ours"], "entropy": [True]},
        over(SMALL | {"quantity": ["fused"], "contender": ["eager"]}),
        most=1.0,
    ),
    Target("peak memory in place, of the logits", LARGE | {"quantity": ["fused_"]}, extra_memory, most=0.01),
    Target("peak memory with own gradient, of the logits", LARGE | {"quantity": ["fused"]}, extra_memory, most=1.01),
    *(
        Target(
            f"linear, {rows}: time over its three products",
            LARGE | {"quantity": ["linear"], "masked": [masked]},
            over(LARGE | {"quantity": ["linear"], "masked": [masked], "contender": ["products"]}),
            most=1.10,
        )
        for rows, masked in (("8192 x 151936 bf16", 0.0), ("half of 8192 masked", 0.5))
    ),
    Target(
        "linear, half of 8192 masked: time over that of all",
        LARGE | {"quantity": ["linear"], "masked": [0.5]},
        over(LARGE | {"quantity": ["linear"]}),
        most=0.6,
    ),
    # Beside the two there are copies of hidden, and what is of size N.
    Target(
        "linear: peak memory beyond gradients, of a chunk and an fp32 gradient",
        LARGE | {"quantity": ["linear"]},
        beyond_gradients,
        most=1.02,
    ),
]


def selected(report: Row, match: Row) -> list[Row]:
    return [r for r in report["rows"] if "plain" in r and all(r[key] in values for key, values in match.items())]


def judge(report: Row) -> list[Row]:
    """{"target", "value", "bar", "verdict"}: met, missed or not measured."""
    judged = []
    for target in TARGETS:
        rows = selected(report, target.match)
        values = [] if report["dry"] or not report.get("ceiling") else [target.value(row, report) for row in rows]
        values = [value for value in values if value == value]  # nan: nothing to compare with
        bar = f">= {target.least:g}" if target.most == float("inf") else f"<= {target.most:g}"
        verdict, worst = "not measured", None
        if values:
            worst = min(values) if target.most == float("inf") else max(values)
            verdict = "met" if target.least <= worst <= target.most else "missed"
            if any("wrong" in row for row in rows):
                verdict = "missed: wrong result"
        judged.append({"target": target.text, "value": worst, "bar": bar, "verdict": verdict})
    return judged


Show = Callable[[Row, Row], str]


def device_time(row: Row, report: Row) -> str:
    return f"{milliseconds(row):.4g} {fraction(row, report):.0%}{'' if 'ms' in row['graph'] else '*'}"


def plain_time(row: Row, report: Row) -> str:
    return f"{row['plain']['ms']:.4g}"


def memory(row: Row, report: Row) -> str:
    return f"{extra_memory(row, report):.2%}"


def over_ours(row: Row, report: Row) -> str:
    same = {key: [row[key]] for key in ("quantity", "rows", "columns", "dtype", "masked", "entropy")}
    ours = selected(report, same | {"contender": ["ours"]})
    return f"{milliseconds(row) / milliseconds(ours[0]):.2f}" if ours and row["contender"] != "ours" else ""


def cell(row: Row | None, report: Row, show: Show = device_time) -> str:
    if row is None:
        return ""
    for problem in ("skipped", "error", "wrong"):
        if problem in row:
            return problem.upper()
    return "dry" if report["dry"] or not report.get("ceiling") else show(row, report)


def table(head: list[str], lines: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)]


def options(row: Row) -> str:
    masked = f" {row['masked']:.0%} masked" if row["masked"] else ""
    return f"{row['dtype']}{' H' if row['entropy'] else ''}{masked}"


def vocabulary_table(report: Row, limit: int | None, show: Show = device_time) -> list[str]:
    shapes: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in report["rows"]:
        if row["quantity"] in VOCABULARY and row["contender"] == "ours":
            shape = tuple(row[key] for key in ("rows", "columns", "dtype", "masked", "entropy"))
            shapes.setdefault(shape, {})[row["quantity"]] = row
    lines = []
    for (n, v, *_), found in list(shapes.items())[:limit]:
        cells = [cell(found.get(q), report, show) for q in VOCABULARY]
        lines.append([str(n), str(v), options(next(iter(found.values()))), *cells])
    return table(["N", "V", "", *VOCABULARY], lines)


def other_table(report: Row) -> list[str]:
    """What has no vocabulary, and what others offer."""
    lines = []
    for row in report["rows"]:
        if row["quantity"] in LINEAR or (row["quantity"] in VOCABULARY and row["contender"] == "ours"):
            continue
        shape = f"[{row['rows']}, {row['columns']}]" if row["columns"] > 1 else f"[{row['rows']}]"
        cells = [cell(row, report, show) for show in (device_time, plain_time, over_ours)]
        lines.append([row["kind"], shape, options(row), *cells, row.get("skipped", row.get("wrong", ""))])
    return table(["what", "shape", "", "device", "plain", "device over ours", ""], lines)


def linear_table(report: Row) -> list[str]:
    def teraflops(row: Row, report: Row) -> str:
        return f"{row['flops'] / milliseconds(row) / 1e9:.0f}"

    def device_ms(row: Row, report: Row) -> str:
        return f"{milliseconds(row):.4g}{'' if 'ms' in row['graph'] else '*'}"

    def over_products(row: Row, report: Row) -> str:
        quantity = row["quantity"].replace("_low", "")
        same = {key: [row[key]] for key in ("rows", "columns", "dtype", "masked", "entropy")}
        return f"{over(same | {'quantity': [quantity], 'contender': ['products']})(row, report):.2f}"

    def peak(row: Row, report: Row) -> str:
        return f"{row['peak_bytes'] / 1e9:.2f}"

    lines = []
    for row in report["rows"]:
        if row["quantity"] in LINEAR:
            shown = [cell(row, report, show) for show in (device_ms, plain_time, teraflops, over_products, peak)]
            problem = next((str(row[key])[:100] for key in ("skipped", "error", "wrong") if key in row), "")
            lines.append([row["kind"], f"[{row['rows']}, {row['columns']}]", options(row), *shown, problem])
    return table(["what", "shape", "", "device", "plain", "TFLOP/s", "over products", "peak GB", ""], lines)


def tests_line(tests: Row | None) -> str:
    if not tests:
        return "Tests: not run."
    parts = [f"{tests[key]} {key}" for key in ("passed", "failed", "errors", "skipped", "unfinished") if tests[key]]
    return f"Tests on {tests['device']}: {', '.join(parts) or 'none'} in {tests['seconds']:.0f} s."


def markdown(report: Row, limit: int | None = None) -> str:
    """`limit`: lines of the large table, and failing tests, at the end of the printed output."""
    environment, ceiling = report["environment"], report.get("ceiling")
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "python", "ppo_kernels"))
    head = "Dry run: nothing was measured." if report["dry"] else "Medians, cold L2, CUDA events."
    lines = [f"# {report['device']}", "", f"{head} {versions}. `{report['command']}`", ""]
    lines += [tests_line(report.get("tests"))]
    for failure in ((report.get("tests") or {}).get("failures") or [])[:limit]:
        last = failure["message"].strip().splitlines()[-1:] or [""]
        lines.append(f"- {failure['id'][-110:]}: {last[0][:110]}")
    lines += [f"- {note[:240]}" for note in report["notes"]]
    if ceiling and not report["dry"]:
        moved = f"{ceiling['gigabytes']:.1f} GB read and written"
        lines += ["", f"Copy: {ceiling['bytes_per_s'] / 1e12:.2f} TB/s, {moved}."]
    lines += ["", "Device ms (a captured call replayed; * plain calls), ideal bytes as a share of copy bandwidth:", ""]
    lines += [*vocabulary_table(report, limit), ""]
    if limit is None:
        lines += ["Plain calls, ms, with the launches where the device waits for them:", ""]
        lines += [*vocabulary_table(report, limit, plain_time), ""]
        lines += ["Peak memory beyond the inputs, of the logits:", "", *vocabulary_table(report, limit, memory), ""]
    lines += [*other_table(report), ""]
    lines += [
        "From hidden states; products: the matrix products alone, in the same chunks:",
        "",
        *linear_table(report),
        "",
    ]
    judged = []
    for found in judge(report):
        value = "" if found["value"] is None else f"{found['value']:.3g}"
        judged.append([found["target"], value, found["bar"], found["verdict"]])
    return "\n".join([*lines, *table(["target", "measured", "bar", "verdict"], judged)]) + "\n"
