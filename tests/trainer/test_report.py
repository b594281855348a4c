"""Reports of made-up runs: every kind of run, hostile texts, damaged files. Nothing is trained here."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from ppo_kernels.trainer import charts, compare, page, record
from ppo_kernels.trainer.charts import Line, chart, interval_strip, smooth, thin, ticks
from ppo_kernels.trainer.report import write_report
from ppo_kernels.trainer.screen import Screen, StageView, sparkline
from ppo_kernels.trainer.settings import DEMO, load

Row = dict[str, Any]

MEASURES = {
    "reward": ["Reward", "{:+.3f}", "what PPO maximises"],
    "metric": ["politeness", "{:+.3f}", "independent; never trained on"],
    "kl": ["KL to the reference", "{:.2f}", "nats per response"],
    "eos": ["Ended by itself", "{:.0%}", "share of responses"],
}


# ---- made-up runs ---------------------------------------------------------------------------------------------------


def around(mean: float, half: float = 0.1) -> list[float]:
    return [mean, mean - half, mean + half]


def update(step: int, evaluated: int, metric: bool = True, **changed: Any) -> Row:
    """A row of metrics.jsonl: everything moves a little."""
    wave = math.sin(step)
    row = {
        "stage": "ppo", "step": step, "seconds": step / 2, "objective/scores": 0.1 * step + 0.05 * wave,
        "objective/scores_std": 0.5, "objective/kl": 0.3 * step, "objective/kl_coef": 0.04,
        "policy/entropy_avg": 2 - wave / 4, "response_length/mean": 20 + wave, "response_length/max": 64.0,
        "response_length/eos_rate": 0.9 + wave / 20, "critic/explained_var": wave / 2, "loss/policy_avg": wave / 100,
        "loss/value_avg": 1 / step, "policy/approxkl_avg": 0.01 / step, "policy/clipfrac_avg": 0.1 / step,
        "policy/clip_range": 0.2, "val/clipfrac_avg": 0.0, "val/ratio": 1.0, "val/ratio_max": 1.5,
        "val/first_logprob_drift": 2e-7, "grad_norm/actor": 1 + wave / 3, "grad_norm/critic": 2 + wave / 3,
        "optimizer_steps": 4, "skipped_steps": 0, "stopped_early": 0.0, "episode": 64.0 * step, "rollbacks": 0.0,
        "lr": 1e-5, "time/update": 2.0 + wave / 9, "time/generate": 1.0, "heldout/update": evaluated,
    }  # fmt: skip
    for name, mean in (("reward", 0.1 * evaluated), ("metric", 0.5), ("kl", 0.3 * evaluated), ("eos", 0.9)):
        if name != "metric" or metric:
            row |= zip((f"heldout/{name}{end}" for end in ("", "_low", "_high")), around(mean), strict=True)
    return row | {key.replace("__", "/"): value for key, value in changed.items()}


def made(
    folder: Path,
    updates: list[Row] | int = 6,
    metric: bool = True,
    finished: bool = True,
    after: float = 0.6,
    **changed: Any,
) -> Path:
    """A run's folder. `changed`: settings, with _ _ for the dot."""
    folder.mkdir(parents=True)
    settings = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in changed.items()]
    config = load(settings, {"data": {"train": "prompts.jsonl"}, "model": {"actor": "actor"}})
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    (folder / "env.json").write_text(
        json.dumps({"command": "ppo-train quick.yaml", "cpu": "a cpu", "threads": 2, "gpu": None})
    )
    if isinstance(updates, int):
        updates = [update(i, i - i % 2, metric) for i in range(1, updates + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in updates))
    (folder / "events.log").write_text("")
    if finished:
        summarize(folder, metric, after)
    return folder


