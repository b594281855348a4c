"""The command line `ppo-report`: a run's report again, or one page that compares several runs."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from ppo_kernels.trainer.charts import Line, chart, interval_strip, key, varies
from ppo_kernels.trainer.page import (
    COLORS,
    Estimate,
    difference,
    direction,
    number,
    section,
    show,
    show_estimate,
    signed,
    table,
    write_page,
)
from ppo_kernels.trainer.panels import HELDOUT, panels
from ppo_kernels.trainer.record import Measures, NoRun, Run, curve, curve_estimate, evaluations, read
from ppo_kernels.trainer.report import write_report

MOST = len(COLORS)
FEW = 3  # runs whose intervals can be drawn over each other
PAIRS = (
    "The run of the line minus that of the column, with its 95% interval; bold where that leaves out 0. The intervals "
    "are over prompts; another seed would move a run as well. Of twenty comparisons of equals, one comes out bold by "
    "chance."
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ppo-report", description="Writes a run's report.html again, or one page that compares up to 8 runs."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder; it may still be going on")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: RUN/report.html for one run, compare.html for several"
    )
    arguments = parser.parse_args(argv)
    folders = list({folder.resolve(): folder for folder in arguments.runs}.values())
    problems, runs = [], []
    if len(folders) > MOST:
        problems.append(f"{len(folders)} runs: a page has room for {MOST}")
    for folder in folders:
        try:
            runs.append(read(folder))
        except NoRun as error:
            problems.append(f"{error}{nearest(folder)}")
    if not problems:
        try:
            if len(runs) == 1:
                print(write_report(folders[0], arguments.out))
            else:
                print(write_comparison(runs, arguments.out or Path("compare.html")))
            return 0
        except OSError as error:
            problems.append(f"--out {arguments.out}: {error.strerror}" if arguments.out else str(error))
    for problem in problems:
        print(f"ppo-report: {problem}", file=sys.stderr)
    return 2


def nearest(folder: Path) -> str:
    """What may have been meant instead: a run that the folder is in, runs in it, or one beside it."""
    if (folder.parent / "config.yaml").is_file():
        return f"; did you mean {folder.parent}?"
    inside = [path.parent for path in sorted(folder.glob("*/config.yaml"))]
    if inside:
        return f"; it holds {len(inside)} runs, name them, for example {inside[0]}"
    found = [path.parent for path in sorted(folder.parent.glob("*/config.yaml"))]
    beside = {run.name: run for run in found if run != folder}
    close = difflib.get_close_matches(folder.name, list(beside), 1, 0.4)
    if close:
        return f"; did you mean {beside[close[0]]}?"
    return f"; beside it are {', '.join(list(beside)[:5])}" if beside else ""


# ---- the page -------------------------------------------------------------------------------------------------------


class Final(NamedTuple):
    """What is known last about a run."""

    estimates: dict[str, Estimate]
    when: str


def write_comparison(runs: list[Run], out: Path) -> Path:
    """One page about 2 to 8 runs, at `out`."""
    names = distinct([run.folder.resolve() for run in runs])
    finals = [final(run) for run in runs]
    measures: Measures = {}
    for run in runs:
        measures = {**run.measures, **measures}
    differing = differences([run.settings for run in runs], skip=("name", "out"))
    other = unlike(runs, differing)
    keys = [key(name, i) for i, name in enumerate(names)]
    legend = f"<div class='keys sticky'>{''.join(keys)}</div>"
    title = " · ".join(names)
    judged = [name for name in ("reward", "metric") if any(name in found.estimates for found in finals)]
    cards = [_card(measures[name], name, names, finals, name not in other) for name in judged]
    pairs = [
        section(f"{measures[name][0]}, run against run", _matrix(measures[name], name, finals, keys))
        for name in judged
        if name not in other
    ]
    parts = [
        f"<h1>{len(runs)} runs compared</h1><p class=sub>{escape(title)}</p>",
        _warnings(runs, other),
        f"<div class=cards>{''.join(cards)}</div>",
        section("What differs between them", _settings(differing, runs, keys)),
        section("Held-out numbers", _numbers(measures, finals, keys)),
        *pairs,
        f"<p class=sub>{PAIRS}</p>" if any(pairs) else "",
        section("Update by update", legend + f"<div class=grid>{''.join(_curves(runs, names, measures))}</div>"),
    ]
    write_page(out, title, parts)
    return out


def distinct(folders: list[Path]) -> list[str]:
    """Their names, with as many folders above as it takes to tell them apart."""
    depth = 1
    while len({folder.parts[-depth:] for folder in folders}) < len(folders):
        depth += 1
    return ["/".join(folder.parts[-depth:]) for folder in folders]


def final(run: Run) -> Final:
    rows = evaluations(run.updates)
    if run.summary is not None:
        found, when = (
            {name: run.estimate("after", "heldout", name) for name in run.measures},
            f"after {run.done} updates",
        )
    elif rows:
        found = {name: curve_estimate(rows[-1], name) for name in run.measures}
        when = f"at update {number(rows[-1]['heldout/update']):g}, not at its end"
    else:
        found, when = {}, "not evaluated yet"
    return Final({name: estimate for name, estimate in found.items() if estimate and math.isfinite(estimate[0])}, when)


def differences(trees: list[dict[str, Any]], skip: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Of flat mappings: the keys whose values differ, with all values as text."""
    every = dict.fromkeys(name for tree in trees for name in tree if name not in skip)
    found = {
        name: [json.dumps(tree[name], ensure_ascii=False, default=str) if name in tree else "–" for tree in trees]
        for name in every
    }
    return {name: values for name, values in found.items() if len({*values}) > 1}


