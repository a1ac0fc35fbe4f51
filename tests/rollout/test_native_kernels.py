"""The kernels of the native engine: Triton's against plain torch, in Triton's interpreter where there is no GPU:

TRITON_INTERPRET=1 python -m pytest tests/rollout/test_native_kernels.py

Without that variable, triton alone suffices to compile them for GPUs that are not there.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from posttrain.models.layers import fp8
from posttrain.rollout.engines import sampling
from posttrain.rollout.engines.native import attention as plain
from posttrain.rollout.engines.native.cache import PAGE, KeyValueStore, LayerShape, PagePool, pages_for
from posttrain.rollout.engines.native.dense_rows import DenseRows
from posttrain.rollout.engines.native.eight_bits import in_eight_bits, rounded
from posttrain.rollout.engines.native.graphs import rows_of_graph
from posttrain.rollout.engines.native.rows import Rows
from posttrain.rollout.engines.native.step import advance_rows
from posttrain.rollout.engines.noise import noise_base, words
from posttrain.rollout.engines.sampling import DrawRule, draw

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
on_cpu = pytest.mark.skipif(ON_GPU, reason="rows lie side by side on a CPU only")
needs_triton = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="needs a GPU, or triton and TRITON_INTERPRET=1")


def pages_of_rows(prefixes, positions, heads, width, value_width=None, in_eight_bits=False):
    """A store with random numbers, and the pages of rows with these prefixes and positions, scattered over it."""
    shape = LayerShape(heads, width, value_width or width, torch.float32, in_eight_bits)
    store = KeyValueStore({0: shape}, torch.device(DEVICE))
    needed = [pages_for(prefix) + pages_for(position + 1 - prefix) for prefix, position in zip(prefixes, positions)]
    store.grow(1 + sum(needed) + 3)
    pool = PagePool()
    pool.grow(store.pages)
    order = torch.randperm(store.pages - 1) + 1
    table = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = order[torch.tensor(pool.take(count)) - 1].int()
    for tensor in (*store.keys, *store.values):
        tensor[:] = torch.randn(tensor.shape).to(DEVICE)
    return store, table.to(DEVICE)


def explicit_attention(query, store, table, row, position, prefix, scale, window, softcap, sinks=None):
    """Token by token, from the definition of `place` in `cache`."""
    places = [p if p < prefix else p + (-prefix) % PAGE for p in range(position + 1)]
    if window:
        places = places[max(0, position - window + 1) :]
    parts = []
    for tensor in (store.keys[0], store.values[0]):
        parts.append(torch.stack([tensor[table[row, place // PAGE].item(), :, place % PAGE] for place in places], 1))
    groups = query.shape[0] // parts[0].shape[0]
    key, value = (part.double().repeat_interleave(groups, 0) for part in parts)
    scores = (key @ query.double()[:, :, None]).squeeze(-1) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], -1)
    return (scores.softmax(-1)[:, None, : value.shape[1]] @ value).squeeze(1)


CASES = [
    pytest.param([0, 5, 16, 33, 70], [0, 5, 30, 100, 150], None, None, id="plain"),
    pytest.param([0, 5, 16, 33, 70], [3, 9, 30, 100, 71], 12, None, id="window"),
    pytest.param([0, 15, 17], [40, 15, 90], None, 1.5, id="softcap"),
    pytest.param([31, 64], [60, 200], 50, 2.0, id="window and softcap"),
]


@pytest.mark.parametrize(("prefixes", "positions", "window", "softcap"), CASES)
@pytest.mark.parametrize(
    "way",
    [
        "torch",
        "torch, sinks, narrow values",
        "torch, sinks, narrow values, 8 bits",
        pytest.param("side by side", marks=on_cpu),
        pytest.param("side by side, sinks, narrow values", marks=on_cpu),
        pytest.param("side by side, sinks, narrow values, 8 bits", marks=on_cpu),
        *(
            pytest.param(f"triton {n}{more}", marks=needs_triton)
            for n in (1, 4)
            for more in ("", ", sinks", ", narrow values", ", 8 bits", ", sinks, narrow values, 8 bits")
        ),
    ],
)
def test_decode_attention_is_the_explicit_sum(way, prefixes, positions, window, softcap):
    torch.manual_seed(1)
    heads, key_heads, width, scale = 6, 2, 24, 0.3
    sinks = torch.randn(heads, device=DEVICE) if "sinks" in way else None
    widths = (width, 16 if "narrow" in way else width)
    store, table = pages_of_rows(prefixes, positions, key_heads, *widths, in_eight_bits="8 bits" in way)
    rows = len(prefixes)
    query = torch.randn(rows, heads, width, device=DEVICE)
    key, value = (torch.randn(rows, key_heads, each, device=DEVICE) for each in widths)
    where = (table, torch.tensor(positions, device=DEVICE), torch.tensor(prefixes, device=DEVICE))
    in_use = torch.ones(rows, dtype=torch.int64, device=DEVICE)
    if way.startswith("torch"):
        plain.write_token(store.keys[0], store.values[0], key, value, *where, in_use > 0)
        found = plain.decode_attention(query, store.keys[0], store.values[0], *where, scale, window, softcap, sinks)
    elif way.startswith("side by side"):
        dense = DenseRows(store, *where, 1)
        found = dense.attend(0, query, key, value, scale, window, softcap, sinks)
        dense.advance()
        dense.keep()
    else:
        from posttrain.rollout.engines.native.decode_triton import decode_attention_triton

        splits = int(way.split()[1].strip(","))
        found = decode_attention_triton(
            query, key, value, store.addresses[0], *where, in_use, scale, window, softcap, sinks, splits,
            in_eight_bits=store.in_eight_bits,
        )  # fmt: skip
    for row, (position, prefix) in enumerate(zip(positions, prefixes)):
        place = position + (-prefix) % PAGE
        page = table[row, place // PAGE].item()
        kept_key, kept_value = (rounded(x[row]) if "8 bits" in way else x[row] for x in (key, value))
        assert torch.equal(store.keys[0][page, :, place % PAGE], kept_key)
        assert torch.equal(store.values[0][page, :, place % PAGE], kept_value)
        wanted = explicit_attention(query[row], store, table, row, position, prefix, scale, window, softcap, sinks)
        assert torch.allclose(found[row].double(), wanted, atol=1e-5), row


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_triton_rounds_to_8_bits_as_torch_does(dtype):
    """Numbers of all sizes, half of them halfway between two that e4m3 has; tokens of zeros, and of one number alone."""
    from posttrain.rollout.engines.native.decode_triton import decode_attention_triton

    torch.manual_seed(0)
    rows, heads, width = 64, 2, 24
    store = KeyValueStore({0: LayerShape(heads, width, width, dtype, in_eight_bits=True)}, torch.device(DEVICE))
    store.grow(rows + 1)
    halfway = (2 * torch.randint(-16, 16, (rows, heads, width)) + 1).float() * 2.0 ** torch.randint(-8, 8, (rows, 1, 1))
    sizes = 10 ** (10 * torch.rand(rows, heads, 1) - 6)  # to the ends of float16
    either = torch.where(torch.rand(rows, heads, 1) < 0.5, halfway, torch.randn(rows, heads, width) * sizes)
    key = either.clamp(-6e4, 6e4).to(DEVICE, dtype)
    key[0], key[1, :, 1:] = 0, 0
    value = key.flip(0)
    where = (1 + torch.arange(rows)[:, None].int(), torch.full((rows,), 5), torch.full((rows,), 0))
    where, in_use = [tensor.to(DEVICE) for tensor in where], torch.ones(rows, dtype=torch.int64, device=DEVICE)
    query = torch.zeros(rows, heads, width, dtype=dtype, device=DEVICE)
    decode_attention_triton(
        query, key, value, store.addresses[0], *where, in_use, 1.0, None, None, splits=1, in_eight_bits=True
    )
    for pages, wanted in ((store.keys[0], key), (store.values[0], value)):
        assert torch.equal(pages[1:, :, 5], rounded(wanted))
        assert torch.equal(pages.exponents[1:, :, 5], in_eight_bits(wanted)[1])


@needs_triton
@pytest.mark.parametrize("width", [16, 100, 4096, 5000])
def test_rows_are_rounded_for_products_as_torch_does(width):
    from posttrain.models.layers.fp8_triton import scaled_triton

    torch.manual_seed(0)
    x = torch.randn(7, width, device=DEVICE) * 10 ** (6 * torch.rand(7, 1, device=DEVICE) - 3)
    x[3] = 0
    x[:, 1] = 0
    for given in (x, x.t().contiguous().t(), x.bfloat16()):
        wanted, scales = fp8.scaled(given)
        found, its_scales = scaled_triton(given)
        assert_rounded(found, its_scales, wanted, scales)


def assert_rounded(found, scales, wanted, its_scales):
    assert torch.equal(scales, its_scales)
    assert torch.equal(found.view(torch.uint8) & 127, wanted.view(torch.uint8) & 127)  # a zero may have either sign
    assert (found.float().sign() == wanted.float().sign()).all()


@needs_triton
@pytest.mark.parametrize(("rows", "width"), [(7, 16), (128, 100), (1025, 130), (2100, 33)])
def test_columns_are_rounded_for_products_as_torch_does(rows, width):
    from posttrain.models.layers.fp8_triton import both_triton, columns_triton

    torch.manual_seed(0)
    x = torch.randn(rows, width, device=DEVICE) * 10 ** (6 * torch.rand(width, device=DEVICE) - 3)
    x[:, 3] = 0
    x[1] = 0
    for given in (x, x.t().contiguous().t(), x.bfloat16()):
        columns, straight = fp8._columns(given), fp8.scaled(given)
        assert_rounded(*columns_triton(given), *columns)
        found = both_triton(given)
        assert_rounded(*found[:2], *columns)
        assert_rounded(*found[2:], *straight)


without_interpreter = pytest.mark.skipif(
    INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs triton, not interpreted"
)


def compiled_for(capability, kernel, pointers, others, constants):
    """Down to machine code; Ada has no conversion of some pairs of dtypes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = pointers | others | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    made = triton.compile(ASTSource(kernel, signature, constants), GPUTarget("cuda", capability, 32), {"num_warps": 4})
    assert made.asm["cubin"]
    return made.asm["ptx"]


