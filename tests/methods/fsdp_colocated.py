"""One of two training processes under FSDP2, each with a colocated vLLM; `test_fsdp_vllm.py` starts both."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.methods import vllm_runs
from tests.methods.fsdp_vllm_run import SHARDED
from tests.trainer import fsdp_on_cpu


def main(output: str, kind: str) -> None:
    fsdp_on_cpu.allow()
    made = vllm_runs.trainer(
        "grpo",
        Path(output),
        vllm_runs.lora() if kind == "adapter" else None,
        vllm_max_model_length=256,
        vllm_engine_args={"max_num_seqs": 16},
        **SHARDED,
    )
    made.train()
    logs = [entry for entry in made.state.log_history if "reward" in entry]
    assert len(logs) == vllm_runs.STEPS
    assert all(entry["sync/logp_difference/mean"] < 1e-4 for entry in logs)
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in logs)
    assert type(made.model).__name__.startswith("FSDP")
    print(f"process {made.args.process_index} is content", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