def unlike(runs: list[Run], differing: dict[str, list[str]]) -> dict[str, str]:
    """The settings by which the held-out prompts, the reward or the metric are not the same in all."""
    demo = any(name.startswith("demo.") for run in runs for name in run.settings)
    made = ("seed", "demo.model", "demo.text", "demo.sft", "demo.reward") if demo else ()  # they train their judge
    starts = {
        "prompts": ("data.", "eval.prompts", "demo.text"),
        "reward": ("reward.model", "reward.function", *made),
        "metric": ("eval.metric",),
    }
    named = {
        what: [x for x in differing if x.startswith(start) and x != "data.limit"] for what, start in starts.items()
    }
    return {what: ", ".join(found) for what, found in named.items() if found}


def _warnings(runs: list[Run], other: dict[str, str]) -> str:
    said = [f"The held-out prompts may not be the same in all ({other['prompts']})."] if "prompts" in other else []
    said += [
        f"The {what} is not the same in all ({other[what]}), and not ranked here."
        for what in ("reward", "metric")
        if what in other
    ]
    if any(run.summary is None for run in runs):
        said.append("Where a run is not at its end, its numbers are those of the last evaluation so far.")
    return f"<p class=notice>{escape(' '.join(said))}</p>" if said else ""


def _card(measure: tuple[str, str, str], name: str, names: list[str], finals: list[Final], same: bool) -> str:
    """`same`: all were measured alike, and can be ranked."""
    label, _, meaning = measure
    found = [(names[i], x.estimates[name], i) for i, x in enumerate(finals) if name in x.estimates]
    strip = interval_strip([(run, estimate) for run, estimate, _ in found], [i for _, _, i in found])
    best, top, _ = max(found, key=lambda row: row[1][0])
    above = [run for run, estimate, _ in found if direction(difference(top, estimate)) > 0]
    close = [run for run, _, _ in found if run not in (*above, best)]
    words = [f"clearly above {', '.join(above)}"] if above else []
    words += [f"not told apart from {', '.join(close)}"] if close else []
    verdict = f"<p><b>{escape(best)}</b> is highest: {escape('; '.join(words))}</p>" if words and same else ""
    return (
        f"<div class=card><p><b>{escape(label)}</b> on held-out prompts<br><small>{escape(meaning)}</small></p>{strip}"
        f"{verdict}</div>"
    )


def _settings(differing: dict[str, list[str]], runs: list[Run], keys: list[str]) -> str:
    parts = ("ppo_kernels", "torch", "transformers", "python", "cpu", "gpu", "threads", "backend")
    machines = differences([{name: run.environment.get(name) for name in parts} for run in runs])
    lines = [
        [f"<code>{escape(name)}</code>", *map(escape, values)] for name, values in {**differing, **machines}.items()
    ]
    return table(["", *keys], lines) if lines else "<p>Nothing: the settings are the same.</p>"


def _numbers(measures: Measures, finals: list[Final], keys: list[str]) -> str:
    shown = {name: measure for name, measure in measures.items() if any(name in found.estimates for found in finals)}
    lines = [
        [
            f"{run}<span class=ci>{escape(found.when)}</span>",
            *(
                show_estimate(form, found.estimates[name]) if name in found.estimates else "–"
                for name, (_, form, _) in shown.items()
            ),
        ]
        for run, found in zip(keys, finals, strict=True)
    ]
    return table(["", *(escape(label) for label, _, _ in shown.values())], lines)


def _matrix(measure: tuple[str, str, str], name: str, finals: list[Final], keys: list[str]) -> str:
    """Every pair once: the run of the line minus the run of the column."""
    if sum(name in found.estimates for found in finals) < 2:
        return ""
    form = signed(measure[1])
    cells = [[run, *[""] * (len(keys) - 1)] for run in keys]
    for column, line in combinations(range(len(keys)), 2):
        pair = [finals[i].estimates.get(name) for i in (line, column)]
        if pair[0] and pair[1]:
            gap = difference(pair[0], pair[1])
            word = {1: "up", -1: "down", 0: ""}[direction(gap)]
            mean = f"<b class={word}>{show(form, gap[0])}</b>" if word else show(form, gap[0])
            low, high = (show(form, end) for end in gap[1:])
            cells[line][column + 1] = f"{mean}<span class=ci>{low} … {high}</span>"
    return table(["", *(f"<small>minus</small> {run}" for run in keys[:-1])], cells[1:])


def _curves(runs: list[Run], names: list[str], measures: Measures) -> list[str]:
    """Every curve of every panel, if it moves in any run."""
    figures = []
    for panel in panels(measures):
        for metric, label in sorted(panel.lines.items(), key=lambda line: line[1] != HELDOUT):
            lines = [curve(run, metric, name) for run, name in zip(runs, names, strict=True)]
            if any(varies(line, share=panel.share) for line in lines):
                title = panel.title if len(panel.lines) == 1 else f"{panel.title}, {label.partition(',')[0]}"
                shown = lines if len(runs) <= FEW else [line._replace(band=None) for line in lines]
                figures.append(chart(title, panel.unit, shown, zero=panel.zero, floor=panel.floor, legend=False))
    figures.insert(3, _frontier(runs, names, measures["reward"][0]))
    return figures


def _frontier(runs: list[Run], names: list[str], reward: str) -> str:
    """What each run paid in KL for its reward, evaluation by evaluation."""
    lines = []
    for run, name in zip(runs, names, strict=True):
        found = [(curve_estimate(row, "kl")[0], curve_estimate(row, "reward")[0]) for row in evaluations(run.updates)]
        lines.append(Line(name, found))
    return chart(f"{reward} for its KL", "held-out", lines, "nats per response", legend=False)
