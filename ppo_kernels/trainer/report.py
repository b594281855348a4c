"""report.html: one self-contained page about one run, made from the files in its folder."""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from typing import Any

from ppo_kernels.trainer.charts import MANY, Line, chart, interval_strip, key, varies
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.page import (
    Estimate,
    difference,
    direction,
    duration,
    number,
    section,
    show,
    show_estimate,
    signed,
    table,
    write_page,
)
from ppo_kernels.trainer.panels import panels
from ppo_kernels.trainer.record import Run, breaks, curve, curve_estimate, evaluations, happenings, read
from ppo_kernels.trainer.settings import flat

LONG = 80  # characters of a prompt that is shown once, above the responses, instead of before each


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Writes `out`, or `folder`/report.html, and returns its path. Raises NoRun."""
    run, path = read(folder), out or folder / "report.html"
    parts = [
        _head(run),
        f"<div class=cards>{''.join(_cards(run))}</div>",
        section("Before and after", _before_and_after(run)),
        section("What happened", _happened(run)),
        section("PPO, update by update", *_curves(run)),
        section("What the models say", _samples(run)),
        section("The stages before PPO", _earlier(run)),
        section("Where the time went", _time(run)),
        section("To repeat it", _repeat(run)),
    ]
    write_page(path, f"{run.name}: PPO report", parts)
    return path


# ---- the first screen -----------------------------------------------------------------------------------------------


def _head(run: Run) -> str:
    environment = run.environment
    facts = [f"{run.done} update{'s' * (run.done != 1)} of PPO"]
    if run.summary is not None:
        facts.append(duration(sum(_stages(run).values())))
        facts.append(f"{show('{:,.0f}', number(run.summary['sizes'].get('parameters')))} parameters")
    if environment:
        threads = environment.get("threads")
        facts.append(str(environment.get("gpu") or f"{environment.get('cpu')}, {threads} thread{'s' * (threads != 1)}"))
        facts.append(str(environment.get("time", "")))
    head = f"<h1>{escape(run.name)}</h1><p class=sub>{escape(' · '.join(filter(None, facts)))}</p>"
    if run.summary is not None:
        return head
    total = number(run.settings.get("train.updates"))
    of = f" of {total:g}" if total >= run.done else ""
    return head + (
        f"<p class=notice>Update {run.done}{of}: this run is still going on, or was stopped. There is no before and "
        "after yet; the numbers are those of its curves. <code>ppo-report</code> makes this page again.</p>"
    )


def _cards(run: Run) -> list[str]:
    cards = []
    for name in ("reward", "metric"):
        if name not in run.measures:
            continue
        label, form, meaning = run.measures[name]
        where = "on held-out prompts"
        if run.summary is not None:
            where = f"on {run.summary['prompts']['heldout']} held-out prompts"
            points = [(moment, run.estimate(moment, "heldout", name)) for moment in ("before", "after")]
        else:
            points = [
                (f"update {number(row['heldout/update']):g}", curve_estimate(row, name))
                for row in evaluations(run.updates)
            ]
        known = [(moment, estimate) for moment, estimate in points if estimate and math.isfinite(estimate[0])]
        if known:
            ends = [known[0], known[-1]] if len(known) > 1 else known
            verdict = _moved(ends[0][1], ends[1][1], form) if len(ends) > 1 else ""
            cards.append(_card(label, where, meaning, form, ends, verdict))
    return cards + _gap_card(run)


def _gap_card(run: Run) -> list[str]:
    gaps = [
        (moment, difference(train, heldout))
        for moment in ("before", "after")
        if (train := run.estimate(moment, "train", "reward")) and (heldout := run.estimate(moment, "heldout", "reward"))
    ]
    if len(gaps) < 2:
        return []
    label, form, _ = run.measures["reward"]
    before, after = (direction(gap) for _, gap in gaps)
    if after <= 0:
        verdict = "within what chance explains: no sign of prompts learned by heart"
    elif before > 0:
        verdict = "training prompts scored more before PPO already"
    else:
        verdict = "<b class=down>more than chance explains:</b> it learned training prompts by heart"
    meaning = f"{label.lower()} that it gains only on prompts it has seen"
    return [_card("Training minus held-out", "", meaning, signed(form), gaps, verdict)]


def _card(label: str, where: str, meaning: str, form: str, points: list[tuple[str, Estimate]], verdict: str) -> str:
    """`points`: one, or the first and the last."""
    start = f"<span class=from>{show(form, points[0][1][0])} →</span> " if len(points) > 1 else ""
    return (
        f"<div class=card><p><b>{escape(label)}</b> {escape(where)}<br><small>{escape(meaning)}</small></p>"
        f"<div class=big>{start}{show(form, points[-1][1][0])}</div>"
        f"{interval_strip(points, [1, 0][-len(points) :])}<p>{verdict}</p></div>"
    )


def _moved(before: Estimate, after: Estimate, form: str) -> str:
    change = difference(after, before)
    mean, low, high = (show(signed(form), value) for value in change)
    word = {1: "<b class=up>rose</b>", -1: "<b class=down>fell</b>"}.get(direction(change))
    verdict = f"{word} by {mean.lstrip('+−')}" if word else f"no change beyond chance: {mean}"
    return f"{verdict}<br><small>95% interval of the change: {low} … {high}</small>"


def _before_and_after(run: Run) -> str:
    if run.summary is None:
        return ""
    sides = {"heldout": "held-out", "train": "training"}
    head = ["", *(f"{side}, {moment}" for side in sides.values() for moment in ("before", "after"))]
    lines = []
    for name, (label, form, meaning) in run.measures.items():
        found = [run.estimate(moment, side, name) for side in sides for moment in ("before", "after")]
        cells = [show_estimate(form, estimate) if estimate else "–" for estimate in found]
        lines.append([f"{escape(label)}<br><small>{escape(meaning)}</small>", *cells])
    prompts = run.summary["prompts"]
    note = (
        f"Means over {prompts['heldout']} held-out and {prompts['train']} training prompts, with bootstrap 95% "
        "intervals over prompts. Intervals of differences treat the two means as independent; before and after share "
        "their prompts and random numbers, so that those of a change are rather too wide."
    )
    if "metric" in run.measures:
        reward, metric = (run.measures[name][0] for name in ("reward", "metric"))
        note += f" If the {reward.lower()} rises while {metric} falls, the reward is being fooled."
    return table(head, lines) + f"<p class=sub>{escape(note)}</p>"


def _happened(run: Run) -> str:
    found = happenings(run.events)
    if not found:
        return ""
    items = [f"<li>{escape(text)}{f' <small>× {n}</small>' if n > 1 else ''}</li>" for text, n in found[:12]]
    if len(found) > 12:
        items.append(f"<li><small>and {len(found) - 12} other kinds, in events.log</small></li>")
    note = "Latest first. Remarks that differ in numbers only are shown once, with the latest numbers."
    return f"<div class=card><ul>{''.join(items)}</ul></div><p class=sub>{note}</p>"


# ---- curves ---------------------------------------------------------------------------------------------------------


def _curves(run: Run) -> list[str]:
    """The panels with something to see; what never changed is told in words."""
    if not run.updates:
        return []
    marks, figures, still = breaks(run), [], []
    for panel in panels(run.measures):
        lines = [curve(run, metric, label) for metric, label in panel.lines.items()]
        shown = [line if varies(line, share=panel.share) else Line(line.label, []) for line in lines]
        figures.append(chart(panel.title, panel.unit, shown, zero=panel.zero, floor=panel.floor, marks=marks))
        for line, moving in zip(lines, shown, strict=True):
            if line.finite and not moving.points and not line.band:
                name = panel.title if len(lines) == 1 else f"{panel.title} ({line.label})"
                still.append(f"{name} {show('{:.4g}', line.finite[-1][1])}")
    notes = [_drift(run), *_counts(run)]
    if marks:
        notes.append(f"Dotted lines: resumed or gone back, at update {', '.join(f'{mark:g}' for mark in marks)}.")
    if len(run.updates) > MANY:
        notes.append("Thin lines are single updates, thick ones a moving median.")
    same = "The same, or nearly so, all along" if len(run.updates) > 1 else "In the one update"
    return [
        f"<p class=sub>{escape(' '.join(filter(None, notes)))}</p>",
        f"<div class=grid>{''.join(figures)}</div>",
        f"<p class=sub>{same}: {escape(' · '.join(still))}</p>" if still else "",
    ]


def _drift(run: Run) -> str:
    drift = max((y for _, y in curve(run, "val/first_logprob_drift").finite), default=math.nan)
    if math.isnan(drift):
        return ""
    size = f"by more than {drift:.1g} nats" if drift else "at all"
    verdict = "the ratio started at 1" if drift <= 1e-3 else "rollout and training do not compute the same thing"
    return f"Before the first step of an update, no log-prob differed from the rollout {size}: {verdict}."


def _counts(run: Run) -> list[str]:
    early, skipped, rollbacks = (
        [y for _, y in curve(run, metric).finite if y > 0] for metric in ("stopped_early", "skipped_steps", "rollbacks")
    )
    target = run.settings.get("ppo.target_kl_stop")
    return [
        f"{len(early)} of {len(run.updates)} updates ended early (ppo.target_kl_stop={target})." if early else "",
        f"{sum(skipped):.0f} optimizer steps were left out." if skipped else "",
        f"Rollbacks to a checkpoint: {max(rollbacks):.0f}." if rollbacks else "",
    ]


def _earlier(run: Run) -> str:
    facts = {name: number(value) for row in run.earlier for name, value in row.items()}

    def loss(metric: str, start: int) -> list[Line]:
        rows = [row for row in run.earlier if metric in row and row["step"] >= start]
        return [Line("loss", [(row["step"], number(row[metric])) for row in rows])]

    text = show("{:.2f}", facts.get("sft/validation_loss", math.nan))
    correlation = show("{:.2f}", facts.get("reward/validation_correlation", math.nan))
    sign = show("{:.0%}", facts.get("reward/validation_sign_accuracy", math.nan))
    judged = f"squared error, training batches; validation correlation with people {correlation}, sign right {sign}"
    figures = chart("SFT", f"nats per token, training batches; {text} on validation text", loss("sft/loss", 0), "step")
    # the reward model's first loss is off the scale
    figures += chart("Reward model", judged, loss("reward/loss", 1), "step", zero=True)
    return figures and f"<div class=grid>{figures}</div>"


# ---- texts and facts ------------------------------------------------------------------------------------------------


def _samples(run: Run) -> str:
    if not run.samples or run.summary is None:
        return ""
    blocks = []
    for row in run.samples:
        prompt = row["prompt"]
        above = f"<div class='said prompt'>{escape(prompt)}</div>" if len(prompt) > LONG else ""
        sides = []
        for moment in ("before", "after"):
            text, score = str(row.get(moment, "")), show("{:+.2f}", number(row.get(f"{moment}_reward")))
            start, found, rest = text.partition(prompt)
            said = escape(rest if found else text)
            if found and not above:
                said = f"<span class=prompt>{escape(start + prompt)}</span>{said}"
            sides.append(f"<div><small>{moment} PPO <b>{score}</b></small><div class=said>{said}</div></div>")
        blocks.append(f"<div class=sample>{above}<div class=pair>{''.join(sides)}</div></div>")
    label = escape(run.measures["reward"][0].lower())
    note = (
        "The first held-out prompts in line, not selected; one response each, sampled as in training. The prompt is "
        f"grey, the number is the {label}."
    )
    return f"<p class=sub>{note}</p><div class=wide>{''.join(blocks)}</div>"


def _stages(run: Run) -> dict[str, float]:
    """Seconds; the file's "total" is the last process's alone."""
    seconds = run.summary["stage_seconds"] if run.summary else {}
    return {name: number(value) for name, value in seconds.items() if name != "total"}


def _time(run: Run) -> str:
    """The stages, PPO in its parts."""
    stages = _stages(run)
    sampling = sum(y for _, y in curve(run, "time/generate").finite)
    training = sum(y for _, y in curve(run, "time/update").finite) - sampling
    rest = stages.get("PPO", 0.0) - sampling - training
    ppo = {"sampling": sampling, "scoring and training": training, "evaluations and checkpoints": rest}
    parts: dict[str, float] = {}
    for name, seconds in (stages or {"PPO": 0.0}).items():
        parts |= ppo if name == "PPO" else {name: seconds}
    shown = [(name, seconds) for name, seconds in parts.items() if seconds >= 0.05]
    if not shown:
        return ""
    spans = "".join(f'<span class=c{i % 8} style="flex:{seconds:.2f}"></span>' for i, (_, seconds) in enumerate(shown))
    keys = "".join(key(f"{name} {duration(seconds)}", i % 8) for i, (name, seconds) in enumerate(shown))
    return f"<div class=card><div class=bar>{spans}</div><div class=keys>{keys}</div></div>"


def _repeat(run: Run) -> str:
    sections: dict[str, Any] = {"demo": {}} if any(name.startswith("demo.") for name in run.settings) else {}
    defaults = flat(Config(**sections).model_dump(mode="json"))
    chosen = [
        f"<code>{escape(name)}={escape(json.dumps(value, ensure_ascii=False, default=str))}</code>"
        for name, value in run.settings.items()
        if defaults.get(name) != value
    ]
    text = run.summary["sizes"].get("text") if run.summary else None
    environment = escape(json.dumps(run.environment, indent=1, ensure_ascii=False))
    return "".join(
        [
            f"<p>Data: {escape(str(text))}</p>" if text else "",
            f"<pre>{escape(str(run.environment['command']))}</pre>" if "command" in run.environment else "",
            "<p class=sub>Settings that are not the defaults:</p>" if chosen else "",
            f"<div class=settings>{''.join(chosen)}</div>",
            f"<details><summary>configuration</summary><pre>{escape(run.config)}</pre></details>",
            f"<details><summary>environment</summary><pre>{environment}</pre></details>",
        ]
    )
