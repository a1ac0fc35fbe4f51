"""A model that was saved, by us or by others: its folder, its base where it is an adapter, and how to load it as it was trained."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME
from transformers.utils.hub import has_file

from posttrain.models.load.adapters import keep_trainable
from posttrain.models.load.image_models import load_processor, sees_images
from posttrain.models.load.model import LoadOptions, config_of_model, errors_named, load_pretrained, load_tokenizer
from posttrain.models.load.vocabulary import fit_embeddings
from posttrain.models.scoring.heads import CAUSAL_LM, SEQUENCE_REWARD, TOKEN_LABELS

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
CONFIG, ADAPTER_CONFIG, ADAPTER_WEIGHTS = "config.json", "adapter_config.json", "adapter_model.safetensors"
QUANTIZATION = "quantization_config.json"
"""Beside an adapter: how the base was quantised that it was trained with."""
SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class NoModelError(ValueError):
    """There is no model where one was looked for; the message says what is there."""


@dataclass(frozen=True)
class SavedModel:
    """A model on disk or on the Hub."""

    path: str  # folder, GGUF file or Hub id; of the adapter where `base` is set
    base: str | None = None  # what the adapter is for
    task: str = CAUSAL_LM

    @property
    def is_adapter(self) -> bool:
        return self.base is not None

    @property
    def has_tokenizer(self) -> bool:
        folder = Path(self.path)
        names = ("tokenizer.json", "tokenizer_config.json")
        return not folder.is_dir() or any((folder / name).exists() for name in names)

    def own_dtype(self) -> torch.dtype | str:
        """In which it was trained: a base is loaded in the dtype of its adapter, all else in its file's."""
        weights = Path(self.path) / ADAPTER_WEIGHTS
        if not self.is_adapter or not weights.exists():
            return "auto"
        from safetensors import safe_open

        with safe_open(weights, "pt") as file:
            kinds = [file.get_slice(name).get_dtype() for name in file.keys() if "magnitude" not in name]  # noqa: SIM118
        return SAFETENSORS_DTYPES.get(kinds[0], "auto") if kinds else "auto"

    def tokenizer(self, trust_remote_code: bool = False) -> Any:
        source = self.path if self.has_tokenizer or self.base is None else self.base
        return load_tokenizer(source, None, trust_remote_code)

    @property
    def sees(self) -> bool:
        """Whether it is a model of images and text."""
        return sees_images(config_of_model(self.base or self.path))

    def processor(self, trust_remote_code: bool = False) -> Any | None:
        """What makes tokens and pixels of images, from its own folder, else from that of its base, with its own tokenizer and chat
        template. None: neither has one, or the model reads texts only."""
        if self.task == CAUSAL_LM and not self.sees:  # of classifiers there are those that see and are in no table
            return None
        for source in filter(None, (self.path, self.base)):
            if any(has_file(source, name) for name in (PROCESSOR_NAME, IMAGE_PROCESSOR_NAME)):
                with errors_named("processor", source):
                    found = load_processor(source, trust_remote_code)
                templates = [found.chat_template, found.tokenizer.chat_template]  # the first is the one that is used
                if source != self.path and self.has_tokenizer:
                    found.tokenizer = self.tokenizer(trust_remote_code)
                    templates.insert(0, found.tokenizer.chat_template)
                found.chat_template = next(filter(None, templates), None)
                return found
        return None

    def processing_class(self, trust_remote_code: bool = False) -> Any:
        """Its processor, or its tokenizer where it has none."""
        return self.processor(trust_remote_code) or self.tokenizer(trust_remote_code)

    def quantization(self) -> dict[str, Any] | None:
        """How the base of an adapter was quantised in training; None: it was not, or was not written down."""
        path = Path(self.path) / QUANTIZATION
        return json.loads(path.read_text(encoding="utf-8")) if self.is_adapter and path.is_file() else None

    def load(
        self,
        dtype: torch.dtype | str | None = None,
        trust_remote_code: bool = False,
        quantised: bool = False,
        device: torch.device | str = "cpu",
    ) -> nn.Module:
        """The weights, on the CPU; an adapter stands beside its base as in training, nothing is merged.

        `quantised`: its base is, if it was in training, lies on `device` and computes in `dtype`.
        """
        options = LoadOptions(dtype=dtype or self.own_dtype(), task=self.task, trust_remote_code=trust_remote_code)
        if quantised and (settings := self.quantization()) is not None:
            options.quantization_config = BitsAndBytesConfig.from_dict(
                settings | {"bnb_4bit_compute_dtype": options.dtype}
            )
            options.model_init_kwargs = {"device_map": {"": device}}  # it would be the GPU, where there is one
        model = load_pretrained(self.base or self.path, options)
        keep_trainable(model)
        return self._with_adapter(model, trust_remote_code) if self.is_adapter else model

    def _with_adapter(self, model: nn.Module, trust_remote_code: bool) -> nn.Module:
        from peft import PeftModel

        if self.has_tokenizer:
            fit_embeddings(model, self.tokenizer(trust_remote_code))
        # PEFT would turn adapters into float32, whatever they were trained in.
        loaded = PeftModel.from_pretrained(model, self.path, autocast_adapter_dtype=False)
        for name, parameter in loaded.named_parameters():
            if "lora_" in name and "magnitude" not in name and parameter.dtype != model.dtype:
                parameter.data = parameter.data.to(model.dtype)
        return loaded.eval()


