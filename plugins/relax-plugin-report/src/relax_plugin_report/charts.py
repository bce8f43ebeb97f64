# SPDX-License-Identifier: Apache-2.0
"""Charts of lines, bars and stacked bars, made of simple shapes and written as inline SVG or as a PNG.

The report decides which metrics to draw. A shape's `style` is its CSS class in a page, and its key in `_INKS` for a
PNG.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Points = Sequence[tuple[float, float]]
MAX_POINTS = 600
"""Most points of a curve in a page, about one per pixel."""
TINIEST = 1e-100
"""Smallest range of values that is divided into ticks."""
_OVERSAMPLING = 3
_BLUE, _DOT_COLOURS = "#2f6fde", ("#d9730d", "#1a8f5a", "#c62f2f")
_INKS = {
    "grid": ("#d9dee4", 1.0), "line line-1": ("#b6cdf3", 1.2), "line line-2": (_BLUE, 2.5), "": ("#5d6773", 13.0),
    "title": ("#1c2128", 16.0), **{f"dots dots-{at}": (colour, 2.0) for at, colour in enumerate(_DOT_COLOURS, start=1)},
}  # fmt: skip
"""Colour of each style, with its line width in pixels or its font size."""


@dataclass(frozen=True, slots=True)
class Polyline:
    style: str
    points: Points
    title: str = ""


@dataclass(frozen=True, slots=True)
class Dot:
    style: str
    x: float
    y: float
    title: str
    radius: float = 4.0


@dataclass(frozen=True, slots=True)
class Bar:
    style: str
    left: float
    top: float
    width: float
    height: float
    title: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    x: float
    y: float
    """Baseline of the text, in pixels from the top."""
    text: str
    anchor: str = "middle"
    """Alignment at `x`: start, middle or end."""
    style: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Shapes on a canvas in pixels from the top left, drawn in order."""

    width: float
    height: float
    label: str
    shapes: tuple[Polyline | Dot | Bar | Label, ...]

    def svg(self) -> str:
        """Return an inline SVG; an empty chart gives an empty string."""
        if not self.shapes:
            return ""
        box = f'viewBox="0 0 {self.width:g} {self.height:g}"'
        drawn = "".join(map(_element, self.shapes))
        return f'<svg class="curve" {box} role="img" aria-label="{html.escape(self.label)}">{drawn}</svg>'

    def write_png(self, path: Path) -> None:
        """Write a PNG on white, drawn at a larger scale and reduced, so that edges are smooth."""
        from PIL import Image, ImageDraw, ImageFont

        scale, anchors = _OVERSAMPLING, {"start": "ls", "middle": "ms", "end": "rs"}
        image = Image.new("RGB", (round(self.width * scale), round(self.height * scale)), "white")
        draw = ImageDraw.Draw(image)
        for shape in self.shapes:
            colour, size = _INKS[shape.style]
            match shape:
                case Polyline(_, points):
                    places = [(x * scale, y * scale) for x, y in points]
                    draw.line(places, fill=colour, width=round(size * scale), joint="curve")
                case Dot(_, x, y, _, radius):
                    draw.circle((x * scale, y * scale), radius * scale, fill=colour)
                case Bar(_, left, top, width, height):
                    draw.rectangle([at * scale for at in (left, top, left + width, top + height)], fill=colour)
                case Label(x, y, text, anchor):
                    font = ImageFont.load_default(size * scale)
                    draw.text((x * scale, y * scale), text, fill=colour, font=font, anchor=anchors[anchor])
        image.reduce(scale).save(path, format="PNG", optimize=True)


def _element(shape: Polyline | Dot | Bar | Label) -> str:
    style = f' class="{shape.style}"' if shape.style else ""
    match shape:
        case Polyline(_, points, title):
            inner = f"<title>{html.escape(title)}</title>" if title else ""
            return f'<polyline{style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}">{inner}</polyline>'
        case Dot(_, x, y, title, radius):
            title = html.escape(title)
            return f'<circle{style} cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}"><title>{title}</title></circle>'
        case Bar(_, left, top, width, height, title):
            inner = f"<title>{html.escape(title)}</title>" if title else ""
            place = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
            return f"<rect{style} {place}>{inner}</rect>"
        case Label(x, y, text, anchor):
            return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


# -- kinds of charts ----------------------------------------------------------------------------------------------


def lines(
    curves: Mapping[str, Points], dots: Mapping[str, Points], label: str, size: tuple[int, int] = (720, 300)
) -> Chart:
    """Draw axes, a line for each curve, and a dot for each point of `dots`."""
    frame = _Frame([point for points in (*curves.values(), *dots.values()) for point in points], size)
    return Chart(*size, label, (*frame.axes(), *frame.curves(curves), *frame.dots(dots)))


def reward_picture(title: str, reward: Points, evals: Mapping[str, Points]) -> Chart:
    """Draw the reward of each step, raw and smoothed, and the evaluations, with a title and a legend."""
    width, height, left = 960, 540, 64
    curves = {"reward": reward, "reward, smoothed": smoothed(reward)} if reward else {}
    styles = [f"line line-{at}" for at in range(1, len(curves) + 1)] + [_dot_style(at) for at in range(len(evals))]
    legend: list[Bar | Label] = []
    x, y = float(left), 54.0
    for style, name in zip(styles, [*curves, *(f"held-out: {name}" for name in evals)], strict=True):
        taken = 40 + 7.0 * len(name)
        if x + taken > width and x > left:
            x, y = float(left), y + 18
        legend += [Bar(style, x, y - 6, 16, 4), Label(x + 22, y, name, "start")]
        x += taken
    every = [point for points in (*curves.values(), *evals.values()) for point in points]
    frame = _Frame(every, (width, height), left, right=24, top=round(y) + 44, bottom=56)
    joined = (Polyline(_dot_style(at), frame.places(points)) for at, points in enumerate(evals.values()))
    names = (
        Label(width / 2, 28, title, style="title"),
        Label(width / 2, height - 14, "step"),
        Label(14, frame.top - 14, "mean reward", "start"),
    )
    shapes = (*frame.axes(), *frame.curves(curves), *joined, *frame.dots(evals), *legend, *names)
    return Chart(width, height, title, shapes)


