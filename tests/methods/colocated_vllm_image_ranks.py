"""One of two training processes that hold one vLLM together and show it images; `test_vllm_images.py` starts both."""

from __future__ import annotations

import sys
from pathlib import Path

from posttrain.rollout.engines.protocol import SamplingParams, generate
from tests.methods import vllm_image_runs as runs


def main(output: str) -> None:
    run = runs.trainer(runs.model("qwen2_5_vl"), Path(output), vllm_tensor_parallel_size=2, **runs.COLOCATED)
    run.train()
    logs = [entry for entry in run.state.log_history if "reward" in entry]
    assert [entry["sync/logp_difference/images"] < 1e-3 for entry in logs] == [True, True]
    run.weight_sync.ready(run.state.global_step)
    # Each has prompts of its own, and one of them more than the other.
    mine = runs.asked(run)[: 4 - run.args.process_index]
    written = generate(run.engine, mine, SamplingParams(max_tokens=8, temperature=0))
    assert runs.largest_gap(run, written) < 1e-3
    print(f"process {run.args.process_index} is content", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