@without_interpreter
@pytest.mark.parametrize("capability", [89, 90, 100])
@pytest.mark.parametrize("element", ["bf16", "fp16", "fp32"])
def test_rows_are_rounded_on_ada_hopper_and_blackwell(capability, element):
    from posttrain.models.layers.fp8_triton import scaled_kernel

    pointers = {"x": f"*{element}", "found": "*fp8e4nv", "scales": "*fp32"}
    assert "e4m3" in compiled_for(capability, scaled_kernel, pointers, {}, {"BLOCK": 4096})


@without_interpreter
@pytest.mark.parametrize("capability", [89, 90, 100])
@pytest.mark.parametrize("with_rows", [False, True])
def test_columns_are_rounded_on_ada_hopper_and_blackwell(capability, with_rows):
    from posttrain.models.layers.fp8_triton import TILE, TILES, largest_kernel, tile_kernel

    pointers = {"x": "*bf16", "of_columns": "*fp32", "of_rows": "*fp32", "turned": "*fp8e4nv", "straight": "*fp8e4nv"}
    constants = {"TILE": TILE, "WITH_ROWS": with_rows}
    assert "e4m3" in compiled_for(capability, tile_kernel, pointers, {}, constants)
    assert "atom" in compiled_for(capability, largest_kernel, pointers, {}, constants | {"TILES": TILES})