def bars(counts: Mapping[str, float], label: str) -> Chart:
    """Draw a bar for each of a few named counts."""
    most, height, width = max(counts.values(), default=0.0) or 1.0, 150, 640
    slot = width / max(len(counts), 1)
    thick = min(slot * 0.7, 80)
    shapes: list[Bar | Label] = []
    for at, (name, count) in enumerate(counts.items()):
        tall, middle = count / most * (height - 46), (at + 0.5) * slot
        shapes.append(Bar("bar", middle - thick / 2, height - 24 - tall, thick, tall))
        shapes += [Label(middle, height - 8, name), Label(middle, height - 30 - tall, f"{count:,.0f}")]
    return Chart(width, height, label, tuple(shapes))


def stacked_bars(rows: Mapping[str, Mapping[str, float]], label: str) -> Chart:
    """Draw a bar for each row, divided by the seconds of the row's parts; CSS classes `spent-PART` set the colours."""
    row_height, gap, left, width = 26, 10, 110, 720
    shapes: list[Bar | Label] = []
    for at, (name, parts) in enumerate(rows.items()):
        top, x, total = at * (row_height + gap), float(left), sum(parts.values())
        shapes.append(Label(left - 8, top + 18, name, "end"))
        for part, seconds in parts.items():
            wide = seconds / total * (width - left)
            title = f"{name}: {part} {seconds:.1f} s, {seconds / total:.0%}"
            shapes.append(Bar(f"spent-{part}", x, top, wide, row_height, title))
            if wide > 44:
                shapes.append(Label(x + wide / 2, top + 18, f"{seconds / total:.0%}", style="on-bar"))
            x += wide
    return Chart(width, len(rows) * (row_height + gap), label, tuple(shapes))


# -- points -------------------------------------------------------------------------------------------------------


def smoothed(points: Points, share: float = 0.05) -> list[tuple[float, float]]:
    """Return a centred running mean over a `share` of the points, at least 5 points."""
    half = max(round(len(points) * share), 5) // 2
    values = [value for _, value in points]
    windows = (values[max(at - half, 0) : at + half + 1] for at in range(len(values)))
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows, strict=True)]


def thin(points: Points, most: int = MAX_POINTS) -> Points:
    """Return about `most` evenly chosen points, always including the last."""
    if len(points) <= most:
        return points
    stride = math.ceil(len(points) / most)
    return [*points[::stride], points[-1]]


def nice_ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Return about `wanted` round numbers that enclose a range."""
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, TINIEST):  # treat a rounding error as an empty range
        half = size * 0.5 if size > TINIEST else 0.5
        low, high = low - half, high + half
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = 9 - math.floor(math.log10(step))
    return [round(at * step, digits) for at in range(first, last + 1)]


def _dot_style(at: int) -> str:
    return f"dots dots-{at % len(_DOT_COLOURS) + 1}"


class _Frame:
    """Axes around points, and the conversion of steps and values to pixels. Without points, nothing is drawn."""

    def __init__(
        self, points: Points, size: tuple[int, int], left: int = 56, right: int = 14, top: int = 12, bottom: int = 36
    ) -> None:
        self.left, self.top, self.right, self.bottom = left, top, size[0] - right, size[1] - bottom
        self._empty = not points
        steps, values = [step for step, _ in points] or [0.0], [value for _, value in points] or [0.0]
        self._first, self._last = min(steps), max(*steps, min(steps) + 1)
        self._ticks = nice_ticks(min(values), max(values))

    def places(self, points: Points) -> list[tuple[float, float]]:
        across, high = self._last - self._first, self._ticks[-1] - self._ticks[0]
        return [
            (
                self.left + (step - self._first) / across * (self.right - self.left),
                self.bottom - (value - self._ticks[0]) / high * (self.bottom - self.top),
            )
            for step, value in points
        ]

    def axes(self) -> Iterator[Polyline | Label]:
        if self._empty:
            return
        for tick in self._ticks:
            ((_, y),) = self.places([(self._first, tick)])
            yield Polyline("grid", [(self.left, y), (self.right, y)])
            yield Label(self.left - 8, y + 4, f"{tick:.4g}", "end")
        for step in nice_ticks(self._first, self._last, max(4, (self.right - self.left) // 140)):
            if self._first <= step <= self._last:
                ((x, _),) = self.places([(step, self._ticks[0])])
                yield Label(x, self.bottom + 24, f"{step:g}")

    def curves(self, curves: Mapping[str, Points]) -> Iterator[Polyline]:
        for at, (name, points) in enumerate(curves.items(), start=1):
            yield Polyline(f"line line-{at}", self.places(thin(points)), name)

    def dots(self, dots: Mapping[str, Points]) -> Iterator[Dot]:
        for at, (name, points) in enumerate(dots.items()):
            for (step, value), (x, y) in zip(points, self.places(points), strict=True):
                yield Dot(_dot_style(at), x, y, f"{name}, step {step:g}: {value:.4g}")
