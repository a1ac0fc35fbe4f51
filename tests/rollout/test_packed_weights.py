"""Linear layers with packed weights: the same numbers, inside of the block only, and those of the weights of now."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from posttrain.rollout.engines.native import packed_weights
from posttrain.rollout.engines.native.packed_weights import PackedWeights, layers_to_pack

needs_packing = pytest.mark.skipif(not packed_weights._can_pack(), reason="needs torch with Arm's Compute Library")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 129, bias=False), nn.Linear(129, 3))


def test_where_torch_cannot_pack_layers_are_left_alone(model, monkeypatch):
    monkeypatch.setattr(packed_weights, "_can_pack", lambda: False)
    with PackedWeights(model).in_use(0):
        assert all("forward" not in vars(layer) for layer in model)


@needs_packing
def test_large_plain_layers_are_packed(model, monkeypatch):
    assert layers_to_pack(model) == [model[0], model[2]]  # the last one is too small to be worth it
    assert layers_to_pack(model.double()) == []
    model.float()
    monkeypatch.setattr(packed_weights, "PACKED_BYTES", model[0].weight.nbytes)
    assert layers_to_pack(model) == []


@needs_packing
@pytest.mark.parametrize("shape", [(1, 128), (2, 128), (1, 8, 128), (1, 300, 128), (3, 5, 128), (1, 1, 128)])
@torch.no_grad()
def test_packed_layers_give_the_same_numbers(model, shape):
    rows = torch.randn(shape)
    wanted = model(rows)
    with PackedWeights(model).in_use(0):
        assert "forward" in vars(model[0])
        assert torch.allclose(model(rows), wanted, atol=1e-6)
    assert "forward" not in vars(model[0])


@needs_packing
@torch.no_grad()
def test_another_version_is_packed_again_and_an_error_leaves_nothing_behind(model):
    packed, rows = PackedWeights(model), torch.randn(8, 128)
    with packed.in_use(0):
        model(rows)
    model[0].weight.mul_(2)
    with packed.in_use(1):
        found = model(rows)
    assert torch.allclose(found, model(rows), atol=1e-6)
    with pytest.raises(ZeroDivisionError), packed.in_use(1):
        1 / 0  # noqa: B018
    assert "forward" not in vars(model[0])
