"""Faster layers of towers of patches: what they change on a CPU is nothing, and copies have their own."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from posttrain.core.vision import VisionFamily
from posttrain.data.vision.families import FAMILIES
from posttrain.models.layers.tower_layers import fuse_tower_layers, padded_mlp
from posttrain.models.vision.tower import install_tower_attention
from tests import tiny_vision

OF_PATCHES = [name for name, family in FAMILIES.items() if family.tower_has_bounds]


class Gated(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=bias) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(inner, width, bias=bias), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def tower_of(name: str) -> tuple[nn.Module, VisionFamily, dict[str, torch.Tensor]]:
    """A tiny model, its family, and what its tower is given: two images."""
    torch.manual_seed(0)
    model_class, config, _, _ = tiny_vision.BUILDERS[name](name, {})
    model = model_class(config).eval()
    grid = torch.tensor([[1, 4, 6], [1, 8, 2]])
    width = config.vision_config.in_channels * config.vision_config.temporal_patch_size
    width *= config.vision_config.patch_size**2
    return model, FAMILIES[name], {"hidden_states": torch.randn(int(grid.prod(1).sum()), width), "grid_thw": grid}


@pytest.mark.parametrize("inner", [13, 16])
@pytest.mark.parametrize("bias", [True, False])
def test_padding_changes_no_result_and_no_gradient(inner: int, bias: bool) -> None:
    torch.manual_seed(0)
    mlp, x = Gated(12, inner, bias).double(), torch.randn(5, 12, dtype=torch.double, requires_grad=True)
    leaves = [x, *mlp.parameters()]
    for made, wanted in zip(
        *([out, *torch.autograd.grad(out.square().sum(), leaves)] for out in (padded_mlp(mlp, x), mlp(x))), strict=True
    ):
        assert made.shape == wanted.shape
        torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OF_PATCHES)
def test_a_cpu_computes_what_transformers_wrote(name: str) -> None:
    model, family, given = tower_of(name)
    install_tower_attention(model.model, family)
    tower = model.get_submodule(family.tower)
    plain = tower(**given).pooler_output
    fuse_tower_layers(model, family)
    fuse_tower_layers(model, family)
    assert torch.equal(tower(**given).pooler_output, plain)


def test_a_copy_and_what_was_stored_have_layers_of_their_own() -> None:
    model, family, given = tower_of("qwen2_5_vl")
    fuse_tower_layers(model, family)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    before = model.get_submodule(family.tower)(**given).pooler_output
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        tower = other.get_submodule(family.tower)
        assert torch.equal(tower(**given).pooler_output, before)
        with torch.no_grad():
            for name, parameter in tower.named_parameters():
                if "norm" in name or "mlp" in name:
                    parameter.zero_()
        assert not torch.equal(tower(**given).pooler_output, before)
        assert torch.equal(model.get_submodule(family.tower)(**given).pooler_output, before)
