"""One of two processes of a run under DeepSpeed on the CPU (or the only one of a run without it).

    python -m tests.trainer.deepspeed_run FOLDER STAGE METHOD

Started by `accelerate launch --use_deepspeed`, the options say nothing of DeepSpeed.

accelerate starts DeepSpeed on accelerators only; here its processes are told to be CPUs on gloo, before it looks.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from safetensors.torch import save_file

from posttrain.methods.table import METHODS
from posttrain.models.load.weight_export import exported_weights
from tests import tiny
from tests.trainer.fsdp_cells import DATA, Cell, model_of

LAUNCHED = "ACCELERATE_USE_DEEPSPEED" in os.environ  # later it is there in any case


def zero(stage: int) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


def allow_on_cpu() -> None:
    PartialState._prepare_backend = lambda self, *_, **__: ("gloo", DistributedType.MULTI_CPU)


def trainer(folder: Path, stage: int, method: str, world: int) -> Any:
    model = model_of(Cell(method))  # before the options: a model that is made after them is partitioned at once
    args = METHODS[method].config_class(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4 // world,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        optim="adamw_torch",
        report_to="none",
        bf16=False,
        dataset_cache_dir=str(folder.parent / "cache"),
        use_cpu=world == 1,
        deepspeed=None if world == 1 or LAUNCHED else zero(stage),
    )
    rows = Dataset.from_list(DATA.get(method, tiny.pairs)(11))
    return METHODS[method].trainer_class(
        model, args=args, train_dataset=rows, eval_dataset=rows, processing_class=tiny.tokenizer()
    )


def main(folder: Path, stage: int, method: str) -> None:
    torch.set_num_threads(1)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        allow_on_cpu()
    made = trainer(folder, stage, method, world)
    made.train()
    made.save_model(str(folder / "final"))
    exported = {name: tensor.clone() for name, tensor in exported_weights(made.model)}
    if rank == 0:
        save_file(exported, folder / "exported.safetensors")
    if world == 1:
        return
    from transformers.integrations import unset_hf_deepspeed_config

    assert all(hasattr(parameter, "ds_id") == (stage == 3) for parameter in made.model.parameters())
    resumed = folder / "resumed"
    if rank == 0:
        shutil.copytree(folder / "checkpoint-2", resumed / "checkpoint-2")
    torch.distributed.barrier()
    unset_hf_deepspeed_config()
    again = trainer(resumed, stage, method, world)
    again.train(resume_from_checkpoint=True)
    again.save_model(str(resumed / "final"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
