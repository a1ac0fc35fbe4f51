"""The curve of a run as an SVG: reward of every step, and its mean over the last few.

    python -m benchmarks.real_runs.reward_curve RESULT.json OUTPUT.svg

RESULT.json is what `grpo_gsm8k` writes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 300, 56, 40
SMOOTHED = 10  # steps


def running_mean(values: Sequence[float], count: int) -> list[float]:
    """Of the last `count` values, or of those there are."""
    return [
        sum(values[max(end - count, 0) : end]) / len(values[max(end - count, 0) : end])
        for end in range(1, len(values) + 1)
    ]


def drawn(values: Sequence[float], label: str) -> str:
    top = max(values) * 1.05

    def point(step: float, value: float) -> str:
        x = LEFT + step / len(values) * (WIDTH - LEFT - 10)
        return f"{x:.1f},{HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - 10):.1f}"

    def line(numbers: Sequence[float], style: str) -> str:
        points = " ".join(point(step, value) for step, value in enumerate(numbers, 1))
        return f'<polyline points="{points}" fill="none" {style}/>'

    marks = []
    for part in range(5):
        height = top * part / 4
        x, y = point(0, height).split(",")
        marks.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - 10}" y2="{y}" stroke="#ddd"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{y}" text-anchor="end" dominant-baseline="middle">{height:.3f}</text>')
    for step in range(0, len(values) + 1, 20):
        x = point(step, 0).split(",")[0]
        marks.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>')
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *marks,
        line(values, 'stroke="#9bc" stroke-width="1"'),
        line(running_mean(values, SMOOTHED), 'stroke="#136" stroke-width="2"'),
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 6}" text-anchor="middle">{label}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("output", type=Path)
    words = parser.parse_args()
    rewards = [entry["reward"] for entry in json.loads(words.result.read_text(encoding="utf-8"))["curve"]]
    label = f"optimizer step; reward of each, and its mean over the last {SMOOTHED}"
    words.output.write_text(drawn(rewards, label), encoding="utf-8")


if __name__ == "__main__":
    main()
