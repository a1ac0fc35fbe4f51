"""What a person sees of a run: what will happen, how it goes, how it went; and the file that keeps every metric."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from transformers import TrainerCallback, TrainerState
from transformers import trainer as transformers_trainer
from transformers.trainer_callback import CallbackHandler, PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging

from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.core.console import say
from posttrain.core.secrets import write_whole
from posttrain.data.store.report import PreparationReport
from posttrain.models.load.model import LoadedModel
from posttrain.models.load.reference import Reference
from posttrain.models.sharding import whole_size
from posttrain.trainer.checkpoints.checkpoint import best_effort
from posttrain.trainer.checkpoints.persistence import RunLifecycle
from posttrain.trainer.checkpoints.saving import Checkpoints
from posttrain.trainer.checkpoints.step_file import StepFile
from posttrain.trainer.options.base import BaseConfig
from posttrain.trainer.report.alerts import AlertsCallback
from posttrain.trainer.report.model_card import may_be_overwritten
from posttrain.trainer.report.progress import RichProgressCallback, count, duration, number, several
from posttrain.trainer.step.gathering import over_processes
from posttrain.trainer.step.metrics import MetricStore
from posttrain.trainer.step.optimizer import StepGuard

METRICS_FILE, DATA_FILE = "metrics.jsonl", "prepared_data.json"
LAYOUTS = {RAGGED: "ragged batches", SHARED: "ragged batches with shared prompts", PADDED: "padded batches"}


class ShownRun(Protocol):
    """What is shown of a run; a trainer has all of it."""

    method: str
    roles: tuple[str, ...]
    args: BaseConfig
    state: TrainerState
    model: nn.Module
    loaded: LoadedModel
    reference: Reference | None
    guard: StepGuard
    metrics: MetricStore
    checkpoints: Checkpoints
    lifecycle: RunLifecycle
    train_dataset: Any
    eval_dataset: Any
    callback_handler: CallbackHandler
    _train_batch_size: int
    add_callback: Callable[[Any], None]
    remove_callback: Callable[[Any], Any]
    plan_lines: Callable[[int], dict[str, str]]
    create_model_card: Callable[[], None]


def display_callbacks(run: ShownRun) -> None:
    """Replace Trainer's own progress bar and printer by ours, and always keep the metrics on disk."""
    for callback in (ProgressCallback, PrinterCallback, transformers_trainer.DEFAULT_PROGRESS_CALLBACK):
        run.remove_callback(callback)
    # Callbacks are called in this order: the plan comes before the live display begins, the summary after it ended.
    run.add_callback(MetricsFile(run.args.output_dir, run.checkpoints))
    run.add_callback(RunPlan(run))
    run.add_callback(RichProgressCallback().defer_to(run.callback_handler.callbacks))
    if run.args.alerts:
        run.add_callback(AlertsCallback(run.args.output_dir))
    run.add_callback(RunSummary(run))


class MetricsFile(TrainerCallback):
    """One JSON line per log in `metrics.jsonl`. A resumed run first drops what was logged after its checkpoint."""

    def __init__(self, output_dir: str, checkpoints: Checkpoints) -> None:
        self.file, self.checkpoints = StepFile(Path(output_dir) / METRICS_FILE), checkpoints

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.file.begin(state.global_step, self._is_logged_again)

    def _is_logged_again(self, entry: dict[str, Any]) -> bool:
        """The totals of a run, and what a stopped run logged though its checkpoint still adds it up."""
        is_partial = "learning_rate" in entry and entry["step"] > self.checkpoints.run_state.last_logged_step
        return "train_runtime" in entry or is_partial

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            self.file.append(state.global_step, logs)


