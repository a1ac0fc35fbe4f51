"""Rounds of rewards in real worker processes: values, arguments, faults, policies."""

from __future__ import annotations

import functools
import os
import threading
import time
import types
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from posttrain.rewards.reward_set import RewardError, RewardOptions, RewardSet
from posttrain.rewards.runtime.invoke import is_async
from tests.rewards.faulty import acting, group, judged
from tests.waiting import eventually


def length(completions):
    return [len(text) for text in completions]


def shouting(completions, **kwargs):
    return [text.isupper() for text in completions]


async def patient(completions, **kwargs):
    import asyncio

    await asyncio.sleep(0.3)
    return [len(text) for text in completions]


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, completions):
        return [self.factor * len(text) for text in completions]


class AsyncScaled(Scaled):
    async def __call__(self, completions):
        return [self.factor * len(text) for text in completions]


def scaled(completions, factor):
    return [factor * len(text) for text in completions]


async def scaled_later(completions, factor):
    return [factor * len(text) for text in completions]


def test_every_kind_of_function():
    rewards = [
        length,
        shouting,
        lambda completions: [0.5] * len(completions),
        functools.partial(scaled, factor=2),
        Scaled(3),
        patient,
        AsyncScaled(4),
        functools.partial(scaled_later, factor=5),
        Scaled(6),
    ]
    assert [is_async(reward) for reward in rewards] == [False] * 5 + [True] * 3 + [False]
    results, made = judged(rewards, group("a", "BB"), group("ccc"), weights=range(9))
    names = ["length", "shouting", "<lambda>", "scaled", "Scaled", "patient", "AsyncScaled", "scaled_later", "Scaled_2"]
    assert made.names == names
    assert made.weights == list(range(9))
    n = np.array([1, 2, 3])
    expected = [n, [0, 1, 0], [0.5] * 3, 2 * n, 3 * n, n, 4 * n, 5 * n, 6 * n]
    np.testing.assert_array_equal(results.values, np.array(expected, dtype=float).T)
    assert results.values.dtype == np.float64
    assert not results.masked.any()
    assert made.notes == []  # all of them travelled


@pytest.mark.parametrize("isolation", ["process", "in_process"])
def test_arguments(isolation):
    """A function gets what it accepts: named columns, or everything with **kwargs; conversations pass through as they are."""

    def named(prompts, solution):
        return [p[0]["content"] == "hi" and s == "x" for p, s in zip(prompts, solution)]

    def all_of_it(completions, trainer_state, log_extra, log_metric, **kwargs):
        log_extra("keys", [sorted(kwargs)] * len(completions))
        log_extra("number", [kwargs["number"][i] for i in range(len(completions))])
        log_metric("step", trainer_state.global_step)
        return [message[-1]["content"] == "yes" for message in completions]

    def positional(completions, /, number):
        return number

    samples = group("", "", solution=["x", "y"], number=[7, None])
    for sample, said in zip(samples, ["yes", "no"]):
        sample.prompt = [{"role": "user", "content": "hi"}]
        sample.completion = [{"role": "assistant", "content": said}]
    state = types.SimpleNamespace(global_step=12, log_history=[{"loss": 1.0}], lock=threading.Lock())
    results, _ = judged([named, all_of_it, positional], samples, state=state, isolation=isolation)
    np.testing.assert_array_equal(results.values, [[1, 1, 7], [0, 0, np.nan]])
    assert results.extras["keys"] == [["completion_ids", "number", "prompts", "solution"]] * 2
    assert results.extras["number"] == [7, None]
    assert results.metrics == {"step": [12.0]}
    assert not results.masked.any()  # None is an opinion too


def test_missing_column_is_a_sentence():
    with pytest.raises(ValueError, match=r"Reward scaled needs the argument 'factor'.*it has answer beside"):
        judged([scaled], group("a", answer=["x"]))


