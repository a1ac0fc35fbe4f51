"""What travels with a sample: columns of several numbers a token, twins, and advantages of single tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer
from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.rollout.loader import pack_samples, pack_units, unpack_samples, unpack_units
from posttrain.rollout.rollout import ADVANTAGES
from tests import tiny

LAYOUTS = [RAGGED, PADDED, SHARED]


def pair(row: int, has_twins: bool = True) -> tuple[Sample, ...]:
    """Two samples that begin alike, with three numbers and three ids for each token, and twins of other lengths."""
    rng = np.random.default_rng(row)
    prompt = rng.integers(3, 90, 4)
    made = []
    for length in (3 + row, 2):
        ids = np.concatenate([prompt, rng.integers(3, 90, length)])
        columns = {
            "scores": rng.normal(size=(len(ids), 3)).astype(np.float32),
            "ids": rng.integers(0, 1 << 30, (len(ids), 3)),
        }
        twin = Sample.of_text(prompt[:2], rng.integers(3, 90, length + 1), row=row) if has_twins else None
        made.append(Sample(ids, np.arange(len(ids)) >= 4, columns, row=row, twin=twin))
    return tuple(made)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_of_several_numbers_and_twins_are_laid_out_like_their_samples(layout):
    units = [pair(0), pair(1)]
    samples = [sample for unit in units for sample in unit]
    batch = collate(units, ("chosen", "rejected"), layout, 0)
    for name in ("scores", "ids"):
        expected = np.concatenate([sample.per_token[name][sample.trained] for sample in samples])
        assert torch.equal(batch.per_token[name], torch.from_numpy(expected))
        assert batch.per_token[name].shape == (batch.num_trained, 3)
    assert torch.equal(batch.input_ids.flatten()[batch.places], batch.targets)
    alone = collate([tuple(s.twin for s in unit) for unit in units], ("chosen", "rejected"), layout, 0)
    assert torch.equal(batch.twin.targets, alone.targets)
    assert torch.equal(batch.twin.positions, alone.positions)
    moved = batch.to("meta")
    assert moved.twin.targets.is_meta
    assert (
        batch.totals().counts
        == collate([pair(0, False), pair(1, False)], ("chosen", "rejected"), layout, 0).totals().counts
    )


def test_a_batch_has_twins_of_all_or_of_none():
    assert collate([pair(0, False)], ("chosen", "rejected"), RAGGED, 0).twin is None
    with pytest.raises(ValueError, match="The sample of row 1 has no twin, and others of its batch have one"):
        collate([pair(0), pair(1, False)], ("chosen", "rejected"), RAGGED, 0)


def test_a_window_survives_its_checkpoint():
    samples = [*pair(0), None, *pair(1)]
    found = unpack_samples(pack_samples(samples))
    assert [sample is None for sample in found] == [sample is None for sample in samples]
    for sample, other in zip(filter(None, samples), filter(None, found), strict=True):
        for name, values in sample.per_token.items():
            assert np.array_equal(other.per_token[name], values), name
            assert other.per_token[name].dtype == values.dtype
        assert np.array_equal(other.twin.input_ids, sample.twin.input_ids)
        assert np.array_equal(other.twin.trained, sample.twin.trained)
        assert other.twin.row == sample.row
    assert unpack_samples(pack_samples([None, None])) == [None, None]


def test_a_window_of_a_version_that_kept_samples_is_read():
    samples = [*pair(0, False), None]
    assert [unit if unit is None else len(unit) for unit in unpack_units(pack_samples(samples))] == [1, 1, None]
    units = [pair(0), None, pair(1)]
    found = unpack_units(pack_units(units))
    assert [unit if unit is None else [s.row for s in unit] for unit in found] == [[0, 0], None, [1, 1]]


def test_slices_and_further_tokens_keep_columns_and_twins():
    sample = pair(2)[0]
    longer = sample.append([5, 6], True)
    assert longer.per_token["scores"].shape == (len(sample) + 2, 3)
    assert not longer.per_token["scores"][-2:].any()
    assert sample.truncate(5).per_token["ids"].shape == (5, 3)
    assert sample.truncate(5).twin is sample.twin


class EarlyCredit(GRPOTrainer):
    """A token is credited less the later it comes."""

    def spread(self, rollouts):
        for rollout in rollouts:
            places = np.cumsum(rollout.sample.trained)
            rollout.sample.per_token[ADVANTAGES] = (rollout.advantage * 0.5**places).astype(np.float32)

    def loss(self, batch, policy, reference):
        self.seen = [*getattr(self, "seen", []), batch]
        return super().loss(batch, policy, reference)


def test_a_method_gives_each_token_its_own_advantage(tmp_path):
    args = {"num_generations": 4, "max_completion_length": 5, "per_device_train_batch_size": 8, "max_steps": 1}
    args |= {"report_to": "none", "use_cpu": True, "reward_workers": 0, "save_strategy": "no"}
    trainer = EarlyCredit(
        tiny.causal_lm(),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 13) for ids in completion_ids],
        args=GRPOConfig(output_dir=str(tmp_path), **args),
        train_dataset=Dataset.from_list([{"prompt": f"Say {number}"} for number in range(2)]),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    (batch,) = trainer.seen
    for advantages in torch.split(batch.per_token[ADVANTAGES], batch.counts.tolist()):
        assert torch.allclose(advantages, advantages[0] * 0.5 ** torch.arange(len(advantages)))
    assert batch.per_token[ADVANTAGES].abs().max() > 0.1