class RunPlan(TrainerCallback):
    """Says what will happen, before the first step.

    `prepared_data.json` names the place of the rows' tokens, so that `posttrain view` can show them as they were trained on.
    """

    def __init__(self, run: ShownRun) -> None:
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        places = {"train": store_of(self.run.train_dataset), "eval": store_of(self.run.eval_dataset)}
        known = {name: {"store": str(place)} for name, place in places.items() if place is not None}
        if known:
            path = Path(args.output_dir) / DATA_FILE
            with best_effort(f"{path}, which leads `posttrain view` to the rows,"):
                write_whole(path, json.dumps(known, indent=1) + "\n")
        say("\n".join(plan(self.run, state.global_step, state.max_steps)))


def store_of(rows: Any) -> Path | None:
    """The folder of a prepared dataset's tokens, be it of prompts, of packed samples or plain; a stream has none."""
    rows = getattr(rows, "prepared", rows)
    rows = getattr(rows, "samples", rows)
    return getattr(getattr(rows, "store", None), "folder", None)


class RunSummary(TrainerCallback):
    """Says how the run went, when it has reached its end or was stopped, and writes the card of its folder.

    transformers draws a bar of its own whenever weights are written, in the middle of ours: not while a run is shown.
    """

    def __init__(self, run: ShownRun) -> None:
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began, self.first_step, self.first_tokens = time.monotonic(), state.global_step, self._tokens()
        self.draws_bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_push_begin(args, state, control)
        tokens = over_processes(self._tokens() - self.first_tokens, args)  # collective: all processes come here
        if state.is_world_process_zero:
            took = time.monotonic() - self.began
            say("\n".join(summary(self.run, state.global_step - self.first_step, tokens, took)))
        if self.draws_bars:
            transformers_logging.enable_progress_bar()

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A run folder, and whatever is pushed from it, has a card that says how the model was made."""
        if state.is_world_process_zero and may_be_overwritten(args.output_dir):
            with best_effort(f"The model card in {args.output_dir}"):
                self.run.create_model_card()

    def _tokens(self) -> float:
        return self.run.metrics.totals.get("num_tokens", 0)


# ---- before --------------------------------------------------------------------------------------------------------------


def _name(run: ShownRun) -> str:
    """online_dpo -> ONLINE DPO."""
    return run.method.upper().replace("_", " ")


def plan(run: ShownRun, step: int, max_steps: int) -> list[str]:
    """The lines of the block that opens a run."""
    args = run.args
    begins = f", from step {step}" if step else ""
    parts = {
        "data": f"{_data(run.train_dataset)}{_evaluation(run)}{_workers(args)}",
        "steps": batch_arithmetic(run, max_steps),
        "compute": _compute(run),
        **({} if run.reference is None else {"reference": str(run.reference)}),
        **run.plan_lines(max_steps),
    }
    lines = [f"{_name(run)} of {run.loaded.name} ({_weights(run)}){begins}"]
    lines += [f"  {name:<12}{line}" for name, line in parts.items()]
    lines += [f"  note        {note}" for note in run.loaded.notes]
    lines.append(f"  run         {args.output_dir} ({_kept(args)})")
    return lines


def batch_arithmetic(run: ShownRun, max_steps: int) -> str:
    """What one optimizer step is made of, in one sentence."""
    args, noun = run.args, _noun(run)
    rows, accumulation, processes = run._train_batch_size, args.gradient_accumulation_steps, args.readers
    return (
        f"{rows} {noun} x {accumulation} accumulation x {several(processes, 'process')} = {rows * accumulation * processes} {noun} "
        f"an optimizer step, {several(max_steps, 'step')}"
    )


def _noun(run: ShownRun) -> str:
    if getattr(run.args, "packing", False):
        return "blocks"
    return {2: "pairs", 3: "triples"}.get(len(run.roles), "rows")


def _weights(run: ShownRun) -> str:
    total = sum(whole_size(parameter) for parameter in run.model.parameters())
    trained = sum(whole_size(parameter) for parameter in run.model.parameters() if parameter.requires_grad)
    if trained == total:
        return f"{count(total)} weights, all trained"
    return f"{count(total)} weights, {count(trained)} ({trained / max(total, 1):.2%}) of them trained"


def _data(dataset: Any) -> str:
    if not hasattr(dataset, "__len__"):
        return "a stream"
    report: PreparationReport | None = getattr(dataset, "report", None)
    if report is None:
        return f"{len(dataset):,} rows"
    trained = f", {count(report.trained_tokens)} of them trained" if report.trained_tokens else ""
    return f"{report.kept:,} rows, {count(report.tokens)} tokens{trained}"


def _evaluation(run: ShownRun) -> str:
    dataset = run.eval_dataset
    if dataset is None or str(run.args.eval_strategy.value) == "no":
        return ""
    parts = dataset.values() if isinstance(dataset, dict) else [dataset]
    return f"; evaluated on {sum(len(part) for part in parts if hasattr(part, '__len__')):,}"


def _workers(args: Any) -> str:
    return f"; batches made by {several(n, 'process')}" if (n := args.dataloader_num_workers) else ""


def _compute(run: ShownRun) -> str:
    args = run.args
    dtype = str(args.compute_dtype).removeprefix("torch.")
    masters = " with float32 masters" if run.guard.masters is not None else ""
    checkpointing = "activations recomputed" if args.gradient_checkpointing else "activations kept"
    return f"{dtype}{masters} on {args.device.type}, {LAYOUTS[run.loaded.layout]}, {checkpointing}"


def _kept(args: Any) -> str:
    trackers = f", reported to {', '.join(args.report_to)}" if args.report_to else ""
    saves = {
        "no": "no checkpoints",
        "steps": "a checkpoint every " + ("step" if args.save_steps == 1 else f"{number(args.save_steps)} steps"),
        "epoch": "a checkpoint every epoch",
        "best": "a checkpoint when evaluation improves",
    }
    return saves[args.save_strategy.value] + trackers


# ---- after ---------------------------------------------------------------------------------------------------------------


def summary(run: ShownRun, steps: int, tokens: float, took: float) -> list[str]:
    """The lines of the block that closes a run."""
    state, args = run.state, run.args
    is_over = state.global_step >= state.max_steps
    ended = "finished" if is_over else f"stopped at step {state.global_step} of {state.max_steps}"
    if is_over and not steps and run.lifecycle.resumed_from is not None:
        ended = f"had ended at step {state.global_step} already"
    speed = f", {count(tokens / took)} tokens/s" if took > 0 and tokens else ""
    lines = [f"{_name(run)} {ended}: {several(steps, 'step')}, {count(tokens)} tokens in {duration(took)}{speed}"]
    lines += [
        f"  {name:<12}{number(values[0])} -> {number(values[-1])}"
        for name in _headline_metric(state.log_history)
        for values in [[entry[name] for entry in state.log_history if name in entry]]
    ]
    if run.checkpoints.run_state.skipped_total:
        lines.append(
            f"  skipped     {several(run.checkpoints.run_state.skipped_total, 'step')} whose gradient was not finite"
        )
    lines += _losses_of_data(run.train_dataset)
    lines.append(f"  run         {args.output_dir} (every metric in {METRICS_FILE})")
    return lines


def _headline_metric(history: list[dict[str, Any]]) -> list[str]:
    """What the run is to improve: the reward where there is one (the loss of a policy gradient says nothing), else the loss."""
    names = dict.fromkeys(name for entry in history for name in entry)
    aim = "reward" if "reward" in names else "loss"
    return [name for name in names if name == aim or (name.startswith("eval_") and name.endswith(f"_{aim}"))]


def _losses_of_data(dataset: Any) -> list[str]:
    """What of the data was cut or left out; nothing where all of it was used."""
    report: PreparationReport | None = getattr(dataset, "report", None)
    if report is None:
        return []
    lines = []
    if report.truncated:
        lines.append(f"  truncated   {report.truncated:,} samples, {report.truncated_tokens:,} tokens")
    if report.dropped:
        lines.append("  dropped     " + ", ".join(f"{rows:,} rows {why}" for why, rows in report.dropped.items()))
    return lines
