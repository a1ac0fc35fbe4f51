"""Triton: one query a row against the pages of its sequence, the new token's keys and values put on their page on the way.

One program for a row, a key head and a part of the context (flash-decoding: long contexts are split, and the parts merged by their
log-sum-exps). All query heads that share the key head are one tile, so keys and values are read once. The pages are found through
a table of addresses: a CUDA graph stays right when they move. Imported where triton is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from posttrain.models.layers.fp8_triton import power, to_e4m3
from posttrain.rollout.engines.native import eight_bits
from posttrain.rollout.engines.native.cache import PAGE

BLOCK = 64
PROGRAMS = 528  # four for each of an H200's multiprocessors
MAX_SPLITS = 32
ROOM, TOP, LEAST = (tl.constexpr(number) for number in (eight_bits.ROOM, eight_bits.TOP, eight_bits.LEAST))
ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def decode_attention_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    addresses: Tensor,
    table: Tensor,
    positions: Tensor,
    prefixes: Tensor,
    remaining: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    splits: int | None = None,
    in_eight_bits: bool = False,
    writes_first: bool = False,
) -> Tensor:
    """(rows, heads, width) of the new tokens -> (rows, heads, width of values); `addresses` (2,): of this layer's keys and values.

    `sinks` (heads,): scores of a place without a value. `in_eight_bits`: the pages are; `addresses` (4,) then has the scales', too.
    `writes_first`: rows share pages and look at each other's new tokens, as the lines of drafts do, so all of these are
    written to their pages before any row attends.
    """
    rows, heads, width = query.shape
    key_heads, value_width = value.shape[1:]
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    splits = splits or _splits(rows * key_heads)
    kept = tl.float8e4nv if in_eight_bits else ELEMENTS[query.dtype]
    if writes_first:
        write_kernel[(rows, key_heads)](
            key, value, addresses, table, positions, prefixes, remaining,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1), table.stride(0),
            KEY_HEADS=key_heads, WIDTH=width, LANES=triton.next_power_of_2(width), VALUE_WIDTH=value_width,
            VALUE_LANES=triton.next_power_of_2(value_width), PAGE=PAGE, EIGHT_BITS=in_eight_bits, KEPT=kept, num_warps=1,
        )  # fmt: skip
    output = torch.empty(rows, heads, value_width, dtype=query.dtype, device=query.device)
    partial = (
        torch.empty(rows, heads, splits, value_width, dtype=torch.float32, device=query.device)
        if splits > 1
        else output
    )
    sums = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=query.device) if splits > 1 else output
    decode_kernel[(rows, key_heads, splits)](
        query, key, value, addresses, table, positions, prefixes, remaining, partial, sums, query if sinks is None else sinks,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1), table.stride(0),
        scale, softcap or 1.0, window or 0,
        KEY_HEADS=key_heads, GROUP=heads // key_heads, TILE=max(16, triton.next_power_of_2(heads // key_heads)),
        WIDTH=width, LANES=max(16, triton.next_power_of_2(width)), VALUE_WIDTH=value_width,
        VALUE_LANES=max(16, triton.next_power_of_2(value_width)), PAGE=PAGE, BLOCK=BLOCK, SPLITS=splits,
        CAPPED=bool(softcap), WINDOWED=bool(window), SUNK=sinks is not None, WRITES=not writes_first,
        ELEMENT=ELEMENTS[query.dtype], EIGHT_BITS=in_eight_bits, KEPT=kept, num_warps=4,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(rows, heads)](
            partial, sums, output, heads, WIDTH=value_width, LANES=triton.next_power_of_2(value_width), SPLITS=splits,
            num_warps=1,
        )  # fmt: skip
    return output


def _splits(programs: int) -> int:
    """Parts of the context, a power of two: enough programs to fill the device."""
    return min(1 << max((PROGRAMS // programs).bit_length() - 1, 0), MAX_SPLITS) if programs < PROGRAMS else 1


@triton.jit
def in_eight_bits(numbers, ROOM: tl.constexpr, TOP: tl.constexpr, LEAST: tl.constexpr):
    """As `eight_bits.in_eight_bits`: (q, which e4m3 has, still in float32; e)."""
    numbers = numbers.to(tl.float32)
    largest = tl.max(tl.abs(numbers), 0)
    exponent = tl.maximum(((largest.to(tl.int32, bitcast=True) + ROOM) >> 23) - TOP, LEAST)
    return to_e4m3(numbers * power(254 - exponent)), exponent


# Over 60 lines: Triton inlines a function that is called, but its tensors would have to be passed and returned one by one.
@triton.jit
def decode_kernel(
    query, key, value, addresses, table, positions, prefixes, remaining, output, sums, sinks,
    query_row, query_head, key_row, key_head, value_row, value_head, table_row, scale, softcap, window,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_LANES: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SUNK: tl.constexpr, WRITES: tl.constexpr,
    ELEMENT: tl.constexpr, EIGHT_BITS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row).to(tl.int32)
    prefix = tl.load(prefixes + row).to(tl.int32)
    gap = (PAGE - prefix % PAGE) % PAGE
    keys = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(KEPT)), 16)  # torch aligns: whole vectors can be read
    values = tl.multiple_of(tl.load(addresses + 1).to(tl.pointer_type(KEPT)), 16)
    if EIGHT_BITS:
        key_exponents = tl.load(addresses + 2).to(tl.pointer_type(tl.uint8))
        value_exponents = tl.load(addresses + 3).to(tl.pointer_type(tl.uint8))
    lanes, value_lanes = tl.arange(0, LANES), tl.arange(0, VALUE_LANES)
    inside, inside_value = lanes < WIDTH, value_lanes < VALUE_WIDTH
    members = tl.arange(0, TILE)
    is_member = members < GROUP
    heads = head * GROUP + members
    both = is_member[:, None] & inside[None, :]
    q = tl.load(query + row * query_row + heads[:, None] * query_head + lanes[None, :], mask=both, other=0.0)

    first = 0
    if WINDOWED:
        oldest = tl.maximum(position - window + 1, 0)
        first = tl.where(oldest < prefix, oldest, oldest + gap)
    last = position + gap  # the place of the new token, which is not on its page yet
    blocks = tl.cdiv(tl.maximum(last - first, 0), BLOCK)
    share = tl.cdiv(blocks, SPLITS)
    peak = tl.full([TILE], -1.0e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    summed = tl.zeros([TILE, VALUE_LANES], tl.float32)
    for block in range(split * share, tl.minimum((split + 1) * share, blocks)):
        places = first + block * BLOCK + tl.arange(0, BLOCK)
        seen = (places < last) & ((places < prefix) | (places >= prefix + gap))
        page = tl.load(table + row * table_row + places // PAGE, mask=seen, other=0).to(tl.int64)
        tokens = (page * KEY_HEADS + head) * PAGE + places % PAGE
        filled = seen[:, None] & inside[None, :]
        k = tl.load(keys + tokens[:, None] * WIDTH + lanes[None, :], mask=filled, other=0.0)
        if EIGHT_BITS:
            k = (k.to(tl.float32) * power(tl.load(key_exponents + tokens, mask=seen, other=127))[:, None]).to(ELEMENT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        scores = tl.where(seen[None, :], scores, -float("inf"))
        above = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp(peak - above)
        weights = tl.exp(scores - above[:, None])
        total = total * shrink + tl.sum(weights, 1)
        filled = seen[:, None] & inside_value[None, :]
        v = tl.load(values + tokens[:, None] * VALUE_WIDTH + value_lanes[None, :], mask=filled, other=0.0)
        if EIGHT_BITS:
            v = (v.to(tl.float32) * power(tl.load(value_exponents + tokens, mask=seen, other=127))[:, None]).to(ELEMENT)
        summed = summed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = above

    if split == SPLITS - 1:  # the new token itself, from registers, and onto its page
        new_key = tl.load(key + row * key_row + head * key_head + lanes, mask=inside, other=0.0)
        new_value = tl.load(value + row * value_row + head * value_head + value_lanes, mask=inside_value, other=0.0)
        kept_key, kept_value = new_key, new_value
        if EIGHT_BITS:
            kept_key, key_exponent = in_eight_bits(new_key, ROOM, TOP, LEAST)
            kept_value, value_exponent = in_eight_bits(new_value, ROOM, TOP, LEAST)
            new_key, new_value = kept_key * power(key_exponent), kept_value * power(value_exponent)
        if WRITES:  # noqa: SIM102 - decided when the kernel is compiled, unlike the other one
            if tl.load(remaining + row) > 0:
                page = tl.load(table + row * table_row + last // PAGE).to(tl.int64)
                token = (page * KEY_HEADS + head) * PAGE + last % PAGE
                tl.store(keys + token * WIDTH + lanes, kept_key.to(KEPT), mask=inside)
                tl.store(values + token * VALUE_WIDTH + value_lanes, kept_value.to(KEPT), mask=inside_value)
                if EIGHT_BITS:
                    tl.store(key_exponents + token, key_exponent.to(tl.uint8))
                    tl.store(value_exponents + token, value_exponent.to(tl.uint8))
        score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        if CAPPED:
            score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
        above = tl.maximum(peak, score)
        shrink, weight = tl.exp(peak - above), tl.exp(score - above)
        total = total * shrink + weight
        summed = summed * shrink[:, None] + weight[:, None] * new_value.to(tl.float32)[None, :]
        peak = above
        if SUNK:
            sink = tl.load(sinks + heads, mask=is_member, other=0.0).to(tl.float32)
            above = tl.maximum(peak, sink)
            shrink = tl.exp(peak - above)
            total = total * shrink + tl.exp(sink - above)
            summed = summed * shrink[:, None]
            peak = above

    place = (row * KEY_HEADS * GROUP + heads) * SPLITS + split
    if SPLITS == 1:
        summed = summed / total[:, None]
    else:
        tl.store(sums + place * 2, peak, mask=is_member)
        tl.store(sums + place * 2 + 1, total, mask=is_member)
    both = is_member[:, None] & inside_value[None, :]
    tl.store(output + place[:, None] * VALUE_WIDTH + value_lanes[None, :], summed, mask=both)


@triton.jit
def write_kernel(
    key, value, addresses, table, positions, prefixes, remaining,
    key_row, key_head, value_row, value_head, table_row,
    KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_LANES: tl.constexpr, PAGE: tl.constexpr, EIGHT_BITS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(remaining + row) > 0:
        prefix = tl.load(prefixes + row).to(tl.int32)
        place = tl.load(positions + row).to(tl.int32) + (PAGE - prefix % PAGE) % PAGE
        page = tl.load(table + row * table_row + place // PAGE).to(tl.int64)
        token = (page * KEY_HEADS + head) * PAGE + place % PAGE
        keys = tl.load(addresses).to(tl.pointer_type(KEPT))
        values = tl.load(addresses + 1).to(tl.pointer_type(KEPT))
        lanes, value_lanes = tl.arange(0, LANES), tl.arange(0, VALUE_LANES)
        inside, inside_value = lanes < WIDTH, value_lanes < VALUE_WIDTH
        new_key = tl.load(key + row * key_row + head * key_head + lanes, mask=inside, other=0.0)
        new_value = tl.load(value + row * value_row + head * value_head + value_lanes, mask=inside_value, other=0.0)
        if EIGHT_BITS:
            new_key, key_exponent = in_eight_bits(new_key, ROOM, TOP, LEAST)
            new_value, value_exponent = in_eight_bits(new_value, ROOM, TOP, LEAST)
            tl.store(tl.load(addresses + 2).to(tl.pointer_type(tl.uint8)) + token, key_exponent.to(tl.uint8))
            tl.store(tl.load(addresses + 3).to(tl.pointer_type(tl.uint8)) + token, value_exponent.to(tl.uint8))
        tl.store(keys + token * WIDTH + lanes, new_key.to(KEPT), mask=inside)
        tl.store(values + token * VALUE_WIDTH + value_lanes, new_value.to(KEPT), mask=inside_value)


@triton.jit
def merge_kernel(partial, sums, output, heads, WIDTH: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr):
    """out = sum_s exp(m_s - M) o_s / sum_s exp(m_s - M) l_s."""
    place = tl.program_id(0) * heads + tl.program_id(1)
    splits, lanes = tl.arange(0, SPLITS), tl.arange(0, LANES)
    inside = lanes < WIDTH
    peaks = tl.load(sums + (place * SPLITS + splits) * 2)
    totals = tl.load(sums + (place * SPLITS + splits) * 2 + 1)
    weights = tl.exp(peaks - tl.max(peaks, 0))
    parts = tl.load(
        partial + (place * SPLITS + splits)[:, None] * WIDTH + lanes[None, :], mask=inside[None, :], other=0.0
    )
    merged = tl.sum(parts * weights[:, None], 0) / tl.sum(totals * weights, 0)
    tl.store(output + place * WIDTH + lanes, merged, mask=inside)
