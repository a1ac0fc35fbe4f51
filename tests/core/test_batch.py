"""TokenBatch and StepTotals: sums, means and roles over ragged samples, and what a step is divided by."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.batch import ACTIVE, BatchImages, StepTotals, TokenBatch, copy_by_one_thread, segment_sum

PAIRS = ("chosen", "rejected")


def batch_with(counts: list[int], roles: tuple[str, ...] = ("text",), **fields) -> TokenBatch:
    """A ragged batch whose samples are one untrained token followed by `counts` trained ones."""
    lengths = torch.tensor(counts, dtype=torch.long) + 1
    width, trained = int(lengths.sum()), sum(counts)
    return TokenBatch(
        layout="ragged",
        input_ids=torch.arange(width)[None],
        position_ids=torch.cat([torch.arange(n + 1) for n in counts])[None],
        positions=torch.arange(trained),
        targets=torch.arange(trained),
        counts=lengths - 1,
        lengths=lengths,
        ends=lengths.cumsum(0) - 1,
        num_units=len(counts) // len(roles),
        roles=roles,
        rows=tuple(range(len(counts))),
        num_tokens=width,
        num_trained=trained,
        **fields,
    )


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_sums_and_means_of_samples():
    """Samples of 2, 0 and 3 trained tokens over 1, 2, 3, 4, 5: sums 3, 0, 12; means 1.5, 0, 4."""
    batch = batch_with([2, 0, 3])
    values = numbers(1, 2, 3, 4, 5).requires_grad_()
    assert batch.sequence_sum(values).tolist() == [3, 0, 12]
    assert batch.sequence_mean(values).tolist() == [1.5, 0, 4]
    (batch.sequence_mean(values) * numbers(2, 7, 6)).sum().backward()
    assert values.grad.tolist() == [1, 1, 2, 2, 2]


def test_expand_gives_each_token_the_number_of_its_sample():
    assert batch_with([2, 0, 3]).expand(numbers(10, 20, 30)).tolist() == [10, 10, 30, 30, 30]


@settings(max_examples=100, deadline=None)
@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=8), seed=st.integers(0, 100))
def test_segment_sum_equals_the_loop_in_value_and_gradient(counts, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(counts), generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(counts), generator=generator, dtype=torch.float64)
    sums = segment_sum(values, torch.tensor(counts))
    expected = [sum(part.tolist()) for part in values.split(counts)]
    assert sums.tolist() == pytest.approx(expected, abs=1e-12)
    (sums * weights).sum().backward()
    assert values.grad.tolist() == [w for w, n in zip(weights.tolist(), counts) for _ in range(n)]


def test_sums_of_no_samples():
    assert segment_sum(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_roles_pick_samples_and_their_tokens():
    """Units (2, 1) and (1, 3): the chosen samples are 0 and 2, the rejected 1 and 3."""
    batch = batch_with([2, 1, 1, 3], PAIRS)
    assert batch.role(numbers(10, 20, 30, 40), "chosen").tolist() == [10, 30]
    assert batch.role(numbers(10, 20, 30, 40), "rejected").tolist() == [20, 40]
    values = numbers(1, 2, 3, 4, 5, 6, 7)
    assert batch.role_tokens(values, "chosen").nan_to_num(0).tolist() == [1, 2, 0, 4, 0, 0, 0]
    assert batch.role_tokens(values, "rejected").nan_to_num(0).tolist() == [0, 0, 3, 0, 5, 6, 7]


def test_roles_of_numbers_with_more_axes():
    batch = batch_with([1, 1, 1, 1], PAIRS)
    values = torch.arange(8).view(4, 2)
    assert batch.role(values, "rejected").tolist() == [[2, 3], [6, 7]]


def test_gradient_through_a_role():
    batch = batch_with([2, 1, 1, 3], PAIRS)
    values = numbers(1, 2, 3, 4, 5, 6, 7).requires_grad_()
    batch.role(batch.sequence_sum(values), "chosen").sum().backward()
    assert values.grad.tolist() == [1, 1, 0, 1, 0, 0, 0]


def test_totals_of_texts_and_of_pairs():
    texts = batch_with([2, 0, 3])
    counts = {"token": 5, "sequence": 3, "unit": 3, "batch": 1, "sequence:active": 0}
    assert texts.totals().counts == counts
    texts.scalars[ACTIVE] = numbers(1, 0, 1)  # a term that only two of them have
    assert texts.totals().counts == counts | {"sequence:active": 2}
    assert batch_with([2, 1, 1, 3], PAIRS).totals().counts == {
        "token": 7,
        "sequence": 4,
        "unit": 2,
        "batch": 1,
        "token:chosen": 3,
        "token:rejected": 4,
    }


def test_totals_of_a_step_add_up():
    """Micro-batches of pairs with 7 and 3 tokens: 10 tokens, 3 + 1 = 4 of them chosen, 3 pairs, 2 micro-batches."""
    totals = StepTotals.of([batch_with([2, 1, 1, 3], PAIRS), batch_with([1, 2], PAIRS)])
    assert totals.counts == {
        "token": 10,
        "sequence": 6,
        "unit": 3,
        "batch": 2,
        "token:chosen": 4,
        "token:rejected": 6,
    }


def test_totals_add_names_that_only_one_side_has():
    assert (StepTotals({"token": 3}) + StepTotals({"token": 1, "unit": 2})).counts == {"token": 4, "unit": 2}


def test_a_denominator_is_at_least_one():
    totals = StepTotals({"token": 0, "unit": 3, "sequence": torch.tensor(0.0), "batch": torch.tensor(5.0)})
    assert totals.denominator("token") == 1
    assert totals.denominator("unit") == 3
    assert totals.denominator("sequence").item() == 1
    assert totals.denominator("batch").item() == 5


def test_an_unknown_denominator_names_those_that_exist():
    with pytest.raises(KeyError, match="per 'word'; this step counts token, sequence, unit, batch"):
        batch_with([1]).totals().denominator("word")


def test_moving_a_batch_casts_nothing():
    fields = {
        "per_token": {"advantages": torch.zeros(3, dtype=torch.float64)},
        "scalars": {"margin": torch.ones(1)},
        "images": BatchImages({"pixels": torch.zeros(2, dtype=torch.bfloat16)}, (2,), (0,), (1,)),
    }
    batch = batch_with([3], **fields)
    moved = batch.to("meta")
    assert moved.device.type == "meta"
    assert moved.per_token["advantages"].dtype == torch.float64
    assert moved.per_token["advantages"].device.type == "meta"
    assert moved.images.encoder["pixels"].dtype == torch.bfloat16
    assert moved.images.encoder["pixels"].device.type == "meta"
    assert moved.images.shown == (0,)
    assert moved.cu_segments is None
    assert (moved.rows, moved.roles, moved.num_trained) == (batch.rows, batch.roles, 3)
    assert batch.device.type == "cpu"


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float32])
def test_copies_for_the_device_take_tensors_of_any_size(shape, dtype):
    """A reward model's batch has no per-token numbers: its empty tensors raised on CUDA, on the first batch."""
    source = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    target = torch.empty(shape, dtype=dtype)
    copy_by_one_thread(target, source)
    assert torch.equal(target, source)
