"""A self-contained HTML page: style, skeleton, tables and numbers. No script, no file beside it, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

Estimate = tuple[float, float, float]  # a mean and its 95% interval

COLORS = (  # of curves: in the light, in the dark
    ("#2563a8", "#6aa9ee"), ("#d9782d", "#f0a062"), ("#3b8f5a", "#6cc48c"), ("#8d4fa8", "#c08ddb"),
    ("#c2384e", "#f0788a"), ("#128a99", "#4fc7d6"), ("#8a6d3b", "#cbb07a"), ("#6b7178", "#b3bac2"),
)  # fmt: skip

STYLE = (
    ":root{color-scheme:light dark;--bg:#fcfcfa;--ink:#1d2126;--soft:#626b74;--rule:#e3e4e0;--card:#fff;--up:#2f7d4c;"
    f"--down:#b3402a;{''.join(f'--c{i}:{light};' for i, (light, _) in enumerate(COLORS))}}}"
    "@media(prefers-color-scheme:dark){:root{--bg:#15181c;--ink:#e6e8ea;--soft:#98a2ab;--rule:#2c3238;--card:#1b1f24;"
    f"--up:#6cc48c;--down:#f08a72;{''.join(f'--c{i}:{dark};' for i, (_, dark) in enumerate(COLORS))}}}}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
overflow-wrap:anywhere}
main{max-width:1120px;margin:0 auto;padding:36px 24px 80px}
h1{font-size:28px;line-height:1.25;margin:0;letter-spacing:-.01em}h2{font-size:18px;margin:40px 0 12px}
small,.sub{color:var(--soft)}.sub{margin:8px 0 16px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:16px;margin-top:20px}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr));gap:16px}
.card,figure{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:16px 18px;margin:0;
min-width:0}figure{display:flex;flex-direction:column;justify-content:space-between}.cards svg{max-width:440px}
.cards .card:only-child{max-width:560px}
.card p{margin:2px 0 8px}.card p:last-child{margin-bottom:0}
.big{font-size:28px;font-weight:650;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.big .from{color:var(--soft);font-weight:400}
.up{color:var(--up)}.down{color:var(--down)}.chip{white-space:nowrap}
.notice{border-left:4px solid var(--c1);padding:8px 14px;background:var(--card);margin:16px 0}
figcaption{margin-bottom:6px;line-height:1.4}
svg{width:100%;height:auto;display:block}svg text{font-size:11px;fill:var(--soft)}
.gridline{stroke:var(--rule)}.mark,.zero{stroke:var(--soft);stroke-dasharray:2 3}
.line,.raw{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}.raw{stroke-width:1;opacity:.35}
.band{opacity:.16}
.keys{display:flex;flex-wrap:wrap;gap:2px 14px}
.key{font-size:12px;color:var(--soft)}.key::before{content:"";display:inline-block;width:14px;height:3px;
margin-right:5px;vertical-align:middle}
.sticky{position:sticky;top:0;background:var(--bg);padding:10px 0;z-index:1;border-bottom:1px solid var(--rule);
margin-bottom:16px}.sticky .key,td .key,th .key{font-size:14px;color:var(--ink)}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:10px}
table{width:100%;border-collapse:collapse}
th,td{padding:8px 12px;text-align:left;border-top:1px solid var(--rule);vertical-align:top}
tr:first-child>th{border-top:0}thead th{font-weight:600;color:var(--soft);font-size:13px}
thead+tbody tr:first-child td{border-top:1px solid var(--rule)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td:first-child{min-width:150px}td code,.notice code{white-space:nowrap}
.ci{color:var(--soft);font-size:12px;display:block}
ul{margin:0;padding-left:20px}li{margin:3px 0}
.sample{padding:12px 16px;border-top:1px solid var(--rule)}.sample:first-child{border-top:0}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:6px 28px}
.said{white-space:pre-wrap;max-height:15em;overflow-y:auto}.prompt{color:var(--soft)}
.said+.pair{margin-top:10px}
@media(max-width:640px){main{padding:20px 14px 60px}.pair{grid-template-columns:1fr}}
details{margin:8px 0}summary{cursor:pointer;color:var(--soft)}
pre{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:14px;overflow-x:auto;
font-size:12.5px;white-space:pre-wrap}
code{font-size:13px}.settings{display:flex;flex-wrap:wrap;gap:2px 18px}
.bar{display:flex;height:22px;border-radius:6px;overflow:hidden;gap:2px;margin-bottom:8px}
.bar span{display:block;min-width:2px}
"""
    + "".join(
        f".line.c{i},.raw.c{i}{{stroke:var(--c{i})}}.band.c{i},.dot.c{i}{{fill:var(--c{i})}}"
        f".key.c{i}::before,.bar .c{i}{{background:var(--c{i})}}"
        for i in range(len(COLORS))
    )
    + "polyline.line.c4,polyline.line.c5,polyline.line.c6,polyline.line.c7{stroke-dasharray:5 3}"
)


def write_page(path: Path, title: str, parts: Iterable[str]) -> None:
    """The page at `path`, replaced as a whole. It allows itself nothing but its own style, whatever texts it holds."""
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_bytes(page.encode("utf-8", "replace"))  # a text may hold half a surrogate pair
    beside.replace(path)


def section(title: str, *parts: str) -> str:
    """Nothing if there is nothing in it."""
    return f"<h2>{escape(title)}</h2>{''.join(parts)}" if any(parts) else ""


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Of HTML cells: the first of a line names it, the others are numbers."""
    body = "".join(f"<tr>{_cells('td', line)}</tr>" for line in lines)
    top = f"<thead><tr>{_cells('th', head)}</tr></thead>"
    return f"<div class=wide><table>{top}<tbody>{body}</tbody></table></div>"


def _cells(tag: str, cells: Iterable[str]) -> str:
    return "".join(f"<{tag}{' class=n' if i else ''}>{cell}</{tag}>" for i, cell in enumerate(cells))


# ---- numbers --------------------------------------------------------------------------------------------------------


def number(value: Any) -> float:
    """NaN for what is none, or too large to draw."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        return math.nan
    return float(value)


def show(form: str, value: float) -> str:
    return form.format(value).replace("-", "−") if math.isfinite(value) else "–"


def show_estimate(form: str, estimate: Estimate) -> str:
    mean, low, high = (show(form, value) for value in estimate)
    return f"{mean}<span class=ci>{low} … {high}</span>"


def duration(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def signed(form: str) -> str:
    """The format, with a sign before positive numbers too."""
    return form if ":+" in form else form.replace("{:", "{:+")


def difference(a: Estimate, b: Estimate) -> Estimate:
    """a − b, as of independent estimates: the arms of their intervals add up as squares do (Zou and Donner 2008)."""
    mean = a[0] - b[0]
    return mean, mean - math.hypot(a[0] - a[1], b[2] - b[0]), mean + math.hypot(a[2] - a[0], b[0] - b[1])


def direction(change: Estimate) -> int:
    """1 or -1 if the whole interval is above or below 0, else 0."""
    return (change[1] > 0) - (change[2] < 0)
