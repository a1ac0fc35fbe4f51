"""Kernels of attention for images on a CUDA device: towers of patches, and images that see themselves whole.

python -m pytest tests/gpu/test_vision_attention.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from posttrain.models.attention.image_blocks import ImageBlocks
from posttrain.models.attention.ragged import segment_attention
from posttrain.models.vision.tower import tower_attention

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
