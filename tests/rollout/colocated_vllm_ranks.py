"""Run on two ranks by `test_vllm_colocate.py`: a vLLM on each (1), or one model over both (2), and prompts that differ by rank."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from posttrain.rollout.engines.protocol import ERROR, Prompt, SamplingParams, generate
from posttrain.rollout.engines.transformers import TransformersEngine
from posttrain.rollout.engines.vllm.colocate import ColocatedVLLM, ColocateOptions
from posttrain.rollout.engines.vllm.sync_probe import SyncProbe, scored_by
from tests.rollout.families import VOCABULARY, loaded, prompts


def check(model, engine, asked, tokens):
    params = SamplingParams(max_tokens=20, temperature=0)
    asked = [replace(prompt, max_tokens=tokens) for prompt in asked]
    for mine, theirs in zip(generate(engine, asked, params), generate(TransformersEngine(model), asked, params)):
        assert mine.ids.tolist() == theirs.ids.tolist()
        np.testing.assert_allclose(mine.policy_logps, theirs.policy_logps, atol=1e-3)


def main(tensor_parallel: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = loaded("llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
    engine = ColocatedVLLM(model, options=ColocateOptions(tensor_parallel=tensor_parallel))
    probe = SyncProbe(VOCABULARY)
    for version in (1, 2):
        engine.load_weights(None, version)
        result = probe.check(scored_by(model), engine.score, version, engine.version, engine.differing_tensors)
        assert result.largest < 1e-4
        check(model, engine, prompts(3 + 5 * rank, seed=rank), 4 + 12 * rank)  # rank 0 is done long before rank 1
        check(model, engine, [] if rank else prompts(2, seed=7), 3)  # and rank 1 has nothing to do here
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version)) * 0.02)
    if tensor_parallel == 2:
        try:
            generate(engine, prompts(1), SamplingParams(max_tokens=2 + rank))
        except ValueError as error:
            assert "different sampling parameters" in str(error)  # noqa: PT017 (no pytest here)
        else:
            raise AssertionError("Two ranks drew by different parameters.")
    with engine.session(SamplingParams(max_tokens=9, temperature=0)) as session:
        bad = session.add(Prompt([VOCABULARY], key=rank))
        for prompt in prompts(2 + rank):
            session.add(prompt)
        while rank and session.in_flight:
            session.advance()
        if not rank:  # leaves its prompts behind
            found = []
            while bad not in [ticket for ticket, _ in found]:
                found += session.advance()
            assert dict(found)[bad].finish_reason == ERROR
    assert not engine.engine._jobs
    total = torch.ones(1)
    dist.all_reduce(total)  # the trainer's own group is as it was
    assert total.item() == 2
    print(f"rank {rank} is content", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
