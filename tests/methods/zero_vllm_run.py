"""One of two processes of runs under DeepSpeed whose completions a server writes (or the only one of those without it).

python -m tests.methods.zero_vllm_run FOLDER URL MODEL
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from tests.methods import fsdp_vllm_run
from tests.trainer.deepspeed_run import allow_on_cpu, zero

KINDS: dict[str, dict[str, Any]] = {  # in this order: an adapter goes over the server's first weights
    "adapter": {"kind": "adapter"},
    "weights": {"kind": "weights", "save_strategy": "steps", "save_steps": 2},
    "loaded": {"kind": "weights"},  # in pieces from the beginning
    "zero2": {"kind": "weights", "stage": 2},
    "rloo": {"kind": "weights", "method": "rloo"},
    "beside": {"kind": "weights", "async_rollouts": True, "async_lead": 0},
}


def trainer(folder: Path, url: str, stage: int = 3, **options: Any) -> Any:
    if fsdp_vllm_run.place()[1] > 1:
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # of the run before
        options |= {"deepspeed": zero(stage), "use_cpu": False}
    return fsdp_vllm_run.trainer(folder, url, optim="adamw_torch", **options)


def main(folder: Path, url: str, model: str) -> None:
    torch.set_num_threads(1)
    rank, world = fsdp_vllm_run.place()
    if world > 1:
        allow_on_cpu()
    for name, options in KINDS.items():
        made = trainer(folder / name, url, **options, **({"model": model} if name == "loaded" else {}))
        fsdp_vllm_run.run(made, folder / name)
        is_in_pieces = world > 1 and options.get("stage", 3) == 3
        assert all(hasattr(parameter, "ds_id") == is_in_pieces for parameter in made.model.parameters())
    if world > 1:
        resumed = folder / "resumed"
        if rank == 0:
            shutil.copytree(folder / "weights" / "checkpoint-2", resumed / "checkpoint-2")
        torch.distributed.barrier()
        made = trainer(resumed, url, **KINDS["weights"])
        made.train(resume_from_checkpoint=True)
        made.save_model(str(resumed / "final"))
        made.engine.close()
    os._exit(0)  # the process group need not be taken apart


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
