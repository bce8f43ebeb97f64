# SPDX-License-Identifier: Apache-2.0
"""Curves: the same points as an inline SVG (for the page, in its colours) and as a PNG (for chats and READMEs).

It draws points it is given; which metric is worth a curve is the report's business.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 36
_EVAL_COLOURS = ("#d9730d", "#1a8f5a", "#c62f2f")
MOST = 600
"""More points than pixels only make the page heavy."""
TINIEST = 1e-100
"""Below it there is no room to divide a range."""


def smoothed(points: Points, share: float = 0.05) -> list[tuple[float, float]]:
    """A running mean over a share of the points (at least 5), centred."""
    half = max(round(len(points) * share), 5) // 2
    values = [value for _, value in points]
    means = [_mean(values[max(at - half, 0) : at + half + 1]) for at in range(len(values))]
    return [(step, mean) for (step, _), mean in zip(points, means, strict=True)]


def svg(
    lines: Mapping[str, Points], dots: Mapping[str, Points], label: str, size: tuple[int, int] = (WIDTH, HEIGHT)
) -> str:
    """Axes, one path a line, one dot a point; classes `line-1`, `dots-1` ... carry the colours."""
    every = [point for points in (*lines.values(), *dots.values()) for point in points]
    if not every:
        return ""
    frame = _Frame(every, size)
    drawn = [frame.axes()]
    drawn += [
        f'<polyline class="line line-{at}" points="{frame.path(thin(points))}"><title>{html.escape(name)}</title></polyline>'
        for at, (name, points) in enumerate(lines.items(), start=1)
    ]
    drawn += [
        f'<circle class="dots dots-{at}" cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="4">'
        f"<title>{html.escape(name)}, step {step:g}: {value:.4g}</title></circle>"
        for at, (name, points) in enumerate(dots.items(), start=1)
        for step, value in points
    ]
    box = f'viewBox="0 0 {size[0]} {size[1]}"'
    return f'<svg class="curve" {box} role="img" aria-label="{html.escape(label)}">{"".join(drawn)}</svg>'


def bars(counts: Mapping[str, float], label: str) -> str:
    """A histogram of a few named counts."""
    if not counts:
        return ""
    most, height, width = max(counts.values()) or 1.0, 150, 640
    slot = width / len(counts)
    drawn = []
    for at, (name, count) in enumerate(counts.items()):
        tall, left = count / most * (height - 46), at * slot
        middle, thick = left + slot / 2, min(slot * 0.7, 80)
        drawn.append(
            f'<rect class="bar" x="{middle - thick / 2:.1f}" y="{height - 24 - tall:.1f}"'
            f' width="{thick:.1f}" height="{tall:.1f}"/>'
            f'<text x="{middle:.1f}" y="{height - 8}" text-anchor="middle">{html.escape(name)}</text>'
            f'<text x="{middle:.1f}" y="{height - 30 - tall:.1f}" text-anchor="middle">{count:,.0f}</text>'
        )
    box = f'viewBox="0 0 {width} {height}"'
    return f'<svg class="curve" {box} role="img" aria-label="{html.escape(label)}">{"".join(drawn)}</svg>'


def write_png(path: Path, title: str, reward: Points, evals: Mapping[str, Points]) -> None:
    """Reward a step, smoothed, and the evaluations, through matplotlib without a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if reward:
        axes.plot(*zip(*reward, strict=True), color="#2f6fde", alpha=0.3, linewidth=1, label="reward")
        axes.plot(*zip(*smoothed(reward), strict=True), color="#2f6fde", linewidth=2, label="reward, smoothed")
    for at, (name, points) in enumerate(evals.items()):
        colour = _EVAL_COLOURS[at % len(_EVAL_COLOURS)]
        axes.plot(*zip(*points, strict=True), marker="o", linewidth=1.5, color=colour, label=f"held-out: {name}")
    axes.set(title=title, xlabel="step", ylabel="mean reward")
    axes.grid(alpha=0.25)
    if reward or evals:
        axes.legend(loc="best", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, format="png")


def thin(points: Points, most: int = MOST) -> Points:
    """At most that many points, evenly chosen, the last one kept."""
    if len(points) <= most:
        return points
    stride = math.ceil(len(points) / most)
    return [*points[::stride], points[-1]]


class _Frame:
    """From values to pixels."""

    def __init__(self, points: Points, size: tuple[int, int]) -> None:
        self.width, self.height = size
        steps, values = [step for step, _ in points], [value for _, value in points]
        self.first, self.last = min(steps), max(*steps, min(steps) + 1)
        self.ticks = nice_ticks(min(values), max(values))
        self.low, self.high = self.ticks[0], self.ticks[-1]

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / (self.last - self.first) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.height - BOTTOM - (value - self.low) / (self.high - self.low) * (self.height - TOP - BOTTOM)

    def path(self, points: Points) -> str:
        return " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in points)

    def axes(self) -> str:
        rows = [
            f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{self.y(tick):.1f}" y2="{self.y(tick):.1f}"/>'
            f'<text x="{LEFT - 8}" y="{self.y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>'
            for tick in self.ticks
        ]
        steps = [tick for tick in nice_ticks(self.first, self.last) if self.first <= tick <= self.last]
        columns = [
            f'<text x="{self.x(step):.1f}" y="{self.height - 12}" text-anchor="middle">{step:g}</text>'
            for step in steps
        ]
        return "".join([*rows, *columns])


def nice_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers that enclose a range."""
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, TINIEST):  # a difference of rounding is none
        half = size * 0.5 if size > TINIEST else 0.5
        low, high = low - half, high + half
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 9 - math.floor(math.log10(step))
    return [round(at * step, digits) for at in range(first, last + 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
