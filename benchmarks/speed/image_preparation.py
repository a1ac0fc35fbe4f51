"""How many rows with images a second are read, checked and rendered before training, on all cores of this machine.

    python -m benchmarks.speed.image_preparation [--rows 10000] [--check header decode]

Rows of `image_step.py`: one JPEG of 600 x 600 pixels in the middle, as bytes, a question and an answer. `header` reads the head of
every image, `decode` all of it, by which half files are found; `check_images="auto"` decodes the images of the first 20,000 rows.
Seconds are those of building a trainer of a tiny model, the probe of whether it sees included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time

import datasets
import torch

from benchmarks.speed import image_step
from posttrain import SFTConfig, SFTTrainer

DISTINCT = 1000


def measured(dataset: datasets.Dataset, check: str) -> dict[str, float | str | int | None]:
    model, processor = image_step.model_and_processor(True, torch.float32, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        shared = {"dataset_cache_dir": f"{folder}/cache", "use_cpu": True, "bf16": False, "report_to": "none"}
        args = SFTConfig(output_dir=folder, check_images=check, verbosity="quiet", **shared)
        started, before = time.perf_counter(), processor_seconds()
        SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=processor)
        seconds, used = time.perf_counter() - started, processor_seconds() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rates = {"rows_per_second": round(len(dataset) / seconds), "rows_per_processor_second": round(len(dataset) / used)}
    return {"check": check, "rows": len(dataset), "cores": os.cpu_count(), **rates, "peak_gib": peak}


def processor_seconds() -> float:
    """Of this process and of those that it has waited for: other programs of the machine do not take part in it."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--check", nargs="+", default=["header", "decode"])
    asked = parser.parse_args()
    some = image_step.rows_of("sft_images", min(DISTINCT, asked.rows), 1, False)
    dataset = datasets.concatenate_datasets([some] * max(asked.rows // len(some), 1))
    for check in asked.check:
        print(json.dumps(measured(dataset, check)), flush=True)


if __name__ == "__main__":
    main()
