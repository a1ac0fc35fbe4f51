"""Keys and values in 8 bits: what rounding does to a number, and that completions depend on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.models.inference import evaluating, inference
from posttrain.models.scoring.token_scores import LanguageHead
from posttrain.rollout.engines.mixture import Mixture
from posttrain.rollout.engines.native import eight_bits, engine, probe
from posttrain.rollout.engines.native.attention import Segments
from posttrain.rollout.engines.native.cache import PAGE
from posttrain.rollout.engines.native.eight_bits import from_eight_bits, in_eight_bits, rounded
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import FP8, generate
from posttrain.rollout.engines.select import ENGINES
from tests.rollout.families import SEEDED, groups, loaded, prompts, texts
from tests.rollout.test_mixture import moved
from tests.rollout.test_native_states import made

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
E4M3 = E4M3[E4M3.isfinite()].unique()
FAMILIES = ["qwen2", "gemma2", "deepseek_v3", "falcon_h1"]


# ---- numbers ---------------------------------------------------------------------------------------------------------

TOPS = {torch.float32: 100, torch.bfloat16: 100, torch.float16: 14}  # exponents of the largest numbers that are tried
EDGES = [1.75, 1.757, 1.8, 1.8125, 1.82, 1.9375, 1.99]  # around 448 / 256, 464 / 256 and 496 / 256


@st.composite
def tokens(draw):
    """(width,) of one dtype: the largest number, and others of its size, of any size, or 0."""
    dtype = draw(st.sampled_from([*TOPS]))
    top = draw(st.sampled_from(EDGES) | st.floats(1, 1.99)) * 2.0 ** draw(st.integers(-40, TOPS[dtype]))
    sizes = st.floats(-1, 1) | st.integers(-30, 0).map(lambda n: 2.0**n) | st.sampled_from([0.0, -0.0])
    others = draw(st.lists(sizes.map(lambda x: x * top), max_size=24))
    return torch.tensor([top, *others], dtype=torch.float64).to(dtype)


@given(tokens())
def test_what_is_rounded_again_keeps_every_bit(numbers):
    q, exponent = in_eight_bits(numbers)
    once = from_eight_bits(q, exponent, numbers.dtype)
    assert torch.equal(once.double(), q.view(torch.float8_e4m3fn).double() * 2.0 ** (int(exponent) - 127))  # exact
    again, its_exponent = in_eight_bits(once)
    assert torch.equal(again, q)
    assert torch.equal(its_exponent, exponent)


@given(tokens())
def test_each_number_becomes_the_nearest_that_e4m3_has(numbers):
    exponent = int(in_eight_bits(numbers)[1])
    grid = E4M3 * 2.0 ** (exponent - 127)
    exact, found = numbers.double(), rounded(numbers).double()
    nearest = (exact[:, None] - grid).abs().min(1).values
    assert torch.equal((found - exact).abs(), nearest)
    largest = exact.abs().max()
    assert largest <= 464 * 2.0 ** (exponent - 127)
    assert exponent == eight_bits.LEAST or largest > 232 * 2.0 ** (exponent - 127)  # no smaller scale would do
    smallest = 2.0 ** (exponent - 127 - 10)  # half of e4m3's smallest number
    assert ((found - exact).abs() <= (exact.abs() / 16).clamp(min=smallest)).all()


def test_tokens_and_heads_are_rounded_each_by_themselves():
    torch.manual_seed(0)
    numbers = torch.randn(5, 3, 16) * 10 ** (4 * torch.rand(5, 3, 1))
    alone = torch.stack([torch.stack([rounded(head) for head in token]) for token in numbers])
    assert torch.equal(rounded(numbers), alone)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_take_what_they_say_and_a_budget_holds_more_of_them(dtype):
    model = loaded("qwen3").to(dtype)  # 2 layers, 2 key heads, 16 wide
    budgets = []
    for kv_dtype, token in ((None, 2 * 2 * 32 * dtype.itemsize), (FP8, 2 * 2 * (32 + 2))):
        native = NativeEngine(model, kv_dtype=kv_dtype, kv_memory=1 << 20)
        with native.session(SEEDED) as session:
            session.grow(10)
            store = native._made[0].store
            kept = [part for pages in (*store.keys, *store.values) for part in parts_of(pages)]
            assert store.page_bytes == PAGE * token == sum(part.nbytes for part in kept) / 10
            assert store.dense_token_bytes == 2 * 2 * 32 * dtype.itemsize
            session.grow(20)
            assert store.pages == 20
            budgets.append(session.budget)
        assert store.pages == 0
    assert budgets[1] == pytest.approx(budgets[0] * 32 * dtype.itemsize / 34, rel=1e-2)


def parts_of(pages):
    return [pages.q, pages.exponents] if isinstance(pages, eight_bits.EightBitPages) else [pages]


# ---- completions -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    """In float64, which torch has not for experts: where a batch has another layout, the last bit of a float32 may move a number to
    its neighbour in 8 bits, if seldom."""
    model = made(request.param) if request.param == "falcon_h1" else loaded(request.param)
    return model if request.param == "deepseek_v3" else model.double()


@pytest.fixture(scope="module")
def expected(model):
    return generate(NativeEngine(model, kv_dtype=FP8), groups(), SEEDED)


@pytest.mark.parametrize("slots", [1, 7])
def test_slots_do_not_matter(model, expected, slots):
    few = groups() if slots > 1 else groups()[:12]
    found = generate(NativeEngine(model, kv_dtype=FP8, max_slots=slots, steps_per_look=slots), few, SEEDED)
    assert texts(found) == texts(expected)[: len(few)]


def test_rows_on_pages_say_what_rows_side_by_side_do(model, expected, monkeypatch):
    monkeypatch.setattr(engine, "DENSE_SHARE", 0)
    assert texts(generate(NativeEngine(model, kv_dtype=FP8), groups(), SEEDED)) == texts(expected)


def test_samples_that_are_put_back_and_those_beside_cancelled_ones_are_what_they_were(model, expected):
    native = NativeEngine(model, kv_dtype=FP8, max_slots=64)
    with native.session(SEEDED):
        page_bytes = native._made[0].store.page_bytes
    native.kv_memory = 20 * page_bytes
    with native.session(SEEDED) as session:
        tickets = [session.add(prompt) for prompt in groups()]
        found = dict(session.advance())
        gone = [ticket for ticket in tickets[::7] if ticket not in found]
        session.cancel(gone)
        while session.in_flight:
            found.update(session.advance())
        assert session.scheduler.preempted > 5
    assert len(found) == len(tickets) - len(gone)
    assert all(one.ids.tolist() == expected[ticket].ids.tolist() for ticket, one in found.items())


class RoundedReader:
    """One pass over whole sequences, whose attention reads every key and value rounded."""

    def __init__(self, segments):
        self.segments = segments

    def attend(self, module, query, key, value, *how):
        return self.segments.attend(query, rounded(key), rounded(value), *how)


@torch.no_grad()
def log_probs(native, prompt, ids, is_rounded):
    """Of the tokens `ids` after a prompt, by one pass."""
    program = native._make()[0]
    sequence = torch.from_numpy(np.concatenate([prompt.ids, ids])).long()
    segments = Segments(torch.tensor([0, len(sequence)], dtype=torch.int32), len(sequence))
    reader = RoundedReader(segments) if is_rounded else engine.ShapeReader(segments, native.innermost.config)
    with evaluating(native.model), inference(native.device), probe.cached_attention(native.innermost):
        hidden = program.hidden(sequence[None], torch.arange(len(sequence))[None], reader)
        logits = LanguageHead.of(native.innermost)(hidden)[len(prompt.ids) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, sequence[len(prompt.ids) :, None])[:, 0].numpy()


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "deepseek_v3"])
def test_log_probs_are_of_one_pass_over_rounded_keys_and_near_those_of_exact_ones(family):
    native, asked = NativeEngine(loaded(family), kv_dtype=FP8), prompts(12)
    found = generate(native, asked, SEEDED)
    for is_rounded, low, high in ((True, 0, 2e-5), (False, 1e-3, 0.06)):
        pairs = [
            (one.policy_logps, log_probs(native, prompt, one.ids, is_rounded)) for prompt, one in zip(asked, found)
        ]
        apart = np.abs(np.concatenate([ours - theirs for ours, theirs in pairs]))
        assert low <= apart.mean() < high, (is_rounded, apart.mean())
        assert apart.max() < (1e-3 if is_rounded else 0.5)


def test_both_models_of_a_mixture_keep_8_bits():
    model, asked = loaded("llama"), prompts(10, samples=3)
    mixture = Mixture(moved(model), 0.4)
    native = ENGINES["native"](model, mixture=mixture, kv_dtype=FP8)
    assert isinstance(native, NativeEngine)
    wanted = generate(native, asked, SEEDED)
    assert texts(generate(NativeEngine(model, mixture=mixture, kv_dtype=FP8, max_slots=5), asked, SEEDED)) == texts(
        wanted
    )
    assert all(part.store.in_eight_bits for part in native._made[0].parts)
    assert texts(generate(NativeEngine(model, mixture=mixture), asked, SEEDED)) != texts(wanted)


def test_auto_is_the_models_dtype():
    model = loaded("llama")
    found = generate(NativeEngine(model, kv_dtype="auto"), prompts(6), SEEDED)
    assert texts(found) == texts(generate(NativeEngine(model), prompts(6), SEEDED))
    assert not NativeEngine(model, kv_dtype="auto").rounds_cache


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gpt_oss", "deepseek_v3"])
def test_the_probe_allows_what_8_bits_are_off_by(family):
    assert isinstance(ENGINES["native"](loaded(family), kv_dtype=FP8), NativeEngine)


def test_a_small_error_is_found_although_8_bits_are_allowed_more(monkeypatch):
    """The same model is tried without them first."""
    from posttrain.rollout.engines.native.attention import DecodeStep

    right = DecodeStep.attend
    monkeypatch.setattr(DecodeStep, "attend", lambda *call: right(*call) * 1.01)
    with pytest.raises(
        ValueError, match=r"does not run LlamaForCausalLM: the native engine's answers differ .* by 0\.0"
    ):
        ENGINES["native"](loaded("llama"), kv_dtype=FP8)


def test_a_model_that_8_bits_change_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(probe, "OF_EIGHT_BITS", 1e-3)
    with pytest.raises(ValueError, match=r"in 8 bits the native engine's answers differ.*Leave `rollout_kv_dtype` out"):
        ENGINES["native"](loaded("llama"), kv_dtype=FP8)


def test_unknown_names_and_gpus_without_8_bit_floats_are_refused(monkeypatch):
    model = loaded("llama")
    with pytest.raises(ValueError, match="`kv_dtype` is 'int3'; known are auto, fp8"):
        NativeEngine(model, kv_dtype="int3")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    for capability, is_refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        reason = eight_bits.why_not(torch.device("cuda"))
        assert (reason is not None) == is_refused
    monkeypatch.setattr(eight_bits, "why_not", lambda device: "A100 has no 8-bit floats")
    with pytest.raises(ValueError, match="in 8 bits, and A100 has no 8-bit floats"):
        NativeEngine(model, kv_dtype=FP8)
