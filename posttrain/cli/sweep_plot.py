"""The trials of a sweep as an SVG: for each option that was varied, the metric against its value."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.cli.sweep import Trial

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 300, 220, 60, 40, 30


def plot(metric: str, over: dict[str, Any], trials: list[Trial]) -> str:
    panels = [_panel(metric, name, trials, place * (WIDTH + 20)) for place, name in enumerate(over)]
    total = len(over) * (WIDTH + 20)
    style = "text{font:11px system-ui,sans-serif;fill:#555}circle{fill:#2a6fdb;fill-opacity:.75}line{stroke:#bbb}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {HEIGHT}" width="{total}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(metric)} by option"><style>{style}</style>{"".join(panels)}</svg>\n'
    )


def _panel(metric: str, name: str, trials: list[Trial], left: int) -> str:
    values = [trial.values[name] for trial in trials]
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    places = [_position(value, values, is_number) for value in values]
    results = [trial.result["metric"] for trial in trials]
    low, high = min(results), max(results)
    span = (high - low) or 1.0
    inner, tall = WIDTH - LEFT - 10, HEIGHT - BOTTOM - TOP
    points = "".join(
        f'<circle cx="{left + LEFT + place * inner:.1f}" cy="{TOP + tall * (1 - (result - low) / span):.1f}" r="4">'
        f"<title>{escape(f'{name}={value}, {metric}={result:.5g}')}</title></circle>"
        for place, result, value in zip(places, results, values)
    )
    ends = (
        [(min(values), 0.0), (max(values), 1.0)]
        if is_number
        else sorted({str(v): p for v, p in zip(values, places)}.items())
    )
    labels = "".join(
        f'<text x="{left + LEFT + place * inner:.1f}" y="{HEIGHT - 22}" text-anchor="middle">'
        f"{escape(f'{value:.3g}' if is_number else str(value))}</text>"
        for value, place in ends
    )
    return (
        f'<text x="{left + LEFT}" y="18">{escape(metric)} by {escape(name)}</text>'
        f'<line x1="{left + LEFT}" y1="{TOP + tall}" x2="{left + WIDTH - 10}" y2="{TOP + tall}"/>'
        f'<text x="{left + LEFT - 6}" y="{TOP + 8}" text-anchor="end">{high:.4g}</text>'
        f'<text x="{left + LEFT - 6}" y="{TOP + tall}" text-anchor="end">{low:.4g}</text>{points}{labels}'
    )


def _position(value: Any, values: list[Any], is_number: bool) -> float:
    if not is_number:
        names = sorted({str(one) for one in values})
        return names.index(str(value)) / max(len(names) - 1, 1)
    low, high = min(values), max(values)
    if low == high:
        return 0.5
    if low > 0 and high / low >= 10:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)
