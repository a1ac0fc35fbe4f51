"""The native engine on a CUDA device: kernels, graphs, memory. Skipped elsewhere. Its speed: `benchmarks.speed rollouts-0.5b`.

python -m pytest tests/gpu/test_native_engine.py tests/rollout/test_native_kernels.py -s
"""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

from posttrain import Sample
from posttrain.data.collate import collate
from posttrain.models.layers.fused_lora import fuse_lora
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.load.reference import adapter_off
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.rollout.engines.mixture import Mixture
from posttrain.rollout.engines.native import drafts
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import SamplingParams, generate
from posttrain.rollout.engines.select import ENGINES
from posttrain.rollout.engines.transformers import TransformersEngine
from tests.mixers import answers
from tests.rollout import families
from tests.rollout.families import FAMILIES, texts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PARAMS = SamplingParams(max_tokens=48, stop_ids=(1, 2), seed=5)


def prompts(count=24, **how):
    return families.prompts(count, **{"samples": 4, "longest": 90, **how})


def loaded(family):
    return families.loaded(family, device="cuda")


def middle_model(dtype):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to("cuda", dtype)
    load_model(model, LoadOptions())
    return model


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])
def test_families_in_float32_are_the_plain_engines(family, caplog):
    model = loaded(family)
    engine = ENGINES["native"](model, max_slots=32)
    assert isinstance(engine, NativeEngine), caplog.text
    wanted = generate(TransformersEngine(model), prompts(), PARAMS)
    with caplog.at_level(logging.WARNING):
        found = generate(engine, prompts(), PARAMS)
    different = sum(one != other for one, other in zip(texts(found), texts(wanted)))
    assert different <= 1
    assert texts(generate(engine, prompts(), PARAMS)) == texts(found)  # graphs of the first session, memory of a second
    if "moe" not in family and family not in ("mixtral", "deepseek_v3"):
        assert "without CUDA graphs" not in caplog.text


def test_sinks_are_known_in_half_precision():
    """Ragged and padded gradients of gpt-oss, and what its sampler reports; the padded ones are by the formula."""
    exact, model = (families.model_of("gpt_oss", vocab_size=256).cuda() for _ in range(2))
    model = model.bfloat16()
    found = {}
    for layout, options in (("padded", {"layout": "padded"}), ("ragged", {})):
        for kind, each in (("exact", exact), (layout, model)):
            if kind == "exact" and layout != "padded":
                continue
            made = load_model(copy.deepcopy(each), LoadOptions(**options))
            assert made.layout == layout, made.notes
            found[kind] = answers(made.model.train(), layout)
    for layout in ("padded", "ragged"):
        logps, gradients = found[layout]
        apart = {
            name: (g.float() - found["exact"][1][name]).norm().item()
            for name, g in gradients.items()
            if "sinks" in name
        }
        print(layout, (logps.float() - found["exact"][0]).abs().mean().item(), apart)
        found[f"{layout} apart"] = (logps.float() - found["exact"][0]).abs().mean().item(), max(apart.values())
    assert all(one < 2 * other + 1e-3 for one, other in zip(found["ragged apart"], found["padded apart"]))
    run = load_model(copy.deepcopy(model), LoadOptions()).model
    engine = ENGINES["native"](run)
    assert isinstance(engine, NativeEngine)
    asked = prompts(8, vocabulary=families.VOCABULARY)
    for prompt, one in zip(asked, generate(engine, asked, PARAMS), strict=True):
        ids = np.concatenate([prompt.ids, one.ids])
        units = [(Sample(ids, np.arange(len(ids)) >= len(prompt.ids)),)]
        with torch.no_grad():
            scores = score_tokens(run.eval(), collate(units, ("text",), "ragged").to("cuda")).logps
        assert (torch.from_numpy(one.policy_logps).cuda() - scores).abs().mean() < 0.03