def summarize(folder: Path, metric: bool = True, after: float = 0.6, **changed: Any) -> None:
    measures = {name: measure for name, measure in MEASURES.items() if name != "metric" or metric}
    side = {"reward": around(0.1), "metric": around(0.5), "kl": around(0, 0), "eos": around(0.9, 0.02)}
    end = {**side, "reward": around(after), "kl": around(2)}
    keep = lambda values: {name: values[name] for name in measures}  # noqa: E731
    summary = {
        "measures": measures,
        "before": {"heldout": keep(side), "train": keep(side)},
        "after": {"heldout": keep(end), "train": keep({**end, "reward": around(after + 0.02)})},
        "prompts": {"heldout": 256, "train": 128},
        "stage_seconds": {"models": 1.0, "before": 2.0, "PPO": 15.0, "after": 2.0, "total": 20.0},
        "sizes": {"parameters": 1234567, "text": "prompts.jsonl"},
    }
    (folder / "summary.json").write_text(json.dumps(summary | changed))
    sample = {"prompt": "Say hello.", "before": "Say hello. No.", "before_reward": -0.5, "after": "Say hello. Hello!",
              "after_reward": 0.5}  # fmt: skip
    (folder / "samples.jsonl").write_text(json.dumps(sample) + "\n")


# ---- what a page may hold -------------------------------------------------------------------------------------------


TAGS = """html head meta title style body main h1 h2 p small b code div span table thead tbody tr th td ul li details
    summary pre br figure figcaption svg line text polyline polygon circle"""


