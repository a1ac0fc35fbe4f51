"""The memory ladder on a CUDA device: estimates against the allocator, and offloading against full checkpointing."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from posttrain.models.layers.checkpointing import allow_selective_checkpointing
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.memory import fit as memory
from posttrain.models.memory.activation_offloading import offloaded_activations

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS wakes up, for the bit-for-bit test
LAYERS, WIDTH, TOKENS = 24, 1024, 16384
CUDA = torch.device("cuda", 0)
LEVELS = {memory.NONE: None, memory.SELECTIVE: {"selective": True}, memory.FULL: {"use_reentrant": False}}


def model(level=memory.FULL):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024, hidden_size=WIDTH, intermediate_size=2816, num_hidden_layers=LAYERS, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=TOKENS,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config).to(CUDA, torch.bfloat16)
    made = load_model(made, LoadOptions(dtype=torch.bfloat16, device=CUDA)).model.train()
    if LEVELS[level] is not None:
        allow_selective_checkpointing(made)
        made.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(LEVELS[level]))
    return made


def loss(made, tokens=TOKENS):
    inputs = memory._probe_inputs(made.config, tokens, CUDA)
    return weighed(made.model(**inputs, use_cache=False).last_hidden_state)


def weighed(hidden):
    """The sum of squares would be a constant after the last norm, and its gradient nothing but rounding."""
    return (hidden * torch.arange(hidden.shape[-1], device=hidden.device).cos().to(hidden.dtype)).sum()


def step(made, offload, tokens=TOKENS):
    """(gradients, peak beside what was there before)."""
    made.zero_grad(set_to_none=False)  # gradients that grow with the backward would hide what activations need
    gc.collect()  # what earlier tests left behind, freed in between, would be taken off the peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if offload:
        with offloaded_activations(CUDA):
            loss(made, tokens).backward()
    else:
        loss(made, tokens).backward()
    torch.cuda.synchronize()
    return [p.grad.clone() for p in made.parameters() if p.grad is not None], torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("level", [memory.FULL, memory.NONE])
def test_gradients_are_bit_for_bit_the_same(level):
    torch.use_deterministic_algorithms(True)  # with `warn_only` the flash backward would stay as it is
    try:
        made = model(level)
        expected, _ = step(made, offload=False, tokens=4096)
        again, _ = step(made, offload=False, tokens=4096)
        assert all(torch.equal(a, b) for a, b in zip(again, expected)), "the model itself is not deterministic here"
        for _ in range(3):  # buffers are used again
            found, _ = step(made, offload=True, tokens=4096)
            assert all(torch.equal(a, b) for a, b in zip(found, expected))
    finally:
        torch.use_deterministic_algorithms(False)


def test_peak_memory_is_below_full_checkpointings_by_the_layer_inputs():
    made = model()
    step(made, offload=True)
    _, parked = step(made, offload=True)
    _, kept = step(made, offload=False)
    inputs = LAYERS * WIDTH * 2 * TOKENS
    print(f"peak: kept {kept / 2**20:.0f} MiB, parked {parked / 2**20:.0f} MiB, layer inputs {inputs / 2**20:.0f} MiB")
    assert kept - parked >= 0.6 * inputs


@pytest.mark.whole_gpu
def test_time_is_within_a_tenth_of_full_checkpointing():
    made = model()
    taken = {}
    for offload in (True, False, True, False):
        step(made, offload)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            step(made, offload)
        end.record()
        torch.cuda.synchronize()
        taken[offload] = begin.elapsed_time(end) / 3
    print(f"ms a step: parked {taken[True]:.1f}, kept {taken[False]:.1f}")
    assert taken[True] <= 1.1 * taken[False]


def test_offloading_does_not_synchronise():
    made = model()
    for _ in range(2):
        step(made, offload=True)
    inputs = memory._probe_inputs(made.config, TOKENS, CUDA)
    made.zero_grad(set_to_none=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with offloaded_activations(CUDA):
            weighed(made.model(**inputs, use_cache=False).last_hidden_state).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("level", list(LEVELS))
def test_the_measured_cost_of_a_token_is_what_the_allocator_sees(level):
    made = model()
    made.gradient_checkpointing_disable()
    cost = memory.activation_cost(made)
    made = model(level)
    loss(made, 1024).backward()
    torch.cuda.synchronize()
    gc.collect()  # models of earlier tests are cycles: freed in between, they would be taken off what is found
    before = torch.cuda.memory_allocated()
    kept = loss(made)
    torch.cuda.synchronize()
    found = (torch.cuda.memory_allocated() - before) / TOKENS
    del kept
    print(f"{level}: {cost.kept[level]:.0f} bytes a token expected, {found:.0f} found")
    beside = 8 * WIDTH  # rotary tables and the last norm, once for all layers
    assert cost.kept[level] * 0.9 <= found <= cost.kept[level] * 1.1 + beside
