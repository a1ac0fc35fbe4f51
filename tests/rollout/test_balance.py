"""Who gets the next prompt: rules that always hold, and the time that a table of lengths takes in a model of four servers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.rollout.engines.protocol import Prompt
from posttrain.rollout.engines.vllm.balance import Balancer
from posttrain.rollout.engines.vllm.server_engine import LOOK_AHEAD

NAMES = ("a", "b", "c", "d")
RATES = {"a": 1000.0, "b": 1000.0, "c": 1000.0, "d": 500.0}
LIMIT = 2048


class Servers:
    """A model: a server writes so many tokens a second, at most `slots` requests at once. `shared`: by all that run there, as where
    arithmetic is the limit; else each has its part, as where a step takes as long for one as for all."""

    def __init__(self, rates, slots, shared=True):
        self.rates, self.slots, self.balancer, self.now = rates, slots, Balancer(), 0.0
        self.each = lambda name, jobs: rates[name] / (len(jobs) if shared else slots)

    def seconds(self, prompts, lengths):
        """Until all are written."""
        waiting, began = [*zip(prompts, map(float, lengths))], self.now
        running = {name: [] for name in self.rates}
        while waiting or any(running.values()):
            waiting = self._placed(waiting, running)
            self._advance(running)
        return self.now - began

    def _placed(self, waiting, running):
        for one in waiting[:LOOK_AHEAD]:
            free = [name for name, jobs in running.items() if len(jobs) < self.slots]
            placed = self.balancer.place(one[0], LIMIT, free, [*self.rates], len(waiting), self.now) if free else None
            if placed is not None:
                running[placed.server].append([one[1], one[1], placed])
                waiting = [other for other in waiting if other is not one]
        return waiting

    def _advance(self, running):
        """To the next end of a completion."""
        ends = {n: min(left for left, *_ in jobs) / self.each(n, jobs) for n, jobs in running.items() if jobs}
        passed = min(ends.values())
        self.now += passed
        for name, jobs in running.items():
            done = passed * self.each(name, jobs) if jobs else 0.0
            for job in jobs:
                job[0] -= done
            for job in [job for job in jobs if job[0] <= 1e-6]:
                self.balancer.finished(job[2], int(job[1]), self.now)
            running[name] = [job for job in jobs if job[0] > 1e-6]


def table(rng, groups=192, samples=4):
    """Prompts, and lengths that differ among prompts and among their samples."""
    usual = rng.lognormal(5.3, 0.5, (groups, 1)) * rng.lognormal(0, 0.4, (groups, samples))
    lengths = np.clip(usual, 1, LIMIT).astype(int)
    first = int(rng.integers(1 << 40))
    prompts = [
        Prompt(np.arange(20), key=first + group, sample=sample) for group in range(groups) for sample in range(samples)
    ]
    return prompts, lengths.ravel()


def longest_first(lengths, rates):
    """What can be done by somebody who knows all lengths."""
    ends = np.zeros(len(rates))
    for length in sorted(lengths, reverse=True):
        place = (ends + length / rates).argmin()
        ends[place] += length / rates[place]
    return ends.max()


@pytest.mark.parametrize("tables", [6, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("shared", "mean", "nearly_all"), [(True, 1.05, 1.10), (False, 1.20, 1.35)])
def test_four_servers_of_which_one_is_half_as_fast(tables, shared, mean, nearly_all):
    """Nobody says how fast they are, nor how long anything will be. Where a request is not written faster when it is alone, what is
    left in the end is one long completion, and that it is long is known too late."""
    found, rates, slots = [], np.array([*RATES.values()]), 8
    for seed in range(tables):
        servers, (prompts, lengths) = Servers(RATES, slots, shared), table(np.random.default_rng(seed))
        best = longest_first(lengths, rates if shared else np.repeat(rates / slots, slots))
        found.append(servers.seconds(prompts, lengths) / best)
    assert np.mean(found) < mean, np.mean(found)
    assert np.mean(np.array(found) < nearly_all) >= 0.99, sorted(found)[-5:]


def test_turns_of_episodes_find_their_cache():
    """Above 90 % where nobody is overloaded; new weights have none."""
    rng, servers = np.random.default_rng(0), Servers(dict.fromkeys(NAMES, 1000.0), slots=64)
    homes, hits = {}, []
    place = servers.balancer.place

    def watched(prompt, *more):
        placed = place(prompt, *more)
        if placed is not None and prompt.first_token:
            hits.append(homes[prompt.key, prompt.sample] == placed.server)
        if placed is not None:
            homes[prompt.key, prompt.sample] = placed.server
        return placed

    servers.balancer.place = watched
    prompts, lengths = table(rng)
    for turn in range(4):
        turns = [Prompt(one.ids, one.key, one.sample, first_token=100 * turn) for one in prompts]
        order = rng.permutation(len(turns))
        servers.seconds([turns[i] for i in order] if turn else turns, lengths[order] if turn else lengths)
    assert np.mean(hits) > 0.9
    servers.balancer.forget()
    assert servers.balancer._homes.get((prompts[0].key, prompts[0].sample)) is None


UP = st.sampled_from([set(NAMES), {"a", "b"}, {"b", "c", "d"}, {"d"}])
MOVE = st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 3), st.integers(0, 2), UP, st.integers(0, 300))


@settings(max_examples=60, deadline=None)
@given(st.lists(MOVE, max_size=40))
def test_work_is_counted_where_it_is_and_goes_nowhere_else(steps):
    balancer, flying, now = Balancer(), [], 0.0
    for ends, key, sample, turn, up, number in steps:
        now += number / 100
        if ends and flying:
            balancer.finished(flying.pop(number % len(flying)), number if number % 3 else None, now)
            continue
        free = [name for name in sorted(up) if number % 7 or name != "a"]
        prompt = Prompt(np.arange(1 + key), key=key, sample=sample, first_token=50 * turn)
        placed = balancer.place(prompt, 1 + number, free, sorted(up), 1 + number % 9, now)
        if placed is None:
            assert set(free) != up  # where all have room nobody waits
            continue
        assert placed.server in free
        flying.append(placed)
    for name, load in balancer.loads.items():
        here = [one for one in flying if one.server == name]
        assert load.in_flight == len(here)
        assert load.work == pytest.approx(sum(one.cost for one in here))


def test_a_group_goes_to_one_server_and_the_next_to_another():
    balancer = Balancer()
    servers = [
        [
            balancer.place(Prompt([1, 2], key=key, sample=sample), 100, NAMES, NAMES, 1, 0.0).server
            for sample in range(8)
        ]
        for key in range(4)
    ]
    assert [len(set(group)) for group in servers] == [1] * 4
    assert {group[0] for group in servers} == set(NAMES)


def test_prompts_without_keys_are_no_group():
    balancer = Balancer()
    for prompts in ([Prompt([i]) for i in range(4)], [Prompt([7])] * 4):
        assert len({balancer.place(one, 100, NAMES, NAMES, 1, 0.0).server for one in prompts}) == 4


def test_a_turn_leaves_a_server_that_is_overloaded():
    balancer = Balancer()
    first = balancer.place(Prompt([1], key=0), 100, NAMES, NAMES, 1, 0.0).server
    for i in range(8):
        balancer.place(Prompt([i], key=1 + i), 100, [first], [first], 1, 0.0)
    assert balancer.place(Prompt([1, 2], key=0, first_token=9), 100, NAMES, NAMES, 1, 0.0).server != first


def test_a_server_that_was_hardly_asked_is_not_taken_for_a_slow_one():
    balancer = Balancer()
    busy = [balancer.place(Prompt([i], key=i), 100, ["a"], ["a"], 1, 0.0) for i in range(40)]
    busy.append(balancer.place(Prompt([99], key=99), 100, ["b"], ["b"], 1, 0.0))
    for placed in busy:
        balancer.finished(placed, 50, 5.0)
    assert balancer._speeds(["a", "b"]) == {"a": 10.0, "b": 10.0}


def test_a_slow_server_is_used_while_much_is_left_and_is_not_given_the_last():
    balancer = Balancer()
    for name, length in (("a", 400), ("b", 100)):
        balancer.finished(balancer.place(Prompt([1], key=1), 400, [name], [name], 1, 0.0), length, 4.0)
    for i in range(4):
        balancer.place(Prompt([i], key=10 + i), 400, ["a"], ["a", "b"], 99, 4.0)
    asked = (Prompt([9], key=20), 400, ["b"], ["a", "b"])
    assert balancer.place(*asked, 1, 4.0) is None
    assert balancer.place(*asked, 99, 4.0).server == "b"