@pytest.mark.parametrize("options", [{"max_slots": 1}, {"max_slots": 7}, {"max_slots": 64}, {"use_graphs": False}])
def test_slots_and_graphs_do_not_matter(options):
    model = loaded("qwen2")
    wanted = generate(NativeEngine(model), prompts(6), PARAMS)
    found = generate(NativeEngine(model, **options), prompts(6), PARAMS)
    assert sum(one != other for one, other in zip(texts(found), texts(wanted))) == 0


@pytest.mark.parametrize("use_graphs", [True, False])
def test_drafts_write_what_is_written_without_them(use_graphs, monkeypatch):
    """In every step of up to eight rows, whether they are accepted or not."""
    monkeypatch.setattr(drafts.Trial, "is_on", True)
    monkeypatch.setitem(drafts.LEAST_ACCEPTED, "cuda", 0.0)
    model = loaded("qwen2")
    for params in (PARAMS, SamplingParams(max_tokens=120, temperature=0.0)):
        wanted = generate(NativeEngine(model, max_slots=8), prompts(3), params)
        engine = NativeEngine(model, max_slots=8, drafts=4, use_graphs=use_graphs)
        found = generate(engine, prompts(3), params)
        assert texts(found) == texts(wanted)
        for one, other in zip(found, wanted):
            np.testing.assert_allclose(one.policy_logps, other.policy_logps, atol=1e-4)
        assert not engine.drafting[1].has_failed
    assert engine.accepted > 0


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_log_probs_are_the_trainers_and_a_rerun_is_identical(dtype, close):
    model = middle_model(dtype)
    engine = ENGINES["native"](model)
    assert isinstance(engine, NativeEngine)
    asked = prompts(40, samples=8, longest=600, vocabulary=32000)
    params = SamplingParams(max_tokens=200, temperature=0.9, seed=3)
    found = generate(engine, asked, params)
    again = generate(engine, asked, params)
    assert texts(found) == texts(again)
    assert all(np.array_equal(one.policy_logps, two.policy_logps) for one, two in zip(found, again))
    for start in range(0, 64, 16):
        pairs = list(zip(asked, found))[start : start + 16]
        units = [
            (Sample(np.concatenate([p.ids, c.ids]), np.arange(len(p.ids) + len(c.ids)) >= len(p.ids)),)
            for p, c in pairs
        ]
        with torch.no_grad():
            scores = score_tokens(model.eval(), collate(units, ("text",), "ragged").to("cuda"), temperature=0.9).logps
        ours = torch.from_numpy(np.concatenate([c.policy_logps for _, c in pairs])).cuda()
        assert (ours - scores).abs().mean() < close / 10
        assert (ours - scores).abs().max() < close


@pytest.mark.parametrize("options", [{"max_slots": 1}, {"max_slots": 7}, {"max_slots": 64}, {"use_graphs": False}])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "deepseek_v3"])
def test_in_8_bits_slots_and_graphs_do_not_matter(family, options, caplog):
    """A last bit of float32 may move a key to its neighbour in 8 bits, which is seldom and moves few draws."""
    model = loaded(family)
    engine = ENGINES["native"](model, kv_dtype="fp8")
    wanted = generate(engine, prompts(6), PARAMS)
    assert texts(generate(engine, prompts(6), PARAMS)) == texts(wanted)  # graphs of before, pages elsewhere
    with caplog.at_level(logging.WARNING):
        found = generate(NativeEngine(model, kv_dtype="fp8", **options), prompts(6), PARAMS)
    assert "without CUDA graphs" not in caplog.text or family == "deepseek_v3"
    assert sum(one != other for one, other in zip(texts(found), texts(wanted))) <= 2


