"""The dataclasses with which TRL's scripts read their command line, and what makes a dataset of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import datasets

from posttrain.core.options import option
from posttrain.data.sources.mixtures import load_mixture
from posttrain.data.sources.named import DatasetSource
from posttrain.data.sources.options import DatasetOptions
from posttrain.models.load.options import ModelOptions


@dataclass
class ModelConfig(ModelOptions):
    """Options of the model in a script of one's own."""

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("`load_in_8bit` and `load_in_4bit` are both set; choose one.")
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]


@dataclass
class ScriptArguments(DatasetOptions):
    """Which dataset a script of one's own trains on."""


@dataclass
class DatasetConfig:
    """One dataset of a mixture."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: Any = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Several datasets as one."""

    datasets: list[DatasetConfig] = field(
        default_factory=list, metadata={"help": "Datasets, each with `path` and more."}
    )
    streaming: bool = option(False, "Read rows as they are needed.")
    test_split_size: float | None = option(None, "Share or number of rows held out as the split 'test'.")

    def __post_init__(self) -> None:
        self.datasets = [DatasetConfig(**one) if isinstance(one, dict) else one for one in self.datasets]


def get_dataset(mixture_config: DatasetMixtureConfig) -> datasets.DatasetDict | datasets.IterableDatasetDict:
    """{"train": ..., and "test" where rows are held out} of a mixture."""
    sources = [_source(one, mixture_config) for one in mixture_config.datasets]
    if not sources:
        raise ValueError("The mixture names no dataset: give `datasets` at least one entry with a `path`.")
    mixed = load_mixture(sources, streaming=mixture_config.streaming)
    if mixture_config.streaming:
        return datasets.IterableDatasetDict({"train": mixed})
    if mixture_config.test_split_size is None:
        return datasets.DatasetDict({"train": mixed})
    return mixed.train_test_split(test_size=mixture_config.test_split_size)


def _source(one: DatasetConfig, mixture: DatasetMixtureConfig) -> DatasetSource:
    fractions = [each.fraction for each in mixture.datasets]
    share = None if one.fraction is None else one.fraction / sum(each for each in fractions if each is not None)
    files = {"data_files": one.data_files, "data_dir": one.data_dir}
    return DatasetSource(one.path, subset=one.name, split=one.split, keep=one.columns, share=share, **files)


def init_zero_verbose() -> None:
    """Warnings as plain lines, without the source line."""
    import warnings

    logging.basicConfig(format="%(message)s", datefmt="[%X]", level=logging.ERROR)
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}")
