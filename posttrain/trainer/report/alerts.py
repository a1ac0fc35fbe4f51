"""Alerts: a sentence when a run drifts, with the numbers seen, what it usually means and what to try.

Every rule compares medians of windows of logs, in units of the noise seen in these windows (the median absolute deviation,
MAD, times 1.4826 estimates a standard deviation), so that a noisy but healthy curve is left in peace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from transformers import TrainerCallback

from posttrain.core.console import say
from posttrain.trainer.checkpoints.step_file import StepFile
from posttrain.trainer.report.progress import number

ALERTS_FILE = "alerts.jsonl"


@dataclass(frozen=True)
class Thresholds:
    """Every number an alert depends on. "Noise" is a robust standard deviation, "error" that of a window's median."""

    repeat_after_logs: int = 50  # logs before the same kind of alert is given again
    kept_logs: int = 400  # logs of a metric that are remembered
    window: int = 10  # logs whose median stands for "now"
    baseline: int = 20  # logs before "now" that a jump is measured against
    loss_floor: float = 0.1  # a rise of the loss by less than this is none, whatever its share
    explosion_ratio: float = 3.0  # loss above this multiple of its running median ...
    explosion_noise: float = 8.0  # ... and this many noises above it
    rise_share: float = 0.2  # median loss (or reward) this share worse than in its best window ...
    rise_errors: float = 8.0  # ... and, for the loss, this many errors
    constant_logs: int = 8  # logs in a row with exactly the same loss
    gradient_spike_ratio: float = 10.0  # gradient norm above this multiple of its running median ...
    gradient_spike_noise: float = 10.0  # ... and this many noises above it, and above its first window's median
    gradient_zero: float = 1e-7  # gradient norm below this ...
    gradient_zero_share: float = 1e-4  # ... or below this share of its first window ...
    gradient_zero_logs: int = 5  # ... for so many logs in a row
    entropy_floor: float = 0.02  # nats per token below which hardly anything is sampled but the likeliest token ...
    entropy_share: float = 0.1  # ... where it is also below this share of its first window
    margin_errors: float = 4.0  # negative margins must also have fallen by this many errors
    stuck_logs: int = 60  # logs over which preference accuracy is averaged
    stuck_accuracy: float = 0.52  # a mean below this, over these logs and over the last third of them, is guessing
    reward_drift: float = 10.0  # mean reward of a reward model this far from 0 ...
    reward_drift_margins: float = 5.0  # ... and this many times its margin between good and bad answers
    hacking_errors: float = 8.0  # reward this many errors above its first window ...
    hacking_length_ratio: float = 2.0  # ... while completions became so many times longer or shorter, or ...
    reward_fall_errors: float = 8.0  # reward this many errors below its best window
    kl_level: float = 1.0  # ... the median KL is above this; it grows where it is so ...
    kl_growth: float = 3.0  # ... and this many times that of the logs before
    waiting_share: float = 0.5  # of the time, in which the trainer waits for rollouts written beside it
    bound_used: float = 1.0  # age of the oldest tokens, in shares of `max_staleness`
    sample_size: float = 0.3  # effective share of the sampled tokens that count, below which few decide
    masked_share: float = 0.1  # of tokens that are too old to be trained
    rate_zero_logs: int = 3  # logs in a row with a learning rate of exactly 0
    overfit_share: float = 0.05  # evaluation loss this share above its best ...
    overfit_evaluations: int = 2  # ... for so many evaluations in a row


DEFAULT_THRESHOLDS = Thresholds()


# ---- what was logged -----------------------------------------------------------------------------------------------------


