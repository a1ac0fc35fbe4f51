"""Which model, in which precision, with which adapter: options that scripts and the command line share, under TRL's names."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

from posttrain.core.options import option

DTYPES = ("auto", "float32", "bfloat16", "float16")
ADAPTER_OPTIONS = ("lora_", "use_rslora", "use_dora")
"""Beginnings of the names of options that mean nothing without an adapter."""


@dataclass
class ModelOptions:
    """Which model, in which precision, with which adapter."""

    model_name_or_path: str | None = option(None, "Model: a Hub id or a folder.")
    model_revision: str | None = option(None, "Branch, tag or commit of a model from the Hub. None: its main branch.")
    dtype: str | None = option(
        None, "Dtype to load the weights in: float32, bfloat16, float16 or auto. None: what `bf16` and `fp16` ask for."
    )
    attn_implementation: str | None = option(None, "Attention of transformers. None: ours, which runs ragged batches.")
    tokenizer_name_or_path: str | None = option(None, "Tokenizer: a Hub id or a folder. None: the model's own.")
    use_peft: bool = option(False, "Train a LoRA adapter instead of the weights.")
    lora_r: int = option(16, "Rank of the adapter.")
    lora_alpha: int = option(32, "Its scale: alpha / r (with `use_rslora` alpha / sqrt(r)).")
    lora_dropout: float = option(0.0, "Dropout before the adapter; above 0 its slower forward is used.")
    lora_target_modules: list[str] | None = option(
        None, "Names of the linear layers that get one, such as q_proj v_proj. None: all but the head."
    )
    lora_target_parameters: list[str] | None = option(
        None, "Names of parameters, for experts that are not linear layers."
    )
    lora_modules_to_save: list[str] | None = option(None, "Modules that are trained whole and saved with the adapter.")
    lora_task_type: str | None = option(None, "PEFT's name of the task. None: that of the method.")
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r).")
    use_dora: bool = option(False, "Learn magnitude and direction apart (DoRA).")
    load_in_8bit: bool = option(False, "Load the weights in 8 bits (bitsandbytes).")
    load_in_4bit: bool = option(False, "Load the weights in 4 bits (bitsandbytes): QLoRA, with `use_peft`.")
    bnb_4bit_quant_type: str = option("nf4", "Type of the 4 bits: nf4 or fp4.")
    use_bnb_nested_quant: bool = option(False, "Quantise the constants of the quantisation, too.")
    bnb_4bit_quant_storage: str | None = option(
        None, "Dtype in which the 4 bits are stored; FSDP needs that of the rest."
    )


def get_peft_config(model_args: Any) -> Any:
    """PEFT's LoRA config that the options describe; None where no adapter is trained."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    if model_args.lora_r < 1:
        raise ValueError(f"`lora_r` is {model_args.lora_r}; an adapter has at least rank 1.")
    if not 0 <= model_args.lora_dropout < 1:
        raise ValueError(f"`lora_dropout` is {model_args.lora_dropout}; it is a share from 0 to below 1.")
    targets, parameters = model_args.lora_target_modules, model_args.lora_target_parameters
    alone = isinstance(targets, list) and len(targets) == 1  # 'all-linear', or a pattern: PEFT takes these as text
    return LoraConfig(
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=targets[0] if alone else targets,
        modules_to_save=model_args.lora_modules_to_save,
        task_type=model_args.lora_task_type or "CAUSAL_LM",
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
        **({"target_parameters": parameters} if parameters else {}),
    )


def get_quantization_config(model_args: Any) -> Any:
    """bitsandbytes' config that the options describe; None where the weights are loaded whole."""
    eight, four = model_args.load_in_8bit, model_args.load_in_4bit
    if not (eight or four):
        return None
    if eight and four:
        raise ValueError("`load_in_8bit` and `load_in_4bit` are both set; choose one.")
    if model_args.bnb_4bit_quant_type not in ("nf4", "fp4"):
        raise ValueError(f"`bnb_4bit_quant_type` is {model_args.bnb_4bit_quant_type!r}; it takes nf4 or fp4.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ImportError(f"`load_in_{4 if four else 8}bit` needs bitsandbytes: pip install 'posttrain[quant]'.")
    import torch
    from transformers import BitsAndBytesConfig

    if eight:
        return BitsAndBytesConfig(load_in_8bit=True)
    compute = getattr(torch, model_args.dtype) if model_args.dtype in DTYPES[1:] else torch.bfloat16
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


def get_kbit_device_map() -> dict[str, int] | None:
    """Where bitsandbytes puts a model: all of it on this process's device; None without a GPU."""
    import torch
    from accelerate import PartialState

    return {"": PartialState().local_process_index} if torch.cuda.is_available() else None
