"""`posttrain view RUN --text`: a run in a terminal. Last values with the shape of their curves, rewards by step, extremes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from posttrain.view.run_folder import RunFolder
from posttrain.view.run_numbers import FIRST, RunNumbers, format_number, numbers_of_run

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
FLAG_WORDS = {
    "error": "could not be written",
    "failures": "with a reward that failed",
    "tool_calls": "with tool calls",
    "tool_errors": "with tool errors",
    "truncated": "cut off",
    "masked": "masked",
}


def print_summary(runs: Sequence[RunFolder], console: Console | None = None) -> None:
    console = console or Console()
    has_bars = console.encoding.lower().startswith("utf")
    for run in runs:
        console.print(summary(numbers_of_run(run), console.width if has_bars else 0))


def summary(numbers: RunNumbers, width: int) -> Group:
    """`width` of the terminal; 0 for one that cannot write the bars."""
    parts: list = [Text.assemble((numbers.name, "bold"), f"  step {numbers.last_step:,}  ", (numbers.path, "dim"))]
    if not numbers.series and not numbers.rollouts:
        parts.append(Text("Nothing has been logged yet."))
    if numbers.series:
        parts.append(_metrics(numbers, width))
    if numbers.rollouts:
        parts += _rollouts(numbers, width)
    for alert in numbers.alerts[-5:]:
        alert_text = f"alert  step {alert.get('step')}: {alert.get('seen', '')}; try: {alert.get('remedy', '')}"
        parts.append(Text(printable(alert_text), style="yellow"))
    return Group(*parts, Text(""))


def _metrics(numbers: RunNumbers, width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("metric", no_wrap=True)
    for name in ("first", "last"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    shown = [name for name in numbers.series if name in FIRST] or list(numbers.series)[:12]
    room = max(0, min(WIDTH, width - max(map(len, shown)) - 28))
    for name in shown:
        values = [value for value in numbers.series[name][1] if value is not None]
        if values:
            table.add_row(name, format_number(values[0]), format_number(values[-1]), sparkline(values, room))
    return table


def _rollouts(numbers: RunNumbers, width: int) -> list:
    counts = [f"{count:,} {FLAG_WORDS[name]}" for name, count in numbers.flags.items() if count]
    parts: list = [Text(f"\n{numbers.rollouts:,} rollouts" + (": " + ", ".join(counts) if counts else ""))]
    means = numbers.rewards.means
    if means:
        shape = sparkline(means, max(0, min(60, width - 34))) or "to"
        parts.append(Text(f"reward by step  {format_number(means[0])} {shape} {format_number(means[-1])}"))
    for title, rows, style in (("best", numbers.best, "green"), ("worst", numbers.worst, "red")):
        for row in rows:
            reward = format_number(row["reward"])
            head = f"{title}  reward {reward}  step {row['step']}  group {row['group']}  {row['tokens']} tokens"
            body = Text.assemble((f"> {printable(row['prompt_text'])}\n", "dim"), printable(row["completion_text"]))
            parts.append(Panel(body, title=head, title_align="left", border_style=style, padding=(0, 1)))
    return parts


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars, averaged over stretches to fit a width."""
    if width < 4:
        return ""
    size = min(width, len(values))
    edges = [round(i * len(values) / size) for i in range(size + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    least, most = min(means), max(means)
    spread = (most - least) or 1.0
    return "".join(BARS[min(int((mean - least) / spread * len(BARS)), len(BARS) - 1)] for mean in means)


def printable(text: str) -> str:
    """What models say may hold commands for terminals; none of them gets there."""
    return "".join(character if character.isprintable() else "�" for character in text)
