"""FlashAttention 3 and 4 on a real card: answers and gradients are those of float32, in calls and in models; and their speed."""

from __future__ import annotations

import itertools

import pytest
import torch

from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.models.attention import flash_choice, ragged
from posttrain.models.attention.flash_choice import Variant
from posttrain.models.attention.flash_packages import FLASH4, PACKAGES
from posttrain.models.attention.ragged import segment_attention
from posttrain.models.attention.trial import flows_of
from posttrain.models.layers.kernels import COMPILED, PLAIN
from posttrain.models.load.model import LoadOptions, load_model
from tests import tiny
from tests.gpu.recomputation import answers, assert_recomputation_changes_nothing, sine
from tests.rollout import families

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not flash_choice.INSTALLED, reason="needs FlashAttention 3 or 4"),
]

CUDA = torch.device("cuda")
LENGTHS = (700, 1024, 3, 2500, 300)
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.fixture(params=PACKAGES, ids=["3", "4"])
def package(request):
    if not request.param.is_installed():
        pytest.skip(f"needs {request.param.name}")
    return request.param


@pytest.fixture
def flash4():
    if not FLASH4.is_installed():
        pytest.skip(f"needs {FLASH4.name}")
    return FLASH4


@pytest.fixture
def everywhere(monkeypatch):
    """A package is used for rows of any length where it is right; a variant that is wrong fails the test."""
    decide = flash_choice.decide

    def alone(package):
        def decided(variant, device):
            decision = decide(variant, device)
            assert not decision.problems, decision
            flash_choice._chosen[variant] = ((0, package),)
            return decision

        monkeypatch.setattr(flash_choice, "INSTALLED", (package,))
        flash_choice._decision.cache_clear()
        monkeypatch.setattr(flash_choice, "decide", decided)

    monkeypatch.setattr(flash_choice, "_chosen", {})
    monkeypatch.setattr(ragged, "dense_pays", lambda *heads: False)
    yield alone
    monkeypatch.undo()
    flash_choice._decision.cache_clear()


