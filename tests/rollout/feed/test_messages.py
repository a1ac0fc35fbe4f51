"""All that a worker may say to the feed: what is malformed, too large or not what was asked for is refused, and written again."""

from __future__ import annotations

import os
import queue
import random
from dataclasses import astuple

import numpy as np
import pytest

from posttrain.core.sample import ImageSpan
from posttrain.core.trees import tree_to_bytes
from posttrain.rewards.runtime.frames import HEADER
from posttrain.rollout.engines.protocol import SamplingParams
from posttrain.rollout.feed import processes, remote
from posttrain.rollout.feed.feed import Feed
from posttrain.rollout.feed.group import rollouts_tree
from posttrain.rollout.feed.pacing import Lead, Pace
from posttrain.rollout.feed.remote import MESSAGES, RemoteWorkers
from posttrain.rollout.feed.worker import FINISH, Writing
from posttrain.rollout.rollout import POLICY_VERSIONS
from tests import tiny
from tests.rollout.feed.test_feed import ROW, rollout
from tests.waiting import eventually

GENERATIONS = 2


class Scripted(RemoteWorkers):
    """Workers that say what a test puts into their mouths; a new one begins where one was ended."""

    def _launch(self, child, plan):
        child.handle, child.replies = queue.Queue(), queue.Queue()

    def _receive(self, child):
        said = child.handle.get()
        if isinstance(said, Exception):
            raise said
        return said

    def _reply(self, child, answer):
        child.replies.put(answer)

    def _kill(self, child):
        child.ended_with = "its end"


class Taken:
    """In the place of the judge."""

    def __init__(self):
        self.groups = []

    def add(self, work, rollouts, seconds):
        self.groups.append((work, rollouts))

    def poll(self):
        return False


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(remote, "DEATHS_IN_A_ROW", 10**6)
    feed = Feed(Pace(2), Lead(1.0, 4, adapts=False), lambda n: (n, 3), lambda row: ROW)
    params = SamplingParams(8, stop_ids=(), seed=0)
    writing = Writing(lambda work: ROW, params, None, lambda request: "policy", GENERATIONS)
    made = Scripted(["cpu"], tiny.causal_lm(), None, writing, feed, Taken(), 1, in_flight=FINISH, keeps_cache=False)
    made.start()
    yield made
    feed.stop()
    for child in made.children:
        child.handle.put(None)
    made.stop(5.0)


def ask(workers, **message):
    child = workers.children[0]
    child.handle.put(tree_to_bytes(message))
    return child.replies.get(timeout=10)


def ended_by(workers, said):
    """Whether the worker was ended for it, and the run was not."""
    child = workers.children[0]
    before, deaths = child.handle, child.deaths
    before.put(said)
    eventually(lambda: child.handle is not before and child.deaths == deaths + 1, 10)
    return not workers.feed.stopped and workers.feed.ledger.held_by(child.name) == []


def group(work, **changes):
    """What a worker that does as it should makes of it."""
    rollouts = [rollout(work[3], sample, work[2]) for sample in range(GENERATIONS)]
    return {"call": "deliver", "work": work, "seconds": 0.5, **rollouts_tree(rollouts), **changes}


def begun(workers):
    ask(workers, call="pull", label=0, most=9)
    work = workers.children[0].issued[0]
    return [*astuple(work)]


WRONG = {int: "x", str: 7, bool: "yes", list: {}, dict: 3, (int, float): "soon"}


def test_every_message_is_refused_where_it_is_malformed(workers, caplog):
    for call, wanted in MESSAGES.items():
        right = {name: next(v for v in (0, "", True, [], {}) if isinstance(v, kind)) for name, kind in wanted.items()}
        wrong = [{"call": call, **right, "more": 1}]
        wrong += [
            {"call": call, **{name: value for name, value in right.items() if name != left_out}} for left_out in right
        ]
        wrong += [{"call": call, **right, name: WRONG[kind]} for name, kind in wanted.items()]
        for message in wrong:
            assert ended_by(workers, tree_to_bytes(message)), message
    assert "what no worker says" in caplog.text
    assert workers.judge.groups == []