class History:
    """(step, value) of every metric, the latest last."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.limits = thresholds
        self.steps_left = True
        self._series: dict[str, tuple[list[int], list[float]]] = {}  # name -> steps, values
        self._first: dict[str, list[float]] = {}

    def add(self, step: int, logs: dict[str, Any]) -> None:
        for name, value in logs.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                for known, new in zip(self._series.setdefault(name, ([], [])), (step, float(value))):
                    known.append(new)
                    del known[: -self.limits.kept_logs]
                first = self._first.setdefault(name, [])
                if len(first) < self.limits.window:
                    first.append(float(value))

    def values(self, name: str) -> list[float]:
        return self._series[name][1] if name in self._series else []

    def steps(self, name: str) -> list[int]:
        return self._series[name][0] if name in self._series else []

    def first(self, name: str) -> list[float]:
        """The values of the first window; empty until it is full."""
        known = self._first.get(name, [])
        return known if len(known) == self.limits.window else []

    def names(self, *endings: str) -> list[str]:
        """Metrics with one of these names, at the top or under a prefix such as `policy/`."""
        return [name for name in self._series if any(name == end or name.endswith("/" + end) for end in endings)]

    def evaluation_losses(self) -> list[str]:
        """`eval_loss`, or one for each of several evaluation sets."""
        return [name for name in self._series if name.startswith("eval_") and name.endswith("_loss")]


def noise(values: Sequence[float]) -> float:
    """1.4826 times the median absolute deviation: the standard deviation, for normal noise; blind to a few outliers."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def error(values: Sequence[float]) -> float:
    """Standard error of the median of a window, sqrt(pi / 2) times that of its mean."""
    return math.sqrt(math.pi / 2) * noise(values) / math.sqrt(len(values))


def both_errors(one: Sequence[float], other: Sequence[float]) -> float:
    return math.hypot(error(one), error(other))


def windows(values: Sequence[float], size: int) -> list[Sequence[float]]:
    """Consecutive windows that end with the latest value; what does not fill one at the beginning is left out."""
    return [values[end - size : end] for end in range(len(values) % size + size, len(values) + 1, size)]


# ---- what is wrong: each gives the numbers seen, or None -----------------------------------------------------------------

Seen = str | None


def loss_not_finite(history: History) -> Seen:
    values, steps = history.values("loss"), history.steps("loss")
    return f"loss is {values[-1]} at step {steps[-1]}" if values and not math.isfinite(values[-1]) else None


def loss_exploded(history: History) -> Seen:
    limits = history.limits
    return _jump(history, "loss", limits.explosion_ratio, limits.explosion_noise, floor=limits.loss_floor)


def gradient_spike(history: History) -> Seen:
    limits, first = history.limits, history.first("grad_norm")
    # Late in a run norms are small and jump harmlessly.
    if not first or history.values("grad_norm")[-1] < median(first):
        return None
    return _jump(history, "grad_norm", limits.gradient_spike_ratio, limits.gradient_spike_noise)


def _jump(history: History, name: str, ratio: float, noises: float, floor: float = 0.0) -> Seen:
    """The latest value against the median of the logs before it."""
    values, limits = history.values(name), history.limits
    before = [value for value in values[-limits.baseline - 1 : -1] if math.isfinite(value)]
    if len(before) < limits.window or not math.isfinite(values[-1]):
        return None
    usual, now = median(before), values[-1]
    if now - usual > max((ratio - 1) * abs(usual), noises * noise(before), floor):
        step = history.steps(name)[-1]
        return (
            f"{name} is {number(now)} at step {step}; its median over the {len(before)} logs before is {number(usual)}"
        )
    return None


def loss_rising(history: History) -> Seen:
    limits = history.limits
    found = _worse_than_best(history, "loss", min, limits.rise_errors, limits.loss_floor)
    return found and f"the median loss rose from {found[0]} to {found[1]} over the last {limits.baseline} logs"


def reward_falling(history: History) -> Seen:
    limits = history.limits
    for name in history.names("reward"):
        found = _worse_than_best(history, name, max, limits.reward_fall_errors)
        if found:
            return f"the median {name} fell from {found[0]} to {found[1]} over the last {limits.baseline} logs"
    return None


def _worse_than_best(
    history: History, name: str, best_of: Callable, errors: float, floor: float = 0.0
) -> tuple[str, str] | None:
    """(best, now) where the latest window is clearly worse than the best one before it."""
    parts = windows([v for v in history.values(name) if math.isfinite(v)], history.limits.baseline)
    if len(parts) < 2:
        return None
    now, best = parts[-1], best_of(parts[:-1], key=median)
    worse = (median(now) - median(best)) * (1 if best_of is min else -1)
    if worse > max(history.limits.rise_share * abs(median(best)), errors * both_errors(now, best), floor):
        return number(median(best)), number(median(now))
    return None


def loss_constant(history: History) -> Seen:
    values, needed = history.values("loss"), history.limits.constant_logs
    if len(values) >= needed and len(set(values[-needed:])) == 1:
        return f"loss is exactly {values[-1]:.6g} in each of the last {needed} logs, up to step {history.steps('loss')[-1]}"
    return None


