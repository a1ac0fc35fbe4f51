"""One sleep level of vLLM in this process: python -m tests.gpu.vllm_sleep LEVEL. vLLM allows one such engine in a process."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from posttrain.models.load.model import LoadOptions, load_model
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate

VOCABULARY = 1024
SHARE = 0.2


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return load_model(made, LoadOptions(dtype=torch.bfloat16, device=torch.device("cuda"))).model.eval()


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def written(engine):
    prompts = [Prompt(np.arange(20 + n, 40 + 2 * n), key=n) for n in range(8)]
    return [found.ids.tolist() for found in generate(engine, prompts, SamplingParams(24, temperature=0.0))]


def sleep_and_wake(level: int) -> None:
    from posttrain.rollout.engines.vllm.colocate import ColocatedVLLM, ColocateOptions, NoWholeWeights
    from posttrain.rollout.engines.vllm.sync_probe import SyncProbe, scored_by

    made = model()
    options = ColocateOptions(context_length=512, memory_share=SHARE, sleep_level=level, eager=True)
    engine = ColocatedVLLM(made, options=options)
    try:
        probe = SyncProbe(VOCABULARY, torch.bfloat16)
        for version in (1, 2):
            engine.load_weights(None, version)
            engine.wake()
            probe.check(scored_by(made), engine.score, version, engine.version, engine.differing_tensors)
            before = written(engine)
            awake = free_bytes()
            engine.sleep()
            back = free_bytes() - awake
            print(f"level {level}: {back / 2**30:.1f} GiB came back")
            assert back > 0.7 * SHARE * torch.cuda.get_device_properties(0).total_memory
            with pytest.raises((RuntimeError, NoWholeWeights)):
                written(engine)
        if level == 2:
            engine.load_weights(None, 3)
        engine.wake()
        assert written(engine) == before
    finally:
        engine.close()


if __name__ == "__main__":
    sleep_and_wake(int(sys.argv[1]))
