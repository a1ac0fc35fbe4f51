"""What a person sees of a run, in a terminal and without one, and what is kept on disk."""

from __future__ import annotations

import io
import json
import re
import socket
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
import transformers.trainer
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from posttrain import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from posttrain.trainer.checkpoints.step_file import StepFile
from posttrain.trainer.report.display import METRICS_FILE, MetricsFile, batch_arithmetic
from posttrain.trainer.report.progress import (
    Pace,
    PlainView,
    RichProgressCallback,
    RichView,
    change,
    count,
    duration,
    number,
    say,
    several,
)
from tests import tiny


def sft(tmp_path, callbacks=None, model=None, rows=16, **changes):
    options = {
        "output_dir": str(tmp_path / "run"), "max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "save_strategy": "no", "learning_rate": 1e-2,
    }  # fmt: skip
    peft_config = changes.pop("peft_config", None)
    return SFTTrainer(
        model or tiny.causal_lm(),
        SFTConfig(**(options | changes)),
        train_dataset=Dataset.from_list(tiny.chats(rows)),
        eval_dataset=Dataset.from_list(tiny.chats(4)),
        processing_class=tiny.tokenizer(),
        callbacks=callbacks,
        peft_config=peft_config,
    )


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or state.global_step >= self.step


class Fail(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise RuntimeError("the machine burns")


# ---- numbers as words ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.23456, "1.235"), (1.8e-5, "1.8e-5"), (0.0, "0"), (3, "3"), (12345, "12,345"), (-0.5, "-0.5"), (1e9, "1.0e+9"),
     (float("nan"), "nan"), (2.0, "2"), ("text", "text")],
)  # fmt: skip
def test_number(value, text):
    assert number(value) == text


def test_durations_and_counts():
    assert [duration(s) for s in (0.04, 4.23, 59.6, 190, 7260)] == ["0.0s", "4.2s", "1m00s", "3m10s", "2h01m"]
    assert [count(n) for n in (0, 999, 12_345, 1.5e6, 2e9)] == ["0", "999", "12.3k", "1.5M", "2.0B"]
    assert [change(*pair) for pair in ((1.0, 1.5), (2.0, 1.0), (1.0, 1.0), (None, 1.0))] == ["+0.5", "-1", "=", ""]


def test_several():
    assert [several(*pair) for pair in ((1, "step"), (1200, "step"), (2, "process"))] == [
        "1 step",
        "1,200 steps",
        "2 processes",
    ]