@without_interpreter
@pytest.mark.parametrize("capability", [89, 90, 100])
@pytest.mark.parametrize("element", ["bf16", "fp16", "fp32"])
def test_pages_of_8_bits_are_read_on_ada_hopper_and_blackwell(capability, element):
    import triton.language as tl

    from posttrain.rollout.engines.native.decode_triton import decode_kernel

    kept = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
    constants = {
        "KEY_HEADS": 2, "GROUP": 7, "TILE": 16, "WIDTH": 64, "LANES": 64, "VALUE_WIDTH": 64, "VALUE_LANES": 64, "PAGE": PAGE,
        "BLOCK": 64, "SPLITS": 4, "CAPPED": True, "WINDOWED": True, "SUNK": True, "WRITES": True,
        "ELEMENT": kept[element], "EIGHT_BITS": True, "KEPT": tl.float8e4nv,
    }  # fmt: skip
    pointers = {"addresses": "*i64", "table": "*i32", "positions": "*i64", "prefixes": "*i64", "remaining": "*i64"}
    pointers |= dict.fromkeys(("query", "key", "value", "sinks"), f"*{element}") | {"output": "*fp32", "sums": "*fp32"}
    assert "e4m3" in compiled_for(capability, decode_kernel, pointers, {"scale": "fp32", "softcap": "fp32"}, constants)


