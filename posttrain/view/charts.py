"""Charts as SVG, for reports that have to stand alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

from posttrain.view.run_numbers import in_words

COLOURS = ("#2b62b5", "#c2571a", "#1f8a70", "#9a3f97", "#7a6a00", "#c0392f", "#5b5fc7", "#4f6b3a")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 170, 52, 10, 10, 22
MOST_POINTS, MOST_DIGITS = 600, 13


@dataclass
class Line:
    name: str
    steps: Sequence[float]
    values: Sequence[float | None]
    colour: str
    low: Sequence[float] = field(default_factory=list)  # a band around the line, if there is one
    high: Sequence[float] = field(default_factory=list)


@dataclass
class Axes:
    """From numbers to places."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, step: float, value: float) -> tuple[float, float]:
        across = (step - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        up = (value - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def svg_chart(title: str, lines: Sequence[Line]) -> str:
    """One metric of several runs."""
    lines = [thinned(line) for line in lines if any(value is not None for value in line.values)]
    if not lines:
        return ""
    axes = _axes(lines)
    parts = [_grid(axes)]
    for line in lines:
        if len(line.low):
            there = [axes.place(s, v) for s, v in zip(line.steps, line.high)]
            back = [axes.place(s, v) for s, v in zip(line.steps, line.low)][::-1]
            parts.append(f'<polygon points="{_points(there + back)}" fill="{line.colour}" opacity="0.15"/>')
        known = [axes.place(s, v) for s, v in zip(line.steps, line.values) if v is not None]
        if len(known) == 1:
            parts.append(f'<circle cx="{known[0][0]:.1f}" cy="{known[0][1]:.1f}" r="2.5" fill="{line.colour}"/>')
        parts.append(f'<polyline points="{_points(known)}" fill="none" stroke="{line.colour}" stroke-width="1.4"/>')
    last = ", ".join(f"{line.name} {in_words(_last(line))}" for line in lines)
    value = in_words(_last(lines[0])) if len(lines) == 1 else ""
    caption = f"<figcaption>{escape(title)} <span>{value}</span></figcaption>"
    label = escape(f"{title}: {last}")
    drawn = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<figure>{caption}{drawn}</figure>"


def thinned(line: Line) -> Line:
    """At most MOST_POINTS values: of each stretch its mean, which keeps a file small."""
    if len(line.values) <= MOST_POINTS or len(line.low):
        return line
    edges = [round(i * len(line.values) / MOST_POINTS) for i in range(MOST_POINTS + 1)]
    steps, values = [], []
    for first, last in pairwise(edges):
        known = [value for value in line.values[first:last] if value is not None]
        steps.append(line.steps[first])
        values.append(sum(known) / len(known) if known else None)
    return Line(line.name, steps, values, line.colour)


def _axes(lines: Sequence[Line]) -> Axes:
    steps = [step for line in lines for step in line.steps]
    values = [v for line in lines for v in (*line.values, *line.low, *line.high) if v is not None]
    least, most = min(values), max(values)
    room = (most - least) * 0.05 or abs(most) * 0.05 or 1.0
    return Axes((min(steps), max(steps)), (least - room, most + room))


def _grid(axes: Axes) -> str:
    parts = []
    marks = [axes.y[0] + (axes.y[1] - axes.y[0]) * (i + 0.5) / 4 for i in range(4)]
    for value, label in zip(marks, told_apart(marks)):
        _, y = axes.place(axes.x[0], value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="rule"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>')
    for step, side in ((axes.x[0], "start"), (axes.x[1], "end")):
        x, _ = axes.place(step, axes.y[0])
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 7}" text-anchor="{side}">{step:g}</text>')
    return "".join(parts)


def told_apart(marks: Sequence[float]) -> list[str]:
    """The marks of an axis, with as few digits as tell them apart."""
    for digits in range(3, MOST_DIGITS):
        words = [f"{mark:.{digits}g}".replace("e-0", "e-").replace("e+0", "e+") for mark in marks]
        if len(set(words)) == len(words):
            break
    return words


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _last(line: Line) -> float | None:
    return next((value for value in reversed(line.values) if value is not None), None)
