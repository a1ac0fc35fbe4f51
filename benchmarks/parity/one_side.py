"""Runs cases with one of the two libraries and writes what it logged and what the weights became, as JSON.

    python -m benchmarks.parity.one_side trl|posttrain MATERIALS RESULTS [CASE ...]

TRL runs the cases that name its version: what an older one has, and this one no longer, is another call with that one installed.
Both libraries are driven by the very same code: trainers, configs, arguments and columns have the same names.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

for name, value in {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig, PeftModel  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoProcessor,
    AutoTokenizer,
)

from benchmarks.parity import completions, corrections, pictures, served  # noqa: E402
from benchmarks.parity.case import Case  # noqa: E402
from benchmarks.parity.cases import CASES, SHARED_OPTIONS, chosen  # noqa: E402

NAMES = {
    "reward": "Reward",
    "distillation": "Distillation",
    "server_distillation": "ServerDistillation",
    "iw_opd": "IWOPD",
    "minillm": "MiniLLM",
}
"""Method -> its name in those of classes; of the others, the method in capitals."""
WRITING = ("distillation", "server_distillation", "iw_opd", "gold", "sdft", "ssd", "minillm")
"""Methods that need no rewards and whose completions are written in the run."""
EXPERIMENTAL = ("cpo", "orpo", "tpo", "bco", "prm", "gkd", "sdpo", *WRITING[1:])
"""Methods whose classes are not at TRL's top level."""
LOADERS = {"reward": AutoModelForSequenceClassification, "prm": AutoModelForTokenClassification}
UNSHARED_LOGS = ("step_time", "runtime", "per_second", "total_flos", "train_loss", "peak", "memory", "mfu", "tokens/s")


def run_case(library: str, case: Case, materials: Path, output: str) -> dict[str, Any]:
    """{"logs": [...], "weights": {name: numbers}} of one run, or {"error": what the library said}."""
    try:
        with served.teacher(library, case, materials, Path(output)) as options:
            trainer = make_trainer(importlib.import_module(library), case, materials, output, options)
            before = {name: value.detach().clone() for name, value in compared(trainer, case).items()}
            trainer.train()
            if case.evaluation:
                trainer.evaluate()
    except Exception as error:  # a case may ask for a refusal: what was said is part of the result
        if os.environ.get("PARITY_RAISE"):
            raise
        return {"error": f"{type(error).__name__}: {error}"}
    logs = [shared(entry) for entry in trainer.state.log_history if "train_runtime" not in entry]
    return {"logs": logs, "weights": {n: numbers(v, before[n]) for n, v in compared(trainer, case).items()}}


def make_trainer(library: Any, case: Case, materials: Path, output: str, more: dict[str, Any]) -> Any:
    title = NAMES.get(case.method, case.method.upper())
    is_ours = library.__name__ == "posttrain"
    if not is_ours and case.method in EXPERIMENTAL:
        library = importlib.import_module(f"trl.experimental.{case.method}")
    options = {**SHARED_OPTIONS, **case.options, **(case.ours if is_ours else case.trl), **more}
    args = getattr(library, f"{title}Config")(output_dir=output, **options)
    reader, folder = (AutoProcessor, case.model) if case.sees else (AutoTokenizer, case.tokenizer)
    given: dict[str, Any] = {"processing_class": reader.from_pretrained(materials / folder)}
    if case.reference:
        given["ref_model"] = load(case, materials, case.reference)
    if case.teacher and case.method != "server_distillation":
        given |= taught_by(case, materials, is_ours)
    if case.evaluation:
        given["eval_dataset"] = read(materials / f"{case.rows}.eval.jsonl")
    if case.formatting_func:
        given["formatting_func"] = case.formatting_func
    if case.adapter == "new":
        given["peft_config"] = LoraConfig.from_pretrained(adapter_of(case, materials))
        given["peft_config"].inference_mode = False
    model = load(case, materials, case.model, case.adapter == "loaded")
    if case.rewards or case.method in WRITING:
        given |= judged_completions(library, case, model, given["processing_class"])
    trainer = getattr(library, f"{title}Trainer")(
        model=model,
        args=args,
        train_dataset=train_rows(case, materials),
        **given,
    )
    if case.corrected and not is_ours:
        getattr(corrections, case.corrected)(trainer)
    if case.adapter == "new":
        set_adapter(trainer.model, adapter_of(case, materials))
    return trainer


