"""Kernels for images on a CUDA device: towers of patches, their attention and layers, and images that see themselves whole.

python -m pytest tests/gpu/test_vision_attention.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from posttrain.data.vision.families import FAMILIES
from posttrain.models.attention.image_blocks import ImageBlocks
from posttrain.models.attention.ragged import segment_attention
from posttrain.models.layers.tower_layers import TOWER_ROTARY, fuse_tower_layers
from posttrain.models.vision.tower import install_tower_attention, tower_attention
from tests import tiny_vision

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTHS = (300, 64, 700)
BOUNDS = torch.tensor([0, 300, 364, 1064], dtype=torch.int32)


def result(attend: Callable[..., Tensor], heads: list[Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
    given = [x.to(device, dtype).requires_grad_() for x in heads]
    output = attend(*given)
    weights = torch.linspace(-1, 1, output.numel(), device=device, dtype=dtype).view_as(output)
    return [x.detach().cpu().double() for x in (output, *torch.autograd.grad((output * weights).sum(), given))]


def assert_close(attend: Callable[..., Tensor], *numbers: int, width: int) -> None:
    """bfloat16 on the device against float64 on the host, output and gradients."""
    torch.manual_seed(0)
    heads = [torch.randn(1, n, sum(LENGTHS), width).bfloat16().double() for n in numbers]
    exact, mine = (result(attend, heads, *where) for where in (("cpu", torch.float64), ("cuda", torch.bfloat16)))
    for one, other in zip(mine, exact, strict=True):
        assert (one - other).abs().max() <= 0.03 * other.abs().max()


@pytest.mark.parametrize("width", [72, 80])  # of Qwen3-VL and Qwen2.5-VL
def test_a_tower_of_patches(width: int) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bounds = BOUNDS.to(query.device)
        return tower_attention(None, query, key, value, None, cu_seq_lens_q=bounds, max_length_q=max(LENGTHS))[0]

    assert_close(attend, 16, 16, 16, width=width)


@pytest.mark.parametrize("window", [None, 256, 512])
def test_images_that_see_themselves_whole(window: int | None) -> None:
    blocks = torch.full((sum(LENGTHS),), -1, dtype=torch.int32)
    for number, start in enumerate((10, 380, 640, 900)):
        blocks[start : start + (100 if number == 3 else 256)] = number

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bounds = BOUNDS.to(query.device)
        images = ImageBlocks.of(blocks.to(query.device), bounds)
        return segment_attention(query, key, value, bounds, max(LENGTHS), None, 0.0, window, images)

    assert_close(attend, 8, 4, 4, width=256)


def features_and_gradients(model: nn.Module, given: dict[str, Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
    tower = copy.deepcopy(model).to(device, dtype).model.visual
    features = tower(given["pixels"].to(device, dtype), grid_thw=given["grid"].to(device)).pooler_output
    weights = torch.linspace(-1, 1, features.numel(), device=device, dtype=dtype).view_as(features)
    trained = [p for p in tower.parameters() if p.requires_grad]
    gradients = torch.autograd.grad((features * weights).sum(), trained, allow_unused=True)
    return [x.detach().cpu().double() for x in (features, *gradients) if x is not None]


def tower_of_odd_widths(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model whose tower has heads of 80 and, in Qwen2.5-VL, MLPs of a width that fills no 16 bytes."""
    torch.manual_seed(0)
    model_class, config, _, _ = tiny_vision.BUILDERS[name](name, {})
    sight = config.vision_config
    if name == "qwen2_5_vl":
        sight.hidden_size, sight.num_heads, sight.intermediate_size = 160, 2, 213
    model, grid = model_class(config), torch.tensor([[1, 12, 8], [1, 8, 20]])
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    install_tower_attention(model.model, FAMILIES[name])
    width = sight.in_channels * sight.temporal_patch_size * sight.patch_size**2
    return model, {"pixels": torch.randn(int(grid.prod(1).sum()), width).bfloat16().float(), "grid": grid}


@pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_layers_of_a_tower(name: str, adapted: bool) -> None:
    """bfloat16 with our layers against float64 with transformers' own: as near as bfloat16 with transformers' own is."""
    model, given = tower_of_odd_widths(name)
    if adapted:
        inject_adapter_in_model(
            LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False), model.model.visual
        )
    exact = features_and_gradients(model, given, "cpu", torch.float64)
    plain = features_and_gradients(model, given, "cuda", torch.bfloat16)
    fuse_tower_layers(model, FAMILIES[name])
    mine = features_and_gradients(model, given, "cuda", torch.bfloat16)
    assert len(mine) == len(exact) == len(plain)
    for one, other, wanted in zip(mine, plain, exact):
        assert (one - wanted).norm() <= 1.2 * (other - wanted).norm() + 0.002 * wanted.norm()


@pytest.mark.parametrize("width", [64, 72, 80])
def test_rotations_of_a_tower(width: int) -> None:
    import transformers.models.qwen2_vl.modeling_qwen2_vl as written

    from posttrain.models.layers.rotary_triton import Rotated

    torch.manual_seed(0)
    plain = getattr(written, TOWER_ROTARY)
    plain = getattr(plain, "__wrapped__", plain)
    joined = torch.randn(37, 3, 6, width, device="cuda").bfloat16().requires_grad_()
    cos, sin = (torch.randn(37, width, device="cuda") for _ in range(2))
    found = []
    for rotate in (Rotated.apply, plain):
        queries, keys, _ = joined.unbind(1)
        made = torch.stack(rotate(queries, keys, cos, sin))
        weights = torch.linspace(-1, 1, made.numel(), device="cuda").view_as(made)
        found.append((made, *torch.autograd.grad((made.float() * weights).sum(), joined)))
    for mine, wanted in zip(*found):
        assert mine.dtype == wanted.dtype
        torch.testing.assert_close(mine, wanted, rtol=0.01, atol=0.02)
