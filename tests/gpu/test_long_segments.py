"""Long segments through cuDNN: the answers and gradients of the varlen kernel, whatever lies beside them."""

from __future__ import annotations

import time

import pytest
import torch

from posttrain.core.batch import RAGGED
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.models.attention import dense, ragged
from posttrain.models.attention.dense import WORTH_IT
from posttrain.models.layers.kernels import COMPILED, LIGER, PLAIN
from posttrain.models.load.model import LoadOptions, load_model
from tests import tiny
from tests.gpu.recomputation import answers, assert_recomputation_changes_nothing, sine

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LENGTHS = [700, 4096, 5000, 300, 300, 9001, 20]
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
REACH = {"max_position_embeddings": 1 << 17}
CUDA = torch.device("cuda")


def batch():
    made = torch.Generator().manual_seed(1)
    rows = [torch.randint(5, 60, (length,), generator=made).tolist() for length in LENGTHS]
    return collate([(Sample(ids, [False] + [True] * (len(ids) - 1)),) for ids in rows], ("text",), RAGGED).to("cuda")


def loaded(dtype, kernels=PLAIN):
    model = tiny.causal_lm(dtype=dtype, **SHAPE, **REACH).train().cuda()
    return load_model(model, LoadOptions(layer_kernels=(kernels,), device=CUDA))


@pytest.mark.parametrize("kernels", [PLAIN, LIGER, COMPILED])
def test_either_kernel_is_as_near_to_float32(kernels, monkeypatch):
    calls, alone = [], dense.alone
    monkeypatch.setattr(dense, "alone", lambda *given: calls.append(given[0].shape[2]) or alone(*given))
    exact = answers(loaded(torch.float32).model, batch())
    assert not calls  # the flash kernel has no float32, and SDPA runs segment by segment as it is
    apart = {}
    for name, pays in (("varlen", False), ("dense", True)):
        monkeypatch.setattr(ragged, "dense_pays", lambda *heads, pays=pays: pays)
        logps, gradient = answers(loaded(torch.bfloat16, kernels).model, batch())
        apart[name] = ((logps - exact[0]).abs().mean().item(), sine(gradient, exact[1]))
    print(f"{kernels}: {apart}")
    assert {4096, 5000, 9001} <= set(calls)
    assert apart["dense"][0] < 1.2 * apart["varlen"][0] + 1e-4
    assert apart["dense"][1] < 1.2 * apart["varlen"][1] + 1e-3


@pytest.mark.parametrize("selective", [False, True])
def test_recomputation_changes_no_gradient(selective, monkeypatch):
    monkeypatch.setattr(ragged, "dense_pays", lambda *heads: True)
    assert_recomputation_changes_nothing(loaded(torch.bfloat16).model, batch(), selective)


@pytest.mark.parametrize(("heads", "key_heads", "width"), [(12, 2, 128), (14, 2, 64), (32, 8, 128), (28, 4, 128)])
def test_the_gain_is_measured(heads, key_heads, width):
    began = time.perf_counter()
    gain = ragged.long_gain(heads, key_heads, width, torch.bfloat16, CUDA)
    print(f"{heads}/{key_heads} x {width}: {gain} Measured in {time.perf_counter() - began:.2f} s.")
    assert gain.problem is None
    assert gain.is_worth_it == (gain.times >= WORTH_IT)


def test_the_choice_is_a_note_of_the_model():
    assert [note for note in loaded(torch.bfloat16).notes if "varlen kernel" in note]
    assert not [note for note in loaded(torch.float32).notes if "varlen kernel" in note]


def test_heads_of_another_width_and_deterministic_runs_stay_with_varlen():
    heads = torch.zeros(1, 4, 8, 16, dtype=torch.bfloat16, device="cuda")
    assert not ragged.dense_pays(heads, heads, heads)
    wide = torch.zeros(1, 12, 8, 128, dtype=torch.bfloat16, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        assert not ragged.dense_pays(wide, wide[:, :2], wide[:, :2])
    finally:
        torch.use_deterministic_algorithms(False)
