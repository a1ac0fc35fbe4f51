"""Progress of a run: a live bar and table in a terminal, one plain line per log everywhere else."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from posttrain.core.console import is_quiet, say

SHOWN = (
    "loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "rewards/accuracies", "rewards/margins",
    "rewards/chosen", "rewards/rejected", "accuracy", "margin", "mean_reward", "reward", "reward_std", "kl",
    "aux_loss", "skipped_steps",
)  # fmt: skip
"""Metrics a person follows, in the order they are shown. Everything else is in metrics.jsonl."""
SHORT_NAMES = {"learning_rate": "lr", "mean_token_accuracy": "token_accuracy"}
REDRAW_SECONDS = 0.1
"""The live display draws at most this often; drawing is on the training thread."""


# ---- numbers as words ----------------------------------------------------------------------------------------------------


def number(value: Any) -> str:
    """Four significant digits; very small and very large ones in scientific notation."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (float(value).is_integer() and 1 <= abs(value) < 1e6):
        return f"{int(value):,}"
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def count(value: float) -> str:
    """12345 -> 12.3k."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def several(amount: int, noun: str) -> str:
    """1 step, 1,200 steps, 2 processes."""
    ending = "" if amount == 1 else "es" if noun.endswith("s") else "s"
    return f"{amount:,} {noun}{ending}"


def duration(seconds: float) -> str:
    """190 -> 3m10s; 4.23 -> 4.2s."""
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f}s"
    seconds = round(seconds)
    hours, minutes, rest = seconds // 3600, seconds % 3600 // 60, seconds % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


# ---- what is known about the speed ---------------------------------------------------------------------------------------


class Pace:
    """Tokens per second between logs, and the time that is left."""

    def __init__(self, step: int, now: float) -> None:
        self.first_step, self.began = step, now
        self.tokens: float | None = 0.0 if step == 0 else None  # a resumed run learns its count from its first log
        self.logged_at = now
        self.tokens_per_second: float | None = None

    def log(self, tokens: float | None, now: float) -> None:
        if tokens is None:
            return
        if self.tokens is not None and now > self.logged_at:
            self.tokens_per_second = (tokens - self.tokens) / (now - self.logged_at)
        self.tokens, self.logged_at = tokens, now

    def left(self, step: int, max_steps: int, now: float) -> float | None:
        done = step - self.first_step
        return (now - self.began) / done * (max_steps - step) if done > 0 and max_steps > 0 else None

    def words(self, step: int, max_steps: int, now: float) -> list[str]:
        parts = [] if self.tokens_per_second is None else [f"{count(self.tokens_per_second)} tok/s"]
        left = self.left(step, max_steps, now)
        return parts if left is None else [*parts, f"eta {duration(left)}"]


def shown_metrics(logs: dict[str, Any]) -> dict[str, Any]:
    """The part of a log that a person follows; evaluations show the same metrics under their `eval_` names."""
    shown = {name: logs[name] for name in SHOWN if name in logs}
    evaluated = {name: value for name, value in logs.items() if name.startswith("eval_")}
    return shown | {name: value for name, value in evaluated.items() if name.endswith(SHOWN)}


# ---- two views of one run ------------------------------------------------------------------------------------------------


class PlainView:
    """One line per log."""

    def begin(self, pace: Pace, step: int, max_steps: int) -> None:
        self.pace, self.max_steps = pace, max_steps

    def advance(self, step: int) -> None:
        """Lines come with logs only."""

    def advance_evaluation(self, total: int | None) -> None:
        """Lines come with logs only."""

    def end_evaluation(self) -> None:
        """Lines come with logs only."""

    def log(self, step: int, logs: dict[str, Any], now: float) -> None:
        shown = shown_metrics(logs)
        if shown:
            words = [f"{SHORT_NAMES.get(name, name)} {number(value)}" for name, value in shown.items()]
            speed = self.pace.words(step, self.max_steps, now) if "loss" in logs else []
            say("  ".join([f"step {step}/{self.max_steps}", *words, *speed]))

    def end(self) -> None:
        """Nothing is left open."""


class RichView:
    """A bar with step, speed and time left, and a table of the latest metrics with their change since the log before."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.latest: dict[str, Any] = {}
        self.before: dict[str, Any] = {}
        self.evaluation: TaskID | None = None
        self.drawn_at = 0.0

    def begin(self, pace: Pace, step: int, max_steps: int) -> None:
        self.pace, self.max_steps, self.step = pace, max_steps, step
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total}"),
            TextColumn("{task.fields[speed]}"),
            console=self.console,
            expand=True,
        )
        self.training = self.bars.add_task("training", total=max_steps, completed=step, speed="")
        # No thread of its own: after an exception nothing continues to draw over the traceback.
        self.live = Live(console=self.console, auto_refresh=False, get_renderable=self.render)
        self.live.start()
        atexit.register(self.end)  # an exception ends a run without `on_train_end`, and the cursor must come back

    def render(self) -> Group:
        return Group(*([self.table()] if self.latest else []), self.bars)

    def table(self) -> Table:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for name, side in (("metric", "left"), ("now", "right"), ("change", "right")):
            table.add_column(name, justify=side)
        for name, value in self.latest.items():
            table.add_row(name, number(value), change(self.before.get(name), value))
        return table

    def advance(self, step: int) -> None:
        self.step = step
        now = time.monotonic()
        self.bars.update(self.training, completed=step, speed="  ".join(self.pace.words(step, self.max_steps, now)))
        self.draw(now)

    def advance_evaluation(self, total: int | None) -> None:
        if self.evaluation is None:
            self.evaluation = self.bars.add_task("evaluation", total=total, speed="")
        self.bars.advance(self.evaluation)
        self.draw(time.monotonic())

    def end_evaluation(self) -> None:
        if self.evaluation is not None:
            self.bars.remove_task(self.evaluation)
            self.evaluation = None

    def log(self, step: int, logs: dict[str, Any], now: float) -> None:
        shown = shown_metrics(logs)
        self.before |= {name: self.latest[name] for name in shown if name in self.latest}
        self.latest |= shown
        self.draw(now, always=True)

    def draw(self, now: float, always: bool = False) -> None:
        if always or now - self.drawn_at >= REDRAW_SECONDS:
            self.drawn_at = now
            self.live.refresh()

    def end(self) -> None:
        atexit.unregister(self.end)
        self.live.stop()


