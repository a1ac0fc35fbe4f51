"""FlashAttention 3 and 4: what is made of their calls, on stand-ins for them, is the formula; and when they are called."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from posttrain.core.batch import RAGGED, SharedPrefixes
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.models.attention import flash, flash_choice, flash_packages, ragged
from posttrain.models.attention.flash import FlashCall
from posttrain.models.attention.flash_choice import Decision, Variant, chosen
from posttrain.models.attention.flash_packages import FLASH3, FLASH4, PACKAGES, Package
from posttrain.models.attention.image_blocks import ImageBlocks
from posttrain.models.attention.ragged import segment_attention
from posttrain.models.layers.checkpointing import allow_selective_checkpointing
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.token_scores import score_tokens
from tests import tiny
from tests.models import flash_kernels
from tests.rollout import families

HEADS, KEY_HEADS, WIDTH = 4, 2, 8
CPU = torch.device("cpu")
USUAL = Variant(HEADS, KEY_HEADS, WIDTH, torch.float64)


def put(patch: pytest.MonkeyPatch, package: Package, least: int = 0) -> list[str]:
    """From here on it is installed, and used from `least` tokens on; what is called of it is appended to the list."""
    calls: list[str] = []
    patch.setitem(sys.modules, flash_packages.MODULE, flash_kernels.module(calls))
    patch.setattr(flash_packages, "_flash3", lambda: flash_kernels.operators(calls))
    patch.setattr(flash_choice, "INSTALLED", (package,))
    patch.setattr(flash_choice, "_chosen", {})
    patch.setattr(flash_choice, "PROBE_LENGTHS", (20, 7, 33))
    patch.setattr(flash_choice, "PROBE_WINDOW", 5)
    patch.setattr(flash_choice, "_gains", lambda package, variant, device: {max(least, 1): 2.0})
    patch.setattr(flash, "flash_can_run", lambda query: True)
    forget()
    return calls


def forget() -> None:
    flash_choice._decision.cache_clear()
    flash_choice._gains_or_reason.cache_clear()


@pytest.fixture(params=PACKAGES, ids=["3", "4"])
def package(request):
    return request.param


@pytest.fixture
def installed(monkeypatch, package):
    yield lambda least=0: put(monkeypatch, package, least)
    monkeypatch.undo()
    forget()


def leaves(tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)] + [(HEADS,)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def edges(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def assert_equal(found, wanted, given) -> None:
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=wanted.dtype).view(wanted.shape)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad((one * weights).sum(), given, allow_unused=True) for one in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 3, 20]),
    softcap=st.sampled_from([None, 0.7]),
    has_sinks=st.booleans(),
    package=st.sampled_from(PACKAGES),
)
def test_segments(lengths, window, softcap, has_sinks, package) -> None:
    *heads, sinks = given = leaves(sum(lengths))
    how = (edges(*lengths), max(lengths), 0.3, 0.0, window, None, softcap, sinks if has_sinks else None)
    wanted = segment_attention(*heads, *how)
    with pytest.MonkeyPatch.context() as patch:
        calls = put(patch, package)
        found = segment_attention(*heads, *how)
        calls.clear()
        assert_equal(found, wanted, given)
    forget()
    assert calls == ["backward"]


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_shared_prefixes(has_sinks, softcap, installed) -> None:
    """Prefixes of 2 and 3 tokens, one segment alone, continuations of 2, 1 and 4 tokens."""
    prefixes = SharedPrefixes(edges(2, 3), edges(3, 4), 5, 7, 14, 3, 4)
    *heads, sinks = given = leaves(14)
    how = {"cu_seq_lens_q": edges(2, 3, 2, 2, 1, 4), "max_length_q": 4, "shared_prefixes": prefixes, "scaling": 0.3}
    how |= {"softcap": softcap, "s_aux": sinks if has_sinks else None}
    wanted = ragged.ragged_attention(None, *heads, None, **how)[0]
    calls = installed()
    found = ragged.ragged_attention(None, *heads, None, **how)[0]
    calls.clear()
    assert_equal(found, wanted, given)
    assert calls == ["backward", "backward"]


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 4])
def test_images_that_see_themselves_whole(window, softcap, installed) -> None:
    blocks = torch.tensor([-1, 0, 0, 0, -1, 1, 1, -1, -1])
    bounds = edges(8, 1)
    *heads, _ = leaves(9)
    how = (bounds, 8, None, 0.0, window, ImageBlocks.of(blocks, bounds), softcap)
    wanted = segment_attention(*heads, *how)
    calls = installed()
    found = segment_attention(*heads, *how)
    calls.clear()
    assert_equal(found, wanted, heads)
    assert calls == ([] if softcap else ["backward", "backward"])  # by the formula


def test_of_a_tower_every_patch_sees_all_of_its_segment(installed) -> None:
    from posttrain.models.vision import tower

    heads = [leaves(9)[0] for _ in range(3)]
    how = {"cu_seq_lens_q": edges(4, 5), "max_length_q": 5}
    wanted = tower.tower_attention(None, *heads, None, **how)[0]
    installed()
    assert_equal(tower.tower_attention(None, *heads, None, **how)[0], wanted, heads)


@pytest.mark.parametrize("is_turned", [False, True])
def test_operators_are_what_compilers_take_them_for(is_turned, package, installed) -> None:
    """Their shapes, strides and gradients without data, and that they change none of their arguments."""
    installed()
    q, k, v = (x[0].detach().transpose(0, 1) for x in leaves(9)[:3])
    q, k, v = ((x if is_turned else x.contiguous()).requires_grad_() for x in (q, k, v))
    how = (edges(4, 5), edges(4, 5), 5, 5, 0.3, True, -1, -1, 0.0)
    torch.library.opcheck(package.forward, (q, k, v, *how))
    out, sums = (x.detach() for x in package.forward(q, k, v, *how))
    heads = [x.detach() for x in (torch.randn_like(q), q, k, v)]
    torch.library.opcheck(package.backward, (*heads, out, sums, *how))


# ---- in a model --------------------------------------------------------------------------------------------------------


def batch():
    made = torch.Generator().manual_seed(1)
    rows = [torch.randint(5, 60, (length,), generator=made).tolist() for length in (3, 9, 17)]
    return collate([(Sample(ids, [False] + [True] * (len(ids) - 1)),) for ids in rows], ("text",), RAGGED)


def answers(model):
    model.zero_grad()
    logps = score_tokens(model, batch()).logps
    logps.square().sum().backward()
    return logps.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("recomputed", "forwards"), [(None, 1), ({}, 2), ({"selective": True}, 1)])
def test_selective_checkpointing_keeps_what_it_returned(recomputed, forwards, installed) -> None:
    model = load_model(tiny.causal_lm(), LoadOptions()).model.double().train()
    wanted = answers(model)
    calls = installed()
    allow_selective_checkpointing(model)
    if recomputed is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False} | recomputed)
    answers(model)
    calls.clear()
    torch.testing.assert_close(answers(model), wanted, rtol=0, atol=1e-9)
    layers = model.config.num_hidden_layers
    assert (calls.count("forward"), calls.count("backward")) == (forwards * layers, layers)


def test_compiled_code_contains_it_and_knows_what_was_decided(installed) -> None:
    *heads, _ = leaves(12)
    calls = installed(least=6)
    compiled = torch.compile(segment_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    with pytest.raises(Exception, match="_flash_attention_forward"):  # nothing is decided: torch's, which is for CUDA
        compiled(*heads, edges(5, 7), 7, 0.3)
    torch._dynamo.reset()
    flash_choice.decide(USUAL, CPU)
    calls.clear()
    found = compiled(*heads, edges(5, 7), 7, 0.3)
    found.sum().backward()
    assert calls == ["forward", "backward"]
    torch.testing.assert_close(found, segment_attention(*heads, edges(5, 7), 7, 0.3))


# ---- the choice --------------------------------------------------------------------------------------------------------


def test_it_is_used_from_the_length_on_at_which_it_is_faster(package, installed) -> None:
    calls = installed(least=100)
    assert chosen(USUAL, 99, CPU) is None
    assert chosen(USUAL, 100, CPU) is package
    assert chosen(USUAL._replace(causal=False), 100, CPU) is package
    assert chosen(USUAL._replace(softcap=2.0), 0, CPU) is package  # torch's kernel cannot
    assert calls.count("forward") == 3  # each variant is compared with the formula once
    assert FlashCall.of_segments(edges(5), 100, 0.3, dropout=0.1).package(*leaves(5)[:2]) is None


def test_what_must_be_deterministic_and_what_is_not_installed_stay_with_torch(installed, monkeypatch) -> None:
    installed()
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(USUAL, 4096, CPU) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert chosen(USUAL, 4096, CPU) is not None
    monkeypatch.setattr(flash_choice, "INSTALLED", ())
    assert chosen(USUAL, 4096, CPU) is None


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("windowed", [False, True])
def test_a_kernel_that_answers_otherwise_is_not_used(windowed, softcap, package, installed, monkeypatch) -> None:
    installed()
    variant = USUAL._replace(softcap=softcap, windowed=windowed)
    assert not flash_choice.decide(variant, CPU).problems
    forget()
    scores_of = flash_kernels.scores_of
    monkeypatch.setattr(
        flash_kernels, "scores_of", lambda q, k, causal, *how: scores_of(q, k, causal, 1.2 * how[0], *how[1:])
    )
    decision = flash_choice.decide(variant, CPU)
    assert decision.steps == ()
    assert f"{package.name} is installed and not used: it answers otherwise than the formula, by 0." in str(decision)
    assert chosen(variant, 1 << 20, CPU) is None


def test_a_kernel_that_leaves_out_a_cap_of_50_is_not_used(package, installed, monkeypatch) -> None:
    installed()
    variant = USUAL._replace(softcap=50.0)
    assert not flash_choice.decide(variant, CPU).problems
    forget()
    scores_of = flash_kernels.scores_of
    monkeypatch.setattr(flash_kernels, "scores_of", lambda *given: scores_of(*given[:-1], 0.0))
    assert flash_choice.decide(variant, CPU).problems[package].startswith("answers otherwise than the formula")


def test_what_is_compiled_is_kept_for_later_processes_in_a_folder_of_the_user(installed, monkeypatch, tmp_path) -> None:
    names = [f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR")]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(flash_packages.os, "environ", dict(os.environ))
    installed()
    (tmp_path / "a file").write_text("")
    monkeypatch.setattr(flash_packages.Path, "home", lambda: tmp_path / "a file")
    flash_packages._flash4()
    assert names[0] not in flash_packages.os.environ  # no folder can be made there: each process compiles
    monkeypatch.setattr(flash_packages.Path, "home", lambda: tmp_path)
    flash_packages._flash4()
    folder = tmp_path / ".cache" / "posttrain" / "flash4"
    assert [flash_packages.os.environ[name] for name in names] == ["1", str(folder)]
    assert folder.stat().st_mode & 0o777 == 0o700
    flash_packages.os.environ[names[0]] = "0"
    flash_packages._flash4()
    assert flash_packages.os.environ[names[0]] == "0"


def test_a_kernel_that_fails_is_a_reason(installed, package, monkeypatch) -> None:
    installed()

    def broken(*given, **how):
        raise AssertionError("Unsupported compute capability")

    monkeypatch.setattr(flash_choice, "INSTALLED", (replace(package, forward=broken),))
    decision = flash_choice.decide(USUAL, CPU)
    assert str(decision) == (
        f"{package.name} is installed and not used: it could not be run (AssertionError: Unsupported compute capability)."
    )
    assert chosen(USUAL, 4096, CPU) is None


def test_from_each_length_on_the_fastest_serves() -> None:
    some = Decision({FLASH3: {256: 1.2, 1024: 1.3, 4096: 1.6}, FLASH4: {256: 0.5, 1024: 1.4, 4096: 1.8}})
    assert some.steps == ((256, FLASH3), (1024, FLASH4))
    assert str(some) == (
        "Rows attend by FlashAttention 3 from 256 tokens a segment on, by FlashAttention 4 from 1,024 tokens a segment on: "
        "FlashAttention 3 is 1.20 times at 256, 1.30 times at 1,024, 1.60 times at 4,096; FlashAttention 4 is 0.50 times at 256, "
        "1.40 times at 1,024, 1.80 times at 4,096 as fast as torch's."
    )
    assert Decision({FLASH4: {256: 1.2, 1024: 1.1, 4096: 1.8}}).steps == ((256, FLASH4), (1024, None), (4096, FLASH4))
    none = Decision({FLASH4: {256: 0.5}}, {FLASH3: "answers otherwise"})
    assert none.steps == ()
    assert str(none) == (
        "Rows attend by torch's kernel: FlashAttention 4 is 0.50 times at 256 as fast as torch's. FlashAttention 3 is installed "
        "and not used: it answers otherwise."
    )
    assert Decision({FLASH3: {}, FLASH4: {}}, is_capped=True).steps == ((0, FLASH3),)


def test_what_serves_between_two_lengths(monkeypatch) -> None:
    monkeypatch.setattr(flash_choice, "_chosen", {USUAL: ((256, FLASH3), (1024, None), (4096, FLASH4))})
    found = [flash_choice.served(USUAL, length) for length in (255, 256, 1023, 1024, 4095, 4096, 1 << 20)]
    assert found == [None, FLASH3, FLASH3, None, None, FLASH4, FLASH4]


def test_gains_are_torchs_seconds_over_its_own(monkeypatch, package) -> None:
    seconds = iter([3.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr(flash_choice, "tried", lambda attend, given: (next(seconds), []))
    monkeypatch.setattr(flash_choice, "LENGTHS", (4, 8))
    monkeypatch.setattr(flash_choice, "TOKENS", 16)
    assert flash_choice._gains(package, USUAL, CPU) == {4: 3.0, 8: 0.5}


def test_the_library_of_flash_attention_3_is_found_without_importing_its_package(monkeypatch, tmp_path) -> None:
    assert not FLASH3.is_installed()
    for folder in ("xformers/flash_attn_3", "flash_attn_3"):  # its own package comes first
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "_C.abi3.so").write_bytes(b"")
        (tmp_path / folder.split("/")[0] / "__init__.py").write_text("raise RuntimeError('imported')")
        monkeypatch.syspath_prepend(tmp_path)
        assert FLASH3.is_installed()
        assert flash_packages._library_of_flash3() == tmp_path / folder / "_C.abi3.so"


@pytest.mark.skipif(not FLASH4.is_installed() or torch.cuda.is_available(), reason="needs flash-attn-4, and no GPU")
@pytest.mark.parametrize(
    ("heads", "key_heads", "width", "causal", "window", "softcap"),
    [(28, 4, 128, True, (-1, -1), 0.0), (12, 2, 128, False, (-1, -1), 0.0), (8, 4, 256, True, (4095, 0), 50.0),
     (64, 8, 64, True, (127, 0), 0.0), (16, 16, 72, False, (-1, -1), 0.0), (16, 16, 192, True, (-1, -1), 0.0)],
)  # fmt: skip
def test_variants_compile_for_hopper(heads, key_heads, width, causal, window, softcap, monkeypatch) -> None:
    """The real package's kernels, forward and backward, down to machine code."""
    for name, value in {
        "FLASH_ATTENTION_ARCH": "sm_90",
        "CUTE_DSL_ARCH": "sm_90a",
        "FLASH_ATTENTION_NUM_SMS": "132",
    }.items():
        monkeypatch.setenv(name, value)
    with FakeTensorMode():
        q, k, v = (
            torch.empty(4096, n, width, dtype=torch.bfloat16, device="cuda") for n in (heads, key_heads, key_heads)
        )
        bounds = torch.empty(9, dtype=torch.int32, device="cuda")
        how = (bounds, bounds, 1000, 1000, 0.1, causal, *window, softcap)
        out, sums = flash_packages._flash4_forward(q, k, v, *how)
        assert (out.shape, sums.shape) == (q.shape, (heads, 4096))
        gradients = flash_packages._flash4_backward(torch.empty_like(out), q, k, v, out, sums, *how)
        assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]


def test_soft_capped_models_are_ragged_on_a_gpu_with_it(package, installed) -> None:
    model = families.loaded("gemma2").bfloat16()
    assert not ragged.soft_caps_run(model, CPU)
    installed()
    assert ragged.soft_caps_run(model, CPU)
    assert ragged.how_rows_attend(model, CPU) == [f"Rows with soft-capped scores attend by {package.name}."]