@pytest.fixture
def bars():
    """transformers' own progress bars, on as for most users; the suite has them off."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    yield
    if not was_on:
        transformers_logging.disable_progress_bar()


@pytest.mark.filterwarnings("ignore:Cannot enable progress bars")
def test_bars_of_saving_are_off_while_training(tmp_path, capfd, bars):
    trainer = sft(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    assert "Writing model shards" not in capfd.readouterr().err
    trainer.save_model()
    assert "Writing model shards" in capfd.readouterr().err


def test_pace():
    """100 steps from 0 s; 3,000 tokens between the logs at 10 s and 12 s; after 20 of 100 steps in 12 s, 48 s are left."""
    pace = Pace(0, 0.0)
    pace.log(5000, 10.0)
    assert pace.tokens_per_second == 500
    pace.log(8000, 12.0)
    assert pace.words(20, 100, 12.0) == ["1.5k tok/s", "eta 48s"]


def test_pace_of_a_resumed_run_knows_its_tokens_from_the_first_log():
    pace = Pace(50, 0.0)
    pace.log(1_000_000, 10.0)
    assert pace.words(60, 70, 10.0) == ["eta 10s"]
    pace.log(1_000_500, 11.0)
    assert pace.words(61, 70, 11.0)[0] == "500 tok/s"


# ---- plain lines ---------------------------------------------------------------------------------------------------------


def test_a_plain_line_per_log(capsys):
    view, pace = PlainView(), Pace(0, 0.0)
    view.begin(pace, 0, 200)
    pace.log(123_000, 10.0)
    view.log(
        40, {"loss": 1.2345, "grad_norm": 0.56, "learning_rate": 1.8e-5, "epoch": 0.3, "num_tokens": 123_000}, 47.5
    )
    view.log(40, {"eval_loss": 1.5, "eval_runtime": 3.0, "epoch": 0.3}, 48.0)
    view.log(200, {"train_runtime": 100.0, "train_loss": 1.1, "total_flos": 1e9}, 49.0)
    assert capsys.readouterr().out.splitlines() == [
        "step 40/200  loss 1.234  grad_norm 0.56  lr 1.8e-5  12.3k tok/s  eta 3m10s",
        "step 40/200  eval_loss 1.5",
    ]


def test_a_run_without_a_terminal(tmp_path, capsys):
    trainer = sft(tmp_path, eval_strategy="steps", eval_steps=2)
    capsys.readouterr()
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    pattern = r"step (\d)/4  loss [\d.]+  grad_norm [\d.]+  lr [\de.-]+  entropy [\d.]+  token_accuracy [\d.]+  \S+ tok/s  eta \S+"
    assert [re.fullmatch(pattern, line)[1] for line in steps if "eval" not in line] == ["1", "2", "3", "4"]
    assert len([line for line in steps if "eval_loss" in line]) == 2
    assert "\x1b" not in "".join(lines)


def test_say_where_the_output_is_ascii(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    say("naïve → done")
    assert raw.getvalue() == b"na?ve ? done\n"


def test_other_processes_show_nothing(capsys):
    callback = RichProgressCallback()
    state = SimpleNamespace(is_world_process_zero=False, global_step=0, max_steps=3)
    args = SimpleNamespace(disable_tqdm=False)
    callback.on_train_begin(args, state, None)
    callback.on_step_end(args, state, None)
    callback.on_log(args, state, None, logs={"loss": 1.0})
    callback.on_prediction_step(args, state, None)
    callback.on_evaluate(args, state, None)
    callback.on_train_end(args, state, None)
    assert capsys.readouterr().out == ""


# ---- the live display ----------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch):
    """A console that believes to be a terminal, outside of CI."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=40)


def shown(console: Console) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def test_a_run_in_a_terminal(tmp_path, terminal, capsys):
    trainer = sft(tmp_path, [RichProgressCallback(terminal)], eval_strategy="steps", eval_steps=2)
    trainer.train()
    text = shown(terminal)
    last = text[text.rindex("metric") :]
    assert re.search(r"training .*4/4 +\S+ tok/s  eta 0.0s", last)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert re.search(rf"loss +{re.escape(number(losses[-1]))} +{re.escape(change(losses[-2], losses[-1]))}", last)
    assert "eval_loss" in last
    assert "evaluation" in text
    assert terminal.file.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back
    assert not re.search(r"^step \d/4", capsys.readouterr().out, re.MULTILINE)  # and the automatic display stood back


def test_a_display_added_later_replaces_the_automatic_one(tmp_path, terminal, capsys):
    trainer = sft(tmp_path)
    trainer.add_callback(RichProgressCallback(terminal))
    trainer.train()
    assert "4/4" in shown(terminal)
    assert not re.search(r"^step \d/4", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("environment", "disable"), [({"CI": "true"}, False), ({"TERM": "dumb"}, False), ({}, True)])
def test_plain_lines_by_wish(terminal, monkeypatch, environment, disable):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    callback = RichProgressCallback(Console(file=io.StringIO(), force_terminal=True))
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=3)
    callback.on_train_begin(SimpleNamespace(disable_tqdm=disable), state, None)
    assert isinstance(callback.view, PlainView)


def test_live_view_only_in_a_terminal(terminal):
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=3)
    for console, view in ((terminal, RichView), (Console(file=io.StringIO()), PlainView)):
        callback = RichProgressCallback(console)
        callback.on_train_begin(SimpleNamespace(disable_tqdm=False), state, None)
        assert type(callback.view) is view
        callback.on_train_end(None, state, None)
        assert callback.view is None


def test_the_terminal_survives_an_exception(tmp_path, terminal):
    """A run that dies leaves its display; the next run of the process ends it and starts its own."""
    callback = RichProgressCallback(terminal)
    with pytest.raises(RuntimeError, match="burns"):
        sft(tmp_path, [callback, Fail()]).train()
    assert callback.view.live.is_started
    dead = callback.view.live
    sft(tmp_path, [callback]).train()
    assert not dead.is_started
    assert terminal.file.getvalue().rstrip().endswith("\x1b[?25h")