def change(before: Any, now: Any) -> str:
    """The signed difference of two numbers; nothing where one is missing."""
    if not isinstance(before, (int, float)) or not isinstance(now, (int, float)):
        return ""
    difference = now - before
    return ("+" if difference > 0 else "") + number(difference) if difference else "="


def wants_live(disable_tqdm: bool, console: Console) -> bool:
    """A live display needs a terminal that can move its cursor, and a person in front of it."""
    watched = console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter
    return watched and not disable_tqdm and not os.environ.get("CI")


# ---- tables of texts -----------------------------------------------------------------------------------------------------


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def show_table(
    title: str, names: Sequence[str], rows: Iterable[Sequence[str]], lines: list[str], disable_tqdm: bool
) -> None:
    """A table in a terminal, plain `lines` elsewhere."""
    console = Console()
    if not wants_live(disable_tqdm, console):
        say("\n".join(lines))
        return
    table = Table(*names, title=title, show_lines=True)
    for row in rows:
        table.add_row(*map(Text, row))  # not markup: completions may hold square brackets
    with console.capture() as drawn:  # a console of its own would write into the live display; `say` writes above it
        console.print(table)
    say(drawn.get().rstrip("\n"))


class RichProgressCallback(TrainerCallback):
    """Progress in the terminal; plain lines where there is none, under `disable_tqdm` and in CI. On the first process only."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console
        self.view: PlainView | RichView | None = None
        self.rivals: Iterable[Any] = ()

    def defer_to(self, callbacks: Iterable[Any]) -> RichProgressCallback:
        """Show nothing when one of `callbacks` (looked at when training begins) is a progress display a person added."""
        self.rivals = callbacks
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_deferred = any(isinstance(rival, RichProgressCallback) and rival is not self for rival in self.rivals)
        if not state.is_world_process_zero or is_deferred or is_quiet():
            return
        if self.view is not None:  # a run in this process that ended by an exception
            self.view.end()
        console = self.console or Console()
        self.view = RichView(console) if wants_live(args.disable_tqdm, console) else PlainView()
        self.pace = Pace(state.global_step, time.monotonic())
        self.view.begin(self.pace, state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.view is not None:
            self.view.advance(state.global_step)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if self.view is not None:
            self.view.advance_evaluation(len(eval_dataloader) if hasattr(eval_dataloader, "__len__") else None)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.view is not None:
            self.view.end_evaluation()

    on_predict = on_evaluate

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.view is not None and logs:
            now = time.monotonic()
            self.pace.log(logs.get("num_tokens"), now)
            self.view.log(state.global_step, logs, now)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.view is not None:
            self.view.end()
            self.view = None
