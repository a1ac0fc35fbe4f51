"""Options of each side. What is the same for both stands in `shared`; what TRL gets besides is printed with the results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.speed.rows import Row


@dataclass(frozen=True)
class Setting:
    """How one library is asked to run a row: options of its config, the format of the weights, the order within a step."""

    name: str
    library: str
    options: dict[str, Any] = field(default_factory=dict)
    weights: str = "float32"
    sort_within_steps: bool = False


def shared(row: Row, device: str, output: str) -> dict[str, Any]:
    return {
        "output_dir": output,
        "learning_rate": row.learning_rate,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": device == "cpu",
        "seed": 42,
        **(of_groups(row) if row.is_online else of_rows(row)),
    }


def of_rows(row: Row) -> dict[str, Any]:
    return {"max_length": row.lengths.prompt + row.lengths.high, "train_sampling_strategy": "sequential"}


def of_groups(row: Row) -> dict[str, Any]:
    sizes = {"num_generations": row.group, "max_completion_length": row.lengths.high}
    return {**sizes, "shuffle_dataset": False, **row.options}


def with_accumulation(row: Row, options: dict[str, Any]) -> dict[str, Any]:
    size = int(options["per_device_train_batch_size"])
    if row.rows % size:
        raise ValueError(f"{row.name} has {row.rows} rows a step, which micro-batches of {size} do not divide.")
    return {**options, "gradient_accumulation_steps": row.rows // size}


def smaller_and_smaller(row: Row, parts: int) -> list[int]:
    """Micro-batches from the whole step down to one of `parts`."""
    return [row.rows // part for part in (1, 2, 4, 8) if part <= min(parts, row.rows)]


def trl_default(row: Row, device: str, tiny: bool) -> list[Setting]:
    """TRL's own defaults: float32 weights under bfloat16 autocast, checkpointing on, padded. Smaller micro-batches if it must."""
    sizes = smaller_and_smaller(row, 4) if device == "cuda" else [row.rows]
    extra = {"bf16": False} if tiny else {}  # bf16 autocast would hide in its noise whether both train on the same rows
    return [Setting("default", "trl", {"per_device_train_batch_size": size, **extra}) for size in sizes]


def trl_tuned(row: Row, device: str, tiny: bool) -> list[Setting]:
    """What an expert would set: bf16 weights, no checkpointing, Liger layers, fused AdamW, rows of one length together."""
    options: dict[str, Any] = {"bf16": False, "optim": "adamw_torch_fused"}
    if device == "cuda":
        options["use_liger_kernel"] = True
    if device == "cuda" and not row.is_online:
        options |= {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    if row.has_reference:
        options["precompute_ref_log_probs"] = True
    return [_tuned(row, device, {**options, **candidate}) for candidate in row.tuned]


def trl_tuned_fallbacks(row: Row, device: str, tiny: bool) -> list[Setting]:
    """For a row that none of the candidates can run: first without Liger, then with checkpointing."""
    smallest = trl_tuned(row, device, tiny)[0].options
    without = {name: value for name, value in smallest.items() if name != "use_liger_kernel"}
    checkpointed = ({**options, "gradient_checkpointing": True} for options in (smallest, without))
    return [_tuned(row, device, options) for options in (without, *checkpointed)]


def with_and_without_liger(setting: Setting) -> list[Setting]:
    """For a candidate that TRL's Liger cannot serve."""
    without = {name: value for name, value in setting.options.items() if name != "use_liger_kernel"}
    return [setting] if without == setting.options else [setting, replace(setting, options=without)]


def _tuned(row: Row, device: str, options: dict[str, Any]) -> Setting:
    return Setting("tuned", "trl", options, "bfloat16" if device == "cuda" else "float32", sort_within_steps=True)


def trl_packed(row: Row, device: str, tiny: bool) -> list[Setting]:
    """`packing` of TRL, for SFT: on an image without flash-attn it is slower, and its losses are of other batches."""
    tuned = trl_tuned(row, device, tiny)[0]
    options = {**tuned.options, "packing": True}
    return [Setting("packed", "trl", options, tuned.weights)] if row.method == "sft" else []


def ours_default(row: Row, device: str, tiny: bool) -> list[Setting]:
    """posttrain as it comes, the whole step as one micro-batch; smaller ones only if that does not fit."""
    options = {"precompute_ref_log_probs": True} if row.has_reference else {}
    weights = "bfloat16" if device == "cuda" else "float32"
    sizes = smaller_and_smaller(row, 8) if device == "cuda" else [row.rows]
    return [Setting("ours", "posttrain", {"per_device_train_batch_size": size, **options}, weights) for size in sizes]


def ours_matched(row: Row, device: str, tuned_options: dict[str, Any]) -> list[Setting]:
    """posttrain with the micro-batch and the checkpointing of TRL tuned: for the comparison of memory."""
    names = ("per_device_train_batch_size", "gradient_checkpointing")
    options = {name: tuned_options[name] for name in names if name in tuned_options}
    if row.has_reference:
        options["precompute_ref_log_probs"] = True
    weights = "bfloat16" if device == "cuda" else "float32"
    return [Setting("matched", "posttrain", options, weights, sort_within_steps=True)]


CANDIDATES = {"default": trl_default, "tuned": trl_tuned, "packed": trl_packed, "ours": ours_default}
LIBRARY = {"default": "trl", "tuned": "trl", "packed": "trl", "ours": "posttrain", "matched": "posttrain"}
