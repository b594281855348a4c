"""What a run left in its folder, read as it is: still growing, cut off by a kill, or of a version before this one."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from ppo_kernels.trainer.charts import Line, Point
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.page import Estimate, difference, number
from ppo_kernels.trainer.settings import flat

Rows = list[dict[str, Any]]
Measures = dict[str, tuple[str, str, str]]  # label, format, meaning


class NoRun(Exception):
    """The folder holds no run; the message says what is missing."""


class Run(NamedTuple):
    folder: Path
    settings: dict[str, Any]  # of config.yaml, by dotted key
    config: str  # its text
    environment: dict[str, Any]
    measures: Measures
    summary: dict[str, Any] | None  # None: the run is not at its end
    updates: Rows
    earlier: Rows  # of the stages before PPO
    samples: Rows
    events: list[str]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def done(self) -> int:
        return int(self.updates[-1]["step"]) if self.updates else 0

    def estimate(self, moment: str, side: str, name: str) -> Estimate | None:
        """Of the summary; None without one, or if that was not measured."""
        found = self.summary and self.summary[moment][side].get(name)
        return _estimate(found) if found else None


def read(folder: Path) -> Run:
    """Raises NoRun."""
    if not (folder / "config.yaml").is_file():
        raise NoRun(
            f"{folder} is no run: " + ("config.yaml is missing" if folder.is_dir() else "there is no such folder")
        )
    config = _text(folder / "config.yaml")
    try:
        tree = yaml.safe_load(config)
        settings = flat(tree)
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise NoRun(f"{folder} is no run: config.yaml is not a configuration") from error
    written = [row for row in rows(folder / "metrics.jsonl") if not math.isnan(number(row.get("step")))]
    updates = [row for row in written if row.get("stage") == "ppo"]
    summary = _summary(folder, updates[-1]["step"] if updates else 0)
    environment = _json(folder / "env.json")
    return Run(
        folder,
        settings,
        config,
        environment if isinstance(environment, dict) else {},
        summary["measures"] if summary else _measures(tree),
        summary,
        updates,
        [row for row in written if row.get("stage") != "ppo"],
        [row for row in rows(folder / "samples.jsonl") if isinstance(row.get("prompt"), str)],
        [text for _, tab, text in (line.partition("\t") for line in _text(folder / "events.log").splitlines()) if tab],
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except ValueError:
        return None


def rows(path: Path) -> Rows:
    """Of a .jsonl file, without those that are no objects: a kill leaves half a line."""
    found = []
    for line in _text(path).split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found


def _summary(folder: Path, updates: int) -> dict[str, Any] | None:
    """None if it is not there, damaged, or of an earlier end: the run went on for more updates since."""
    found = _json(folder / "summary.json")
    try:
        whole = {"heldout", "train"} <= {*found["prompts"]} and "reward" in found["measures"]
        whole &= isinstance(found["sizes"], dict) and isinstance(found["stage_seconds"], dict)
        for name, (_, form, _) in found["measures"].items():
            for side in (found[moment][side] for moment in ("before", "after") for side in ("heldout", "train")):
                [form.format(value) for value in _estimate(side.get(name, [0, 0, 0]))]
        return found if whole and found.get("updates", updates) >= updates else None
    except (TypeError, KeyError, ValueError, AttributeError, IndexError):
        return None


def _measures(tree: dict[str, Any]) -> Measures:
    """Of a run that has no summary."""
    from ppo_kernels.trainer.evaluate import measures  # imports transformers, which takes seconds

    try:
        return {**measures(Config.model_validate(tree))}
    except ValidationError:  # of another version
        return {**measures(Config())}


def _estimate(values: Any) -> Estimate:
    mean, low, high = map(number, values)
    return mean, low, high


# ---- curves ---------------------------------------------------------------------------------------------------------


def evaluations(updates: Rows) -> Rows:
    """The first row of each: those in between repeat the last one."""
    found: Rows = []
    for row in updates:
        if "heldout/update" in row and (not found or row["heldout/update"] != found[-1]["heldout/update"]):
            found.append(row)
    return found


def curve_estimate(row: dict[str, Any], name: str) -> Estimate:
    return _estimate([row.get(f"heldout/{name}{end}") for end in ("", "_low", "_high")])


def curve(run: Run, metric: str, label: str = "") -> Line:
    """By update: a metric of metrics.jsonl, with its interval if it is held-out; or "gap"."""
    if metric == "gap":
        return _with_band(label, [(row["step"], gap(row)) for row in evaluations(run.updates) if _same_update(row)])
    side, _, name = metric.partition("/")
    if side == "heldout":
        points = [(number(row["heldout/update"]), curve_estimate(row, name)) for row in evaluations(run.updates)]
        return _with_band(label, points)
    return Line(label, [(float(row["step"]), number(row[metric])) for row in run.updates if metric in row])


def _with_band(label: str, found: list[tuple[float, Estimate]]) -> Line:
    band: list[Point] = [(low, high) for _, (_, low, high) in found]
    return Line(label, [(at, mean) for at, (mean, _, _) in found], band)


def _same_update(row: dict[str, Any]) -> bool:
    return bool(row["heldout/update"] == row["step"])


def gap(row: dict[str, Any]) -> Estimate:
    """How much more the training batch of an update scored than held-out prompts did after it."""
    mean, deviation = number(row.get("objective/scores")), number(row.get("objective/scores_std"))
    count = number(row.get("episode")) / max(row["step"], 1)
    half = 1.96 * deviation / math.sqrt(count) if count > 0 else math.nan
    return difference((mean, mean - half, mean + half), curve_estimate(row, "reward"))


# ---- events ---------------------------------------------------------------------------------------------------------


def happenings(events: list[str]) -> list[tuple[str, int]]:
    """Each kind of event with its latest text and how often it came, the latest kind first. Of a kind are texts that
    differ in numbers only."""
    latest: dict[str, tuple[str, int]] = {}
    for text in events:
        kind = re.sub(r"[-+−]?(?<![A-Za-z])(\d[\d.e+%-]*|nan\b|inf\b)", "#", text)
        _, count = latest.pop(kind, ("", 0))
        latest[kind] = (text, count + 1)
    return list(latest.values())[::-1]


def breaks(run: Run) -> list[float]:
    """Updates after which the run was resumed, or from which on it is another stream of samples."""
    resumed = [float(found[1]) for text in run.events if (found := re.match(r"resumed at update (\d+)$", text))]
    rolled = [
        float(after["step"]) - 1
        for before, after in zip(run.updates, run.updates[1:], strict=False)
        if number(after.get("rollbacks")) > number(before.get("rollbacks"))
    ]
    return sorted({*resumed, *rolled})
