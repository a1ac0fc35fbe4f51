"""Modules that transformers passes no segment bounds to: attention without keyword arguments, convolutions, recurrences."""

from __future__ import annotations

import copy
import io
import itertools
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.batch import PADDED, RAGGED, SHARED, SharedPrefixes
from posttrain.models.attention import mixers
from posttrain.models.layers.kernels import COMPILED
from posttrain.models.load.model import LoadOptions, load_model
from scripts.families import small_model
from tests.mixers import KINDS, answers, assert_alike, loaded


@pytest.mark.parametrize("family", KINDS)
def test_gradients_are_equal_in_every_layout(family):
    model = small_model(family).train()
    wanted = answers(loaded(model, PADDED), PADDED)
    for layout in (RAGGED, SHARED):
        assert_alike(answers(loaded(model, layout), layout), wanted)


@pytest.mark.parametrize("family", ["stablelm", "lfm2_moe"])
def test_a_recomputed_layer_gets_the_bounds_again(family):
    model = small_model(family).train()
    wanted = answers(loaded(model, PADDED), PADDED)
    recomputing = loaded(model, SHARED)
    recomputing.gradient_checkpointing_enable({"use_reentrant": False})
    assert_alike(answers(recomputing, SHARED), wanted)


@pytest.mark.parametrize("family", ["stablelm", "lfm2_moe"])
def test_a_copy_computes_with_its_own_weights_and_bounds(family):
    """Rollouts beside training run a copy on a thread of its own."""
    model = loaded(small_model(family).train(), SHARED)
    wanted = answers(model, SHARED)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = []
    beside = threading.Thread(target=lambda: found.append(answers(other, SHARED)))
    beside.start()
    answers(model, RAGGED)
    beside.join()
    assert_alike(found[0], wanted)
    torch.save(other, io.BytesIO())  # nothing of a batch is left in it, and nothing that cannot be sent to a process


def test_a_family_that_stays_padded_is_left_as_it_was():
    model = small_model("falcon")
    made = load_model(model, LoadOptions())
    assert made.layout == PADDED
    for module in itertools.islice(model.modules(), 1, None):
        assert not [*module._forward_pre_hooks, *module._forward_hooks]
        assert "forward" not in vars(module)


@pytest.mark.trust
@pytest.mark.parametrize("family", ["stablelm", "lfm2_moe"])
def test_compiled_layers_get_the_bounds(family):
    """By default compiled code does not check for hooks that were registered after it was compiled."""
    model = small_model(family).train()
    wanted = answers(loaded(model, PADDED), PADDED)
    assert_alike(answers(loaded(model, SHARED, layer_kernels=(COMPILED,)), SHARED), wanted)


def edges(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
def test_each_token_is_taken_once_and_rows_are_half_full(lengths):
    rows = mixers._made_rows(edges(lengths), None)
    taken = torch.cat([batch.tokens.flatten()[batch.taken] for batch in rows.batches])
    assert taken[rows.order].tolist() == list(range(sum(lengths)))
    for batch in rows.batches:
        found = [row for row in batch.tokens.tolist() if row]
        assert len(batch.taken) >= mixers.LEAST_FULL * batch.tokens.numel()
        assert len(found) == len(batch.tokens)
    assert sum(len(batch.tokens) for batch in rows.batches) == sum(length > 0 for length in lengths)


def test_a_continuation_is_a_row_behind_its_prefix():
    """Prefixes of 2 and 3 tokens; the first is continued by 2 and 1, the second by 4. Two tokens share nothing."""
    prefixes = SharedPrefixes(edges([2, 3]), edges([3, 4]), 5, 7, 14, 3, 4)
    rows = mixers._made_rows(edges([2, 3, 2, 2, 1, 4]), prefixes)
    laid = [row for batch in rows.batches for row in batch.tokens.tolist()]
    assert laid == [[2, 3, 4, 10, 11, 12, 13], [0, 1, 7, 8, 0, 0, 0], [0, 1, 9], [5, 6, 0]]
    taken = torch.cat([batch.tokens.flatten()[batch.taken] for batch in rows.batches])
    assert taken[rows.order].tolist() == list(range(14))
    assert rows.repeats