def gradient_vanished(history: History) -> Seen:
    limits, values = history.limits, history.values("grad_norm")
    latest, first = values[-limits.gradient_zero_logs :], history.first("grad_norm")
    floor = max(limits.gradient_zero, limits.gradient_zero_share * median(first) if first else 0.0)
    if len(latest) == limits.gradient_zero_logs and max(latest) < floor:
        return f"grad_norm was at most {number(max(latest))} in the last {len(latest)} logs"
    return None


def entropy_collapsed(history: History) -> Seen:
    limits = history.limits
    values, first = history.values("entropy"), history.first("entropy")
    latest = values[-limits.window :]
    if not first or len(values) < 2 * limits.window:
        return None
    if median(latest) < limits.entropy_floor and median(latest) < limits.entropy_share * median(first):
        return f"entropy fell from {number(median(first))} to {number(median(latest))} nats per token"
    return None


def margins_negative(history: History) -> Seen:
    limits = history.limits
    for name in history.names("rewards/margins", "margin"):
        values = history.values(name)
        now, before = values[-limits.window :], values[-2 * limits.window : -limits.window]
        if len(before) < limits.window or max(now) >= 0:
            continue
        if median(before) - median(now) > limits.margin_errors * both_errors(now, before):
            return f"{name} is negative in the last {len(now)} logs and fell from {number(median(before))} to {number(median(now))}"
    return None


