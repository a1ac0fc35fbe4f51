"""How many rows with images a second are read, checked and rendered before training, on all cores of this machine; and how many
images a second the loader then decodes and cuts.

    python -m benchmarks.speed.image_preparation [--rows 10000] [--check header decode] [--workers 0 1 2 4 8]

Rows of `image_step.py`: one JPEG of 600 x 600 pixels in the middle, as bytes, a question and an answer. `header` reads the head of
every image, `decode` all of it, by which half files are found; `check_images="auto"` decodes the images of the first 20,000 rows.
Seconds are those of building a trainer of a tiny model, the probe of whether it sees included. `--workers`: images a second of a
training loader with that many workers (0: in the process), batches of 16, the first two of each worker not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from typing import Any

import datasets
import torch

from benchmarks.speed import image_step
from posttrain import SFTConfig, SFTTrainer
from tests import tiny_vision

DISTINCT, BATCH, LOADED = 1000, 16, 20
"""LOADED: batches for each worker."""


def trainer_of(dataset: datasets.Dataset, folder: str, processor: Any = None, **options: Any) -> SFTTrainer:
    model, small = image_step.model_and_processor(image_step.FAMILY, True, torch.float32, "cpu")
    shared = {"dataset_cache_dir": f"{folder}/cache", "use_cpu": True, "bf16": False, "report_to": "none"}
    args = SFTConfig(output_dir=folder, verbosity="quiet", **shared, **options)
    return SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=processor or small)


def measured(dataset: datasets.Dataset, check: str) -> dict[str, float | str | int | None]:
    with tempfile.TemporaryDirectory() as folder:
        started, before = time.perf_counter(), processor_seconds()
        trainer_of(dataset, folder, check_images=check)
        seconds, used = time.perf_counter() - started, processor_seconds() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rates = {"rows_per_second": round(len(dataset) / seconds), "rows_per_processor_second": round(len(dataset) / used)}
    return {"check": check, "rows": len(dataset), "cores": os.cpu_count(), **rates, "peak_gib": peak}


def loaded(dataset: datasets.Dataset, workers: int) -> dict[str, float | int | None]:
    """Real limits of pixels: the images that the tests' processor would make are a tenth as wide."""
    processor = tiny_vision.BUILDERS[image_step.FAMILY](image_step.FAMILY, image_step.PIXELS[image_step.FAMILY])[2]()
    options = {"per_device_train_batch_size": BATCH, "dataloader_num_workers": workers, "check_images": "header"}
    with tempfile.TemporaryDirectory() as folder:
        loader = iter(trainer_of(dataset, folder, processor, max_length=None, **options).get_train_dataloader())
        for _ in range(2 * max(workers, 1)):
            next(loader)
        started, batches = time.perf_counter(), sum(1 for _ in loader)
        rate = batches * BATCH / (time.perf_counter() - started)
    return {"workers": workers, "images": batches * BATCH, "cores": os.cpu_count(), "images_per_second": round(rate, 1)}


def processor_seconds() -> float:
    """Of this process and of those that it has waited for: other programs of the machine do not take part in it."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--check", nargs="*", default=["header", "decode"])
    parser.add_argument("--workers", nargs="*", type=int, default=[])
    asked = parser.parse_args()
    some = image_step.rows_of("sft_images", min(DISTINCT, asked.rows), 1, False)
    dataset = datasets.concatenate_datasets([some] * max(asked.rows // len(some), 1))
    for check in asked.check:
        print(json.dumps(measured(dataset, check)), flush=True)
    for workers in asked.workers:
        rows = datasets.concatenate_datasets([some] * (1 + max(workers, 1) * BATCH * LOADED // len(some)))
        print(json.dumps(loaded(rows.select(range(max(workers, 1) * BATCH * LOADED)), workers)), flush=True)


if __name__ == "__main__":
    main()