def test_8_bits_take_half_the_memory_and_are_near_the_trainers_log_probs():
    """On a CPU they are 0.014 off on average and 0.07 at most; bfloat16 alone, 0.002 and 0.02."""
    model = middle_model(torch.bfloat16)  # key heads of 64 numbers
    asked = prompts(40, samples=8, longest=600, vocabulary=32000)
    params = SamplingParams(max_tokens=200, temperature=0.9, seed=3)
    taken = {}
    for kv_dtype in ("auto", "fp8"):
        engine = NativeEngine(model, kv_dtype=kv_dtype)
        with engine.session(params) as session:
            before = torch.cuda.memory_allocated()
            session.grow(20_000)
            taken[kv_dtype] = torch.cuda.memory_allocated() - before
            store = engine._made[0].store
            assert abs(taken[kv_dtype] - 20_000 * store.page_bytes) < 1 << 20
    assert taken["fp8"] / taken["auto"] == pytest.approx(65 / 128, rel=0.01)
    engine = ENGINES["native"](model, kv_dtype="fp8")
    found = generate(engine, asked, params)
    again = generate(engine, asked, params)
    assert texts(found) == texts(again)
    assert all(np.array_equal(one.policy_logps, two.policy_logps) for one, two in zip(found, again))
    apart = gaps_to_the_trainer(model, asked[:32], found[:32], 0.9)
    print(f"8 bits: mean {apart.mean():.2g}, largest {apart.max():.2g}")
    assert 0.005 < apart.mean() < 0.03
    assert apart.max() < 0.3


@pytest.mark.parametrize("options", [{"max_slots": 7}, {"use_graphs": False}, {"drafts": 3}])
def test_with_products_in_8_bits_slots_graphs_and_drafts_do_not_matter(options):
    model = middle_model(torch.bfloat16)
    asked = prompts(24, vocabulary=32000)
    engine = ENGINES["native"](model, weight_dtype="fp8")
    assert isinstance(engine, NativeEngine)
    wanted = generate(engine, asked, PARAMS)
    assert texts(generate(engine, asked, PARAMS)) == texts(wanted)  # graphs of before, rounded into the same memory
    found = generate(NativeEngine(model, weight_dtype="fp8", **options), asked, PARAMS)
    same_starts = sum(one[:4] == other[:4] for one, other in zip(texts(found), texts(wanted)))
    print(
        f"{options}: {sum(one == other for one, other in zip(texts(found), texts(wanted)))} of {len(asked)} are the same"
    )
    assert same_starts > 0.8 * len(asked)


def test_products_in_8_bits_are_near_the_trainers_log_probs_and_follow_its_weights(caplog):
    model = middle_model(torch.bfloat16)
    asked = prompts(40, samples=2, vocabulary=32000)
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=3)
    engine = ENGINES["native"](model, weight_dtype="fp8")
    with caplog.at_level(logging.WARNING):
        for version in range(2):
            apart = gaps_to_the_trainer(model, asked, generate(engine, asked, params), 0.9)
            print(f"products in 8 bits: mean {apart.mean():.2g}, largest {apart.max():.2g}")
            assert 1e-4 < apart.mean() < 0.1
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.add_(0.3 * parameter.std() * torch.randn_like(parameter))
            engine.load_weights(None, version + 1)
    assert "without CUDA graphs" not in caplog.text


def gaps_to_the_trainer(model, asked, found, temperature):
    units = [
        (Sample(np.concatenate([p.ids, c.ids]), np.arange(len(p.ids) + len(c.ids)) >= len(p.ids)),)
        for p, c in zip(asked, found)
    ]
    batch = collate(units, ("text",), "ragged").to(next(model.parameters()).device)
    with torch.no_grad():
        scores = score_tokens(model.eval(), batch, temperature=temperature).logps
    return (torch.from_numpy(np.concatenate([c.policy_logps for c in found])).to(scores.device) - scores).abs()


