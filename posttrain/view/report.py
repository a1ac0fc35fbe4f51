"""`posttrain view RUN --report FILE`: an HTML page that stands alone, or a picture (PNG, with matplotlib)."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from posttrain.core import __version__
from posttrain.view.errors import NoRunError
from posttrain.view.run_folder import RunFolder
from posttrain.view.run_numbers import FIRST, RunNumbers, format_number, numbers_of_run

EXTREMES = 5
REWARDS = "reward of rollouts (mean; 10 % to 90 %)"
STYLE = """
:root{color-scheme:light dark;--ink:#1c1d20;--soft:#70747d;--ground:#f7f7f5;--surface:#fff;--rule:#e6e6e2}
@media(prefers-color-scheme:dark){:root{--ink:#e8e8e6;--soft:#8d929c;--ground:#131417;--surface:#1a1c20;--rule:#292c32}}
body{font:14px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--ground);margin:0 auto;padding:24px;max-width:1320px}
h1{font-size:20px;margin:0}h2{font-size:15px;margin:28px 0 8px}p,.soft{color:var(--soft)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(360px,1fr));gap:12px}
figure{margin:0;background:var(--surface);border:1px solid var(--rule);border-radius:7px;padding:8px 10px}
figcaption{font-weight:600;font-size:13px;display:flex;justify-content:space-between}svg{display:block;width:100%}
svg text{font:10.5px system-ui,sans-serif;fill:var(--soft)}.rule{stroke:var(--rule)}
table{border-collapse:collapse;background:var(--surface);width:100%}
td,th{border:1px solid var(--rule);padding:4px 8px;text-align:left;vertical-align:top}
th{font-weight:500;color:var(--soft)}td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
i.dot{display:inline-block;width:9px;height:9px;border-radius:50%;margin-right:6px}
"""


def write_report(runs: Sequence[RunFolder], path: Path) -> Path:
    """By the ending of the file's name. Raises a NoRunError with what is wrong with it."""
    write = WRITERS.get(path.suffix.lower())
    if write is None:
        raise NoRunError(f"--report {path}: the name has to end in {' or '.join(WRITERS)}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write([numbers_of_run(run, EXTREMES) for run in runs], path)
    return path


# ---- HTML ----------------------------------------------------------------------------------------------------------------


def _write_html(runs: list[RunNumbers], path: Path) -> None:
    names = ", ".join(run.name for run in runs)
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    parts = [
        f"<h1>{escape(names)}</h1><p>{now}, posttrain {__version__}</p>",
        "".join(_head(run, COLOURS[i % len(COLOURS)]) for i, run in enumerate(runs)),
        f'<h2>Curves</h2><div class="charts">{"".join(svg_chart(name, lines) for name, lines in curves(runs).items())}</div>',
        *(_extremes(run) for run in runs if run.rollouts),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}"><title>{escape(names)}</title>'
    page = f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{"".join(parts)}</body></html>\n'
    path.write_text(page, encoding="utf-8")


def _head(run: RunNumbers, colour: str) -> str:
    alerts = "".join(
        f"<li>step {escape(str(a.get('step')))}: {escape(str(a.get('seen', '')))}</li>" for a in run.alerts
    )
    progress = f"step {run.last_step:,}" + (f", {run.rollouts:,} rollouts" if run.rollouts else "")
    return (
        f'<p><i class="dot" style="background:{colour}"></i><b>{escape(run.name)}</b> {progress} '
        f'<span class="soft">{escape(run.path)}</span></p>' + (f"<ul>{alerts}</ul>" if alerts else "")
    )


def curves(runs: list[RunNumbers]) -> dict[str, list[Line]]:
    """Title -> the lines of all runs; what people follow first."""
    found: dict[str, list[Line]] = {}
    for i, run in enumerate(runs):
        colour = COLOURS[i % len(COLOURS)]
        band = run.rewards
        if band.steps:
            found.setdefault(REWARDS, []).append(Line(run.name, band.steps, band.means, colour, band.low, band.high))
        for name, (steps, values) in run.series.items():
            found.setdefault(name, []).append(Line(run.name, steps, values, colour))
    return found


def _extremes(run: RunNumbers) -> str:
    def row(kind: str, each: dict[str, Any]) -> str:
        numbers = (format_number(each["reward"]), each["step"], each["group"], each["tokens"])
        cells = "".join(f'<td class="n">{value}</td>' for value in numbers)
        return f"<tr><td>{kind}</td>{cells}<td>{escape(each['prompt_text'])}</td><td>{escape(each['completion_text'])}</td></tr>"

    rows = "".join([*(row("best", each) for each in run.best), *(row("worst", each) for each in run.worst)])
    names = "".join(f"<th>{name}</th>" for name in ("", "reward", "step", "group", "tokens", "prompt", "completion"))
    return f"<h2>Rollouts of {escape(run.name)}, last tenth of the steps</h2><table><tr>{names}</tr>{rows}</table>"


# ---- PNG -----------------------------------------------------------------------------------------------------------------


def _write_png(runs: list[RunNumbers], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoRunError(
            f"--report {path}: a PNG is drawn by matplotlib, which is not installed: pip install 'posttrain[view]', "
            "or write an .html report, which needs nothing."
        ) from error
    shown = {name: lines for name, lines in curves(runs).items() if name in (*FIRST, REWARDS)} or curves(runs)
    columns = min(3, len(shown)) or 1
    rows = -(-len(shown) // columns) or 1
    figure = Figure(figsize=(4.6 * columns, 2.6 * rows + 0.4), dpi=130, layout="constrained")
    for axes, (name, lines) in zip(figure.subplots(rows, columns, squeeze=False).flat, shown.items()):
        _draw(axes, name, [thinned(line) for line in lines])
    for axes in list(figure.axes)[len(shown) :]:
        axes.set_axis_off()
    figure.suptitle(", ".join(run.name for run in runs), fontsize=10)
    figure.savefig(path)


def _draw(axes: Any, name: str, lines: list[Line]) -> None:
    for line in lines:
        values = [float("nan") if value is None else value for value in line.values]
        marker = "." if len(values) == 1 else None
        axes.plot(line.steps, values, color=line.colour, linewidth=1.1, label=line.name, marker=marker)
        if len(line.low):
            axes.fill_between(line.steps, line.low, line.high, color=line.colour, alpha=0.15, linewidth=0)
    axes.set_title(name.partition(" (")[0], fontsize=9)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    if len(lines) > 1:
        axes.legend(fontsize=7)


WRITERS: dict[str, Callable[[list[RunNumbers], Path], None]] = {".html": _write_html, ".png": _write_png}


# ---- charts as SVG -------------------------------------------------------------------------------------------------------

COLOURS = ("#2b62b5", "#c2571a", "#1f8a70", "#9a3f97", "#7a6a00", "#c0392f", "#5b5fc7", "#4f6b3a")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 170, 52, 10, 10, 22
MAX_POINTS, MAX_DIGITS = 600, 13


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
    last = ", ".join(f"{line.name} {format_number(_last(line))}" for line in lines)
    value = format_number(_last(lines[0])) if len(lines) == 1 else ""
    caption = f"<figcaption>{escape(title)} <span>{value}</span></figcaption>"
    label = escape(f"{title}: {last}")
    drawn = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<figure>{caption}{drawn}</figure>"


def thinned(line: Line) -> Line:
    """At most MAX_POINTS values: of each stretch its mean, which keeps a file small."""
    if len(line.values) <= MAX_POINTS or len(line.low):
        return line
    edges = [round(i * len(line.values) / MAX_POINTS) for i in range(MAX_POINTS + 1)]
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
    for value, label in zip(marks, distinct_labels(marks)):
        _, y = axes.place(axes.x[0], value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="rule"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>')
    for step, side in ((axes.x[0], "start"), (axes.x[1], "end")):
        x, _ = axes.place(step, axes.y[0])
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 7}" text-anchor="{side}">{step:g}</text>')
    return "".join(parts)


def distinct_labels(marks: Sequence[float]) -> list[str]:
    """The marks of an axis, with as few digits as tell them apart."""
    for digits in range(3, MAX_DIGITS):
        words = [f"{mark:.{digits}g}".replace("e-0", "e-").replace("e+0", "e+") for mark in marks]
        if len(set(words)) == len(words):
            break
    return words


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _last(line: Line) -> float | None:
    return next((value for value in reversed(line.values) if value is not None), None)
