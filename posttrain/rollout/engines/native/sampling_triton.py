"""Triton: the end of a decode step. Two passes over the logits draw a token a row, say how likely it was, and move the row on.

The first pass finds the maximum and the sum of exponentials of each block of the vocabulary; the second draws the block, then the
token in it (`rollout/sampling` is the same in plain torch, `rollout/noise` the noise). Then it does what `step.advance_rows` does.
Imported where triton is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.rollout.engines import sampling
from posttrain.rollout.engines.native.rows import Rows

BLOCKS_A_PROGRAM = 4


def draw_and_advance_triton(logits: Tensor, rows: Rows, count: int, temperature: float, stop_ids: Tensor) -> None:
    """Draw from softmax(logits / temperature), or the most likely token at temperature 0."""
    vocabulary, block = logits.shape[1], sampling.BLOCK
    blocks = triton.cdiv(vocabulary, block)
    parts = torch.empty(count, blocks, 2, dtype=torch.float32, device=logits.device)
    inverse = 1.0 / temperature if temperature > 0 else 1.0
    blocks_kernel[(count, triton.cdiv(blocks, BLOCKS_A_PROGRAM))](
        logits, parts, logits.stride(0), vocabulary, blocks, inverse, BLOCK=block, TILE=BLOCKS_A_PROGRAM, num_warps=4
    )
    fields = [rows.field(name, count) for name in ("bases", "numbers", "tokens", "positions", "remaining")]
    draw_kernel[(count,)](
        logits, parts, *fields, rows.step, rows.ids, rows.logps[0], rows.logps[1], stop_ids,
        logits.stride(0), vocabulary, blocks, rows.ids.stride(0), inverse,
        STOPS=len(stop_ids), GREEDY=temperature == 0, BLOCK=block, BLOCKS=triton.next_power_of_2(blocks),
        FIRST_TOKEN=sampling.FIRST_TOKEN, num_warps=4,
    )  # fmt: skip


@triton.jit
def blocks_kernel(logits, parts, stride, vocabulary, blocks, inverse, BLOCK: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * TILE + tl.arange(0, TILE)
    lanes = numbers[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    z = tl.load(logits + row * stride + lanes, mask=lanes < vocabulary, other=-float("inf")).to(tl.float32) * inverse
    peaks = tl.max(z, 1)
    totals = tl.sum(tl.exp(z - tl.maximum(peaks, -1.0e30)[:, None]), 1)
    places = parts + (row * blocks + numbers) * 2
    tl.store(places, peaks, mask=numbers < blocks)
    tl.store(places + 1, totals, mask=numbers < blocks)


@triton.jit
def mixed(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def gumbels(word, indices):
    words = mixed(word + (indices.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    uniforms = ((words >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniforms))


@triton.jit
def first_of_largest(scores, indices, SIZE: tl.constexpr):
    return tl.min(tl.where(scores == tl.max(scores, 0), indices, SIZE - 1), 0)


@triton.jit
def draw_kernel(
    logits, parts, bases, numbers, tokens, positions, remaining, step, ids, sampling_logps, policy_logps, stop_ids,
    stride, vocabulary, blocks, line, inverse,
    STOPS: tl.constexpr, GREEDY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, FIRST_TOKEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    all_blocks = tl.arange(0, BLOCKS)
    known = all_blocks < blocks
    peaks = tl.load(parts + (row * blocks + all_blocks) * 2, mask=known, other=-float("inf"))
    totals = tl.load(parts + (row * blocks + all_blocks) * 2 + 1, mask=known, other=0.0)
    peak = tl.max(peaks, 0)
    total = tl.sum(totals * tl.exp(peaks - peak), 0)
    lanes = tl.arange(0, BLOCK)
    number = tl.load(numbers + row)
    word = tl.load(bases + row).to(tl.uint64, bitcast=True)
    word = mixed(word + (number.to(tl.uint64, bitcast=True) + 1) * 0x9E3779B97F4A7C15)
    if GREEDY:
        block = first_of_largest(peaks, all_blocks, BLOCKS)
    else:
        log_sums = peaks.to(tl.float64) + tl.log(totals.to(tl.float64))
        block = first_of_largest(log_sums + gumbels(word, all_blocks), all_blocks, BLOCKS)
    there = block * BLOCK + lanes
    z = tl.load(logits + row * stride + there, mask=there < vocabulary, other=-float("inf")).to(tl.float32) * inverse
    if GREEDY:
        place = first_of_largest(z, lanes, BLOCK)
    else:
        place = first_of_largest(z.to(tl.float64) + gumbels(word, there.to(tl.int64) + FIRST_TOKEN), lanes, BLOCK)
    token = tl.minimum(block * BLOCK + place, vocabulary - 1)
    chosen = tl.load(logits + row * stride + token).to(tl.float32) * inverse
    logp = (chosen - peak) - tl.log(total)
    line_start = tl.load(step) * line
    tl.store(ids + line_start + row, token.to(tl.int64))
    tl.store(policy_logps + line_start + row, logp)
    tl.store(sampling_logps + line_start + row, 0.0 if GREEDY else logp)

    left = tl.load(remaining + row)
    in_use = left > 0
    left = tl.maximum(left - 1, 0)
    for stop in tl.static_range(STOPS):
        left = tl.where(tl.load(stop_ids + stop) == token, 0, left)
    tl.store(remaining + row, left)
    tl.store(numbers + row, number + in_use.to(tl.int64))
    tl.store(positions + row, tl.load(positions + row) + (left > 0).to(tl.int64))
    tl.store(tokens + row, tl.where(left > 0, token.to(tl.int64), tl.load(tokens + row)))
