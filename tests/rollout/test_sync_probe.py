"""The probe: the same tokens everywhere, a bound that NaN is past, and an error that names what differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posttrain.rollout.engines.vllm.held_weights import complete
from posttrain.rollout.engines.vllm.sync_probe import BOUNDS, SyncProbe, WeightsDiffer, scored_by
from tests.rollout.families import VOCABULARY, loaded


def off_by(amount):
    return lambda sequences: [np.full(len(ids) - 1, amount, np.float32) for ids in sequences]


def test_the_probe_is_fixed_by_seed_and_vocabulary():
    one, same, other, small = SyncProbe(1000), SyncProbe(1000), SyncProbe(1000, seed=1), SyncProbe(50)
    assert all(np.array_equal(a, b) for a, b in zip(one.sequences, same.sequences))
    assert not any(np.array_equal(a, b) for a, b in zip(one.sequences, other.sequences))
    assert max(ids.max() for ids in small.sequences) < 50
    assert [len(ids) for ids in one.sequences] == [48] * 4
    assert one.sequences[0][:6].tolist() == [400, 419, 820, 742, 726, 568]  # on this machine as on every other


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS.items())
def test_the_bound_goes_with_the_dtype(dtype, bound):
    probe = SyncProbe(100, dtype)
    result = probe.check(off_by(0), off_by(bound * 0.9), 3)
    assert (result.mean, result.largest) == (pytest.approx(bound * 0.9), pytest.approx(bound * 0.9))
    with pytest.raises(WeightsDiffer, match=r"version 3 .* differ from the trainer's by") as caught:
        probe.check(off_by(0), off_by(bound * 1.1), 3)
    assert caught.value.tensor is None


def test_numbers_that_are_none_wrong_lengths_versions_and_tensors_are_past_every_bound():
    probe = SyncProbe(100, bound=1e9)
    with pytest.raises(WeightsDiffer, match=r"differ .* by nan"):
        probe.check(off_by(0), off_by(np.nan), 1)
    with pytest.raises(WeightsDiffer, match="scored 47 tokens of the probe, the trainer 188"):
        probe.check(off_by(0), lambda sequences: off_by(0)(sequences[:1]), 1)
    with pytest.raises(WeightsDiffer, match=r"serves version 4 .* sent version 5"):
        probe.check(off_by(0), off_by(0), 5, version_there=4)
    with pytest.raises(WeightsDiffer, match=r"other numbers than the trainer in model\.a") as caught:
        probe.check(off_by(0), off_by(0), 5, 5, lambda at_most: ["model.a"])
    assert caught.value.tensor == "model.a"
    assert probe.check(off_by(0), off_by(0), 5, 5, lambda at_most: []).tensors_compared


def test_scores_of_the_model_and_its_mode_are_as_they_should_be():
    model = loaded("llama").train()
    probe = SyncProbe(VOCABULARY)
    found = scored_by(model)(probe.sequences)
    assert model.training
    with torch.no_grad():
        rows = torch.tensor(np.stack(probe.sequences).astype(np.int64))
        wanted = model.eval()(input_ids=rows).logits[:, :-1].log_softmax(-1).gather(2, rows[:, 1:, None])[..., 0]
    np.testing.assert_allclose(np.stack(found), wanted.numpy(), atol=1e-5)
    twin = loaded("llama")
    assert probe.check(scored_by(model), scored_by(twin), 1).largest < 1e-5
    with torch.no_grad():
        twin.model.layers[0].mlp.down_proj.weight.mul_(1.2)
    with pytest.raises(WeightsDiffer):
        probe.check(scored_by(model), scored_by(twin), 1)


def test_only_a_whole_version_passes():
    weights = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    wanted = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    assert dict(complete(weights.items(), wanted)).keys() == wanted.keys()
    for given, words in (
        ([("a", weights["a"])], "1 of 2 tensors did not come, b first"),
        ([("a", weights["a"]), ("a", weights["a"])], "a came twice"),
        ([("c", weights["a"])], "c is not a tensor of this model"),
        ([("a", weights["b"])], r"a has the shape \(4,\); it must have \(2, 3\)"),
        ([("a", weights["a"].half())], r"a came in torch.float16; it must come in torch.float32"),
    ):
        with pytest.raises(ValueError, match=words):
            list(complete(given, wanted))