@pytest.mark.parametrize(
    "said",
    [b"", b"\0" * 8, b"x" * 100, tree_to_bytes([1]), tree_to_bytes({"call": "__init__"}), ValueError("too long")],
)
def test_what_is_no_message_ends_who_sent_it(workers, said):
    begun(workers)
    assert ended_by(workers, said)
    begun(workers)
    assert [workers.feed.ledger.live[number].attempt for number in range(4)] == [2] * 4


def test_a_message_that_is_too_large_is_not_read():
    read, write = os.pipe()
    os.write(write, HEADER.pack(remote.LARGEST_MESSAGE + 1))

    class Handle:
        class socket:
            fileno = staticmethod(lambda: read)

    child = remote.Child(None, "cpu", Handle)
    with pytest.raises(ValueError, match="bytes was announced; at most"):
        processes.WorkerProcesses._receive(None, child)


def test_fuzzed_answers_are_refused_and_the_group_is_issued_again(workers, caplog):
    """Gaps in versions, labels that the worker did not have, too many tokens, images of no row, work of others."""
    rng = random.Random(3)

    def versions(values):
        def change(work):
            made = [rollout(work[3], sample, work[2]) for sample in range(GENERATIONS)]
            for one in made:
                column = np.full(len(one.sample), float(work[2]), np.float32)
                column[rng.randrange(4, len(column))] = values(work)
                one.sample.per_token[POLICY_VERSIONS] = column
            return group(work, **rollouts_tree(made))

        return change

    def tokens(count, value=1):
        def change(work):
            made = [rollout(work[3], sample, work[2]) for sample in range(GENERATIONS)]
            columns = {name: np.zeros(count, np.float32) for name in made[0].sample.per_token}
            made[0].sample = made[0].sample.append(np.full(count, value), trained=True, **columns)
            return group(work, **rollouts_tree(made))

        return change

    def showing(span):
        def change(work):
            made = [rollout(work[3], sample, work[2]) for sample in range(GENERATIONS)]
            made[1].sample.images = (span,)
            return group(work, **rollouts_tree(made))

        return change

    def labelled(label):
        return lambda work: group(work, **rollouts_tree([rollout(work[3], s, label) for s in range(GENERATIONS)]))

    other = lambda place: lambda work: group([n + rng.randint(1, 9) * (i == place) for i, n in enumerate(work)])  # noqa: E731
    kinds = [
        versions(lambda work: float("nan")), versions(lambda work: work[2] + 1), versions(lambda work: work[2] - 1),
        showing(ImageSpan(0, 2, bytes(16), (4, 4), (1, 1))), showing(ImageSpan(0, 99, bytes(16), (4, 4), (1, 1))),
        tokens(9), tokens(1, value=10**6), tokens(1, value=-1), labelled(3), labelled(-1),
        lambda work: group(work, **rollouts_tree([rollout(work[3], 0, work[2])])),
        lambda work: group(work, rollouts=[{"prompt": 1}] * GENERATIONS),
        lambda work: group(work, samples={}), lambda work: group(work) | {"work": []},
        lambda work: group(work) | {"work": ["a"] * 5},
        *(other(place) for place in range(5)),
    ]  # fmt: skip
    for number in range(2 * len(kinds)):
        work = begun(workers)
        assert ended_by(workers, tree_to_bytes(kinds[number % len(kinds)](work))), number
        assert workers.judge.groups == []
    work = begun(workers)
    ask(workers, **group(work))
    assert [done.number for done, _ in workers.judge.groups] == [0]
    assert ended_by(workers, tree_to_bytes(group(work))), "handed in twice"
    assert len(workers.judge.groups) == 1