def test_order_of_samples_whatever_the_order_of_work():
    def slow_first(completions, log_metric, log_extra, delay):
        import time

        time.sleep(delay[0])
        log_metric("first", float(completions[0]))
        log_extra("text", completions)
        return [float(text) for text in completions]

    groups = [group(str(2 * i), str(2 * i + 1), delay=[0.2 - 0.03 * i] * 2) for i in range(6)]
    results, _ = judged([slow_first], *groups, workers=4)
    assert results.values[:, 0].tolist() == list(range(12))
    assert results.metrics == {"first": [0, 2, 4, 6, 8, 10]}
    assert results.extras == {"text": [str(i) for i in range(12)]}
    assert results.seconds["slow_first"] > 0.6


FAULTS = {"raise": "error", "hang": "timeout", "nan": "invalid", "exit": "crash", "segfault": "crash"}
FAULTS |= {"text": "invalid", "leave": "error"}


def test_faults_cost_their_own_sample_only():
    """Raises on 5 % of samples, hangs on 2 %, NaN on 1 %, exits, segfaults: the rest is exact and the guilty are named."""
    completions = ["x" * (i % 13) for i in range(200)]
    guilty = {5 + 20 * i: "raise" for i in range(10)} | {17: "hang", 80: "hang", 111: "hang", 160: "hang"}
    guilty |= {33: "nan", 77: "nan", 99: "exit", 150: "segfault", 20: "text", 199: "leave"}
    for number, act in guilty.items():
        completions[number] = act
    groups = [group(*completions[start : start + 8]) for start in range(0, 200, 8)]
    results, _ = judged([acting, length], *groups, timeout=1.0, workers=4)
    assert {failure.sample: failure.kind for failure in results.failures} == {
        n: FAULTS[act] for n, act in guilty.items()
    }
    assert {failure.reward for failure in results.failures} == {"acting"}
    assert set(np.flatnonzero(results.masked)) == set(guilty)
    valid = ~results.masked
    lengths = np.array([float(len(text)) for text in completions])
    np.testing.assert_array_equal(results.values[valid, 0], lengths[valid])
    np.testing.assert_array_equal(results.values[:, 1], lengths)
    assert np.isnan(results.values[~valid, 0]).all()
    by_sample = {failure.sample: failure.message for failure in results.failures}
    assert "ValueError: as asked" in by_sample[5]
    assert "faulty.py" in by_sample[5]
    assert by_sample[17] == "it ran longer than 1 s."
    assert by_sample[99] == "its process ended with exit code 3."
    assert by_sample[150] == "its process ended with signal SIGSEGV."
    assert results.failure_counts() == {"error": 11, "timeout": 4, "invalid": 3, "crash": 2}


def test_wrong_length_costs_its_call():
    def short(completions):
        return [1.0] * (len(completions) - (completions[0] == "short"))

    results, _ = judged([short], group("a", "b"), group("short", "b", "c"))
    assert [(f.sample, f.kind) for f in results.failures] == [(2, "invalid"), (3, "invalid"), (4, "invalid")]
    assert results.failures[0].message == "it returned 2 values for 3 samples."
    assert results.masked.tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("isolation", ["auto", "in_process"])
def test_a_function_says_which_of_its_samples_it_could_not_judge(isolation):
    def unsure(completions, log_failure):
        log_failure(1, "nobody answered", "timeout")
        return [1.0] * len(completions)

    def wrong(completions, log_failure):
        log_failure(9, "whoever that is")
        return [2.0] * len(completions)

    results, _ = judged([unsure], group("a", "b", "c"), isolation=isolation)
    assert str(results.failures[0]) == "Reward unsure, sample 1 (timeout): nobody answered"
    assert results.masked.tolist() == [False, True, False]
    results, _ = judged([wrong], group("a", "b"), isolation=isolation)
    assert "log_failure(9, ..., 'error') is not about one of the 1 samples" in results.failures[0].message


