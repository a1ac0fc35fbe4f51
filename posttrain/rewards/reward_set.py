"""RewardSet: functions, async functions and reward models, judged together, beside generation.

    rewards = RewardSet([accuracy_reward, my_function, "org/reward-model"], weights=[1.0, 0.5, 0.1])
    with rewards.open(trainer_state) as round:
        round.add(group)              # as groups are finished: work starts at once, in worker processes
        results = round.finish()      # waits; every call has a deadline

A function has TRL's signature, `f(prompts, completions, completion_ids, **columns, trainer_state, log_extra, log_metric,
environments)`, and is given the arguments that it accepts: all of them where it takes **kwargs. It returns a list with one
number, or None for "does not apply", for each completion; what else it may return is ruled on in `values.py`. It is called
with one group at a time. When such a call raises, hangs or kills its worker, the samples of the group are called one by one,
so that only the guilty one is lost. In a worker `trainer_state` is a copy of the state's plain fields. `environments` are live
objects of the trainer's process: a function that names this argument runs there; one that takes **kwargs alone runs in a worker
without them. One that names `log_failure` may call it with (place, message, kind) for samples that it could not judge; they fail
as if it had raised for them alone.

Reward models run in the trainer's process when the round is finished, in micro-batches by tokens.

A judge (`judges.py`) is a reward as well, and then the only one: its numbers are places within a group, no amounts.
"""

from __future__ import annotations

import concurrent.futures
import functools
import io
import logging
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from posttrain.rewards.judges import NAMED, JudgeReward, RewardModelJudge, judge_reward, named_judge
from posttrain.rewards.judging import BESIDE, CALLER, BaseJudge
from posttrain.rewards.runtime.invoke import OURS, Wants, invoke
from posttrain.rewards.runtime.options import ALL_AT_ONCE, AUTO, BY_GROUP, BY_SAMPLE, IN_PROCESS, RewardOptions
from posttrain.rewards.runtime.results import (
    Judged,
    Outcomes,
    RewardError,
    RewardFailure,
    RewardResults,
    too_many_failures,
)
from posttrain.rewards.runtime.runner import Call, FunctionReward, Runner, all_arguments, stays_in_process
from posttrain.rewards.runtime.statistics import RewardWatch

if TYPE_CHECKING:
    from posttrain.rewards.reward_model import ModelReward

__all__ = ["Judged", "RewardError", "RewardFailure", "RewardOptions", "RewardResults", "RewardRound", "RewardSet"]

logger = logging.getLogger(__name__)

ALSO_CALLED = {"solution": ("answer", "ground_truth", "target", "label", "final_answer")}
"""Argument of a built-in reward -> what datasets call that column."""
ENOUGH_TO_STOP = 8  # samples of a round; in fewer, a large share of failures is bad luck


