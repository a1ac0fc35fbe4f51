"""vLLM, the native engine and transformers on the real pretrained 135M model in float32. Run by `test_vllm_colocate.py`."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import torch

from posttrain.cli.commands import demo
from posttrain.models.load.model import LoadOptions, load_model, load_tokenizer
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.rollout.engines.select import ENGINES
from posttrain.rollout.engines.vllm.colocate import ColocatedVLLM, ColocateOptions
from posttrain.rollout.engines.vllm.sync_probe import SyncProbe, scored_by
from tests.slow import gsm8k

PROMPTS, TOKENS = int(os.environ.get("REAL_PROMPTS", "8")), 16  # `make trust` takes 100, and 50 syncs: seven minutes
SYNCS = int(os.environ.get("REAL_SYNCS", "10"))


@pytest.fixture(scope="module")
def real():
    folder = demo.real_model()
    tokenizer = load_tokenizer(folder, None, False)
    model = load_model(folder, LoadOptions()).model.float().eval()
    engine = ColocatedVLLM(model, tokenizer.decode, tokenizer, ColocateOptions(context_length=1024))
    yield model, tokenizer, engine
    engine.close()


def asked(tokenizer):
    """Questions of GSM8K, of 30 to 150 tokens."""
    rows = (gsm8k.rows("train") + gsm8k.rows("test"))[:PROMPTS]
    chats = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True) for row in rows]
    return [Prompt(chat["input_ids"], key=key) for key, chat in enumerate(chats)]


def assert_agree(model, tokenizer, engine, others):
    params = SamplingParams(TOKENS, 0.0, stop_ids=(tokenizer.eos_token_id,))
    prompts = asked(tokenizer)
    assert len(prompts) == PROMPTS
    found = generate(engine, prompts, params)
    for name in others:
        same = written = 0
        largest = 0.0
        for mine, theirs in zip(found, generate(ENGINES[name](model, decode=tokenizer.decode), prompts, params)):
            length = min(len(mine.ids), len(theirs.ids))
            equal = np.cumprod(mine.ids[:length] == theirs.ids[:length]).astype(bool)
            same, written = same + int(equal.sum()), written + max(len(mine.ids), len(theirs.ids))
            apart = np.abs(mine.policy_logps[:length] - theirs.policy_logps[:length])[equal]
            largest = max(largest, float(apart.max(initial=0)))
        print(f"vLLM and {name}: {same} of {written} tokens, log-probs to {largest:.1e}")
        assert same >= 0.99 * written
        assert largest < 1e-3


def test_greedy_tokens_and_log_probs_agree_before_and_after_syncs(real):
    model, tokenizer, engine = real
    engine.load_weights(None, 0)
    began = time.perf_counter()
    assert_agree(model, tokenizer, engine, ("native", "transformers"))
    print(f"three engines: {time.perf_counter() - began:.0f} s")
    probe = SyncProbe(engine.vocabulary, sequences=1, length=24)
    generator = torch.Generator().manual_seed(0)
    began = time.perf_counter()
    for version in range(1, SYNCS + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 2e-3 * (torch.rand((), generator=generator) - 0.5))  # every number of it changes
        engine.load_weights(None, version)
        differing = engine.differing_tensors if version % 10 == 0 else None
        result = probe.check(scored_by(model), engine.score, version, engine.version, differing)
        assert result.largest < 1e-3
    print(f"{SYNCS} syncs with their probes: {time.perf_counter() - began:.0f} s")
    assert_agree(model, tokenizer, engine, ("native",))
