"""One family's images in front of a vLLM in this process: python -m tests.gpu.vllm_images FAMILY."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from posttrain.rollout.engines.protocol import SamplingParams, generate
from tests.methods.colocated_vllm_images import disturb_vision, has_moved
from tests.methods.vllm_image_runs import asked, model, own_logps, trainer

GREEDY = SamplingParams(max_tokens=8, temperature=0)
ROUNDING = 0.05
"""Mean difference of log-probs in bfloat16. Without its image a prompt's are 0.3 and more off."""


def shown(family: str) -> None:
    """Completions about images have the trainer's log-probs, and follow a tower that changes. `ready` compares by itself, too."""
    options = {"use_cpu": not torch.cuda.is_available(), "bf16": True, "vllm_gpu_memory_utilization": 0.2}
    with tempfile.TemporaryDirectory() as folder:
        tiny = model(family)
        tiny.model.to(torch.bfloat16)
        run = trainer(tiny, Path(folder), vllm_engine_args={"max_num_seqs": 16, "enforce_eager": True}, **options)
        try:
            found = []
            for version in (0, 1):
                run.weight_sync.ready(version)
                found.append(generate(run.engine, asked(run), GREEDY))
                pairs = zip(own_logps(run, found[-1]), found[-1])
                gap = np.abs(np.concatenate([ours - one.policy_logps for ours, one in pairs])).mean()
                print(f"{family}, version {version}: log-probs {gap:.4f} from the trainer's")
                assert gap < ROUNDING
                disturb_vision(run)
            assert has_moved(*found[0][:2])  # the same text about another image
            assert any(map(has_moved, found[0][:3], found[1][:3]))
        finally:
            run.engine.close()


if __name__ == "__main__":
    shown(sys.argv[1])
