"""Line charts as inline SVG: no script, no font, no file beside the page. What is not finite is left out, and said."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from ppo_kernels.trainer.page import Estimate

WIDTH, HEIGHT = 340, 200
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 28
MANY = 60  # points from which on a moving median is what one sees

Point = tuple[float, float]


class Line(NamedTuple):
    label: str
    points: list[Point]  # y may be NaN
    band: list[Point] | None = None  # low, high for each point

    @property
    def finite(self) -> list[Point]:
        return [(x, y) for x, y in self.points if math.isfinite(x) and math.isfinite(y)]


def varies(*lines: Line, share: float = 1e-6) -> bool:
    """Whether there is anything to see: two points, and values that differ by more than that share of them."""
    ys = [y for line in lines for _, y in line.finite]
    longest = max((len(line.finite) for line in lines), default=0)
    return longest > 1 and max(ys) - min(ys) > share * max(map(abs, ys))


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers that span [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.6g}") for i in range(first, min(last, first + 2 * count) + 1)]


class Axis:
    """Values to pixels, and the values worth a label."""

    def __init__(
        self, low: float, high: float, start: float, end: float, count: int, logarithmic: bool = False
    ) -> None:
        self.logarithmic = logarithmic
        self.low, self.high = (math.log10(low), math.log10(high)) if logarithmic else (low, high)
        self.start, self.end, self.count = start, end, count

    def __call__(self, value: float) -> float:
        at = math.log10(max(value, 1e-300)) if self.logarithmic else value
        share = min(max((at - self.low) / (self.high - self.low), 0.0), 1.0)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        if not self.logarithmic:
            return ticks(self.low, self.high, self.count)
        first, last = math.ceil(self.low), math.floor(self.high)
        return [10.0**i for i in range(first, last + 1, max(1, (last - first) // self.count + 1))]


def chart(
    title: str,
    unit: str,
    lines: Sequence[Line],  # each in the colour of its place
    x_label: str = "update",
    zero: bool = False,
    floor: float | None = None,  # what is lower is drawn there
    marks: Sequence[float] = (),  # x of vertical lines
    legend: bool = True,
) -> str:
    """A <figure>, or nothing if no line has a point; a legend only when there is more than one."""
    drawn = [(color, line) for color, line in enumerate(lines) if line.finite]
    if not drawn:
        return ""
    xs = [x for _, line in drawn for x, _ in line.finite]
    ys = [y for _, line in drawn for _, y in line.finite]
    bands = [y for _, line in drawn for pair in line.band or [] for y in pair if math.isfinite(y)]
    span = max(max(xs) - min(xs), 1e-9)
    x_axis = Axis(min(xs), min(xs) + (span if span > 1e-9 else 1.0), LEFT, WIDTH - RIGHT, 5)
    y_axis = _y_axis(ys + bands, zero, floor, min(ys) > 0 and max(ys) > 100 * statistics.median(ys))

    parts = []
    for y in y_axis.ticks():
        parts.append(f'<line class="gridline" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_axis(y)}" y2="{y_axis(y)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y_axis(y) + 3.5:.1f}" text-anchor="end">{_tick(y)}</text>')
    for x in x_axis.ticks():
        if x == round(x) or x_label not in ("update", "step"):
            parts.append(f'<text x="{x_axis(x)}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{_tick(x)}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 3}" text-anchor="end">{escape(x_label)}</text>')
    for x in marks:
        if min(xs) <= x <= max(xs):
            parts.append(f'<line class="mark" x1="{x_axis(x)}" x2="{x_axis(x)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    for color, line in drawn:
        parts += _band(line, color, x_axis, y_axis)
    for color, line in drawn:
        parts += _curve(line, color, x_axis, y_axis)

    lost = sum(not math.isfinite(y) for _, line in drawn for _, y in line.points)
    keys = "".join(key(line.label, color) for color, line in drawn) if legend and len(drawn) > 1 else ""
    notes = [
        unit,
        "95% interval" if bands and not keys else "",
        "logarithmic" if y_axis.logarithmic else "",
        f"{lost} not finite" if lost else "",
    ]
    return (
        f"<figure><figcaption><b>{escape(title)}</b> <small>{escape(', '.join(filter(None, notes)))}</small>"
        f"<div class=keys>{keys}</div></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></figure>'
    )


def key(label: str, color: int) -> str:
    return f'<span class="key c{color}">{escape(label)}</span>'


def _y_axis(ys: list[float], zero: bool, floor: float | None, logarithmic: bool) -> Axis:
    bottom, top = HEIGHT - BOTTOM, TOP
    if logarithmic:
        positive = [y for y in ys if y > 0]
        return Axis(min(positive) / 1.3, max(positive) * 1.3, bottom, top, 4, logarithmic=True)
    low, high = min([*ys, 0.0] if zero else ys), max([*ys, 0.0] if zero else ys)
    if floor is not None:
        low, high = max(low, floor), max(high, floor)
    margin = (high - low) * 0.06
    if margin <= 1e-7 * max(abs(low), abs(high)):
        margin = max(abs(low), abs(high)) * 0.1 or 1.0
    return Axis(low - margin * (low != 0 or not zero), high + margin, bottom, top, 4)


def _tick(value: float) -> str:
    text = f"{value:g}" if 1e-4 <= abs(value) < 1e5 or value == 0 else f"{value:.3g}"
    return text.replace("e+0", "e").replace("e-0", "e-").replace("e+", "e").replace("-", "−")


def _band(line: Line, color: int, x_axis: Axis, y_axis: Axis) -> list[str]:
    """One polygon for each run of points with a whole interval."""
    whole = [
        (x_axis(x), y_axis(low), y_axis(high)) if all(map(math.isfinite, (x, y, low, high))) else None
        for (x, y), (low, high) in zip(line.points, line.band or [], strict=False)
    ]
    parts = []
    for there, group in groupby(whole, key=lambda corner: corner is not None):
        corners = [corner for corner in group if corner is not None]
        if there and len(corners) > 1:
            outline = [f"{x},{high}" for x, _, high in corners] + [f"{x},{low}" for x, low, _ in corners[::-1]]
            parts.append(f'<polygon class="band c{color}" points="{" ".join(outline)}"/>')
        elif there:
            (x, low, high), *_ = corners
            parts.append(f'<line class="raw c{color}" x1="{x}" x2="{x}" y1="{low}" y2="{high}"/>')
    return parts


def _curve(line: Line, color: int, x_axis: Axis, y_axis: Axis) -> list[str]:
    """The polyline, broken where a value is missing; the moving median of many points, the points themselves faint."""

    def polylines(name: str, points: list[Point]) -> list[str]:
        parts = []
        for there, group in groupby(points, key=lambda point: math.isfinite(point[0]) and math.isfinite(point[1])):
            if there:
                path = [f"{x_axis(x)},{y_axis(y)}" for x, y in group]
                parts.append(f'<polyline class="{name} c{color}" points="{" ".join(path * (1 + (len(path) == 1)))}"/>')
        return parts

    if len(line.finite) > MANY and not line.band:
        return polylines("raw", thin(line.finite)) + polylines("line", thin(smooth(line.finite)))
    dots = [
        f'<circle class="dot c{color}" cx="{x_axis(x)}" cy="{y_axis(y)}" r="2.4"><title>{escape(line.label)}: '
        f"{_tick(float(f'{y:.4g}'))} at {_tick(x)}</title></circle>"
        for x, y in line.finite
    ]
    return polylines("line", line.points) + (dots if len(dots) <= 30 else [])


def smooth(points: list[Point]) -> list[Point]:
    """The median of a 25th of the points, around each: a spike is seen in the points, and does not widen here."""
    half = max(len(points) // 50, 3)
    windows = [points[max(i - half, 0) : i + half + 1] for i in range(len(points))]
    return [(x, statistics.median(y for _, y in window)) for (x, _), window in zip(points, windows, strict=True)]


def thin(points: list[Point], buckets: int = 200) -> list[Point]:
    """As many points as there is room for: the lowest and the highest of each bucket, so that no spike is lost."""
    if len(points) <= 2 * buckets:
        return points
    size = math.ceil(len(points) / buckets)
    cuts = [range(at, min(at + size, len(points))) for at in range(0, len(points), size)]
    ends = [{min(cut, key=lambda i: points[i][1]), max(cut, key=lambda i: points[i][1])} for cut in cuts]
    return [points[i] for i in sorted(set[int]().union(*ends))]


def interval_strip(rows: Sequence[tuple[str, Estimate]], colors: Sequence[int]) -> str:
    """Means as dots and intervals as bars on one axis. Rows without a finite interval are left out."""
    kept = [(*row, color) for row, color in zip(rows, colors, strict=True) if all(map(math.isfinite, row[1]))]
    if not kept:
        return ""
    low, high = min(row[1][1] for row in kept), max(row[1][2] for row in kept)
    margin = max((high - low) * 0.08, 1e-6 * max(abs(low), abs(high))) or 1.0
    names = [label if len(label) <= 22 else f"{label[:21]}…" for label, *_ in kept]
    left, height = 14 + 6.2 * max(map(len, names)), 22 * len(kept) + 20
    axis = Axis(low - margin, high + margin, left, WIDTH - 10, 4)
    parts = []
    for x in axis.ticks():
        parts.append(f'<line class="gridline" x1="{axis(x)}" x2="{axis(x)}" y1="2" y2="{height - 16}"/>')
        parts.append(f'<text x="{axis(x)}" y="{height - 3}" text-anchor="middle">{_tick(x)}</text>')
    if low - margin < 0 < high + margin:
        parts.append(f'<line class="zero" x1="{axis(0)}" x2="{axis(0)}" y1="2" y2="{height - 16}"/>')
    for i, (name, (label, (mean, start, end), color)) in enumerate(zip(names, kept, strict=True)):
        y = 14 + 22 * i
        parts.append(f'<text x="0" y="{y + 4}">{escape(name)}<title>{escape(label)}</title></text>')
        parts.append(f'<line class="line c{color}" x1="{axis(start)}" x2="{axis(end)}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="dot c{color}" cx="{axis(mean)}" cy="{y}" r="4.5"/>')
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="95% intervals">{"".join(parts)}</svg>'
