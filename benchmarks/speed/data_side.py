"""Raw JSONL to the first batch with one library: what a user waits for before training starts.

    python -m benchmarks.speed.data_side PLAN.json RESULTS.jsonl

Both libraries read the same file, use the same tokenizer and template, as many processes, and a cache that is empty.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def tiny_model(vocabulary: int) -> Any:
    """Something to hand to the trainer; its size must not matter."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    return AutoModelForCausalLM.from_config(Qwen2Config(vocab_size=vocabulary, **shape, **heads))


def prepare(library: Any, plan: dict[str, Any], file: str, folder: str) -> dict[str, Any]:
    """Seconds of reading the file and of everything from there to the first batch; tokens of the whole dataset."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plan["tokenizer"])
    model = tiny_model(len(tokenizer))
    options = {
        "output_dir": folder,
        "max_length": 2048,
        "per_device_train_batch_size": 8,
        "dataset_num_proc": plan["num_proc"] or None,  # 0: what the library does by itself
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "packing": plan["packing"],
    }
    if library.__name__ == "posttrain":
        options["dataset_cache_dir"] = str(Path(folder) / "tokens")
    start, processor = time.perf_counter(), processor_seconds()
    rows = Dataset.from_json(file, cache_dir=str(Path(folder) / "arrow"))
    read = time.perf_counter()
    trainer = library.SFTTrainer(
        model=model, args=library.SFTConfig(**options), train_dataset=rows, processing_class=tokenizer
    )
    batch = next(iter(trainer.get_train_dataloader()))
    done = time.perf_counter()
    ids = batch["input_ids"] if isinstance(batch, dict) or hasattr(batch, "keys") else batch.input_ids
    return {
        "read_seconds": read - start,
        "prepare_seconds": done - read,
        "processor_seconds": processor_seconds() - processor,
        "tokens": count_tokens(trainer.train_dataset),
        "rows": len(rows),
        "first_batch": list(ids.shape),
    }


def processor_seconds() -> float:
    """Of this process and of those it started and ended: what other programs on the machine do not change."""
    uses = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def count_tokens(dataset: Any) -> int:
    if hasattr(dataset, "unit_lengths"):
        return int(sum(dataset.unit_lengths))
    return sum(map(len, dataset["input_ids"]))


def main(plan_file: Path, results: Path) -> None:
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    library = importlib.import_module(plan["library"])
    library.SFTTrainer  # noqa: B018 - imported here: import time has a row of its own
    for file in plan["files"]:
        for _ in range(plan["repeats"]):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = prepare(library, plan, file, folder)
                except Exception as error:  # the other files go on
                    found = {"error": f"{type(error).__name__}: {error}"}
            peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
            entry = {"row": "data", "file": Path(file).stem, "setting": plan["library"], "process": plan["process"]}
            entry |= {"num_proc": plan["num_proc"], "packing": plan["packing"], "peak_bytes": peak * 1024, **found}
            with open(results, "a", encoding="utf-8") as out:
                out.write(json.dumps(entry) + "\n")
            print(entry, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
