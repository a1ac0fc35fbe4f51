"""Rounding to e4m3 in Triton: `fp8.scaled` of rows and of columns, and what kernels of keys and values in 8 bits share with it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.models.layers.fp8 import E4M3, filled

BLOCK = 4096
TILE, TILES = 128, 8  # rows and columns of a tile; tiles below each other whose largest values one program finds
_LARGEST = tl.constexpr(torch.finfo(E4M3).max)
_SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny * torch.finfo(E4M3).max)  # rows of zeros stay zeros


def scaled_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """(m, k) -> the same in e4m3, and (m, 1) the scales."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, width = x.shape
    found = torch.empty(rows, width, dtype=E4M3, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(width), BLOCK)
    scaled_kernel[(rows,)](x, found, scales, width, x.stride(0), BLOCK=block, num_warps=8 if block > 2048 else 4)
    return found, scales


def columns_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """(m, k) -> its transpose in e4m3, filled up with zeros to (k, `filled(m)`), and (k, 1) the scales."""
    return _tiled(x, with_rows=False)[:2]


def both_triton(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `columns_triton` and `scaled_triton` give, of reading the numbers twice, not four times."""
    return _tiled(x, with_rows=True)


def _tiled(x: Tensor, with_rows: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, width = x.shape
    turned = torch.empty(width, filled(rows), dtype=E4M3, device=x.device)
    straight = torch.empty(rows if with_rows else 0, width, dtype=E4M3, device=x.device)
    column_scales, row_scales = (
        torch.zeros(n, 1, dtype=torch.float32, device=x.device) for n in (width, len(straight))
    )
    across = triton.cdiv(width, TILE)
    given, how = (x, column_scales, row_scales, rows, width, x.stride(0)), {"TILE": TILE, "WITH_ROWS": with_rows}
    largest_kernel[(across, triton.cdiv(rows, TILE * TILES))](*given, TILES=TILES, **how, num_warps=8)
    for largest in (column_scales, row_scales):
        largest.clamp_(min=_SMALLEST.value).div_(_LARGEST.value)
    grid = (across, triton.cdiv(filled(rows), TILE))
    tile_kernel[grid](*given, turned, straight, turned.stride(0), **how, num_warps=8)
    return turned, column_scales, straight, row_scales


@triton.jit
def largest_kernel(
    x, of_columns, of_rows, rows, width, x_row, TILE: tl.constexpr, TILES: tl.constexpr, WITH_ROWS: tl.constexpr
):
    """The largest magnitude of each column and row. Bits of positive floats are ordered as they are."""
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    largest = tl.zeros((TILE,), tl.float32)
    for number in range(TILES):
        row = (tl.program_id(1) * TILES + number) * TILE + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & (column < width)[None]
        sizes = tl.abs(tl.load(x + row.to(tl.int64)[:, None] * x_row + column[None], inside, 0.0).to(tl.float32))
        largest = tl.maximum(largest, tl.max(sizes, 0))
        if WITH_ROWS:
            bits = tl.max(sizes, 1).to(tl.int32, bitcast=True)
            tl.atomic_max(of_rows.to(tl.pointer_type(tl.int32)) + row, bits, row < rows)
    tl.atomic_max(of_columns.to(tl.pointer_type(tl.int32)) + column, largest.to(tl.int32, bitcast=True), column < width)


@triton.jit
def tile_kernel(
    x,
    of_columns,
    of_rows,
    rows,
    width,
    x_row,
    turned,
    straight,
    turned_row,
    TILE: tl.constexpr,
    WITH_ROWS: tl.constexpr,
):
    """A tile of numbers over their columns' scales, transposed, and over their rows'."""
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < width)[None]
    numbers = tl.load(x + row.to(tl.int64)[:, None] * x_row + column[None], inside, 0.0).to(tl.float32)
    scales = tl.load(of_columns + column, column < width, 1.0)
    rounded = to_e4m3(numbers / scales[None]).to(tl.float8e4nv)
    there = (column < width)[:, None] & (row < turned_row)[None]
    tl.store(turned + column.to(tl.int64)[:, None] * turned_row + row[None], tl.trans(rounded), there)
    if WITH_ROWS:
        scales = tl.load(of_rows + row, row < rows, 1.0)
        rounded = to_e4m3(numbers / scales[:, None]).to(tl.float8e4nv)
        tl.store(straight + row.to(tl.int64)[:, None] * width + column[None], rounded, inside)


@triton.jit
def power(exponents):
    """2^(e - 127)."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(numbers):
    """Numbers of at most 464 -> the nearest that e4m3 has, still in float32.

    Added to 1.5 * 2^23 times the distance between its neighbours in e4m3, a number is rounded to one of them, the even one of two
    that are as near.
    """
    binade = tl.maximum(tl.abs(numbers).to(tl.int32, bitcast=True) >> 23, 127 - 6)
    shift = 1.5 * power(binade + 20)
    return (numbers + shift) - shift


@triton.jit
def scaled_kernel(x, found, scales, width, x_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        numbers = tl.load(x + row * x_row + start + lanes, mask=start + lanes < width, other=0.0)
        largest = tl.maximum(largest, tl.abs(numbers.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, 0), _SMALLEST) / _LARGEST
    tl.store(scales + row, scale)
    for start in range(0, width, BLOCK):
        inside = start + lanes < width
        numbers = tl.load(x + row * x_row + start + lanes, mask=inside, other=0.0).to(tl.float32)
        tl.store(found + row * width + start + lanes, to_e4m3(numbers / scale).to(tl.float8e4nv), mask=inside)