def test_trainers_own_displays_are_gone(tmp_path, monkeypatch):
    class Notebook(TrainerCallback):
        """Stands for what transformers puts in a notebook."""

    monkeypatch.setattr(transformers.trainer, "DEFAULT_PROGRESS_CALLBACK", Notebook)
    names = [type(callback).__name__ for callback in sft(tmp_path).callback_handler.callbacks]
    assert not {"Notebook", "ProgressCallback", "PrinterCallback"} & set(names)
    assert names.count("RichProgressCallback") == names.count("MetricsFile") == 1


# ---- before and after ----------------------------------------------------------------------------------------------------


def test_what_will_happen(tmp_path, capsys):
    trainer = sft(tmp_path, eval_strategy="steps", eval_steps=2)
    capsys.readouterr()
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    report = trainer.train_dataset.report
    assert lines[:5] == [
        "SFT of Qwen2ForCausalLM (13.0k weights, all trained)",
        f"  data        16 rows, {count(report.tokens)} tokens, {count(report.trained_tokens)} of them trained; evaluated on 4",
        "  steps       2 rows x 2 accumulation x 1 process = 4 rows an optimizer step, 4 steps",
        "  compute     float32 on cpu, ragged batches, activations kept",
        f"  run         {tmp_path / 'run'} (no checkpoints)",
    ]


def test_what_will_happen_to_an_adapter_with_blocks_and_bf16(tmp_path, capsys):
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = tiny.causal_lm(dtype=torch.bfloat16)
    trainer = sft(
        tmp_path, model=model, peft_config=lora, packing=True, max_length=128, bf16=True, gradient_checkpointing=True
    )
    trainer.train()
    out = capsys.readouterr().out
    assert re.search(r"SFT of \w+ \(13\.\dk weights, \d+ \(\d\.\d\d%\) of them trained\)", out)
    assert "2 blocks x 2 accumulation x 1 process = 4 blocks an optimizer step, 4 steps" in out
    assert "bfloat16 with float32 masters on cpu, ragged batches, activations recomputed" in out


def test_what_will_happen_to_pairs(tmp_path, capsys):
    args = DPOConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=3, save_strategy="epoch", padding_free=False
    )
    trainer = DPOTrainer(
        tiny.causal_lm(), args=args, train_dataset=Dataset.from_list(tiny.pairs(8)), processing_class=tiny.tokenizer()
    )
    trainer.train()
    out = capsys.readouterr().out
    assert "  reference   a frozen copy\n" in out
    assert "3 pairs x 1 accumulation x 1 process = 3 pairs an optimizer step, 1 step\n" in out
    assert "padded batches" in out
    assert f"  run         {tmp_path} (a checkpoint every epoch)" in out


def test_what_will_happen_to_a_reward_model(tmp_path, capsys):
    """It trains on whole sequences: "0 of them trained" would be wrong."""
    args = RewardConfig(output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, save_strategy="no")
    rows = Dataset.from_list(tiny.pairs(8))
    trainer = RewardTrainer(tiny.reward_model(), args=args, train_dataset=rows, processing_class=tiny.tokenizer())
    trainer.train()
    assert f"  data        8 rows, {count(trainer.train_dataset.report.tokens)} tokens\n" in capsys.readouterr().out


def test_batch_arithmetic_of_many_processes():
    args = SimpleNamespace(gradient_accumulation_steps=2, readers=4)
    trainer = SimpleNamespace(args=args, _train_batch_size=8, roles=("text",))
    assert (
        batch_arithmetic(trainer, 1200)
        == "8 rows x 2 accumulation x 4 processes = 64 rows an optimizer step, 1,200 steps"
    )