class Notes:
    """Sentences, each reported once. Not a method of RewardSet: its runner would keep a forgotten set alive."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.report = report
        self.sentences: list[str] = []

    def __call__(self, sentence: str) -> None:
        if sentence not in self.sentences:
            self.sentences.append(sentence)
            self.report(sentence)


class RewardSet:
    """The rewards of a run and their workers, which live until `close`.

    `rewards` are functions, or classifiers of sequences or tokens (process rewards) as ids, paths or modules, or ModelReward
    and ProcessReward objects, which say more about how a model is run, or one judge; `tokenizers` (one entry for each reward) and
    `model_options` (arguments of ModelReward: device, dtype, max_tokens, ...) are for those given by id or module. `report`
    gets sentences about what was decided and, with `watch`, about rewards that look wrong (see `statistics.py`); they are kept
    in `notes` too.
    """

    def __init__(
        self,
        rewards: Any,
        weights: Sequence[float] | None = None,
        options: RewardOptions | None = None,
        *,
        tokenizers: Sequence[Any] | None = None,
        model_options: dict[str, Any] | None = None,
        report: Callable[[str], None] = logger.warning,
        watch: bool = True,
        may_be_empty: bool = False,
    ) -> None:
        """`may_be_empty`: for methods that need no reward; the values are then (N, 0)."""
        rewards = list(rewards) if isinstance(rewards, list | tuple) else [rewards]
        if tokenizers is None:
            tokenizers = [None] * len(rewards)
        tokenizers = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
        self.options = options or RewardOptions()
        self._say, self._model_options = Notes(report), model_options or {}
        self.notes = self._say.sentences
        self._watch = RewardWatch() if watch else None
        if not rewards and not may_be_empty:
            raise ValueError("There is no reward: give at least one function or model.")
        self.weights = _checked_weights(weights, rewards, tokenizers)
        refuse_beside_judge(rewards)
        self.rewards = [self._reward(key, *pair) for key, pair in enumerate(zip(rewards, tokenizers))]
        self.names = _distinct([reward.name for reward in self.rewards])
        for reward, name in zip(self.rewards, self.names):
            reward.name = name
        self._runner = Runner(self.options, self._say)
        self._end = weakref.finalize(self, self._runner.close)  # also when the interpreter ends

    def open(self, trainer_state: Any = None) -> RewardRound:
        """A new round; use it as a context manager, so that what still runs is given up after an error."""
        if not self._end.alive:
            raise RuntimeError("This RewardSet was closed, and its workers have ended. Make a new one.")
        if os.getpid() != self._runner.owner:
            raise RuntimeError("This RewardSet belongs to the process that this one was forked from. Make one here.")
        return RewardRound(self, trainer_state)

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        self._end()

    def __enter__(self) -> RewardSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def look_at(self, samples: list[Judged], results: RewardResults) -> None:
        """Say what is remarkable about a round."""
        if self._watch is None:
            return
        lengths = np.array([len(sample.completion_ids) for sample in samples])
        valid = ~results.masked
        for sentence in self._watch.look(self.names, results.values[valid], lengths[valid]):
            self._say(sentence)

    def stop_if_too_many_failed(self, results: RewardResults, samples: int) -> None:
        failed = len({failure.sample for failure in results.failures})
        if samples >= ENOUGH_TO_STOP and failed > self.options.stop_above * samples:
            raise RewardError(too_many_failures(results.failures, samples, self.options.stop_above))

    @property
    def compares_groups(self) -> bool:
        """Whether the completions of a prompt must come here together."""
        return any(getattr(reward, "whole_groups", False) for reward in self.rewards)

    def _reward(self, key: int, reward: Any, tokenizer: Any) -> FunctionReward | ModelReward:
        if is_judge(reward):
            return self._judge(key, reward, tokenizer)
        if _is_model(reward):
            from posttrain.rewards.process_reward import model_reward  # torch and transformers, for who uses a model

            made = model_reward(reward, tokenizer, **self._model_options)
            for note in made.notes:
                self._say(note)
            return made
        if not callable(reward):
            raise TypeError(f"A reward is a function, a model or the id of a model, not {reward!r}.")
        made = FunctionReward(key, reward_name(reward), reward, Wants(reward), None)
        made.packed = self._packed(made)
        return made

    def _judge(self, key: int, judge: Any, tokenizer: Any) -> FunctionReward:
        if isinstance(judge, str):
            judge = named_judge(judge)
        if isinstance(judge, str):
            judge = RewardModelJudge(judge, tokenizer, **self._model_options)
        reward = judge if isinstance(judge, JudgeReward) else judge_reward(judge)
        if reward.whole_groups:
            self._refuse_for_judge(reward)
        runs, function = reward.judge.runs, reward
        if runs == BESIDE:
            reward.seconds, function = self.options.timeout, reward.beside()
        made = FunctionReward(key, reward_name(reward), function, Wants(function), None, reward.whole_groups)
        made.keeps_time, made.runs_last = runs == BESIDE, runs == CALLER
        made.packed = None if runs in (BESIDE, CALLER) else self._packed(made)
        return made

    def _refuse_for_judge(self, reward: JudgeReward) -> None:
        if self.options.reward_batching != BY_GROUP:
            raise ValueError(
                f"{reward_name(reward)} compares the completions of a prompt, and `reward_batching` is "
                f"{self.options.reward_batching!r}: leave it at {BY_GROUP!r}."
            )
        if self.options.cache:
            raise ValueError(
                f"{reward_name(reward)} compares completions with each other, so that the value of one cannot be remembered: "
                "leave `reward_cache` off."
            )

    def _packed(self, reward: FunctionReward) -> bytes | None:
        if self.options.isolation == IN_PROCESS:
            return None
        try:
            if not sys.executable:
                raise CannotTravel("this Python does not know its own executable")
            if reward.takes_environments:
                raise CannotTravel("it takes `environments`, which are live objects")
            return packed(reward.function)
        except CannotTravel as error:
            if self.options.isolation != AUTO:
                raise ValueError(
                    f'Reward {reward.name} cannot run in a worker process: {error}. Use isolation="auto" or "in_process".'
                ) from error
            self._say(stays_in_process(reward.name, str(error)))
            return None


class RewardRound:
    """The samples of one step: groups are added as they are finished, and judged meanwhile."""

    def __init__(self, rewards: RewardSet, trainer_state: Any) -> None:
        self._set, self._runner = rewards, rewards._runner
        functions = [reward for reward in rewards.rewards if isinstance(reward, FunctionReward)]
        self._functions = [reward for reward in functions if not reward.runs_last]
        self._last = [reward for reward in functions if reward.runs_last]
        self._groups: list[int] = []  # of each sample
        self._outcomes = Outcomes(rewards.names, rewards.options, trainer_state)
        self._samples: list[Judged] = []
        self._running: list[concurrent.futures.Future[None]] = []

    def add(self, group: list[Judged]) -> None:
        """Take the samples of one prompt and start to judge them. Does not block."""
        if not group:
            return
        numbers = list(range(len(self._samples), len(self._samples) + len(group)))
        self._samples += group
        self._groups += [len(self._groups)] * len(group)
        self._check_arguments(group)
        if self._set.options.reward_batching != ALL_AT_ONCE:
            self._start(numbers, group)

    @property
    def is_judged(self) -> bool:
        """Whether `finish` has nothing to wait for."""
        return all(future.done() for future in self._running)

    def finish(self, may_stop: bool = True) -> RewardResults:
        """Wait for every call; the results have the samples in the order in which they were added.

        Where too many calls failed, that is an error; with `may_stop` False the caller looks at several rounds together.
        """
        if self._set.options.reward_batching == ALL_AT_ONCE and self._samples:
            self._start(list(range(len(self._samples))), self._samples)
        self._score_models()
        done, _ = concurrent.futures.wait(self._running, return_when=concurrent.futures.FIRST_EXCEPTION)
        for future in done:
            future.result()
        results = self._outcomes.results(len(self._samples))
        if may_stop:
            self._set.stop_if_too_many_failed(results, len(self._samples))
        self._set.look_at(self._samples, results)
        return results

    def __enter__(self) -> RewardRound:
        return self

    def __exit__(self, *_: object) -> None:
        """Give up what still runs: after an error, or when the round is not wanted any more."""
        for future in self._running:
            future.cancel()

    def _start(self, numbers: list[int], samples: list[Judged]) -> None:
        size = 1 if self._set.options.reward_batching == BY_SAMPLE else len(samples)
        parts = [slice(start, start + size) for start in range(0, len(samples), size)]
        calls = [
            Call(reward, numbers[part], samples[part], self._outcomes) for part in parts for reward in self._functions
        ]
        if calls:
            self._running.append(self._runner.start(self._runner.judge(calls)))

    def _score_models(self) -> None:
        for key, reward in enumerate(self._set.rewards):
            if not isinstance(reward, FunctionReward):
                reward.judge(key, self._samples, self._outcomes)
        for reward in self._last if self._samples else ():
            call = Call(reward, [*range(len(self._samples))], self._samples, self._outcomes)
            self._runner.take(
                call, invoke(reward.function, reward.wants, {**all_arguments(call), "group_numbers": self._groups})
            )

    def _check_arguments(self, group: list[Judged]) -> None:
        columns = {name for sample in group for name in sample.columns}
        with_environments = any(sample.environment is not None for sample in group)
        for reward in self._functions:
            if missing := missing_arguments(reward.name, reward.wants, columns, with_environments):
                raise ValueError(missing)


def missing_arguments(name: str, wants: Wants, columns: set[str], with_environments: bool) -> str | None:
    """The sentence about arguments of a reward that are not columns beside the prompt; None where all are there."""
    missing = wants.missing(columns | (set(OURS) if with_environments else set(OURS) - {"environments"}))
    if not missing:
        return None
    near = [other for other in ALSO_CALLED.get(missing[0], ()) if other in columns]
    rename = f"Rename the column: --dataset_columns '{{\"{near[0]}\": \"{missing[0]}\"}}'." if near else (
        "Rename the argument or the column, or give it a default."
    )  # fmt: skip
    return (
        f"Reward {name} needs the argument{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}, but there is no such "
        f"column in the dataset; it has {', '.join(sorted(columns)) or 'none'} beside the prompt. {rename}"
    )


def reward_name(function: Callable[..., Any]) -> str:
    """As in TRL the name of the function; of a partial that of its function, of an object that of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def is_judge(reward: Any) -> bool:
    return isinstance(reward, BaseJudge | JudgeReward) or (isinstance(reward, str) and reward.startswith(NAMED))