def find_saved(where: str | Path, checkpoint: int | None = None) -> SavedModel:
    """A run's folder, a checkpoint, a model's or an adapter's folder, a GGUF file, or a Hub id."""
    path = Path(where).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return SavedModel(str(path))
    if not path.exists():
        if checkpoint is not None or str(where).startswith((".", "/", "~")) or str(where).count("/") > 1:
            raise NoModelError(f"There is no folder {where}.")
        return SavedModel(str(where))
    folder = _folder(path, checkpoint)
    if not (folder / ADAPTER_CONFIG).exists():
        return SavedModel(str(folder), task=_task_of(folder))
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    task = {"SEQ_CLS": SEQUENCE_REWARD, "TOKEN_CLS": TOKEN_LABELS}.get(config.get("task_type"), CAUSAL_LM)
    return SavedModel(str(folder), _base(folder, config), task)


def with_adapter(model: SavedModel, adapter: str | Path) -> SavedModel:
    """A model with another adapter on top."""
    if model.is_adapter:
        raise NoModelError(f"{model.path} is an adapter itself; name its base, {model.base}, as the model.")
    folder = Path(adapter).expanduser()
    if not (folder / ADAPTER_CONFIG).exists():
        raise NoModelError(f"{adapter} holds no adapter (no {ADAPTER_CONFIG}).")
    return SavedModel(str(folder), model.path, model.task)


def holds_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in (CONFIG, ADAPTER_CONFIG))


def _folder(path: Path, checkpoint: int | None) -> Path:
    steps = {int(match[1]): one for one in path.iterdir() if (match := CHECKPOINT.fullmatch(one.name)) and one.is_dir()}
    if checkpoint is not None:
        if checkpoint not in steps:
            known = f"it has {', '.join(map(str, sorted(steps)))}" if steps else "it has none"
            raise NoModelError(f"{path} has no checkpoint {checkpoint}; {known}.")
        return steps[checkpoint]
    if holds_model(path):
        return path
    whole = [step for step in sorted(steps) if holds_model(steps[step])]
    if not whole:
        raise NoModelError(f"The folder {path} holds no model (no {CONFIG}, no {ADAPTER_CONFIG}) and no checkpoint.")
    return steps[whole[-1]]


def _task_of(folder: Path) -> str:
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if "step_separator" in config:  # of a process reward model; one that sees is of its family's own class
        return TOKEN_LABELS
    named = config.get("architectures") or [""]
    if (
        named[0].endswith("ForConditionalGeneration") and len(config.get("id2label", ())) == 1
    ):  # a reward model that sees
        return SEQUENCE_REWARD
    kinds = {"ForSequenceClassification": SEQUENCE_REWARD, "ForTokenClassification": TOKEN_LABELS}
    return next((task for ending, task in kinds.items() if named[0].endswith(ending)), CAUSAL_LM)


def classifier_task(where: str | Path) -> str:
    """TOKEN_LABELS for a process reward model, SEQUENCE_REWARD for whatever else judges; of a Hub id its config says it."""
    if Path(where).expanduser().exists():
        task = find_saved(where).task
    else:
        try:
            named = PretrainedConfig.get_config_dict(str(where))[0].get("architectures") or [""]
        except OSError:  # none there; loading the model will say so in its own words
            named = [""]
        task = TOKEN_LABELS if named[0].endswith("ForTokenClassification") else SEQUENCE_REWARD
    return task if task == TOKEN_LABELS else SEQUENCE_REWARD


def _base(folder: Path, config: dict[str, Any]) -> str:
    """Where the base is: as it was written down, else seen from where the run was started."""
    named = config.get("base_model_name_or_path")
    if not named:
        raise NoModelError(f"{folder / ADAPTER_CONFIG} does not say which model the adapter is for.")
    if Path(named).is_absolute():
        if not Path(named).exists():
            raise NoModelError(f"The adapter in {folder} is for the model in {named}, and there is no such folder.")
        return named
    for start in (Path(), *folder.resolve().parents[:3]):
        if (start / named).exists():
            return str(start / named)
    return named
