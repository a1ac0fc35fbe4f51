"""TaskEvals: a run that answers prompts and is judged, from before its first step on; the scores are those of `posttrain eval`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import SaveStrategy

from posttrain.core.console import say
from posttrain.data.render.renderer import Renderer
from posttrain.evaluation.result import EvalResult
from posttrain.evaluation.run import TaskEvaluation, stop_ids
from posttrain.evaluation.spec import EvalSpec
from posttrain.models.load.vocabulary import tokenizer_of
from posttrain.trainer.online.run_engine import RunEngine, WritingRun
from posttrain.trainer.options.base import BaseConfig

PREFIX = "evals"


def is_due(spec: EvalSpec, step: int, asked: bool) -> bool:
    """After a step; `asked`: whether the run saves or evaluates there."""
    return asked if spec.every is None else step % spec.every == 0


def is_read(spec: EvalSpec, metric: str | None) -> bool:
    """Whether an evaluation of the run wants this score; `metric` says which checkpoint is best."""
    return spec.every is None or (metric is not None and metric.startswith(f"{PREFIX}/{spec.name}/"))


def best_metric(args: Any, specs: Sequence[EvalSpec]) -> str | None:
    """The metric of ours that says which checkpoint is best; None: another one does."""
    named = args.metric_for_best_model
    if named is None:
        # With a limit of 1 transformers deletes the last checkpoint for the best: only where that was asked for.
        return None if args.save_total_limit == 1 else f"{PREFIX}/{specs[0].name}/score"
    named = named.removeprefix("eval_")
    return named if named.startswith(f"{PREFIX}/") else None


class EvaluatedRun(WritingRun, Protocol):
    """What is asked of the trainer, besides what its engine asks."""

    args: BaseConfig
    state: TrainerState
    model: nn.Module
    renderer: Renderer
    processing_class: Any
    callback_handler: CallbackHandler
    log: Callable[[dict[str, float]], None]


class TaskEvals(TrainerCallback):
    """Evaluates tasks before the first step, every so often and at the end. Adds itself to the trainer:

        TaskEvals(trainer, [EvalSpec(data="test.jsonl", reward=my_reward, every=50)])

    Scores are logged as `evals/NAME/score` and so on. The checkpoint with the best score is the run's best checkpoint, which
    `save_total_limit` spares: of the metric that `metric_for_best_model` names, else of the first task's score. Where the run
    also evaluates a loss (`eval_strategy`), the scores are among the metrics of each evaluation, so that transformers' best
    model and EarlyStoppingCallback read them; `patience` of a spec needs no evaluation set. No random generator is touched:
    training is the same with and without.
    """

    def __init__(self, trainer: EvaluatedRun, evals: Sequence[EvalSpec]) -> None:
        self.trainer, self.specs = trainer, [*evals]
        self._refuse_impossible()
        self.engine = RunEngine(trainer, "task scores")
        args, renderer = trainer.args, trainer.renderer
        self.tasks = [
            TaskEvaluation(
                spec,
                spec.rows(renderer, args.chat_template_kwargs),
                tokenizer_of(trainer.processing_class),
                args.process_index,
                args.world_size,
                args.device,
            )
            for spec in self.specs
        ]
        self._scored: dict[str, tuple[int, dict[str, float]]] = {}  # name -> (step, metrics)
        # After transformers' own callback, which says what this step will do; before all that read metrics.
        trainer.callback_handler.callbacks.insert(1, self)

    def _refuse_impossible(self) -> None:
        names = [spec.name for spec in self.specs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"Two evaluations are named {twice[0]!r}; set `name` of one of them.")
        metric = best_metric(self.trainer.args, self.specs)
        if metric is not None and metric.split("/")[1] not in names:
            raise ValueError(f"`metric_for_best_model` is {metric!r}; the evaluations are named {', '.join(names)}.")

    # ---- when ---------------------------------------------------------------------------------------------------------

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._run(self.tasks, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_last = state.global_step >= state.max_steps
        asked = control.should_save or control.should_evaluate
        self._run([task for task in self.tasks if is_last or is_due(task.spec, state.global_step, asked)], control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save or control.should_evaluate:
            self._run([task for task in self.tasks if task.spec.every is None], control)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """The scores of this step join the metrics of an evaluation, under the names that transformers looks for."""
        wanted = best_metric(self.trainer.args, self.specs)
        self._run([task for task in self.tasks if is_read(task.spec, wanted)], control)
        for step, scores in self._scored.values():
            if step == state.global_step and metrics is not None:
                metrics.update({f"eval_{name}": value for name, value in scores.items()})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for task in self.tasks:
            task.close()
        self.engine.close()

    # ---- what ---------------------------------------------------------------------------------------------------------

    def _run(self, tasks: list[TaskEvaluation], control: Any) -> None:
        state = self.trainer.state
        tasks = [task for task in tasks if self._scored.get(task.spec.name, (-1,))[0] != state.global_step]
        if not tasks:
            return
        with self.engine.writing() as engine:
            ends = stop_ids(self.trainer.model, tokenizer_of(self.trainer.processing_class))
            for task in tasks:
                self._take(task, task(engine, ends, state), control)
        self._keep_best(control)

    def _take(self, task: TaskEvaluation, result: EvalResult, control: Any) -> None:
        spec, state = task.spec, self.trainer.state
        scores = {f"{PREFIX}/{spec.name}/{name}": value for name, value in result.metrics().items()}
        self._scored[spec.name] = (state.global_step, scores)
        will_log = control.should_log
        self.trainer.log(dict(scores))
        control.should_log = will_log  # transformers takes any log for the one of this step
        if state.is_world_process_zero:
            say(_sentence(state.global_step, result))
        if reason := self._stop_reason(spec):
            control.should_training_stop = True
            if state.is_world_process_zero:
                say(f"The run ends at step {state.global_step}: {reason}.", always=True)

    def _history(self, name: str) -> list[float]:
        """All values of a metric so far. The log is a part of checkpoints, so a resumed run knows them."""
        return [entry[name] for entry in self.trainer.state.log_history if name in entry]

    def _stop_reason(self, spec: EvalSpec) -> str | None:
        scores = self._history(f"{PREFIX}/{spec.name}/score")
        if spec.max_drop is not None and scores and scores[0] - scores[-1] > spec.max_drop:
            return (
                f"the score of {spec.name} is {scores[-1]:.4g}, more than `max_drop`={spec.max_drop} below the {scores[0]:.4g} "
                "that it began with"
            )
        if spec.patience is not None and len(scores) > spec.patience:
            before = max(scores[: -spec.patience])
            if max(scores[-spec.patience :]) <= before:
                return f"the score of {spec.name} has not been above {before:.4g} in {spec.patience} evaluations"
        return None

    # ---- the best checkpoint -------------------------------------------------------------------------------------------

    def _keep_best(self, control: Any) -> None:
        """As Trainer does after an evaluation, for runs that have none: only steps that are saved can be the best."""
        args, state, metric = self.trainer.args, self.trainer.state, best_metric(self.trainer.args, self.specs)
        if str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no" or metric is None:
            return
        now = {name: value for step, scores in self._scored.values() if step == state.global_step
               for name, value in scores.items()}  # fmt: skip
        by_score = args.save_strategy == SaveStrategy.BEST
        if state.global_step == 0 or not (by_score or control.should_save) or metric not in now:
            return
        sign = -1 if args.greater_is_better is False else 1
        best = -sign * math.inf if state.best_metric is None else state.best_metric
        if sign * now[metric] > sign * best:
            state.best_metric, state.best_global_step = now[metric], state.global_step
            control.should_save = True
        elif by_score:
            control.should_save = False


def _sentence(step: int, result: EvalResult) -> str:
    score = result.score
    interval = "" if math.isnan(score.low) else f" ({score.low:.4g} to {score.high:.4g})"
    what = "pass@1" if result.threshold is not None else "mean reward"
    took = sum(result.seconds.values())
    return f"eval {result.spec.name} at step {step}: {what} {score.value:.4g}{interval}, {result.prompts} prompts in {took:.1f} s"
