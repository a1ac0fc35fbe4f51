"""Tools: whatever a model asks and whatever a tool does ends in a text, in time."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import numpy as np
import pytest

from posttrain.rollout.episodes import call_threads
from posttrain.rollout.episodes.call_threads import CallThreads
from posttrain.rollout.episodes.tools import Toolbox
from tests.waiting import eventually


def run(box, name, arguments):
    """Make a call and wait for it."""
    running = box.start(name, arguments)
    while not running.is_over:
        running.pending.over.wait(0.01)
    return running.finished()


def double(number: int) -> int:
    """
    Twice a number.

    Args:
        number: The number.
    """
    return 2 * number


async def slow_echo(text: str, seconds: float = 0.0) -> str:
    """
    The same text, later.

    Args:
        text: What is said.
        seconds: How much later.
    """
    await asyncio.sleep(seconds)
    return text


def anything(value: str) -> object:
    """
    Something.

    Args:
        value: Which thing.
    """
    return THINGS[value]()


def boom() -> None:
    raise ValueError("no luck \ud800")


def leave() -> None:
    raise SystemExit(3)


RING: list = []
RING.append(RING)
THINGS = {
    "none": lambda: None, "dict": lambda: {"a": [1, "ä"]}, "array": lambda: {"x": np.arange(2)}, "text": lambda: "as it is",
    "float": lambda: 1.5, "half": lambda: "a\ud800b", "object": lambda: {"o": complex(1, 2)}, "boom": boom, "leave": leave,
    "ring": lambda: RING, "big": lambda: "x" * 10_000_000, "hang": lambda: time.sleep(3), "block": lambda: time.sleep(1.5),
}  # fmt: skip


async def blocks(value: str) -> str:
    """
    An async function that does what it should not.

    Args:
        value: Which thing.
    """
    return str(THINGS[value]())


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        ("none", "null"), ("dict", '{"a": [1, "ä"]}'), ("array", '{"x": [0, 1]}'), ("text", "as it is"), ("float", "1.5"),
        ("half", "a?b"), ("object", '{"o": "(1+2j)"}'),
    ],
)  # fmt: skip
def test_results_become_text(thing, text):
    call = run(Toolbox([anything]), "anything", {"value": thing})
    assert (call.result, call.error) == (text, None)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("nothing", {}, "There is no tool 'nothing'. Known are: anything, double."),
        (["double"], {}, "There is no tool"),
        ("double", [3], "The arguments of double must be an object, not list."),
        ("double", None, "must be an object, not NoneType"),
        ("double", {"nummer": 3}, "Wrong arguments for double: missing a required argument: 'number'."),
        ("double", {"number": 3, "x": 1}, "unexpected keyword argument 'x'"),
        ("double", {"number": None}, "TypeError: unsupported operand"),
        ("anything", {"value": "boom"}, "ValueError: no luck ?"),
        ("anything", {"value": "leave"}, "SystemExit: 3"),
        ("anything", {"value": "ring"}, "ValueError: Circular reference"),
    ],
)
def test_mistakes_become_text(name, arguments, told):
    call = run(Toolbox([anything, double]), name, arguments)
    assert told in call.error
    assert json.loads(call.result) == {"error": call.error}
    call.arguments.encode()


def test_long_results_are_cut_with_a_note():
    call = run(Toolbox([anything], max_result=100), "anything", {"value": "big"})
    assert call.result == "x" * 100 + "\n[cut: 10,000,000 characters, of which the first 100 are shown]"


def test_async_tools_run_side_by_side():
    box = Toolbox([slow_echo], parallel=True)
    began = time.monotonic()
    running = [box.start("slow_echo", {"text": str(i), "seconds": 1}) for i in range(20)]
    eventually(lambda: all(one.is_over for one in running))
    assert time.monotonic() - began < 15  # one after the other they would take 20
    assert [one.finished().result for one in running] == [str(i) for i in range(20)]


def test_late_calls_are_given_up_and_others_go_on():
    box = Toolbox([anything, double, slow_echo], CallThreads(threads=2), timeout=0.1)
    hanging = [box.start("anything", {"value": "hang"}) for _ in range(4)]
    began = time.monotonic()
    eventually(lambda: all(one.is_over for one in hanging))
    assert run(box, "double", {"number": 4}).result == "8"  # although all threads that there were hang
    assert run(box, "slow_echo", {"text": "x", "seconds": 60}).error == "It took longer than 0.1 s."
    assert time.monotonic() - began < 30
    assert {one.finished().error for one in hanging} == {"It took longer than 0.1 s."}
    assert box.threads.abandoned == 4


def test_a_blocked_event_loop_is_replaced():
    box = Toolbox([blocks, slow_echo], timeout=0.1)
    assert run(box, "blocks", {"value": "block"}).error == "It took longer than 0.1 s."
    assert run(box, "slow_echo", {"text": "x"}).result == "x"


def test_too_many_hanging_calls_stop_the_run():
    box = Toolbox([anything], CallThreads(most_abandoned=2), timeout=0.02)
    run(box, "anything", {"value": "hang"})
    run(box, "anything", {"value": "hang"})
    with pytest.raises(RuntimeError, match="3 calls of tools or environments hang"):
        run(box, "anything", {"value": "hang"})


def test_threads_are_used_again_and_end(monkeypatch):
    monkeypatch.setattr(call_threads, "IDLE_SECONDS", 0.1)
    before = set(threading.enumerate())
    box = Toolbox([double])
    for i in range(300):
        assert run(box, "double", {"number": i}).result == str(2 * i)
    assert len(set(threading.enumerate()) - before) <= 2
    time.sleep(0.4)
    assert not set(threading.enumerate()) - before
    assert run(box, "double", {"number": 4}).result == "8"


def test_schemas_come_from_docstrings():
    (schema,) = Toolbox([double]).schemas
    assert schema["function"]["name"] == "double"
    assert schema["function"]["description"] == "Twice a number."
    assert schema["function"]["parameters"]["required"] == ["number"]


def bare(x: int) -> int:
    return x


def untyped(x):
    """
    Something.

    Args:
        x: A thing.
    """


def undescribed(x: int, y: int) -> int:
    """
    Something.

    Args:
        x: A thing.
    """


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ([bare], "Tool bare cannot be described to the model: .*docstring"),
        ([untyped], "Tool untyped cannot be described to the model: .* x"),
        ([undescribed], "Tool undescribed cannot be described to the model: .*'y'"),
        ([double, double], "two tools called 'double'"),
        ([lambda: 1], "a function with a name"),
        ([3], "a function with a name"),
    ],
)
def test_tools_without_a_description_are_refused(tools, told):
    with pytest.raises((ValueError, TypeError), match=told):
        Toolbox(tools)
