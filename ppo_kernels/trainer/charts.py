"""Line charts as inline SVG: no script, no font, no file beside the page."""

from __future__ import annotations

import math
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 28


class Line(NamedTuple):
    label: str
    points: list[tuple[float, float]]
    band: list[tuple[float, float]] | None = None  # low, high for each point


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that span [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def chart(title: str, unit: str, lines: list[Line], x_label: str = "update", zero: bool = False) -> str:
    """A <figure> with up to four lines; a legend only when there is more than one."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [y for line in lines for pair in line.band or [] for y in pair]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    low, high = min([*ys, 0.0] if zero else ys), max([*ys, 0.0] if zero else ys)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = low - margin * (low != 0 or not zero), high + margin

    def px(x: float) -> float:
        return round(LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT), 1)

    def py(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    parts = []
    for y in ticks(low, high):
        parts.append(f'<line class="gridline" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(y)}" y2="{py(y)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{py(y) + 3.5}" text-anchor="end">{y:g}</text>')
    for x in ticks(x_low, x_high, 5):
        parts.append(f'<text x="{px(x)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 1}" text-anchor="end">{escape(x_label)}</text>')
    for index, line in enumerate(lines):
        if line.band:
            upper = [f"{px(x)},{py(band[1])}" for (x, _), band in zip(line.points, line.band, strict=True)]
            lower = [f"{px(x)},{py(band[0])}" for (x, _), band in zip(line.points, line.band, strict=True)]
            parts.append(f'<polygon class="band c{index}" points="{" ".join(upper + lower[::-1])}"/>')
        path = " ".join(f"{px(x)},{py(y)}" for x, y in line.points)
        parts.append(f'<polyline class="line c{index}" points="{path}"/>')
        if len(line.points) <= 30:
            parts += [
                f'<circle class="dot c{index}" cx="{px(x)}" cy="{py(y)}" r="2.6"><title>'
                f"{escape(line.label)}: {y:.4g} at {x:g}</title></circle>"
                for x, y in line.points
            ]
    legend = "".join(f'<span class="key c{i}">{escape(line.label)}</span>' for i, line in enumerate(lines))
    caption = f"<b>{escape(title)}</b> <small>{escape(unit)}</small>"
    return (
        f"<figure><figcaption>{caption}{legend if len(lines) > 1 else ''}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )


def interval_strip(rows: list[tuple[str, float, float, float]]) -> str:
    """Means as dots and intervals as bars on one axis: (label, mean, low, high) for each row."""
    low, high = min(row[2] for row in rows), max(row[3] for row in rows)
    margin = (high - low) * 0.08 or 1.0
    low, high = low - margin, high + margin
    height = 22 * len(rows) + 20

    def px(x: float) -> float:
        return round(60 + (x - low) / (high - low) * (WIDTH - 72), 1)

    parts = []
    for x in ticks(low, high):
        parts.append(f'<line class="gridline" x1="{px(x)}" x2="{px(x)}" y1="2" y2="{height - 16}"/>')
        parts.append(f'<text x="{px(x)}" y="{height - 3}" text-anchor="middle">{x:g}</text>')
    for i, (label, mean, left, right) in enumerate(rows):
        y = 14 + 22 * i
        parts.append(f'<text x="0" y="{y + 4}">{escape(label)}</text>')
        parts.append(f'<line class="line c{1 - i % 2}" x1="{px(left)}" x2="{px(right)}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="dot c{1 - i % 2}" cx="{px(mean)}" cy="{y}" r="4.5"/>')
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="95% intervals">{"".join(parts)}</svg>'