def refuse_beside_judge(rewards: Sequence[Any]) -> None:
    """A judge says who is better, not by how much: its numbers cannot be added to those of another reward."""
    if len(rewards) > 1 and any(map(is_judge, rewards)):
        raise ValueError(
            f"A judge is the only reward of a run, and there are {len(rewards)} rewards: what it says of a completion is its place "
            "among the others of its prompt, which cannot be added to an amount. Use the judge alone, or functions and models."
        )


def refuse_text_readers(rewards: Any) -> None:
    """Where completions are about images: a model or a judge that is shown the text alone would reward whatever it guesses."""
    for reward in rewards if isinstance(rewards, list | tuple) else [rewards]:
        if is_judge(reward) or _is_model(reward):
            who = reward if isinstance(reward, str | Path) else reward_name(reward)
            raise ValueError(
                f"The model is shown images, and {who}, a reward model or a judge, would be shown texts alone. Write a reward "
                "function, which is given the pictures in `prompts`, `completions` and `images`."
            )


def _is_model(reward: Any) -> bool:
    if isinstance(reward, str | Path):
        return True
    torch = sys.modules.get("torch")  # who has no torch imported has no module
    if torch is not None and isinstance(reward, torch.nn.Module):
        return True
    return any(kind.__module__ == "posttrain.rewards.reward_model" for kind in type(reward).__mro__)


