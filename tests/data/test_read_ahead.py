"""Batches made early by a thread are the same batches, and what goes wrong there is raised here."""

from __future__ import annotations

import threading
import time

import pytest

from posttrain.data.loader import read_ahead


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("posttrain-batches")]


def test_same_batches_in_the_same_order():
    assert list(read_ahead(iter(range(100)))) == list(range(100))
    assert threads() == []


def test_at_most_depth_and_one_are_made_early():
    made = []

    def batches():
        for number in range(10):
            made.append(number)
            yield number

    ahead = read_ahead(batches(), depth=2)
    assert next(ahead) == 0
    time.sleep(0.3)
    assert len(made) <= 4  # the one in use, two in the queue, one in the thread's hands
    ahead.close()
    assert threads() == []


def test_an_error_of_the_thread_is_raised_at_its_place():
    def batches():
        yield 1
        raise ValueError("row 7 is broken")

    ahead = read_ahead(batches())
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="row 7 is broken"):
        next(ahead)
    assert threads() == []
