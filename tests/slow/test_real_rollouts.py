"""The native engine on the real pretrained 135M model. Marked slow: CI runs these in its second step."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from posttrain import Sample
from posttrain.cli.commands import demo
from posttrain.data.collate import collate
from posttrain.models.load.model import LoadOptions, load_model, load_tokenizer
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.rollout.engines.native.engine import NativeEngine
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.rollout.engines.select import ENGINES
from tests.slow import gsm8k

pytestmark = pytest.mark.slow
PROMPTS, TOKENS = int(os.environ.get("REAL_PROMPTS", "10")), 12  # 200 takes ten minutes on two cores


@pytest.fixture(scope="module")
def real():
    folder = demo.real_model()
    return load_model(folder, LoadOptions()).model.eval(), load_tokenizer(folder, None, False)


def asked(tokenizer, samples=1):
    """Questions of GSM8K, of 30 to 150 tokens."""
    found = []
    for key, row in enumerate((gsm8k.rows("train") + gsm8k.rows("test"))[:PROMPTS]):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        found += [Prompt(ids, key=key, sample=sample) for sample in range(samples)]
    return found


def test_greedy_and_seeded_completions_are_the_plain_engines_and_log_probs_the_scorers(real):
    model, tokenizer = real
    native = ENGINES["native"](model, decode=tokenizer.decode)
    assert isinstance(native, NativeEngine)
    plain = ENGINES["transformers"](model)
    for temperature in (0.0, 1.0):
        params = SamplingParams(TOKENS, temperature, stop_ids=(tokenizer.eos_token_id,), seed=1)
        found, wanted = (generate(engine, asked(tokenizer), params) for engine in (native, plain))
        parted = sum(one.ids.tolist() != two.ids.tolist() for one, two in zip(found, wanted))
        print(f"temperature {temperature}: {parted} of {len(found)} completions part")
        assert parted <= max(PROMPTS // 100, 1)  # two tokens that are equally good
    units, exact = [], []
    for prompt, completion in zip(asked(tokenizer), found):
        ids = np.concatenate([prompt.ids, completion.ids])
        units.append((Sample(ids, np.arange(len(ids)) >= len(prompt.ids)),))
        exact.append(logps_of_full_forward(model, prompt.ids, completion.ids))
    with torch.no_grad():
        scores = score_tokens(model, collate(units, ("text",), "ragged")).logps
    ours = torch.from_numpy(np.concatenate([completion.policy_logps for completion in found]))
    gaps = {"a full forward": (ours - torch.cat(exact)).abs(), "the scorer": (ours - scores).abs()}
    for name, gap in gaps.items():
        print(f"log-probs, native against {name}: mean {gap.mean():.2g}, largest {gap.max():.2g}")
    for gap in gaps.values():  # rounding of thirty layers: 4e-6 on average, 3e-5 at most
        assert gap.mean() < 1e-5
        assert gap.max() < 1e-4


@torch.no_grad()
def logps_of_full_forward(model, prompt, completion):
    """float32 logits, float64 softmax."""
    ids = torch.from_numpy(np.concatenate([prompt, completion])).long()
    logps = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    return logps.gather(-1, ids[len(prompt) :, None]).squeeze(-1)


@pytest.mark.parametrize("rounded", ["kv_dtype", "weight_dtype"])
def test_what_8_bits_change(real, rounded):
    """Their ratio to exact log-probs is what importance weights are made of: a bound on a completion's leaves out long ones."""
    model, tokenizer = real
    native = ENGINES["native"](model, decode=tokenizer.decode, **{rounded: "fp8"})
    assert isinstance(native, NativeEngine)
    params = SamplingParams(48, stop_ids=(tokenizer.eos_token_id,), seed=1)
    found = generate(native, asked(tokenizer), params)
    gaps = [
        logps_of_full_forward(model, prompt.ids, one.ids) - torch.from_numpy(one.policy_logps)
        for prompt, one in zip(asked(tokenizer), found)
    ]
    apart, ratios = torch.cat(gaps).abs(), torch.stack([gap.sum() for gap in gaps]).exp()
    print(
        f"{rounded}: log-probs of {len(apart)} tokens against exact ones: mean {apart.mean():.2g}, largest {apart.max():.2g}"
    )
    print(f"ratios of completions of 48 tokens: {ratios.min():.2g} to {ratios.max():.2g}")
    assert 0.02 < apart.mean() < 0.25
    assert apart.max() < 1.5


def test_the_answer_makes_sense_and_a_stop_string_ends_it(real):
    model, tokenizer = real
    native = ENGINES["native"](model, decode=tokenizer.decode)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    completion = generate(native, [Prompt(ids)], SamplingParams(20, 0.0, stop=("France is Paris",)))[0]
    assert tokenizer.decode(completion.ids) == "The capital of France is Paris"
    assert completion.finish_reason == "stop"