class Page(HTMLParser):
    """Its text and its elements; fails on anything that runs, loads, is not closed, or is drawn nowhere."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        assert tag in TAGS.split()
        assert not [name for name in found if name.startswith("on") or name in ("src", "href", "srcset", "action")]
        for name in ("points", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r"):
            for number in re.split(r"[ ,]", found.get(name, "")):
                assert not number or -1 <= float(number) <= max(charts.WIDTH, 400), (tag, found)
        self.elements.append((tag, found))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def figures(self) -> list[str]:
        return [
            found["aria-label"]
            for tag, found in self.elements
            if tag == "svg" and found["aria-label"] != "95% intervals"
        ]


def report(folder: Path) -> Page:
    return Page(write_report(folder))


# ---- one run --------------------------------------------------------------------------------------------------------


def test_the_first_screen_tells_what_improved_and_by_how_much(tmp_path: Path) -> None:
    text = report(made(tmp_path / "polite")).text
    top = text.partition("Before and after")[0]
    assert "polite 6 updates of PPO · 20 s · 1,234,567 parameters · a cpu, 2 threads" in top
    assert "Reward on 256 held-out prompts what PPO maximises +0.100 → +0.600" in top
    assert "rose by 0.500 95% interval of the change: +0.359 … +0.641" in top  # 0.5 ± √2 · 0.1
    assert "politeness on 256 held-out prompts" in top
    assert "no change beyond chance: +0.000" in top
    assert "Training minus held-out reward that it gains only on prompts it has seen +0.000 → +0.020" in top
    assert "no sign of prompts learned by heart" in top


def test_a_reward_that_fell_and_prompts_learned_by_heart_are_said(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", after=-0.4)
    summary = json.loads((folder / "summary.json").read_text())
    summary["after"]["train"]["reward"] = around(0.8)
    (folder / "summary.json").write_text(json.dumps(summary))
    text = report(folder).text
    assert "fell by 0.500" in text
    assert "more than chance explains: it learned training prompts by heart" in text


def test_a_run_that_is_no_demo_has_neither_its_labels_nor_its_stages(tmp_path: Path) -> None:
    found = report(made(tmp_path / "run", metric=False))
    assert not re.search("VADER|SFT|rating|politeness|stages before PPO|being fooled", found.text)
    assert {"Reward", "Training minus held-out", "KL to the reference", "Critic"} <= {*found.figures}


def test_the_stages_of_a_demo_are_shown(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    rows = [{"stage": "sft", "step": i, "sft/loss": 5 - i / 10} for i in range(20)]
    rows += [{"stage": "sft", "step": 20, "sft/validation_loss": 3.21}]
    rows += [{"stage": "reward_model", "step": i, "reward/loss": 1 / (1 + i)} for i in range(20)]
    rows += [{"stage": "reward_model", "step": 20, "reward/validation_correlation": 0.71,
              "reward/validation_sign_accuracy": 0.8}]  # fmt: skip
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + metrics.read_text())
    found = report(folder)
    assert found.figures[-2:] == ["SFT", "Reward model"]
    assert "3.21 on validation text" in found.text
    assert "validation correlation with people 0.71, sign right 80%" in found.text


def test_only_what_moves_gets_a_chart_and_the_rest_is_told_in_words(tmp_path: Path) -> None:
    still = report(made(tmp_path / "still"))
    assert not {"KL coefficient", "Clip range", "Optimizer steps", "Losses beside PPO"} & {*still.figures}
    assert "KL coefficient 0.04 · Response length (longest) 64 · Clipped (value) 0" in still.text
    assert "Optimizer steps (taken) 4 · Optimizer steps (left out) 0" in still.text
    rows = [
        update(i, 0, objective__kl_coef=0.04 * i, policy__clip_range=0.2 / i, loss__ptx=3 - i / 9, loss__sft=2.0 / i,
               optimizer_steps=4 - i % 2, skipped_steps=i % 2)
        for i in range(1, 9)
    ]  # fmt: skip
    moving = report(made(tmp_path / "moving", rows))
    assert {"KL coefficient", "Clip range", "Optimizer steps", "Losses beside PPO"} <= {*moving.figures}
    assert "pretraining text SFT pairs" in moving.text


def test_early_stops_skips_rollbacks_and_resumes_are_counted_and_marked(tmp_path: Path) -> None:
    rows = [
        update(i, 0, stopped_early=float(i > 6), skipped_steps=2 * (i == 3), rollbacks=float(i > 4))
        for i in range(1, 9)
    ]
    folder = made(tmp_path / "run", rows, ppo__target_kl_stop=0.02)
    (folder / "events.log").write_text("0.1\tresumed at update 6\n")
    found = report(folder)
    assert "2 of 8 updates ended early (ppo.target_kl_stop=0.02)." in found.text
    assert "2 optimizer steps were left out." in found.text
    assert "Rollbacks to a checkpoint: 1." in found.text
    assert "Dotted lines: resumed or gone back, at update 4, 6." in found.text
    per_figure = found.source.count('class="mark"') / len(found.figures)
    assert per_figure == pytest.approx(2, abs=0.5)  # the curves by evaluation may not reach that far


def test_events_are_told_once_with_their_latest_numbers_and_how_often(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    (folder / "events.log").write_text(
        "1.0\tonly 12% of responses end by themselves: raise rollout.max_new_tokens\n"
        "2.0\tupdate 12 diverged: the loss is nan (policy), 0.3 (value); back to update 10\n"
        "3.0\tonly 6% of responses end by themselves: raise rollout.max_new_tokens\n"
        "4.0\tcheckpoint step_000010 could not be written\n"
        "5.0\tupdate 14 diverged: the loss is -1.5e-3 (policy), inf (value); back to update 10\n"
        "6.0\tcheckpoint step_000020 could not be wri"
    )
    happened = report(folder).text.partition("What happened ")[2].partition(" Latest first")[0]
    assert happened == (
        "checkpoint step_000020 could not be wri "
        "update 14 diverged: the loss is -1.5e-3 (policy), inf (value); back to update 10 × 2 "
        "checkpoint step_000010 could not be written "
        "only 6% of responses end by themselves: raise rollout.max_new_tokens × 2"
    )


def test_nothing_happened_is_no_section(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    assert "What happened" not in report(folder).text
    (folder / "events.log").unlink()
    assert "What happened" not in report(folder).text


@pytest.mark.parametrize("values", [(0.3, float("nan")), (float("inf"), float("-inf")), (1e200, -1e200), (None, "x")])
def test_no_value_of_a_row_becomes_a_coordinate_that_is_none(tmp_path: Path, values: tuple[Any, Any]) -> None:
    names = [name for name in update(1, 0) if "/" in name and name != "heldout/update"]
    rows = [update(i, i) for i in range(1, 12)]
    for i, row in enumerate(rows):
        row |= {name: values[(i + j) % 2] for j, name in enumerate(names) if (i * 7 + j) % 3 == 0}
        del row[names[i]]
    found = report(made(tmp_path / "run", rows))
    assert "Gradient norms" in found.figures
    assert "not finite" in found.text


def test_estimates_that_are_not_finite_are_dashes(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text())
    summary["after"]["heldout"]["reward"] = [float("nan")] * 3
    summary["after"]["train"]["kl"] = [0.5, float("-inf"), float("inf")]
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "nan" not in report(folder).text.lower()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_updates(tmp_path: Path, count: int) -> None:
    found = report(made(tmp_path / "run", count))
    assert f"{count} update{'s' * (count != 1)} of PPO" in found.text
    assert ("In the one update: Reward (training batch)" in found.text) == (count == 1)


def test_many_updates_stay_a_page_and_keep_their_spikes(tmp_path: Path) -> None:
    rows = [update(i, i - i % 10) for i in range(1, 901)]
    rows[456]["grad_norm/actor"] = 1e6
    found = report(made(tmp_path / "run", rows))
    assert len(found.source) < 1_000_000
    assert "Thin lines are single updates, thick ones a moving median." in found.text
    longest = max(len(attributes.get("points", "").split()) for _, attributes in found.elements)
    assert longest <= 400
    assert "Gradient norms before clipping, logarithmic" in found.text


def test_a_run_that_goes_on_shows_its_curves_and_says_so(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", 7, finished=False, train__updates=40, eval__metric="judge.py:politeness")
    found = report(folder)
    assert "Update 7 of 40: this run is still going on, or was stopped." in found.text
    meaning = "what PPO maximises, before clipping, normalising and penalties"
    assert f"Reward on held-out prompts {meaning} +0.000 → +0.600" in found.text
    assert "politeness on held-out prompts" in found.text
    assert "held-out, before" not in found.text
    assert "Critic" in found.figures


def test_a_run_without_any_update_yet(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", 0, finished=False)
    for name in ("metrics.jsonl", "events.log"):
        (folder / name).unlink()
    assert "Update 0 of 100: this run is still going on" in report(folder).text


def test_a_demo_that_goes_on_has_the_labels_of_a_demo(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", finished=False)
    (folder / "config.yaml").write_text(yaml.safe_dump(load([], DEMO).model_dump(mode="json")))
    text = report(folder).text
    assert "Learned reward on held-out prompts" in text
    assert "VADER on held-out prompts" in text


def test_a_summary_older_than_the_last_updates_is_not_taken_for_the_end(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", 8)
    summarize(folder, updates=6)
    assert "this run is still going on" in report(folder).text
    summarize(folder, updates=8)
    assert "this run is still going on" not in report(folder).text


# ---- texts ----------------------------------------------------------------------------------------------------------


def samples(folder: Path, **row: Any) -> Page:
    base = {"prompt": "p", "before": "p b", "before_reward": 0.0, "after": "p a", "after_reward": 1.0}
    (folder / "samples.jsonl").write_text(json.dumps(base | row) + "\n")
    return report(folder)


def test_texts_that_are_html_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    evil = "</pre></style><script>alert(1)</script><img src=x onerror='a()'> \" ' & <!-- \x00\x1b"
    folder = made(tmp_path / "a <b> run", reward__function=f"{evil}.py:f")
    (folder / "events.log").write_text(f"1.0\t{evil}\n")
    (folder / "env.json").write_text(json.dumps({"command": evil, "cpu": evil, "gpu": None, evil: evil}))
    summary = json.loads((folder / "summary.json").read_text())
    summary["measures"]["metric"] = [evil, "{:.2f}", evil]
    summary["sizes"]["text"] = evil
    (folder / "summary.json").write_text(json.dumps(summary))
    found = samples(folder, prompt=evil, before=evil + evil, after=evil)
    assert "<script" not in found.source
    assert found.text.count("<script>alert(1)</script>") > 8
    assert "default-src 'none'" in found.source


def test_half_a_surrogate_pair_does_not_stop_the_page(tmp_path: Path) -> None:
    assert "broken ?" in samples(made(tmp_path / "run"), after="broken \ud83d").text


def test_a_short_prompt_stands_before_each_response_and_a_long_one_above_both(tmp_path: Path) -> None:
    folder = made(tmp_path / "run")
    short = samples(folder, prompt="Hello", before="Hello you", after="Hello there").text
    assert "before PPO +0.00 Hello you after PPO +1.00 Hello there" in short
    prompt = "word " * 100
    long = samples(folder, prompt=prompt, before=f"{prompt}you", after=f"{prompt}there").text
    assert long.count("word word") == 50
    assert "before PPO +0.00 you after PPO +1.00 there" in long


def test_a_conversation_is_shown_whole(tmp_path: Path) -> None:
    said = "system\nBe kind.\nuser\nHi\nassistant\nHello\nuser\nAnd then?\nassistant\nBye"
    found = samples(made(tmp_path / "run"), prompt="Hi", before=said, after=said)
    assert "before PPO +0.00 system Be kind. user Hi assistant Hello user And then? assistant Bye" in found.text


# ---- damaged files --------------------------------------------------------------------------------------------------


def test_half_a_line_at_the_end_is_ignored(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", 6, finished=False)
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole + json.dumps(update(7, 6))[:200])
    assert "Update 6 of 100" in report(folder).text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\xfe garbage",
        b"{",
        b"[]",
        b"null",
        b'{"measures": {"reward": 3}}\n[1]\n"x"',
        b'{"measures": {}, "prompts": {"heldout": 1, "train": 1}, "sizes": {}, "stage_seconds": {}}',
    ],
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "summary.json", "env.json", "events.log"])
def test_a_damaged_file_costs_its_part_of_the_page_only(tmp_path: Path, name: str, content: bytes) -> None:
    folder = made(tmp_path / "run")
    (folder / name).write_bytes(content)
    assert "To repeat it" in report(folder).text


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"step": 1},
        {"stage": "ppo"},
        {"stage": "ppo", "step": None},
        {"stage": "ppo", "step": 7},
        {"heldout/update": 1},
    ],
)
def test_a_row_without_its_names_is_no_reason_to_fail(tmp_path: Path, row: Row) -> None:
    folder = made(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n" + json.dumps(update(8, 8)) + "\n")
    assert "8 updates of PPO" in report(folder).text


def test_settings_of_another_version_are_no_reason_to_fail(tmp_path: Path) -> None:
    folder = made(tmp_path / "run", finished=False)
    with (folder / "config.yaml").open("a") as file:
        file.write("gone: {setting: 1}\n")
    assert "gone.setting=1" in report(folder).text


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_the_interval_of_a_difference_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):  # 40 rows of mean 1 and 60 of mean 3, skewed
        ends = []
        for count, scale in ((40, 1.0), (60, 3.0)):
            rows = rng.exponential(scale, count)
            means = rng.choice(rows, (300, count)).mean(1)
            ends.append((rows.mean(), *np.percentile(means, [2.5, 97.5])))
        _, low, high = page.difference(ends[1], ends[0])
        held += low <= 2 <= high
    assert 0.91 < held / 1000 < 0.97  # the bootstrap's own intervals hold a little less than 95%


def test_the_gap_of_an_update_is_of_its_batch_and_of_the_evaluation_after_it() -> None:
    row = update(4, 4, objective__scores=1.0, objective__scores_std=0.4, episode=256.0) | {
        "heldout/reward": 0.7, "heldout/reward_low": 0.6, "heldout/reward_high": 0.8,
    }  # fmt: skip
    half = math.sqrt((1.96 * 0.4 / 8) ** 2 + 0.1**2)  # 64 responses
    assert record.gap(row) == pytest.approx((0.3, 0.3 - half, 0.3 + half))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 7), (0.1, 0.1001), (-1e-9, 1e-9), (1e9, 5e9), (-1e29, 1e29)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 9
    assert all(low - 1e-6 * abs(low) <= x <= high + 1e-6 * abs(high) for x in found)
    assert len({*found}) == len(found)


def test_thinning_keeps_extremes_and_order() -> None:
    points = [(float(i), math.sin(i)) for i in range(5000)]
    points[1234] = (1234.0, 99.0)
    kept = thin(points)
    assert len(kept) <= 400
    assert (1234.0, 99.0) in kept
    assert kept == sorted(kept)


def test_a_moving_median_of_a_line_is_the_line() -> None:
    points = [(float(i), 3.0 * i) for i in range(200)]
    assert [y for _, y in smooth(points)[50:150]] == pytest.approx([y for _, y in points[50:150]])


def test_a_missing_value_breaks_the_line_and_a_lone_point_is_still_seen() -> None:
    ys = [1.0, 2.0, math.nan, 3.0, math.inf, 4.0, 5.0]
    drawn = chart("t", "u", [Line("l", [(float(i), y) for i, y in enumerate(ys)], [(y - 1, y + 1) for y in ys])])
    assert drawn.count("<polyline") == 3
    assert drawn.count("<polygon") == 2
    assert "u, 95% interval, 2 not finite" in drawn


def test_nothing_to_draw_is_no_chart() -> None:
    assert chart("t", "u", [Line("l", []), Line("l", [(0.0, math.nan)])]) == ""
    assert interval_strip([("x", (math.nan, 0.0, 1.0))], [0]) == ""


# ---- ppo-report -----------------------------------------------------------------------------------------------------


def test_one_run_gets_its_report_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "run")
    assert compare.main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    first = (folder / "report.html").read_text()
    assert compare.main([str(folder), str(folder), "--out", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").read_text() == first


def test_several_runs_get_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "low", after=0.1, kl__coef=0.5)
    made(tmp_path / "high", [update(i, i, objective__scores=2.0 * i) for i in range(1, 9)], after=0.9)
    made(tmp_path / "near", after=0.85, rollout__temperature=0.7)
    assert compare.main(["low", "high", "near"]) == 0
    found = Page(tmp_path / "compare.html")
    assert "high is highest: clearly above low; not told apart from near" in found.text
    differ = found.text.partition("What differs between them")[2].partition("Held-out numbers")[0]
    assert differ.strip() == "low high near rollout.temperature 1.0 1.0 0.7 kl.coef 0.5 0.04 0.04"
    numbers = found.text.partition("Held-out numbers")[2]
    assert "low after 6 updates +0.100 +0.000 … +0.200" in numbers
    assert "high after 8 updates +0.900 +0.800 … +1.000" in numbers
    matrix = found.source.partition("Reward, run against run")[2].partition("politeness, run against run")[0]
    assert "<b class=up>+0.800</b>" in matrix  # high minus low
    assert "<td class=n>−0.050<" in matrix  # near minus high: within the intervals
    curves = found.source.partition("Update by update")[2]
    assert {f"c{i}" for i in range(3)} <= {*re.findall(r'class="line (c\d)"', curves)}
    assert "Reward for its KL" in found.figures


def test_a_comparison_says_when_the_judges_or_the_prompts_differ(tmp_path: Path) -> None:
    runs = [made(tmp_path / "a"), made(tmp_path / "b", data__seed=3, reward__function="x.py:f")]
    runs.append(made(tmp_path / "c", finished=False))
    assert compare.main([*map(str, runs), "--out", str(tmp_path / "out.html")]) == 0
    text = Page(tmp_path / "out.html").text
    assert "The held-out prompts may not be the same in all (data.seed)." in text
    assert "The reward is not the same in all (reward.function), and not ranked here." in text
    assert "Where a run is not at its end" in text
    assert "is highest" not in text.partition("politeness")[0]
    assert "Reward, run against run" not in text
    assert "politeness, run against run" in text
    assert "at update 6, not at its end" in text


def test_demos_of_different_seeds_have_different_reward_models(tmp_path: Path) -> None:
    runs = [made(tmp_path / name, seed=seed, demo={}) for name, seed in (("a", 1), ("b", 2))]
    assert compare.unlike([record.read(run) for run in runs], {"seed": ["1", "2"]}) == {"reward": "seed"}
    runs = [made(tmp_path / name, seed=seed) for name, seed in (("c", 1), ("d", 2))]
    assert compare.unlike([record.read(run) for run in runs], {"seed": ["1", "2"]}) == {}


def test_eight_runs_and_runs_of_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [made(tmp_path / f"day-{i}" / "run", 70, after=0.1 * i) for i in range(9)]
    out = ["--out", str(tmp_path / "out.html")]
    assert compare.main([*map(str, runs[:8]), *out]) == 0
    found = Page(tmp_path / "out.html")
    assert "day-7/run is highest" in found.text
    assert "Nothing: the settings are the same." in found.text
    assert len({*re.findall(r'class="line (c\d)"', found.source)}) == 8
    assert compare.main([*map(str, runs), *out]) == 2
    assert "9 runs: a page has room for 8" in capsys.readouterr().err


def test_runs_without_a_number_in_common(tmp_path: Path) -> None:
    runs = [made(tmp_path / "a", 0, finished=False), made(tmp_path / "b", metric=False)]
    assert compare.main([*map(str, runs), "--out", str(tmp_path / "out.html")]) == 0
    text = Page(tmp_path / "out.html").text
    assert "not evaluated yet" in text
    assert "is highest" not in text
    assert "run against run" not in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("runs/smok", "there is no such folder; did you mean {}/runs/smoke?"),
        ("runs/zzz", "there is no such folder; beside it are smoke, tldr"),
        ("runs", "config.yaml is missing; it holds 2 runs, name them, for example {}/runs/smoke"),
        ("runs/smoke/final", "there is no such folder; did you mean {}/runs/smoke?"),
        ("nowhere/at/all", "there is no such folder"),
        ("broken", "config.yaml is not a configuration"),
    ],
)
def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str, said: str) -> None:
    made(tmp_path / "runs" / "smoke")
    made(tmp_path / "runs" / "tldr")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("- a list\n")
    assert compare.main([str(tmp_path / given)]) == 2
    error = capsys.readouterr().err.strip()
    assert error == f"ppo-report: {tmp_path / given} is no run: {said.format(tmp_path)}"


def test_every_bad_folder_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(tmp_path / "a"), str(made(tmp_path / "x" / "b")), str(tmp_path / "c")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "run")
    for out in (tmp_path / "missing" / "x.html", tmp_path):
        assert compare.main([str(folder), "--out", str(out)]) == 2
        assert f"ppo-report: --out {out}: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        compare.main([])
    assert ended.value.code == 2


# ---- the screen -----------------------------------------------------------------------------------------------------


def test_the_screen_has_the_words_of_any_run_and_survives_what_is_not_finite() -> None:
    console = Console(width=120, record=True, quiet=True)
    screen = Screen(console, "ppo_kernels · runs/[red]run")
    row = update(3, 2) | {"objective/kl": math.nan, "loss/ptx": 2.5}
    screen.values = {name: value for name, value in row.items() if "/" in name}
    screen.curves = {name: [value, math.nan, value] for name, value in screen.values.items()}
    console.quiet = False
    with console.capture() as capture:
        console.print(screen.render([StageView("PPO", "running", 10, 3, "upd 3/10 | x")], 61.0, 5.0))
    shown = capture.get()
    assert "runs/[red]run" in shown
    for label in ("reward, held-out prompts", "independent metric", "KL to the reference", "pretraining text"):
        assert label in shown
    assert not re.search("VADER|SFT model|learned", shown)


def test_a_sparkline_leaves_out_what_is_not_finite() -> None:
    assert sparkline([0.0, math.nan, 7.0, math.inf]) == "▁█"
    assert sparkline([math.nan]) == "▁"
