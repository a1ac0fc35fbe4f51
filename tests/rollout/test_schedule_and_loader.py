"""The arithmetic of groups and windows, and the loader that makes rollouts look like a dataset."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.batch import SHARED, passes_of
from posttrain.core.sample import ImageSpan, Sample
from posttrain.data.collate import Collator
from posttrain.rollout.loader import RolloutLoader, pack_samples, unpack_samples
from posttrain.rollout.schedule import Schedule
from posttrain.rollout.source import Prompts, PromptStream


def schedule(**changes):
    return Schedule.of(**{"num_generations": 4, "batch_size": 8, "world_size": 1, "accumulation": 2, **changes})


# ---- arithmetic -----------------------------------------------------------------------------------------------------------


def test_by_default_a_generation_feeds_one_optimizer_step():
    plan = schedule()
    assert (plan.samples, plan.prompts, plan.window, plan.is_on_policy) == (16, 4, 2, True)


def test_generation_batch_size_and_steps_per_generation_say_the_same():
    assert schedule(generation_batch_size=64) == schedule(steps_per_generation=8)
    assert not schedule(steps_per_generation=8).is_on_policy
    assert not schedule(num_iterations=2).is_on_policy
    assert schedule(steps_per_generation=1).is_on_policy  # two generations, then one step


def test_the_sentence_has_every_number():
    told = schedule(world_size=2, num_iterations=3, steps_per_generation=4).sentence(100)
    assert told == (
        "16 prompts x 4 completions = 64 samples a generation (up to 6,400 tokens) feed 6 optimizer steps, in 3 passes; an "
        "optimizer step sees 32 samples (8 x 2 processes x 2 micro-batches)"
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"generation_batch_size": 64, "steps_per_generation": 8}, "each follows from the other"),
        ({"generation_batch_size": 20}, "a multiple of the 8 samples"),
        ({"num_generations": 5}, "groups would be incomplete"),
        ({"steps_per_generation": 0}, "at least 1"),
    ],
)
def test_numbers_that_do_not_divide_are_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        schedule(**changes)


# ---- prompts --------------------------------------------------------------------------------------------------------------


def test_every_epoch_has_every_row_once_in_an_order_of_its_own():
    stream = PromptStream(10, seed=3, shuffle=True)
    epochs = [[stream.row(epoch * 10 + place) for place in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] == [PromptStream(10, 3, True).row(place) for place in range(10)]
    assert [PromptStream(10, 3, False).row(place) for place in range(12)] == [*range(10), 0, 1]


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_the_processes_ask_for_each_sample_of_a_generation_once(world, batch, steps, group):
    plan = Schedule.of(
        num_generations=group, batch_size=batch * group, world_size=world, accumulation=1, steps_per_generation=steps
    )
    stream = PromptStream(7, 0, True)
    asked = []
    for rank in range(world):
        prompts = Prompts(stream, plan, rank)
        prompts.take_window()
        asked += prompts.take_window()
    expected = itertools.product(range(plan.prompts, 2 * plan.prompts), range(group))
    assert sorted((request.number, request.sample) for request in asked) == list(expected)
    assert all(request.row == stream.row(request.number) for request in asked)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_an_optimizer_step_has_the_same_samples_whatever_the_number_of_processes(world, batch, accumulation, steps):
    def step_samples(processes, size):
        plan = Schedule.of(
            num_generations=1, batch_size=size, world_size=processes, accumulation=accumulation,
            steps_per_generation=accumulation * steps,
        )  # fmt: skip
        shares = [plan.places(rank) for rank in range(processes)]
        a_step = size * accumulation
        return [sorted(p for share in shares for p in share[i * a_step : (i + 1) * a_step]) for i in range(steps)]

    assert step_samples(world, batch) == step_samples(1, batch * world)


def test_a_group_may_lie_on_two_processes():
    plan = Schedule.of(num_generations=4, batch_size=2, world_size=2, accumulation=1)
    asked = [Prompts(PromptStream(5, 0, True), plan, rank).take_window() for rank in range(2)]
    assert [[(r.number, r.sample) for r in mine] for mine in asked] == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]


def test_groups_in_the_place_of_others_are_dealt_to_the_processes_that_miss_them():
    plan = Schedule.of(num_generations=2, batch_size=4, world_size=3, accumulation=1)
    loaders = [Prompts(PromptStream(50, 0, True), plan, rank) for rank in range(3)]
    for loader in loaders:
        loader.take_window()
    asked = [[r.number for r in loader.take_groups([2, 0, 1])] for loader in loaders]
    assert asked == [[6, 6, 7, 7], [], [8, 8]]
    assert {loader.taken for loader in loaders} == {9}


# ---- the loader -----------------------------------------------------------------------------------------------------------


def sample_of(request):
    """Its tokens say who it is."""
    prompt = Sample(np.full(3, request.row), np.zeros(3, bool), row=request.row, group=request.number)
    return prompt.append([100 + request.sample, request.number % 90], True, advantages=np.array([0.5, 1.5]))


class Written:
    """A source whose completions say whose they are."""

    def __init__(self, plan, rows=6, unit_of=lambda request: (sample_of(request),)):
        self.prompts, self.unit_of, self.calls = Prompts(PromptStream(rows, 0, True), plan), unit_of, []
        self.num_rows = rows

    def next_window(self):
        self.calls.append(self.prompts.taken)
        return [self.unit_of(request) for request in self.prompts.take_window()]

    def state(self):
        return {"taken": self.prompts.taken}

    def load_state(self, state):
        self.prompts.taken = state["taken"]


def loader_of(plan, rows=6, max_tokens=None):
    source = Written(plan, rows)
    return RolloutLoader(source, plan, Collator(("completion",), 0, SHARED, None, max_tokens)), source.calls


def targets(batch):
    return [part.targets.tolist() for part in passes_of(batch)]


def test_an_epoch_is_what_fills_whole_generations_and_the_next_goes_on_from_there():
    loader, calls = loader_of(schedule(batch_size=4, accumulation=1, num_iterations=2), rows=5)
    assert len(loader) == 5 * 2
    first = [targets(batch) for batch in loader]
    assert len(first) == 10
    assert all(first[i] == first[i + 1] for i in range(0, 10, 2))  # two passes over each generation
    loader.set_epoch(1)
    assert len(list(loader)) == 10
    assert calls == list(range(10))  # a prompt each


def test_fewer_prompts_than_a_generation_holds_are_answered_more_than_once():
    loader, _ = loader_of(schedule(batch_size=16, accumulation=1), rows=3)
    assert len(loader) == 1
    (batch,) = list(loader)
    assert sorted(set(batch.rows)) == [0, 1, 2]
    assert len(batch.rows) == 16


def test_samples_of_a_group_share_their_prompt():
    loader, _ = loader_of(schedule(batch_size=8, accumulation=1))
    batch = next(iter(loader))
    assert batch.num_units == 2
    assert batch.prefixes is not None
    assert batch.input_ids.numel() == 2 * 3 + 8 * 2
    assert batch.per_token["advantages"].tolist() == [0.5, 1.5] * 8


def test_a_group_that_is_too_large_for_a_pass_is_cut():
    loader, _ = loader_of(schedule(batch_size=8, accumulation=1), max_tokens=8)
    batch = next(iter(loader))
    parts = passes_of(batch)
    assert all(part.input_ids.numel() <= 8 for part in parts)
    whole = next(iter(loader_of(schedule(batch_size=8, accumulation=1))[0]))
    assert [target for part in targets(batch) for target in part] == whole.targets.tolist()


def test_a_shuffled_step_lays_the_samples_of_a_group_beside_each_other():
    """4 prompts of 4 completions, cut anew in each pass into 2 steps of 2 micro-batches: a step shares what prompts it can."""
    plan = Schedule.of(
        num_generations=4, batch_size=4, world_size=1, accumulation=2, steps_per_generation=4, num_iterations=3
    )
    source = Written(plan)
    source.window_start = 0
    loader = RolloutLoader(source, plan, Collator(("completion",), 0, SHARED), permutation_seed=1)
    batches = [batch for batch, _ in zip(loader, range(plan.window))]
    steps = [batches[place : place + 2] for place in range(0, len(batches), 2)]
    seen = []
    for step in steps:
        groups = [group for batch in step for group in batch.targets[1::2].tolist()]
        assert groups == sorted(groups, key=groups.index)  # neighbours
        prompts = sum((batch.input_ids.shape[1] - 2 * batch.num_samples) // 3 for batch in step)
        assert prompts == sum(len(set(batch.targets[1::2].tolist())) for batch in step)
        seen.append(sorted(batch.targets.tolist() for batch in step))
    assert len({str(step) for step in seen}) == len(seen)  # every pass is cut anew


def test_a_process_whose_samples_all_take_part_in_nothing_sends_an_empty_batch():
    plan = schedule(accumulation=1)
    loader = RolloutLoader(Written(plan, 4, lambda request: None), plan, Collator(("completion",), 0))
    batch = next(iter(loader))
    assert (batch.num_units, batch.num_trained) == (0, 0)


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_loader_goes_on_from_its_state_wherever_it_stopped(stop):
    plan = schedule(batch_size=4, accumulation=1, steps_per_generation=2, num_iterations=2)
    quiet, _ = loader_of(plan)
    expected = [targets(batch) for batch in quiet]
    first, _ = loader_of(plan)
    batches = iter(first)
    found = [targets(next(batches)) for _ in range(stop)]
    second, calls = loader_of(plan)
    second.load_state(first.state())
    second.skip_first(stop)
    found += [targets(batch) for batch in second]
    assert found == expected
    assert len(calls) == (12 - stop) // 4  # nothing that was generated is generated again
    with pytest.raises(RuntimeError, match="stand at micro-batch"):
        first.skip_first(stop + 1)


def test_samples_survive_packing():
    samples = [sample_of(request) for request in loader_of(schedule())[0].source.prompts.take_window()]
    samples[2] = None
    samples[3].scalars["kl_sum"] = 0.25
    for sample in samples:
        if sample is not None:
            sample.scalars.setdefault("kl_sum", 1.0)
    found = unpack_samples(pack_samples(samples))
    assert [s is None for s in found] == [s is None for s in samples]
    for mine, theirs in zip(samples, found):
        if mine is not None:
            assert mine.input_ids.tolist() == theirs.input_ids.tolist()
            assert mine.trained.tolist() == theirs.trained.tolist()
            assert mine.per_token["advantages"].tolist() == theirs.per_token["advantages"].tolist()
            assert (mine.row, mine.group, mine.scalars) == (theirs.row, theirs.group, theirs.scalars)
    assert unpack_samples(pack_samples([None])) == [None]


def test_pairs_stay_together_in_micro_batches_and_in_checkpoints():
    """A unit of two samples is one of a window; a window that is partly used comes back from its checkpoint."""
    plan = schedule(batch_size=4, accumulation=1, steps_per_generation=2, num_iterations=2)

    def pair_of(request):
        return None if request.number == 1 else (sample_of(request), sample_of(request))

    class Pairs(Written):
        def next_window(self):
            # A pair for two samples.
            return [unit for place, unit in enumerate(super().next_window()) if place % 2 == 0]

    collator = Collator(("chosen", "rejected"), 0)
    first = RolloutLoader(Pairs(plan, unit_of=pair_of), plan, collator)
    batches = iter(first)
    found = [next(batches) for _ in range(3)]
    assert [batch.num_units for batch in found] == [2, 0, 2]  # the second group takes part in nothing
    assert all(len(batch.counts) == 2 * max(batch.num_units, 0.5) for batch in found)
    second = RolloutLoader(Pairs(plan, unit_of=pair_of), plan, collator)
    second.load_state(first.state())
    assert targets(next(iter(second))) == targets(next(batches))


def test_images_of_samples_and_of_their_twins_survive_a_checkpoint():
    span = ImageSpan(1, 3, bytes(range(16)), (60, 40), (1, 4, 2))
    drawn = replace(span, start=3, stop=4, grid=(2,), draw=2**62 + 1)
    positions = np.arange(15, dtype=np.int32).reshape(3, 5)
    shown = Sample(np.arange(5), np.arange(5) > 3, images=(span, drawn), positions=positions)
    text = Sample(np.arange(2), [False, True])
    samples = [replace(text, twin=shown), replace(shown, twin=replace(shown, positions=None)), replace(text, twin=text)]
    found = unpack_samples(pack_samples(samples))
    whole = [*zip(samples, found), *((one.twin, other.twin) for one, other in zip(samples, found))]
    for mine, theirs in whole:
        assert mine.images == theirs.images
        assert (mine.positions is None) == (theirs.positions is None)
        assert mine.positions is None or mine.positions.tolist() == theirs.positions.tolist()


@given(st.lists(st.lists(st.integers(1, 5), max_size=3) | st.none(), max_size=4), st.booleans())
def test_a_checkpoint_keeps_what_samples_show(sizes, has_positions):
    """Without its images, a resumed window would train other sequences than those that were sampled."""
    samples = []
    for number, widths in enumerate(sizes):
        if widths is None:
            samples.append(None)
            continue
        stops = np.cumsum([width + 1 for width in widths]).tolist()
        grids = [(1, 2, 2 * width) if width % 2 else (width,) for width in widths]
        spans = tuple(
            ImageSpan(stop - width, stop, bytes([number, place] * 8), (10 + width, 20), grid)
            for place, (stop, width, grid) in enumerate(zip(stops, widths, grids))
        )
        length = 2 + max(stops, default=0)
        positions = np.arange(3 * length, dtype=np.int32).reshape(3, -1) if has_positions and widths else None
        samples.append(Sample(np.arange(length), np.ones(length), images=spans, positions=positions))
    for one, found in zip(samples, unpack_samples(pack_samples(samples)), strict=True):
        assert (one is None) == (found is None)
        if one is not None:
            assert found.images == one.images
            assert (
                np.array_equal(found.positions, one.positions) if one.positions is not None else found.positions is None
            )