def taught_by(case: Case, materials: Path, is_ours: bool) -> dict[str, Any]:
    """The teacher and its tokenizer, which TRL looks for where the teacher says that it comes from."""
    teacher, folder = load(case, materials, case.teacher), materials / case.teacher_tokenizer
    if is_ours:
        return {"teacher_model": teacher, "teacher_processing_class": AutoTokenizer.from_pretrained(folder)}
    teacher.config._name_or_path = str(folder)
    return {"teacher_model": teacher}


def judged_completions(library: Any, case: Case, model: Any, tokenizer: Any) -> dict[str, Any]:
    """The arguments of an online trainer: rewards, and who writes completions."""
    is_ours = library.__name__ == "posttrain"
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if not is_ours:
        set_shuffling(case.is_shuffled)
    given: dict[str, Any] = {}
    if case.rewards:
        given["reward_funcs"] = [completions.REWARDS[name] for name in case.rewards]
    if case.written_by == "function":
        given["rollout_func"] = completions.rollout_func
    elif is_ours:
        given["engine"] = completions.scripted_engine(tokenizer)
    else:
        completions.script_generate(model, tokenizer)
    return given


def set_shuffling(is_on: bool) -> None:
    """Whether TRL shuffles the samples of a generation among its micro-batches."""
    from trl.trainer import grpo_trainer, rloo_trainer, utils

    for module in (grpo_trainer, rloo_trainer):
        module.shuffle_sequence_dict = utils.shuffle_sequence_dict if is_on else utils.identity


def load(case: Case, materials: Path, name: str, with_adapter: bool = False) -> Any:
    plain = AutoModelForImageTextToText if case.sees else AutoModelForCausalLM
    model = LOADERS.get(case.method, plain).from_pretrained(materials / name, dtype=torch.float32)
    if with_adapter:
        return PeftModel.from_pretrained(model, str(adapter_of(case, materials)), is_trainable=True)
    return model


def adapter_of(case: Case, materials: Path) -> Path:
    return materials / f"{case.model}_{case.saved_adapter}"


def set_adapter(model: Any, folder: Path) -> None:
    """The saved initialisation, in place of the one the library drew: for every weight that the adapter has in this model."""
    saved = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            name = name.replace(".default", "").replace(".modules_to_save", "")
            if name in saved or parameter.requires_grad:  # we freeze adapters of a layer that no feature depends on
                parameter.copy_(saved[name])


def read(path: Path) -> Dataset:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return Dataset.from_list([pictures.drawn(row) for row in rows])


def train_rows(case: Case, materials: Path) -> Any:
    dataset = read(materials / f"{case.rows}.jsonl")
    if case.first_rows is not None:
        dataset = dataset.select(range(case.first_rows))
    return dataset.to_iterable_dataset() if case.streamed else dataset


def compared(trainer: Any, case: Case) -> dict[str, torch.Tensor]:
    """What is trained; where there is a tower, all: weights of it that no image reaches are parameters of TRL's optimizer, too."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: value for name, value in model.named_parameters() if value.requires_grad or case.sees}


def numbers(after: torch.Tensor, before: torch.Tensor) -> dict[str, float]:
    """Norm of a tensor, norm of what training changed, and one number that sees the direction of the change."""
    after, before = after.detach().double(), before.double()
    moved = (after - before).flatten()
    pattern = torch.cos(torch.arange(len(moved), dtype=torch.float64))
    return {"norm": after.norm().item(), "moved": moved.norm().item(), "direction": (moved @ pattern).item()}


def shared(entry: dict[str, float]) -> dict[str, float | None]:
    """A log entry without clocks; a number that is not finite becomes its name."""
    kept = {key: value for key, value in entry.items() if not any(part in key for part in UNSHARED_LOGS)}
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in kept.items()}


def main(library: str, materials: Path, results: Path, names: list[str]) -> None:
    results.mkdir(parents=True, exist_ok=True)
    version = importlib.metadata.version("trl") if library == "trl" else None
    for case in chosen(CASES, names):
        if version not in (None, case.trl_version):
            continue
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as output:
            result = run_case(library, case, materials, output)
        result["seconds"] = round(time.perf_counter() - start, 2)
        (results / f"{case.name}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        print(f"{library:9} {case.name:44} {result['seconds']:6.2f} s  {result.get('error', '')[:200]}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
