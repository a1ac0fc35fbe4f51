"""`posttrain env`: versions and devices, as a bug report needs them."""

from __future__ import annotations

import os
import platform

from posttrain.cli.running.run_record import version_of

PACKAGES = (
    "posttrain", "torch", "transformers", "accelerate", "datasets", "peft", "safetensors", "tokenizers", "huggingface_hub",
    "vllm", "liger-kernel", "flash-attn-4", "bitsandbytes", "deepspeed", "triton", "trackio", "wandb", "tensorboard",
)  # fmt: skip


def main(words: list[str]) -> int:
    for name, value in report():
        print(f"{name:<16} {value}")
    return 0


def report() -> list[tuple[str, str]]:
    import torch

    rows = [("platform", platform.platform()), ("python", platform.python_version())]
    rows += [(name, version_of(name, "not installed")) for name in PACKAGES]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            rows.append((f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    else:
        rows.append(("accelerator", "none"))
    rows.append(("cpu cores", f"{len(os.sched_getaffinity(0))} usable, {torch.get_num_threads()} torch threads"))
    return rows
