"""One screen of live progress for a terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SHOWN = {  # metric -> label, format
    "objective/scores": ("reward, training prompts", "{:.3f}"),
    "heldout/reward": ("reward, held-out prompts", "{:.3f}"),
    "heldout/metric": ("independent metric, held-out prompts", "{:.3f}"),
    "objective/kl": ("KL to the reference, nats per response", "{:.2f}"),
    "policy/entropy_avg": ("entropy, nats per token", "{:.2f}"),
    "response_length/mean": ("response length, tokens", "{:.1f}"),
    "response_length/eos_rate": ("ended by itself", "{:.0%}"),
    "policy/clipfrac_avg": ("tokens clipped", "{:.1%}"),
    "critic/explained_var": ("critic, explained variance", "{:.2f}"),
    "loss/ptx": ("pretraining text, nats per token", "{:.3f}"),
    "loss/sft": ("SFT pairs, nats per token", "{:.3f}"),
    "sft/loss": ("SFT loss, nats per token", "{:.3f}"),
    "reward/loss": ("reward model, squared error", "{:.3f}"),
}
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass
class StageView:
    name: str
    state: str = "waiting"
    total: int = 1
    step: int = 0
    line: str = ""
    started: float = 0.0
    seconds: float = 0.0


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}" if seconds >= 60 else f"{seconds:.0f} s"


def sparkline(values: list[float], width: int = 24) -> str:
    """Of those that are finite."""
    values = [value for value in values if math.isfinite(value)] or [0.0]
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values), max(values)
    return "".join(BLOCKS[round((value - low) / ((high - low) or 1.0) * 7)] for value in values)


class Screen:
    def __init__(self, console: Console, title: str) -> None:
        self.title, self.note = title, ""
        self.values: dict[str, float] = {}
        self.curves: dict[str, list[float]] = {}
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def draw(self, stages: list[StageView], elapsed: float, left: float) -> None:
        self._live.update(self.render(stages, elapsed, left))

    def render(self, stages: list[StageView], elapsed: float, left: float) -> RenderableType:
        steps = Table.grid(padding=(0, 2))
        for stage in stages:
            running = stage.state == "running"
            mark = {"done": "[green]✓[/]", "running": "[cyan]▶[/]", "waiting": "[dim]·[/]"}[stage.state]
            bar = ProgressBar(stage.total, stage.step, width=24) if running else Text("")
            line = stage.line.split(" | ")[0] if running else stage.line.split(" | ")[-1]
            time = clock(stage.seconds) if stage.state != "waiting" else ""
            steps.add_row(mark, Text(stage.name, style="bold" if running else ""), bar, Text(time), Text(line))

        numbers = Table.grid(padding=(0, 2))
        for name, (label, form) in SHOWN.items():
            if name in self.values:
                curve = self.curves[name]
                numbers.add_row(
                    Text(label, style="dim"),
                    Text(form.format(curve[0]), style="dim"),
                    Text("→", style="dim"),
                    Text(form.format(self.values[name]), style="bold"),
                    Text(sparkline(curve), style="cyan"),
                )
        ending = f" · about {clock(left)} left" if left else ""
        parts: list[RenderableType] = [steps, Text(""), numbers]
        if self.note:
            parts += [Text(""), Text(self.note, style="yellow")]
        return Panel(Group(*parts), title=Text(self.title), subtitle=f"{clock(elapsed)}{ending}", padding=(1, 2))