def accuracy_stuck(history: History) -> Seen:
    limits = history.limits
    for name in history.names("rewards/accuracies", "accuracy"):
        latest = history.values(name)[-limits.stuck_logs :]
        is_full, last_third = len(latest) == limits.stuck_logs, latest[-len(latest) // 3 :]
        if is_full and max(fmean(latest), fmean(last_third)) < limits.stuck_accuracy:
            return f"{name} averages {number(fmean(latest))} over the last {len(latest)} logs; guessing gives 0.5"
    return None


def reward_drifted(history: History) -> Seen:
    """A reward model whose rewards leave 0 together: only differences are learnt, the offset is free."""
    limits = history.limits
    means, margins = (history.values(name)[-limits.window :] for name in ("mean_reward", "margin"))
    if len(means) < limits.window or len(margins) < limits.window:
        return None
    offset, margin = median(means), median(margins)
    if abs(offset) > max(limits.reward_drift, limits.reward_drift_margins * abs(margin)):
        return (
            f"mean_reward is {number(offset)} over the last {len(means)} logs, with a margin of only {number(margin)}"
        )
    return None


def reward_hacked(history: History) -> Seen:
    """The reward rises while the answers change their length or leave the reference: both at once are suspicious."""
    limits = history.limits
    for name in history.names("reward"):
        first, now = history.first(name), history.values(name)[-limits.window :]
        if not first or len(history.values(name)) < 2 * limits.window:
            continue
        if median(now) - median(first) > max(limits.hacking_errors * both_errors(first, now), 1e-12):
            beside = _side_effect(history)
            if beside:
                return f"{name} rose from {number(median(first))} to {number(median(now))} while {beside}"
    return None


def _side_effect(history: History) -> Seen:
    limits = history.limits
    for name in history.names("mean_length"):
        first, now = history.first(name), history.values(name)[-limits.window :]
        if first and median(first) > 0:
            ratio = median(now) / median(first)
            if ratio > limits.hacking_length_ratio or ratio < 1 / limits.hacking_length_ratio:
                return f"{name} went from {number(median(first))} to {number(median(now))}"
    for name in history.names("kl"):
        level = median(history.values(name)[-limits.window :])
        if level > limits.kl_level:
            return f"{name} is at {number(level)}"
    return None


def kl_growing(history: History) -> Seen:
    limits = history.limits
    for name in history.names("kl"):
        values = history.values(name)
        now, before = values[-limits.window :], values[-2 * limits.window : -limits.window]
        if len(before) < limits.window:
            continue
        if median(now) > max(limits.kl_level, limits.kl_growth * median(before)):
            return f"{name} grew from {number(median(before))} to {number(median(now))} over the last {2 * limits.window} logs"
    return None


def median_beyond(history: History, name: str, threshold: str, below: bool = False) -> Seen:
    """Where the median of the last window is at or beyond one of the thresholds."""
    latest, limit = history.values(name)[-history.limits.window :], getattr(history.limits, threshold)
    if len(latest) < history.limits.window:
        return None
    now = median(latest)
    if (now > limit) if below else (now < limit):
        return None
    side = "below" if below else "above"
    return f"the median of {name} over the last {len(latest)} logs is {number(now)}, at or {side} {number(limit)}"


def rate_zero(history: History) -> Seen:
    latest = history.values("learning_rate")[-history.limits.rate_zero_logs :]
    if history.steps_left and len(latest) == history.limits.rate_zero_logs and not any(latest):
        step = history.steps("learning_rate")[-1]
        return f"learning_rate is 0 in the last {len(latest)} logs, up to step {step}, and steps are left"
    return None


def overfitting(history: History) -> Seen:
    limits = history.limits
    for name in history.evaluation_losses():
        values, steps = history.values(name), history.steps(name)
        best = min(range(len(values)), key=values.__getitem__)
        since = values[best + 1 :]
        limit = values[best] + limits.overfit_share * abs(values[best])
        if len(since) < limits.overfit_evaluations or min(since[-limits.overfit_evaluations :]) <= limit:
            continue
        if _train_loss_fell_since(history, steps[best]):
            return (
                f"{name} rose from {number(values[best])} at step {steps[best]} to {number(values[-1])} at step {steps[-1]} "
                "while the training loss fell"
            )
    return None


def _train_loss_fell_since(history: History, step: int) -> bool:
    pairs = list(zip(history.steps("loss"), history.values("loss")))
    before = [value for at, value in pairs if at <= step][-history.limits.window :]
    now = [value for at, value in pairs if at > step][-history.limits.window :]
    return bool(before and now) and median(now) < median(before)


# ---- the rules -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """How a symptom is recognised, what it usually means, what to try."""

    seen: Callable[[History], Seen]
    meaning: str
    remedy: str


RULES: dict[str, Rule] = {
    "loss_not_finite": Rule(
        loss_not_finite,
        "a number overflowed, or a row holds what the model cannot read",
        "look at skipped_steps.jsonl for the rows, lower `learning_rate`, or compute in float32 (`bf16=False`)",
    ),
    "loss_exploded": Rule(
        loss_exploded,
        "one step was far too large, or a batch is unlike the others",
        "lower `learning_rate` or `max_grad_norm`, lengthen the warm-up, and look at the rows of that step",
    ),
    "loss_rising": Rule(
        loss_rising,
        "the steps are too large, or the data changed its nature on the way",
        "lower `learning_rate`, lengthen the warm-up, and check that the data is shuffled",
    ),
    "loss_constant": Rule(
        loss_constant,
        "nothing is learnt: no gradient reaches a trained weight, or the learning rate is 0",
        "check that some parameters require a gradient, that rows have trained tokens, and `learning_rate`",
    ),
    "gradient_spike": Rule(
        gradient_spike,
        "a batch is unlike the others, or training is about to diverge",
        "keep `max_grad_norm` at 1 or below, lower `learning_rate`, and look at the rows of that step",
    ),
    "gradient_vanished": Rule(
        gradient_vanished,
        "nothing is left to learn from these rows, or the loss no longer depends on the weights",
        "stop here if the loss is as low as wanted; else check frozen layers, and `beta` for preference losses",
    ),
    "entropy_collapsed": Rule(
        entropy_collapsed,
        "the model gives nearly all probability to one token: it repeats what it memorised and explores no more",
        "lower `learning_rate`, train fewer epochs, or add an entropy bonus or a KL penalty in online methods",
    ),
    "margins_negative": Rule(
        margins_negative,
        "the model learns to prefer the rejected answers: labels may be swapped, or the learning rate is too high",
        "check a few rows for swapped `chosen` and `rejected`, then lower `learning_rate`",
    ),
    "accuracy_stuck": Rule(
        accuracy_stuck,
        "the model cannot tell chosen from rejected: labels are close to random, or the steps are too small",
        "read some pairs, raise `learning_rate`, lower `beta`, and check that answers are not cut to the same text",
    ),
    "reward_drifted": Rule(
        reward_drifted,
        "all rewards moved away from 0 together, which says nothing about which answer is better",
        "set `center_rewards_coefficient=0.01`",
    ),
    "reward_falling": Rule(
        reward_falling,
        "the policy got worse at what it is paid for",
        "go back to the best checkpoint, lower `learning_rate`, or raise the KL penalty",
    ),
    "reward_hacked": Rule(
        reward_hacked,
        "the policy may have found a way to please the reward without doing the task",
        "read completions of the last steps, raise the KL penalty, or correct the reward",
    ),
    "kl_growing": Rule(
        kl_growing, "the policy runs away from the reference", "raise `beta`, lower `learning_rate`, or stop earlier"
    ),
    "rollouts_wait": Rule(
        partial(median_beyond, name="async/trainer_idle", threshold="waiting_share"),
        "rollouts are the slow side, and the trainer waits for them",
        "give them more workers or GPUs, shorten `max_completion_length`, bound episodes with `episode_timeout`, or raise "
        "`async_lead` where it is a number",
    ),
    "rollouts_at_the_bound": Rule(
        partial(median_beyond, name="async/bound_used", threshold="bound_used"),
        "every step trains on tokens as old as `max_staleness` allows",
        "lower `async_lead` where it is a number, give rollouts more workers, or raise `max_staleness` if learning is as good",
    ),
    "few_samples_count": Rule(
        partial(median_beyond, name="sampling/effective_sample_size", threshold="sample_size", below=True),
        "the policy has moved far from the weights that wrote the completions, and few tokens decide the step",
        "lower `max_staleness`, `num_iterations` or `learning_rate`",
    ),
    "old_tokens_masked": Rule(
        partial(median_beyond, name="async/masked_share", threshold="masked_share"),
        "long completions lose the tokens that they began with",
        "raise `max_staleness`, or take `on_stale='wait'`",
    ),
    "rate_zero": Rule(
        rate_zero,
        "training continues without changing a weight",
        "check `learning_rate`, the schedule, and whether `max_steps` grew after a resume",
    ),
    "overfitting": Rule(
        overfitting,
        "the model memorises the training rows",
        "keep the checkpoint with the best evaluation (`load_best_model_at_end=True`), train fewer epochs or add data",
    ),
}


@dataclass(frozen=True)
class Alert:
    """One thing that was noticed."""

    kind: str
    seen: str
    meaning: str
    remedy: str

    def sentence(self, step: int) -> str:
        return (
            f"Alert at step {step} ({self.kind}): {self.seen}. This usually means {self.meaning}. Try: {self.remedy}."
        )


class Watch:
    """Looks at every log; each kind of alert is given at most once in `repeat_after_logs` logs."""

    def __init__(self, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> None:
        self.history = History(thresholds)
        self.logs = 0
        self._given: dict[str, int] = {}

    def look(self, step: int, logs: dict[str, Any], steps_left: bool = True) -> list[Alert]:
        self.history.steps_left = steps_left
        self.history.add(step, logs)
        self.logs += 1
        alerts = []
        for kind, rule in RULES.items():
            if self.logs - self._given.get(kind, -(10**9)) < self.history.limits.repeat_after_logs:
                continue
            seen = rule.seen(self.history)
            if seen:
                self._given[kind] = self.logs
                alerts.append(Alert(kind, seen, rule.meaning, rule.remedy))
        return alerts


class AlertsCallback(TrainerCallback):
    """Says and writes down (`alerts.jsonl`) what `Watch` notices. A resumed run continues from the logs of its checkpoint."""

    def __init__(self, output_dir: str, thresholds: Thresholds = DEFAULT_THRESHOLDS) -> None:
        self.file = StepFile(Path(output_dir) / ALERTS_FILE)
        self.thresholds = thresholds
        self.watch: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.watch = Watch(self.thresholds)
        for entry in state.log_history:  # what was noticed before the checkpoint is not reported again
            if "loss" in entry or any(name.startswith("eval_") for name in entry):
                self.watch.look(entry["step"], _metrics(entry))
        self.file.begin(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.watch is None or not logs or "train_runtime" in logs:
            return
        for alert in self.watch.look(state.global_step, _metrics(logs), state.global_step < state.max_steps):
            say(alert.sentence(state.global_step), always=True)
            self.file.append(state.global_step, asdict(alert))


def _metrics(logs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in logs.items() if name not in ("step", "epoch")}
