"""Rows with a label: pairs taken apart, partners with another prompt, the same for every cut of a step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.sample import KEEP_END, Sample
from posttrain.data.loader import StreamBatches
from posttrain.data.unpaired import MAX_CANDIDATES, PartneredBatches, PartneredRows, Partners, parted


def sample(prompt, answer, row=0):
    return Sample.of_text(prompt, answer, row=row, label=1.0)


class Rows(list):
    """A dataset of units."""


def rows_of(prompts):
    return Rows([(sample([prompt, 5], [100 + row, 7], row),) for row, prompt in enumerate(prompts)])


def test_a_partner_gives_its_answer_to_another_prompt():
    first, second = sample([1, 2], [3, 4]), sample([5], [6, 7, 8])
    twin = Partners().given(first, [second]).twin
    assert twin.input_ids.tolist() == [1, 2, 6, 7, 8]
    assert twin.trained.tolist() == [False, False, True, True, True]


def test_an_answer_to_the_same_prompt_is_no_mismatch():
    first, same, other = sample([1, 2], [3]), sample([1, 2], [4]), sample([9], [5, 6])
    assert Partners().given(first, [same, other]).twin.input_ids.tolist() == [1, 2, 5, 6]
    alone = Partners().given(first, [same]).twin
    assert alone.num_trained == 0


def test_the_search_for_another_prompt_has_an_end():
    first = sample([1], [3])
    asked = itertools.count()
    others = (sample([1], [next(asked) % 200]) for _ in itertools.count())
    assert Partners().given(first, others).twin.num_trained == 0
    assert next(asked) == MAX_CANDIDATES


def test_twins_are_cut_like_rows_and_may_be_left_without_an_answer():
    long_prompt, other = sample([1, 2, 3, 4], [5]), sample([6], [7, 8])
    cut = Partners(max_length=5).given(long_prompt, [other]).twin
    assert (cut.input_ids.tolist(), cut.num_trained) == ([1, 2, 3, 4, 7], 1)
    assert Partners(max_length=4).given(long_prompt, [other]).twin.num_trained == 0
    assert Partners(max_length=4, truncation_mode=KEEP_END).given(long_prompt, [other]).twin.input_ids[-1] == 8


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_partners_are_those_of_the_step_whatever_its_cut(prompts, batch_size, accumulation, world_size):
    """Micro-batches and processes of a step of `size` rows give the twins that the step as one batch gives."""
    rows, size = rows_of(prompts), batch_size * accumulation * world_size

    def twins(batch, steps, processes):
        found = {}
        for rank in range(processes):
            batches = PartneredBatches(
                len(rows), batch, rank=rank, world_size=processes, accumulation=steps, seed=3, order="random"
            )
            view = PartneredRows(rows, Partners())
            found |= {key[0]: tuple(view[key][0].twin.input_ids) for keys in batches for key in keys}
        return found

    whole = twins(size, 1, 1)
    assert twins(batch_size, accumulation, world_size) == whole
    assert len(whole) == len(rows)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_a_twin_has_another_prompts_answer_or_none(prompts):
    for (own,) in Partners().given_all(rows_of(prompts)):
        if own.twin.num_trained:
            donor = int(own.twin.input_ids[len(parted(own)[0])]) - 100
            assert prompts[donor] != prompts[own.row]
        else:
            assert len(set(prompts)) == 1


def test_a_row_alone_has_the_row_before_it_in_the_dataset_for_its_partner():
    view = PartneredRows(rows_of([0, 0, 1]), Partners())
    assert [int(view[row][0].twin.input_ids[2]) for row in range(3)] == [102, 102, 101]


def test_a_streams_partners_come_from_the_whole_step():
    made = []
    stream = StreamBatches(rows_of([0, 1, 2, 3, 4]), 1, 0, 1, made.append, accumulation=4, arrange=Partners().given_all)
    list(stream)
    answers = [int(unit[0].twin.input_ids[2]) - 100 for (unit,) in made[:4]]
    assert answers == [3, 0, 1, 2]
    assert made[4][0][0].twin.num_trained == 0  # the last step has one row


@pytest.mark.parametrize("trained_from", [0, 1])
def test_prompt_and_answer_of_a_sample(trained_from):
    whole = Sample([1, 2, 3], np.arange(3) >= trained_from, per_token={"x": [1, 2, 3]})
    prompt, answer = parted(whole)
    assert (len(prompt), len(answer)) == (trained_from, 3 - trained_from)
    assert not prompt.per_token