@pytest.mark.parametrize("way", ["torch", *(pytest.param(f"triton {n}", marks=needs_triton) for n in (1, 4))])
@pytest.mark.parametrize("in_eight_bits", [False, True])
@pytest.mark.parametrize(("prefixes", "positions", "window", "softcap"), CASES)
def test_lines_of_one_row_look_at_each_other(way, in_eight_bits, prefixes, positions, window, softcap):
    """Four lines a row, across the edges of pages; the last of every row is not in use."""
    torch.manual_seed(3)
    heads, key_heads, each, scale = 6, 2, 4, 0.3
    widths = (24, 16)
    ends = [position + each for position in positions]
    store, table = pages_of_rows(prefixes, ends, key_heads, *widths, in_eight_bits=in_eight_bits)
    count = each * len(prefixes)
    query = torch.randn(count, heads, widths[0], device=DEVICE)
    key, value = (torch.randn(count, key_heads, width, device=DEVICE) for width in widths)
    sinks = torch.randn(heads, device=DEVICE)
    ahead = torch.arange(each).repeat(len(prefixes))
    in_use = (ahead < each - 1).long().to(DEVICE)
    places, starts = (torch.tensor(x).repeat_interleave(each) for x in (positions, prefixes))
    places = places + ahead * (ahead < each - 1)
    where = (table.repeat_interleave(each, 0), places.to(DEVICE), starts.to(DEVICE))
    before = store.keys[0][:] + 0
    if way == "torch":
        plain.write_token(store.keys[0], store.values[0], key, value, *where, in_use > 0)
        found = plain.decode_attention(
            query, store.keys[0], store.values[0], table, *where[1:], scale, window, softcap, sinks
        )
    else:
        from posttrain.rollout.engines.native.decode_triton import decode_attention_triton

        found = decode_attention_triton(
            query, key, value, store.addresses[0], *where, in_use, scale, window, softcap, sinks,
            splits=int(way.split()[1]), in_eight_bits=in_eight_bits, writes_first=True,
        )  # fmt: skip
    key, value = store.as_kept(key, value)
    written = 0
    for line in range(count):
        if not in_use[line]:
            continue
        row, position, prefix = line // each, places[line].item(), starts[line].item()
        place = position + (-prefix) % PAGE
        page = table[row, place // PAGE].item()
        assert torch.equal(store.keys[0][page, :, place % PAGE], key[line])
        assert torch.equal(store.values[0][page, :, place % PAGE], value[line])
        wanted = explicit_attention(query[line], store, table, row, position, prefix, scale, window, softcap, sinks)
        assert torch.allclose(found[line].double(), wanted, atol=1e-5), line
        written += 1
    assert (store.keys[0][:][1:] != before[1:]).any(-1).any(1).sum() == written  # and nothing else, but for page 0


@pytest.mark.parametrize("way", ["torch", pytest.param("triton", marks=needs_triton)])
def test_rows_out_of_use_write_to_nobodys_page(way):
    store, table = pages_of_rows([4, 4], [6, 6], 2, 16)
    before = store.keys[0][1:].clone()
    query, key = torch.randn(2, 4, 16, device=DEVICE), torch.randn(2, 2, 16, device=DEVICE)
    where = (table, torch.tensor([6, 6], device=DEVICE), torch.tensor([4, 4], device=DEVICE))
    nothing = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    if way == "torch":
        plain.write_token(store.keys[0], store.values[0], key, key, *where, nothing > 0)
    else:
        from posttrain.rollout.engines.native.decode_triton import decode_attention_triton

        decode_attention_triton(query, key, key, store.addresses[0], *where, nothing, 0.3, None, None)
    assert torch.equal(store.keys[0][1:], before)


@on_cpu
@pytest.mark.parametrize("is_rounded", [False, True])
def test_steps_side_by_side_are_those_on_pages(is_rounded):
    """Seven steps, kept after the third and the last: the same answers, and the same tokens on the same pages."""
    torch.manual_seed(2)
    prefixes, positions = [0, 5, 16, 40], [0, 7, 16, 90]
    store, table = pages_of_rows(prefixes, [p + 7 for p in positions], 2, 16, in_eight_bits=is_rounded)
    other = KeyValueStore(store.shapes, store.device)
    other.grow(store.pages)
    for mine, theirs in zip((*other.keys, *other.values), (*store.keys, *store.values)):
        mine[:] = theirs[:]
    where, in_use = [table, torch.tensor(positions), torch.tensor(prefixes)], torch.ones(4, dtype=torch.bool)
    dense = DenseRows(other, *where, 7)
    for step in range(7):
        query, key, value = torch.randn(4, 4, 16), torch.randn(4, 2, 16), torch.randn(4, 2, 16)
        plain.write_token(store.keys[0], store.values[0], key, value, *where, in_use)
        wanted = plain.decode_attention(query, store.keys[0], store.values[0], *where, 0.3, 9, None)
        assert torch.allclose(dense.attend(0, query, key, value, 0.3, 9, None), wanted, atol=1e-6)
        dense.advance()
        where[1] = where[1] + 1
        if step in (2, 6):
            dense.keep()
    assert torch.equal(store.keys[0][:], other.keys[0][:])
    assert torch.equal(store.values[0][:], other.values[0][:])


@on_cpu
def test_rows_side_by_side_that_run_on_after_their_end_disturb_nobody():
    """A row that has no further page writes to page 0; a page 0 without numbers is seen by nobody."""
    store, table = pages_of_rows([4, 4, 40], [4 + PAGE - 1, 6, 45], 2, 16)
    store.keys[0][0] = store.values[0][0] = float("nan")
    before = store.keys[0].clone()
    where = (table[:, :2], torch.tensor([4 + PAGE - 1, 6, 6]), torch.tensor([4, 4, 4]))
    table[1:, 1] = table[1:, 0]  # pages that hold their tokens; only the first row's last one is full
    dense = DenseRows(store, *where, 3)
    for _ in range(3):
        found = dense.attend(0, *(torch.randn(3, heads, 16) for heads in (4, 2, 2)), 0.3, None, None)
        assert found.isfinite().all()
        dense.advance()
    dense.keep()
    changed = (store.keys[0] != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert set(changed) <= {0, *table[:, :2].flatten().tolist()}


def made_rows(count, vocabulary):
    rows = Rows(count, 4, 3, torch.device(DEVICE))
    fields = torch.zeros_like(rows.host)
    fields[0] = 7
    fields[1] = torch.arange(count) + 10
    fields[3] = torch.tensor([noise_base(5, row, 1) for row in range(count)])
    fields[4] = torch.arange(count)
    fields[5] = torch.arange(count) % 3  # some not in use, some with one token left
    rows.device.copy_(fields)
    rows.step += 1
    return rows


@needs_triton
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_triton_draws_and_moves_on_as_torch_does(temperature, monkeypatch):
    from posttrain.rollout.engines.native import sampling_triton

    if not ON_GPU:
        monkeypatch.setattr(sampling, "BLOCK", 64)
    torch.manual_seed(0)
    count, vocabulary = 50, 50_000 if ON_GPU else 1000
    logits = 3 * torch.randn(count, vocabulary, device=DEVICE)
    logits[3, 200:] = float("-inf")
    logits[4, :600] = float("-inf")
    ours, theirs = (made_rows(count, vocabulary) for _ in range(2))
    noise = words(ours.field("bases", count), ours.field("numbers", count))
    drawn = draw(logits, noise, DrawRule(temperature=temperature))
    stop_ids = drawn.ids[[8, 11, 20]].clone()
    advance_rows(ours, count, drawn, stop_ids)
    sampling_triton.draw_and_advance_triton(logits, theirs, count, temperature, stop_ids)
    assert torch.equal(ours.ids, theirs.ids)
    assert torch.equal(ours.device, theirs.device)
    assert torch.allclose(ours.logps, theirs.logps, atol=1e-5)
    assert theirs.field("remaining", count)[8] == 0


def test_graphs_come_in_sizes_that_waste_little():
    assert [rows_of_graph(rows, 1024) for rows in (1, 2, 3, 100, 200, 256)] == [1, 2, 4, 128, 256, 256]
    assert [rows_of_graph(rows, 1024) for rows in (257, 384, 385, 600, 900)] == [384, 384, 512, 768, 1024]
    assert rows_of_graph(40, 48) == 48  # all slots, which need not be a power of two
