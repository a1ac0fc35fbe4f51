"""One of two training processes with a colocated vLLM; `test_vllm_training.py` starts both."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.methods import vllm_runs


def main(output: str, tensor_parallel: str) -> None:
    made = vllm_runs.trainer(
        "grpo",
        Path(output),
        vllm_max_model_length=256,
        vllm_engine_args={"max_num_seqs": 16},
        vllm_tensor_parallel_size=int(tensor_parallel),
    )
    made.train()
    logs = [entry for entry in made.state.log_history if "reward" in entry]
    assert len(logs) == vllm_runs.STEPS
    assert all(entry["sync/logp_difference/mean"] < 1e-4 for entry in logs)
    made.weight_sync.ready(made.state.global_step)
    vllm_runs.assert_same_answers(made)
    print(f"process {made.args.process_index} is content", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