def _distinct(names: list[str]) -> list[str]:
    """Two rewards of one name would be one metric: the second is called name_2."""
    return [f"{name}_{names[:i].count(name) + 1}" if name in names[:i] else name for i, name in enumerate(names)]


def _checked_weights(weights: Sequence[float] | None, rewards: list[Any], tokenizers: list[Any]) -> list[float]:
    if len(tokenizers) != len(rewards):
        raise ValueError(
            f"There are {len(tokenizers)} reward tokenizers for {len(rewards)} rewards; give one each or None."
        )
    if weights is None:
        return [1.0] * len(rewards)
    if len(weights) != len(rewards):
        raise ValueError(f"There are {len(weights)} reward weights for {len(rewards)} rewards.")
    return [float(weight) for weight in weights]


# ---- functions for another process: pickled by value, so that the child need not import the user's script ------------

LARGEST_FUNCTION = 64 * 2**20  # bytes; more is data or a model, of which every worker would hold a copy

_registering = threading.Lock()  # cloudpickle keeps the modules that go by value in one table


class CannotTravel(Exception):
    """The message says why."""


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "is_cuda", False) is True:
            raise CannotTravel("it refers to a tensor on a GPU")
        return super().reducer_override(obj)


class _Bounded(io.BytesIO):
    """Stops before a table of gigabytes is written out in full."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > LARGEST_FUNCTION:
            raise CannotTravel(f"it carries more than {LARGEST_FUNCTION // 2**20} MiB with it")
        return super().write(data)


def packed(function: Callable[..., Any]) -> bytes:
    """The function as bytes, or CannotTravel.

    What is defined in the user's own files goes by value, so that no file of theirs is imported again; where that fails, as
    for functions that refer to a lock or a large table of their module, the module is imported by name in the worker.
    """
    module = _own_module(function)
    reason = None
    for by_value in (module, None) if module else (None,):
        try:
            return _pickled(function, by_value)
        except CannotTravel as error:
            reason = reason or error
    raise reason


def _pickled(function: Callable[..., Any], by_value: Any) -> bytes:
    buffer = _Bounded()
    try:
        with _going_by_value(by_value):
            _Pickler(buffer).dump(function)
    except CannotTravel:
        raise
    except Exception as error:  # every type refuses to be pickled in its own way
        raise CannotTravel(f"it cannot be pickled ({type(error).__name__}: {error})") from error
    return buffer.getvalue()


@contextmanager
def _going_by_value(module: Any) -> Iterator[None]:
    if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    with _registering:
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def _own_module(function: Callable[..., Any]) -> Any:
    """The module of the user's that defines this; None for `__main__` (by value anyway) and for what is installed."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    home = function if hasattr(function, "__qualname__") else type(function)
    module = sys.modules.get(getattr(home, "__module__", None) or "")
    if module is None or module.__name__ in ("__main__", "builtins") or module.__name__.split(".")[0] == "posttrain":
        return None
    file = getattr(module, "__file__", None)
    return module if file and not _is_installed(Path(file)) else None


def _is_installed(file: Path) -> bool:
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(file.is_relative_to(place) for place in places if place)