def edges(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def assert_rows_are_as_in_float32(heads, key_heads, width, window=None, softcap=None):
    torch.manual_seed(0)
    made = [
        torch.randn(1, sum(LENGTHS), n, width, device="cuda").transpose(1, 2) for n in (heads, key_heads, key_heads)
    ]
    made[0] *= 1 if softcap is None else softcap / 8  # so that scores feel it
    made = [x.bfloat16() for x in made]
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        given = [x.detach().to(dtype).requires_grad_() for x in made]
        output = segment_attention(*given, edges(LENGTHS), max(LENGTHS), None, 0.0, window, None, softcap)
        results[dtype] = [output, *torch.autograd.grad(output, given, flows_of(output))]
    for one, other in zip(results[torch.float32], results[torch.bfloat16], strict=True):
        assert (one - other.float()).norm() < 0.02 * one.norm()


SHAPES = [(12, 2, 128), (14, 2, 64), (8, 4, 256), (16, 16, 192)]


@pytest.mark.parametrize(("heads", "key_heads", "width"), SHAPES)
@pytest.mark.parametrize("window", [None, 100])
def test_rows_are_attended_to_as_in_float32(heads, key_heads, width, window, package, everywhere):
    everywhere(package)
    assert_rows_are_as_in_float32(heads, key_heads, width, window)
    key = Variant(heads, key_heads, width, torch.bfloat16, True, window is not None)
    assert flash_choice._chosen == {key: ((0, package),)}


@pytest.mark.parametrize(("heads", "key_heads", "width"), SHAPES)
@pytest.mark.parametrize("window", [None, 100])
def test_soft_capped_rows_are_attended_to_as_in_float32(heads, key_heads, width, window, flash4, everywhere):
    """By FlashAttention 4: of 3, xformers' build leaves soft-caps out."""
    everywhere(flash4)
    assert_rows_are_as_in_float32(heads, key_heads, width, window, 30.0)


@pytest.mark.parametrize("window", [None, 100])
def test_what_is_answered_wrongly_is_left_to_torchs_kernel(window):
    """FlashAttention 4.0.0b36 is off by more than the answers' own norm with heads of 80 on a Hopper, those of Qwen2-VL's tower."""
    variant = Variant(16, 16, 80, torch.bfloat16, windowed=window is not None)
    print(flash_choice.decide(variant, CUDA))
    assert_rows_are_as_in_float32(*variant[:3], window)


def test_operators_are_what_compilers_take_them_for(package):
    q, k, v = (torch.randn(600, n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2))
    how = (edges([200, 400]), edges([200, 400]), 400, 400, 0.1, True, -1, -1, 0.0)
    asked = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(package.forward, (q, k, v, *how), test_utils=asked)
    out, sums = (x.detach() for x in package.forward(q, k, v, *how))
    heads = [x.detach() for x in (torch.randn_like(q), q, k, v)]
    torch.library.opcheck(package.backward, (*heads, out, sums, *how), test_utils=asked)


def batch(layout=RAGGED):
    made = torch.Generator().manual_seed(1)
    ids = [torch.randint(5, 60, (length,), generator=made).tolist() for length in LENGTHS]
    if layout != SHARED:
        units = [(Sample(row, [False] + [True] * (len(row) - 1)),) for row in ids]
        return collate(units, ("text",), layout).to("cuda")
    pairs = [(ids[0] + ids[2], ids[0] + ids[4]), (ids[1] + ids[4], ids[1] + ids[2])]
    starts = [len(ids[0]), len(ids[1])]
    units = [
        tuple(Sample(row, [False] * start + [True] * (len(row) - start)) for row in pair)
        for pair, start in zip(pairs, starts)
    ]
    return collate(units, ("chosen", "rejected"), SHARED).to("cuda")


def loaded(dtype, kernels=PLAIN):
    model = tiny.causal_lm(dtype=dtype, **SHAPE).train().cuda()
    return load_model(model, LoadOptions(layer_kernels=(kernels,), device=CUDA, share_prefixes=True)).model


@pytest.mark.parametrize("layout", [RAGGED, SHARED])
@pytest.mark.parametrize("kernels", [PLAIN, COMPILED])
def test_a_model_is_as_near_to_float32_as_with_torchs_kernel(kernels, layout, package, everywhere, monkeypatch):
    exact, apart = answers(loaded(torch.float32), batch(layout)), {}
    everywhere(package)
    for name in ("package", "torch"):
        torch.compiler.reset()
        monkeypatch.setattr(flash_choice, "INSTALLED", (package,) if name == "package" else ())
        logps, gradient = answers(loaded(torch.bfloat16, kernels), batch(layout))
        apart[name] = ((logps - exact[0]).abs().mean().item(), sine(gradient, exact[1]))
    print(f"{kernels}, {layout}: {apart}")
    assert {variant.causal for variant in flash_choice._chosen} >= ({True, False} if layout == SHARED else {True})
    assert apart["package"] != apart["torch"]
    assert apart["package"][0] < 1.2 * apart["torch"][0] + 1e-4
    assert apart["package"][1] < 1.2 * apart["torch"][1] + 1e-3


@pytest.mark.parametrize("selective", [False, True])
def test_recomputation_changes_no_gradient(selective, package, everywhere):
    everywhere(package)
    assert_recomputation_changes_nothing(loaded(torch.bfloat16), batch(), selective)


def of_family(family, dtype, layout):
    model = families.model_of(family, head_dim=64, max_position_embeddings=4096).to("cuda", dtype).train()
    if family == "gemma2":
        model.set_attn_implementation("eager")  # transformers' SDPA leaves out the soft-cap
    made = load_model(model, LoadOptions(device=CUDA, layout=PADDED if layout == PADDED else None))
    assert made.layout == layout, made.notes
    return answers(made.model, batch(layout))


@pytest.mark.parametrize(("family", "rival"), [("gemma2", PADDED), ("gpt_oss", RAGGED)])
def test_soft_caps_and_sinks_are_as_near_to_float32_as_without_it(family, rival, flash4, everywhere, monkeypatch):
    exact, apart = of_family(family, torch.float32, PADDED), []
    everywhere(flash4)
    for packages, layout in (((flash4,), RAGGED), ((), rival)):
        monkeypatch.setattr(flash_choice, "INSTALLED", packages)
        logps, gradient = of_family(family, torch.bfloat16, layout)
        apart.append(((logps - exact[0]).abs().mean().item(), sine(gradient, exact[1])))
    print(f"{family}: {apart}")
    assert any(variant.windowed for variant in flash_choice._chosen)
    assert family != "gemma2" or all(variant.softcap for variant in flash_choice._chosen)
    assert apart[0][0] < 1.3 * apart[1][0] + 1e-3
    assert apart[0][1] < 1.3 * apart[1][1] + 1e-2


@pytest.mark.whole_gpu
@pytest.mark.parametrize(("heads", "key_heads", "width"), [(12, 2, 128), (14, 2, 64), (32, 8, 128), (28, 4, 128)])
def test_the_gain_is_measured(heads, key_heads, width):
    decision = flash_choice.decide(Variant(heads, key_heads, width, torch.bfloat16), CUDA)
    print(f"{heads}/{key_heads} x {width}: {decision}")
    beside = ragged.long_gain(heads, key_heads, width, torch.bfloat16, CUDA)
    print(f"{heads}/{key_heads} x {width}: {beside}")
    assert not decision.problems
    assert beside.problem is None
    assert decision.steps