def test_policy_default():
    results, _ = judged([acting], group("abc", "raise"), on_error="default", default_value=-1.0)
    assert results.values[:, 0].tolist() == [3, -1]
    assert not results.masked.any()
    assert len(results.failures) == 1


def test_policy_fail():
    with pytest.raises(RewardError, match=r"Reward acting, sample 1 \(error\): ValueError: as asked"):
        judged([acting], group("abc", "raise"), on_error="fail")


def test_too_many_failures_end_the_run():
    samples = group(*["raise"] * 5, "a", "b", "c")
    with pytest.raises(RewardError, match=r"failed for 5 of the 8 samples .*5 error.*\n.*sample 0 \(error\)"):
        judged([acting], samples, stop_above=0.5)
    results, _ = judged([acting], samples, stop_above=0.7)
    assert results.masked.sum() == 5


def test_retries(tmp_path):
    def flaky(completions, path):
        with open(path[0], "a") as file:
            file.write("x")
        if os.path.getsize(path[0]) < 3:
            raise OSError("not yet")
        return [1.0]

    results, _ = judged([flaky], group("a", path=[str(tmp_path / "one")]), retries=1)
    assert results.failures[0].message.startswith("OSError: not yet")
    results, _ = judged([flaky], group("a", path=[str(tmp_path / "two")]), retries=2)
    assert results.values.tolist() == [[1.0]]


def test_all_at_once():
    def rank(completions):
        order = sorted(completions)
        return [order.index(text) for text in completions]

    results, _ = judged([rank], group("d", "a"), group("c", "b"), reward_batching="all")
    assert results.values[:, 0].tolist() == [3, 0, 2, 1]
    results, _ = judged([acting], group("d", "raise"), group("c"), reward_batching="all")
    assert [failure.kind for failure in results.failures] == ["error"] * 3  # it compares: no sample has a value alone


def test_by_sample():
    def sizes(completions):
        return [len(completions)] * len(completions)

    for batching, size in (("sample", 1), ("group", 3)):
        results, _ = judged([sizes], group("a", "b", "c"), group("d", "e", "f"), reward_batching=batching)
        assert results.values[:, 0].tolist() == [size] * 6


def test_cache(tmp_path):
    def counted(completions, path, log_extra):
        with open(path[0], "a") as file:
            file.write("".join(completions))
        log_extra("twice", [text * 2 for text in completions])
        return [{"x": None}.get(text, len(text)) for text in completions]

    path = str(tmp_path / "calls")
    options = RewardOptions(cache=True, cache_size=3, workers=1)
    with RewardSet([counted], options=options) as made:
        for texts in (["a", "bb", "x"], ["bb", "x", "a"], ["dddd", "a"], ["bb"]):
            with made.open() as round:
                round.add(group(*texts, path=[path] * len(texts)))
                results = round.finish()
            expected = [np.nan if text == "x" else len(text) for text in texts]
            np.testing.assert_array_equal(results.values[:, 0], expected)
            assert results.extras["twice"] == [text * 2 for text in texts]
        assert Path(path).read_text() == "abbx" + "dddd" + "bb"  # bb was the oldest of three
        assert made._runner.cache.hits == 4


def test_async_calls_share_a_worker():
    """None comes back before all of them are there."""

    async def meeting(completions):
        import asyncio
        import sys

        sys.here = getattr(sys, "here", 0) + 1
        while sys.here < 16:
            await asyncio.sleep(0.01)
        return [float(sys.here)]

    results, _ = judged([meeting], *[group("abc") for _ in range(16)], workers=1, concurrency=16, timeout=60)
    assert results.values.tolist() == [[16.0]] * 16


@pytest.mark.parametrize("isolation", ["process", "in_process"])
def test_async_time_limit(isolation):
    async def hanging(completions):
        import asyncio

        if "hang" in completions:
            await asyncio.sleep(60)
        return [1.0] * len(completions)

    groups = [group("a", "b"), group("a", "hang"), group("c", "d")]
    results, _ = judged([hanging], *groups, workers=1, timeout=1.0, isolation=isolation)
    assert [(f.sample, f.kind) for f in results.failures] == [(3, "timeout")]
    assert np.nansum(results.values) == 5


