"""Which dataset: options that scripts and the command line share, under TRL's names."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.options import option


@dataclass
class DatasetOptions:
    """One dataset, its splits, and how it is read."""

    dataset_name: str | None = option(None, "Dataset: a Hub id, a file (JSONL, JSON, CSV, Parquet, ...) or a folder.")
    dataset_config: str | None = option(None, "Configuration of a dataset from the Hub.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split to evaluate on, where `eval_strategy` asks for evaluation.")
    dataset_streaming: bool = option(False, "Read rows as they are needed instead of preparing all of them first.")
    ignore_bias_buffers: bool = option(False, "Keep boolean buffers out of DDP's broadcasts.")