def test_summary_at_the_end(tmp_path, capsys):
    trainer = sft(tmp_path, eval_strategy="steps", eval_steps=2, max_length=40)
    trainer.train()
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("SFT finished"))
    tokens = trainer.metrics.totals["num_tokens"]
    assert re.fullmatch(rf"SFT finished: 4 steps, {count(tokens)} tokens in \S+, \S+ tokens/s", lines[start])
    history = trainer.state.log_history
    losses, evaluations = ([e[name] for e in history if name in e] for name in ("loss", "eval_loss"))
    report = trainer.train_dataset.report
    assert report.truncated > 0
    assert lines[start + 1 :] == [
        f"  loss        {number(losses[0])} -> {number(losses[-1])}",
        f"  eval_loss   {number(evaluations[0])} -> {number(evaluations[-1])}",
        f"  truncated   {report.truncated:,} samples, {report.truncated_tokens:,} tokens",
        f"  run         {tmp_path / 'run'} (every metric in metrics.jsonl)",
    ]


def test_summary_of_a_run_that_was_stopped_and_of_dropped_rows(tmp_path, capsys):
    trainer = sft(tmp_path, [StopAt(2)], max_length=50, truncation_mode="drop")
    trainer.train()
    out = capsys.readouterr().out
    assert "SFT stopped at step 2 of 4: 2 steps, " in out
    dropped = sum(trainer.train_dataset.report.dropped.values())
    assert f"  dropped     {dropped} rows longer than max_length" in out


def test_a_dataset_of_which_nothing_is_left_ends_the_run_with_the_reason(tmp_path):
    with pytest.raises(
        ValueError, match=r"No row of the train dataset is left\.\n(.|\n)* 0 kept(.|\n)* longer than max_length"
    ):
        sft(tmp_path, max_length=5, truncation_mode="drop")


def test_summary_counts_skipped_steps(tmp_path, capsys):
    trainer = sft(tmp_path)
    ordinary, calls = trainer.compute_loss, []

    def poisoned(*args, **kwargs):
        calls.append(1)
        loss = ordinary(*args, **kwargs)
        return loss * float("nan") if len(calls) == 3 else loss

    trainer.compute_loss = poisoned
    trainer.train()
    assert "  skipped     1 step whose gradient was not finite" in capsys.readouterr().out


# ---- metrics.jsonl and the trackers --------------------------------------------------------------------------------------


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_file_has_every_log(tmp_path):
    trainer = sft(tmp_path, eval_strategy="steps", eval_steps=2)
    trainer.train()
    kept = read(tmp_path / "run" / METRICS_FILE)
    assert (
        [entry["step"] for entry in kept]
        == [entry["step"] for entry in trainer.state.log_history]
        == [1, 2, 2, 3, 4, 4, 4]
    )
    assert [entry["loss"] for entry in kept if "loss" in entry] == [
        e["loss"] for e in trainer.state.log_history if "loss" in e
    ]


def test_metrics_file_of_a_resumed_run_has_each_step_once(tmp_path):
    kept = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    sft(tmp_path, [StopAt(3)], **kept).train()  # logs of step 3 belong to no checkpoint
    assert [e["step"] for e in read(tmp_path / "run" / METRICS_FILE) if "loss" in e] == [1, 2, 3]
    sft(tmp_path, **kept).train(resume_from_checkpoint=True)
    assert [e["step"] for e in read(tmp_path / "run" / METRICS_FILE) if "loss" in e] == [1, 2, 3, 4]


def losses_of(folder) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in read(folder / "run" / METRICS_FILE) if "loss" in entry}


def test_a_short_run_logs_every_step_and_a_longer_one_ten_times(tmp_path, capsys):
    """As the README's first command: 4 steps, and nobody set `logging_steps`."""
    trainer = sft(tmp_path / "short", logging_steps=10)
    trainer.train()
    losses = losses_of(tmp_path / "short")
    assert list(losses) == [1, 2, 3, 4]
    shown = capsys.readouterr().out
    assert all(f"step {step}/4  loss {number(loss)}" in shown for step, loss in losses.items())
    assert f"  loss        {number(losses[1])} -> {number(losses[4])}" in shown
    state = SimpleNamespace(max_steps=35, logging_steps=10)
    assert [step for step in range(1, 36) if trainer.args.logs_at(step, state)] == [1, *range(3, 34, 3), 35]
    state.max_steps = 100
    assert [step for step in range(1, 101) if trainer.args.logs_at(step, state)] == [1, *range(10, 101, 10)]