def test_async_neighbours_of_a_crash_are_not_lost():
    async def exiting(completions):
        import asyncio
        import os
        import time

        await asyncio.sleep(0.2)
        if "exit" in completions:
            os._exit(1)
        if "block" in completions:
            time.sleep(60)
        return [1.0] * len(completions)

    groups = [group("a", "b"), group("a", "exit"), group("c"), group("block"), group("d")]
    results, _ = judged([exiting], *groups, workers=1, timeout=1.0)
    assert {f.sample: f.kind for f in results.failures} == {3: "crash", 5: "timeout"}
    assert np.nansum(results.values) == 5


def test_work_overlaps_with_the_caller(tmp_path):
    """Four calls come back when the caller, who has not waited for them, has seen all four begin."""

    def second(completions, folder):
        import time
        import uuid
        from pathlib import Path

        (Path(folder[0]) / f"{uuid.uuid4()}.begun").touch()
        while not (Path(folder[0]) / "go").exists():
            time.sleep(0.01)
        return [1.0] * len(completions)

    with RewardSet([second], options=RewardOptions(workers=4, timeout=60)) as made, made.open() as round:
        for _ in range(4):
            round.add(group("a", folder=[str(tmp_path)]))
        eventually(lambda: len(list(tmp_path.glob("*.begun"))) == 4, 60)
        (tmp_path / "go").touch()
        assert round.finish().values.tolist() == [[1.0]] * 4


def test_a_round_that_is_given_up_frees_its_workers():
    with RewardSet([acting], options=RewardOptions(workers=1, timeout=30)) as made:
        with made.open() as round:
            round.add(group("hang"))
            time.sleep(0.5)
        started = time.perf_counter()
        with made.open() as round:
            round.add(group("abc"))
            assert round.finish().values.tolist() == [[3.0]]
        assert time.perf_counter() - started < 25


def test_empty_round_and_rounds_in_a_row():
    with RewardSet([length], options=RewardOptions(workers=1)) as made:
        with made.open() as round:
            assert round.finish().values.shape == (0, 1)
        for _ in range(3):
            with made.open() as round:
                round.add([])
                round.add(group("a", "bb"))
                assert round.finish().values.tolist() == [[1.0], [2.0]]


@dataclass
class State:
    global_step: int = 3
    log_history: list = field(default_factory=lambda: [{"loss": 0.5}])
    callbacks: dict = field(default_factory=lambda: {"lock": threading.Lock()})


def test_trainer_state_travels_without_what_is_not_data():
    def look(completions, trainer_state):
        assert not hasattr(trainer_state, "callbacks")
        return [trainer_state.global_step + trainer_state.log_history[0]["loss"]]

    results, _ = judged([look], group("a"), state=State())
    assert results.values.tolist() == [[3.5]], results.failures


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"timeout": 0}, "`timeout` is 0"),
        ({"retries": -1}, "`retries` is -1"),
        ({"on_error": "skip"}, "`on_error` is 'skip'; it must be one of 'mask', 'default', 'fail'"),
        ({"isolation": "thread"}, "`isolation` is 'thread'"),
        ({"reward_batching": "row"}, "`reward_batching` is 'row'"),
        ({"stop_above": 2}, "`stop_above` is 2"),
    ],
)
def test_options_are_checked(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        RewardOptions(**change)


def test_counts_are_checked():
    with pytest.raises(ValueError, match="2 reward weights for 1 rewards"):
        RewardSet([length], weights=[1, 2])
    with pytest.raises(ValueError, match="no reward"):
        RewardSet([])
    with pytest.raises(TypeError, match="not 3"):
        RewardSet([3])
