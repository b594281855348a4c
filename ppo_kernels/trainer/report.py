"""report.html: one self-contained page about one run, made from the files in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from ppo_kernels.trainer.charts import Line, chart, interval_strip

Rows = list[dict[str, Any]]

STYLE = """
:root{--bg:#fcfcfa;--ink:#1d2126;--soft:#667079;--rule:#e3e4e0;--card:#fff;--c0:#2563a8;--c1:#d9782d;--c2:#3b8f5a;--c3:#8d4fa8}
@media(prefers-color-scheme:dark){:root{--bg:#15181c;--ink:#e6e8ea;--soft:#98a2ab;--rule:#2c3238;--card:#1b1f24;
--c0:#6aa9ee;--c1:#f0a062;--c2:#6cc48c;--c3:#c08ddb}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:36px 24px 80px}
h1{font-size:28px;margin:0;letter-spacing:-.01em}h2{font-size:18px;margin:40px 0 12px}
.sub,small,figcaption small{color:var(--soft)}.sub{margin:4px 0 24px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(340px,1fr));gap:16px}
.card,figure{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:16px 18px;margin:0}
.card .big{font-size:30px;font-weight:650;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.card .from{color:var(--soft);font-weight:400}
.card p{margin:2px 0 8px}.good{color:var(--c2)}.flat{color:var(--c1)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(320px,1fr));gap:16px}
figcaption{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:baseline;margin-bottom:6px}
svg{width:100%;height:auto;display:block}svg text{font-size:11px;fill:var(--soft)}
.gridline{stroke:var(--rule)}.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.band{opacity:.16}
.line.c0{stroke:var(--c0)}.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}
.band.c0,.dot.c0{fill:var(--c0)}.band.c1,.dot.c1{fill:var(--c1)}.band.c2,.dot.c2{fill:var(--c2)}.band.c3,.dot.c3{fill:var(--c3)}
.key{font-size:12px;color:var(--soft)}.key::before{content:"";display:inline-block;width:14px;height:3px;margin-right:5px;
vertical-align:middle;background:currentColor}
.key.c0::before{background:var(--c0)}.key.c1::before{background:var(--c1)}.key.c2::before{background:var(--c2)}
.key.c3::before{background:var(--c3)}
table{width:100%;border-collapse:collapse;background:var(--card);
border:1px solid var(--rule);border-radius:10px;overflow:hidden}
th,td{padding:8px 12px;text-align:left;border-top:1px solid var(--rule);vertical-align:top}
thead th{border-top:0;font-weight:600;color:var(--soft);font-size:13px}
td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}th.n{text-align:right}
.ci{color:var(--soft);font-size:12px;display:block}.prompt{color:var(--soft)}
.wide{overflow-x:auto}details{margin:8px 0}summary{cursor:pointer;color:var(--soft)}
pre{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px;overflow-x:auto;
font-size:12.5px}
.bar{display:flex;height:22px;border-radius:6px;overflow:hidden;gap:2px}.bar span{display:block;min-width:2px}
"""


def write_report(folder: Path) -> Path:
    """Writes `folder`/report.html and returns its path."""
    summary = json.loads((folder / "summary.json").read_text())
    environment = json.loads((folder / "env.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row["stage"] == "ppo"]
    drift = max(row["val/first_logprob_drift"] for row in updates)
    facts = (
        f"{summary['sizes']['parameters']:,} parameters · {summary['stage_seconds']['total']:.0f} s · "
        f"{environment['cpu']}, {environment['threads']} threads · {environment['time']}"
    )
    pretrain = _pretrain_charts(rows)
    judges = [name for name in ("reward", "metric") if name in summary["measures"]]
    body = [
        f"<h1>PPO on a language model, before and after</h1><p class=sub>{escape(folder.name)} · {escape(facts)}</p>",
        f"<div class=cards>{''.join(_card(name, summary) for name in judges)}</div>",
        "<h2>Before and after</h2>",
        _table(summary),
        "<h2>PPO, update by update</h2>",
        f"<p class=sub>Before the first step of an update, no log-prob differed from the rollout by more than "
        f"{drift:.1g} nats: the ratio started at 1.</p>",
        f"<div class=grid>{''.join(_ppo_charts(updates))}</div>",
        "<h2>What the models say</h2>",
        "<p class=sub>The first held-out prompts in line, not selected; one response each, sampled as in training. "
        "The prompt is grey, the number is the learned reward.</p>",
        _samples(samples),
        f"<h2>The stages before PPO</h2><div class=grid>{''.join(pretrain)}</div>" if pretrain else "",
        "<h2>Where the time went</h2>",
        _stage_bar(summary["stage_seconds"]),
        "<h2>To repeat it</h2>",
        f"<p>{escape(summary['sizes']['text'])}.</p><pre>{escape(environment['command'])}</pre>",
        f"<details><summary>configuration</summary><pre>{escape((folder / 'config.yaml').read_text())}</pre></details>",
        f"<details><summary>environment</summary><pre>{escape(json.dumps(environment, indent=1))}</pre></details>",
    ]
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(folder.name)}: PPO report</title><style>{STYLE}</style><main>{''.join(body)}</main></html>\n"
    )
    path = folder / "report.html"
    path.write_text(page)
    return path


def _card(name: str, summary: dict[str, Any]) -> str:
    label, form, meaning = summary["measures"][name]
    before, after = summary["before"]["heldout"][name], summary["after"]["heldout"][name]
    if after[1] > before[2]:
        verdict = "<span class=good>up; the 95% intervals do not overlap</span>"
    elif after[2] < before[1]:
        verdict = "<span class=flat>down; the 95% intervals do not overlap</span>"
    else:
        verdict = "<span class=flat>the 95% intervals overlap</span>"
    return (
        f"<div class=card><p><b>{label}</b> on {summary['prompts']['heldout']} held-out prompts<br><small>{meaning}"
        f"</small></p><div class=big><span class=from>{form.format(before[0])} →</span> {form.format(after[0])}</div>"
        f"{interval_strip([('before', *before), ('after', *after)])}<p>{verdict}</p></div>"
    )


def _table(summary: dict[str, Any]) -> str:
    head = "".join(
        f"<th class=n>{side}, {moment}</th>" for side in ("held-out", "training") for moment in ("before", "after")
    )
    lines = []
    for name, (label, form, meaning) in summary["measures"].items():
        cells = ""
        for side in ("heldout", "train"):
            for moment in ("before", "after"):
                mean, low, high = (form.format(value) for value in summary[moment][side][name])
                cells += f"<td class=n>{mean}<span class=ci>{low} … {high}</span></td>"
        lines.append(f"<tr><td>{label}<br><small>{meaning}</small></td>{cells}</tr>")
    note = (
        f"Means over {summary['prompts']['heldout']} held-out and {summary['prompts']['train']} training prompts with "
        "bootstrap 95% intervals over prompts. A training mean far above the held-out one is overfitting; a learned "
        "reward that rises while VADER does not is a reward model being fooled."
    )
    return (
        f"<div class=wide><table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f"<p class=sub>{note}</p>"
    )


def _series(rows: Rows, name: str, label: str) -> Line:
    return Line(label, [(row["step"], row[name]) for row in rows if name in row])


def _heldout(rows: Rows, name: str, label: str) -> Line:
    """A point for each new evaluation, with its interval; rows in between repeat the last one."""
    points, band, last = [], [], None
    for row in rows:
        if (at := row["heldout/update"]) != last and f"heldout/{name}" in row:
            points.append((at, row[f"heldout/{name}"]))
            band.append((row[f"heldout/{name}_low"], row[f"heldout/{name}_high"]))
            last = at
    return Line(label, points, band)


def _ppo_charts(rows: Rows) -> list[str]:
    def line(name: str, label: str) -> Line:
        return _series(rows, name, label)

    return [
        chart(
            "Learned reward",
            "mean per response",
            [line("objective/scores", "training batch"), _heldout(rows, "reward", "held-out, 95% interval")],
        ),
        chart("Independent metric", "held-out, never trained on", [_heldout(rows, "metric", "held-out, 95% interval")]),
        chart("KL to the SFT model", "nats per response", [line("objective/kl", "KL")], zero=True),
        chart("Entropy", "nats per token", [line("policy/entropy_avg", "entropy")], zero=True),
        chart("Response length", "tokens", [line("response_length/mean", "mean")], zero=True),
        chart(
            "Shares",
            "of tokens or responses",
            [line("policy/clipfrac_avg", "tokens clipped"), line("response_length/eos_rate", "ended by itself")],
            zero=True,
        ),
        chart("Value loss", "mean per token", [line("loss/value_avg", "value loss")], zero=True),
        chart("Critic", "explained variance of the returns", [line("critic/explained_var", "explained")]),
        chart(
            "Gradient norms",
            "before clipping",
            [line("grad_norm/actor", "actor"), line("grad_norm/critic", "critic")],
            zero=True,
        ),
    ]


def _pretrain_charts(rows: Rows) -> list[str]:
    found = {key.partition("/")[2]: value for row in rows for key, value in row.items() if "validation" in key}
    if not found:
        return []
    judged = f"{found['validation_correlation']:.2f}, sign right {found['validation_sign_accuracy']:.0%}"
    return [
        chart(
            "SFT",
            f"nats per token, training batches; {found['validation_loss']:.2f} on validation text",
            [_series(rows, "sft/loss", "loss")],
            x_label="step",
        ),
        chart(
            "Reward model",
            f"squared error, training batches; validation correlation with people {judged}",
            [
                _series([row for row in rows if row["step"] > 0], "reward/loss", "loss")
            ],  # the first one is off the scale
            x_label="step",
            zero=True,
        ),
    ]


def _samples(samples: Rows) -> str:
    def cell(text: str, prompt: str) -> str:
        if text.startswith(prompt):
            return f"<span class=prompt>{escape(prompt)}</span>{escape(text[len(prompt) :])}"
        return escape(text)

    number: Callable[[float], str] = "{:+.2f}".format
    lines = "".join(
        f"<tr><td>{cell(row['before'], row['prompt'])}</td><td class=n>{number(row['before_reward'])}</td>"
        f"<td>{cell(row['after'], row['prompt'])}</td><td class=n>{number(row['after_reward'])}</td></tr>"
        for row in samples
    )
    head = "<th>before PPO</th><th class=n></th><th>after PPO</th><th class=n></th>"
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"


def _stage_bar(seconds: dict[str, float]) -> str:
    stages = [(name, value) for name, value in seconds.items() if name != "total"]
    spans = "".join(
        f'<span style="flex:{max(value, 0.01):.2f};background:var(--c{i % 4})" title="{escape(name)}"></span>'
        for i, (name, value) in enumerate(stages)
    )
    keys = " ".join(
        f'<span class="key c{i % 4}">{escape(name)} {value:.1f} s</span>' for i, (name, value) in enumerate(stages)
    )
    return f"<div class=card><div class=bar>{spans}</div><p>{keys}</p></div>"