def test_the_first_and_the_last_step_are_logged_with_the_means_of_what_was_not_logged_before(tmp_path):
    each, some = tmp_path / "each", tmp_path / "some"
    sft(each, max_steps=5).train()
    trainer = sft(some, max_steps=5, logging_steps=3)
    trainer.train()
    one, found = losses_of(each), losses_of(some)
    assert list(found) == [1, 3, 5]
    means = [one[1], (one[2] + one[3]) / 2, (one[4] + one[5]) / 2]
    assert list(found.values()) == pytest.approx(means, rel=1e-6)
    last = trainer.state.log_history[-2]  # the entry after it has the totals of the run
    assert (last["step"], last["loss"], "entropy" in last) == (5, found[5], True)


def test_nothing_is_logged_where_logs_are_off(tmp_path):
    sft(tmp_path, logging_strategy="no").train()
    assert losses_of(tmp_path) == {}


def test_a_stopped_run_logs_its_last_steps_and_resumes_as_if_it_had_not_stopped(tmp_path):
    options = {"max_steps": 8, "logging_steps": 3, "save_strategy": "steps", "save_steps": 5}
    each, whole, stopped = (tmp_path / name for name in ("each", "whole", "stopped"))
    sft(each, **options | {"logging_steps": 1}).train()
    sft(whole, **options).train()
    sft(stopped, [StopAt(5)], **options).train()
    one, partial = losses_of(each), losses_of(stopped)
    assert list(partial) == [1, 3, 5]
    assert partial[5] == pytest.approx((one[4] + one[5]) / 2, rel=1e-6)
    sft(stopped, **options).train(resume_from_checkpoint=True)
    assert list(losses_of(whole)) == [1, 3, 6, 8]
    assert losses_of(stopped) == losses_of(whole)


def test_a_fresh_run_starts_a_fresh_file_and_a_cut_line_is_dropped(tmp_path):
    file = StepFile(tmp_path / "lines.jsonl")
    file.append(1, {"loss": 1.0})
    file.append(2, {"loss": float("nan"), "norm": float("inf")})
    with open(file.path, "a", encoding="utf-8") as handle:
        handle.write('{"step": 2, "lo')
    file.begin(2)
    assert read(file.path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None, "norm": None}]
    file.begin(0)
    assert read(file.path) == []


def test_metrics_of_other_processes_are_not_written(tmp_path):
    callback = MetricsFile(str(tmp_path), SimpleNamespace())
    state = SimpleNamespace(is_world_process_zero=False, global_step=0)
    callback.on_train_begin(None, state, None)
    callback.on_log(None, state, None, logs={"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_every_training_metric(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    sft(tmp_path, report_to="tensorboard").train()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    kept = [entry for entry in read(tmp_path / "run" / METRICS_FILE) if "loss" in entry]
    for name in ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens"):
        written = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        assert written == [(entry["step"], pytest.approx(entry[name], rel=1e-6)) for entry in kept], name


@pytest.mark.parametrize("config", [SFTConfig, DPOConfig, RewardConfig])
def test_nothing_is_reported_by_default(tmp_path, config):
    assert config(output_dir=str(tmp_path)).report_to == []


def test_a_run_opens_no_connection(tmp_path, monkeypatch):
    """No tracker, no telemetry, no version check: a socket that connects would raise here."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def refuse(self, address):
        raise AssertionError(f"a run connected to {address}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: refuse(None, a[:2]))
    sft(tmp_path, save_strategy="steps", save_steps=2).train()


def test_alerts_can_be_turned_off(tmp_path):
    def names(**changes):
        return [type(callback).__name__ for callback in sft(tmp_path, **changes).callback_handler.callbacks]

    assert "AlertsCallback" in names()
    assert "AlertsCallback" not in names(alerts=False)


def test_a_run_that_learns_nothing_says_so(tmp_path, capsys):
    """Learning rate 0: the same row again and again gives the same loss."""
    sft(
        tmp_path, rows=1, max_steps=12, learning_rate=0.0, per_device_train_batch_size=1, gradient_accumulation_steps=1
    ).train()
    kinds = [entry["kind"] for entry in read(tmp_path / "run" / "alerts.jsonl")]
    assert kinds == ["rate_zero", "loss_constant"]
    assert "Alert at step 8 (loss_constant): loss is exactly" in capsys.readouterr().out
