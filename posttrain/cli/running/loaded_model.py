"""MODEL of `eval`, `export` and `chat`: found and its tokenizer loaded at once, its weights when they are wanted."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.errors import UsageError
from posttrain.cli.running.output import no_bars

if TYPE_CHECKING:
    from posttrain.cli.options.arguments import RunConfig
    from posttrain.models.load.saved_model import SavedModel


@dataclass
class OpenedModel:
    saved: SavedModel
    tokenizer: Any
    options: argparse.Namespace

    def processor(self) -> Any:
        """What shows it images. UsageError where it cannot be shown any."""
        found = self.saved.processor(self.options.trust_remote_code)
        if found is not None:
            return found
        why = "has no processor (no processor_config.json): copy that of the model that it was trained from into its folder"
        if not self.saved.sees:
            why = "reads texts only, and cannot be shown images: leave --image out, or take a vision-language model"
        raise UsageError(f"{self.options.model} {why}.")

    def load(self, sees: bool = False) -> Any:
        """On its device, with the adapters' products fused as in training, and on the quantised base of a QLoRA run. A dtype that
        is named is that of the whole base. `sees`: as transformers has it, to be given what its processor makes of images."""
        import torch

        from posttrain.models.load.model import LoadOptions, load_model

        dtype = dtype_named(self.options.dtype)
        is_quantised = dtype is None and self.saved.quantization() is not None
        if is_quantised and importlib.util.find_spec("bitsandbytes") is None:
            raise UsageError(
                f"{self.options.model} was trained on a quantised base, which needs bitsandbytes: `pip install bitsandbytes`, or "
                "name the dtype in which the whole base is to be loaded, such as `--dtype bfloat16`."
            )
        device = device_named(self.options.device) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = self.saved.load(dtype, self.options.trust_remote_code, is_quantised, device)
        if sees:
            return model.to(device).eval()
        return load_model(model, LoadOptions(dtype=model.dtype, device=device)).model.eval()


def open_model(options: argparse.Namespace) -> OpenedModel:
    """The model that `options` name, if it is one that writes. `--dtype` and `--device` are looked at before anything is loaded."""
    from posttrain.models.scoring.heads import CAUSAL_LM

    no_bars()
    dtype_named(options.dtype)
    device_named(options.device)
    saved = saved_named(options.model, adapter=getattr(options, "adapter", None))
    if saved.task != CAUSAL_LM:
        raise UsageError(f"{options.model} is a sequence classifier (a reward model): it writes nothing.")
    try:
        tokenizer = saved.tokenizer(options.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UsageError(f"The tokenizer of {options.model} cannot be loaded: {str(error).splitlines()[0]}") from error
    return OpenedModel(saved, tokenizer, options)


def saved_named(model: str, checkpoint: int | None = None, adapter: str | None = None) -> SavedModel:
    from posttrain.models.load.saved_model import NoModelError, find_saved, with_adapter

    try:
        saved = find_saved(model, checkpoint)
        return saved if adapter is None else with_adapter(saved, adapter)
    except NoModelError as error:
        raise UsageError(str(error)) from error


def dtype_named(name: str | None) -> Any:
    """torch's dtype of that name; None where none is named."""
    from posttrain.models.load.options import DTYPES

    if name is None or name == "auto":
        return None
    if name not in DTYPES:
        raise UsageError(f"--dtype is {name!r}; it takes one of {', '.join(DTYPES)}.")
    import torch

    return getattr(torch, name)


def device_named(name: str | None) -> Any:
    """torch's device of that name, if this machine has it; None where none is named."""
    import torch

    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device is {name!r}; it takes cpu, cuda or cuda:1, or another that torch knows.") from error
    if device.type == "cpu":
        return device
    found = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if found is not None and found.type == device.type else 0
    if (device.index or 0) >= count:
        raise UsageError(
            f"--device is {name!r}, and torch finds {count} devices of that kind here; use cpu, or leave it out."
        )
    return device


def model_name(config: RunConfig) -> str:
    """Hub id or folder that a run's options name; a folder must hold a model."""
    name = config.get("model_name_or_path")
    if not name:
        raise UsageError(f"posttrain {config.method} needs a model: --model_name_or_path with a Hub id or a folder.")
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    path = Path(name).expanduser()
    if looks_local and not path.exists():
        raise UsageError(f"{config.where('model_name_or_path')}: there is no folder {name}.")
    if path.is_dir() and not any((path / file).exists() for file in ("config.json", "adapter_config.json")):
        raise UsageError(f"{config.where('model_name_or_path')}: the folder {name} holds no model (no config.json).")
    return str(path) if path.exists() else name