def test_memory_is_given_back_and_graphs_survive_its_return_elsewhere():
    model = middle_model(torch.bfloat16)
    engine = ENGINES["native"](model, max_slots=64)
    asked = prompts(16, vocabulary=32000)
    wanted = texts(generate(engine, asked, PARAMS))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    captured = dict(engine._made[1]._graphs)
    torch.cuda.empty_cache()
    elsewhere = [torch.zeros(1 << 20, device="cuda") for _ in range(40)]  # the pages come back at other addresses
    assert texts(generate(engine, asked, PARAMS)) == wanted
    assert engine._made[1]._graphs == captured  # nothing was captured again
    del elsewhere
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert engine._made[0].store.pages == 0


@pytest.mark.parametrize(("kv_dtype", "moved"), [("auto", 1), ("fp8", 2)])
def test_samples_that_are_put_back_when_memory_is_short_are_what_they_were(kv_dtype, moved):
    model = loaded("qwen2")
    engine = NativeEngine(model, max_slots=64, kv_dtype=kv_dtype)
    wanted = texts(generate(engine, prompts(), PARAMS))
    engine.kv_memory = 60 * engine._made[0].store.page_bytes
    with engine.session(PARAMS) as session:
        tickets = [session.add(prompt) for prompt in prompts()]
        found = {}
        while session.in_flight:
            found.update(session.advance())
        assert session.scheduler.preempted > 0
    assert sum(found[ticket].ids.tolist() != ids for ticket, ids in zip(tickets, wanted)) <= moved


def test_adapters_on_and_off_are_different_graphs_and_changed_weights_the_same():
    base = loaded("llama")
    plain = texts(generate(NativeEngine(base), prompts(6), PARAMS))
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    model.to("cuda")
    fuse_lora(model)
    engine = ENGINES["native"](model)
    assert isinstance(engine, NativeEngine)
    adapted = texts(generate(engine, prompts(6), PARAMS))
    with model.disable_adapter():
        assert texts(generate(engine, prompts(6), PARAMS)) == plain
    assert adapted != plain
    assert texts(generate(engine, prompts(6), PARAMS)) == adapted
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1)
    assert texts(generate(engine, prompts(6), PARAMS)) != adapted


@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.8},
        {"top_k": 20, "min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"logit_bias": {5: 3.0}},
        {"temperature": 0.0},
    ],
)
def test_every_way_to_draw_runs_in_a_graph(changes, caplog):
    model = loaded("qwen2")
    params = SamplingParams(**{"max_tokens": 40, "seed": 2, **changes})
    wanted = texts(generate(TransformersEngine(model), prompts(8), params))
    engine = ENGINES["native"](model, max_slots=16)
    assert isinstance(engine, NativeEngine), caplog.text
    with caplog.at_level(logging.WARNING):
        found = texts(generate(engine, prompts(8), params))
    assert "without CUDA graphs" not in caplog.text
    assert sum(one != other for one, other in zip(found, wanted)) <= 1


@pytest.mark.parametrize("has_adapter", [False, True])
def test_a_mixture_is_captured_as_one_graph_of_both_models(has_adapter):
    """Graphs survive another weight, and the adapter is off in the second half of each step."""
    model = loaded("qwen2")
    if has_adapter:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
        other, context = model, adapter_off(model).context
    else:
        other, context = families.loaded("qwen2", device="cuda"), nullcontext
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    weight = [0.4]
    mixture = Mixture(other, lambda: weight[0], context)
    engine = ENGINES["native"](model, max_slots=32, mixture=mixture)
    assert isinstance(engine, NativeEngine)
    plain = TransformersEngine(model, mixture=mixture)
    for weight[0] in (0.4, 0.8):
        found, wanted = (texts(generate(one, prompts(), PARAMS)) for one in (engine, plain))
        assert sum(one != two for one, two in zip(found, wanted)) <= len(found) // 20
    assert engine._made[1]._graphs
    captured = dict(engine._made[1]._graphs)
    generate(engine, prompts(), PARAMS)
    assert engine._made[1]._graphs == captured  # nothing was captured again
    alone = texts(generate(ENGINES["native"](model, max_slots=32), prompts(), PARAMS))
    assert alone != found
