"""Memory that `posttrain explain` predicts against what a few real steps take, phase by phase, on a CUDA device.

    python benchmarks/explain_memory.py [--shape 0.5b] [--only sft-full ...] [--seconds 170] [--json FILE]

Models have random weights and real shapes; nothing is downloaded. Bytes are torch's own (`max_memory_allocated`), less what was
there before. A configuration that fails is reported and the next one is tried. Exit code 1 where a peak is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tests.tiny's tokenizer

from posttrain.cli.commands.explain import Explained  # noqa: E402
from posttrain.cli.options.arguments import parse  # noqa: E402
from posttrain.cli.running.assemble import trainer_of  # noqa: E402

BOUND = 0.1
SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
}  # fmt: skip
KEPT = {"gradient_checkpointing": False, "activation_offloading": False, "keep_logits": False}
RECOMPUTED = {**KEPT, "gradient_checkpointing": True}
LORA = {"use_peft": True, "lora_target_modules": ["all-linear"], "lora_dropout": 0.0}
GROUPS = {
    "num_generations": 8, "per_device_train_batch_size": 16, "max_completion_length": 256, "reward_workers": 0,
    "reward_funcs": ["reward_of_benchmark.py:length"],
}  # fmt: skip
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft-full": ("sft", {**KEPT, "per_device_train_batch_size": 8}),
    "sft-full-recomputed": ("sft", {**RECOMPUTED, "per_device_train_batch_size": 16}),
    "sft-full-accumulated": ("sft", {**KEPT, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    "sft-lora": ("sft", {**KEPT, **LORA, "per_device_train_batch_size": 8}),
    "sft-lora-dropout": ("sft", {**KEPT, **LORA, "lora_dropout": 0.05, "per_device_train_batch_size": 8}),
    "sft-lora-two-modules": (
        "sft",
        {**KEPT, "use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "per_device_train_batch_size": 8},
    ),
    "dpo-full": ("dpo", {**KEPT, "per_device_train_batch_size": 4}),
    "dpo-lora-recomputed": ("dpo", {**RECOMPUTED, **LORA, "per_device_train_batch_size": 8}),
    "dpo-full-logits-kept": ("dpo", {**KEPT, "per_device_train_batch_size": 4, "keep_logits": True}),
    "grpo-full-reference": ("grpo", {**KEPT, **GROUPS, "beta": 0.04}),
    "grpo-lora-two-iterations": ("grpo", {**KEPT, **LORA, **GROUPS, "num_iterations": 2}),
}
COMMON = {
    "max_steps": 3, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "max_length": 1024, "alerts": False,
    "use_liger_kernel": None, "disable_tqdm": True, "keep_rollouts": None,
}  # fmt: skip
REWARD = "def length(completions, **columns):\n    return [float(len(text)) for text in completions]\n"


def write_inputs(folder: Path, shape: str) -> None:
    """A model with random weights, a byte tokenizer, and rows of known length."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests import tiny

    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPES[shape], max_position_embeddings=4096, eos_token_id=256, pad_token_id=257, bos_token_id=None
    )
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.cpu().save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    words = "lorem ipsum dolor sit amet "
    rows = {
        "sft": [{"text": (words * 60)[i : i + 1200]} for i in range(256)],
        "dpo": [{"prompt": words * 4, "chosen": (words * 60)[i : i + 920], "rejected": (words * 60)[i : i + 920][::-1]}
                for i in range(1, 129)],
        "grpo": [{"prompt": (words * 20)[i : i + 256]} for i in range(128)],
    }  # fmt: skip
    for name, each in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in each), encoding="utf-8")
    (folder / "reward_of_benchmark.py").write_text(REWARD, encoding="utf-8")


def words_of(method: str, options: dict[str, Any], name: str) -> list[str]:
    found = []
    named = {"model_name_or_path": "./model", "dataset_name": f"{method}.jsonl", "output_dir": f"out-{name}"}
    for key, value in {**COMMON, **named, **options}.items():
        if value is None:
            continue
        if isinstance(value, bool):
            found.append(f"--{key}" if value else f"--no_{key}")
        else:
            found += [f"--{key}", *([str(one) for one in value] if isinstance(value, list) else [str(value)])]
    return found


class Meter:
    """Peaks of allocated bytes by phase, above what was there when it began."""

    def __init__(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        self.before = torch.cuda.memory_allocated()
        self.peaks: dict[str, int] = {}

    def note(self, phase: str, size: int) -> None:
        self.peaks[phase] = max(self.peaks.get(phase, 0), size - self.before)

    def around(self, owner: Any, name: str, phase: str) -> None:
        """The peak inside of `owner.name(...)`. The update's own peak so far is kept."""
        real = getattr(owner, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            try:
                return real(*args, **kwargs)
            finally:
                torch.cuda.synchronize()
                self.note(phase, torch.cuda.max_memory_allocated())
                torch.cuda.reset_peak_memory_stats()

        setattr(owner, name, measured)

    def steps(self, trainer: Any) -> None:
        from transformers import TrainerCallback

        meter = self

        class Update(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                torch.cuda.reset_peak_memory_stats()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                torch.cuda.synchronize()
                meter.note("update", torch.cuda.max_memory_allocated())

        trainer.add_callback(Update())


def measured(method: str, options: dict[str, Any], name: str) -> dict[str, int]:
    meter = Meter()
    trainer = trainer_of(parse(method, words_of(method, options, name)))
    gc.collect()
    meter.note("load", torch.cuda.memory_allocated())
    meter.steps(trainer)
    if hasattr(trainer, "collector"):
        meter.around(trainer.collector.writer, "write", "generation")
        meter.around(trainer, "annotate", "scoring")
    trainer.train()
    del trainer
    return meter.peaks


def predicted(method: str, options: dict[str, Any], name: str) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    report = Explained(parse(method, words_of(method, options, name))).memory
    return {phase.name: phase.peak for phase in report.phases}, {phase.name: phase.terms for phase in report.phases}


def compare(name: str) -> list[dict[str, Any]]:
    method, options = CONFIGURATIONS[name]
    expected, terms = predicted(method, options, name)
    found = measured(method, options, name)
    lines = []
    for phase, size in expected.items():
        if phase in found:
            off = size / max(found[phase], 1) - 1
            lines.append({
                "configuration": name, "phase": phase, "predicted": size, "measured": found[phase], "off": off,
                "terms": terms[phase],
            })  # fmt: skip
    return lines


def show(line: dict[str, Any]) -> None:
    terms = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in line["terms"].items())
    print(
        f"{line['configuration']:<26}{line['phase']:<12}{line['predicted'] / 2**30:>9.2f}{line['measured'] / 2**30:>9.2f}"
        f"{line['off']:>+8.1%}  {terms}",
        flush=True,
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--shape", default="0.5b", choices=SHAPES)
    options.add_argument("--only", nargs="*", default=list(CONFIGURATIONS), choices=CONFIGURATIONS)
    options.add_argument("--seconds", type=float, default=170.0, help="no configuration is begun after this time")
    options.add_argument("--json", help="where the lines are written")
    args = options.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/explain_memory.py needs a CUDA device.", file=sys.stderr)
        return 2
    began, lines, failed = time.monotonic(), [], []
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), args.shape)
        os.environ["HF_DATASETS_CACHE"] = str(Path(folder) / "cache")
        back = os.getcwd()
        os.chdir(folder)
        print(f"{'configuration':<26}{'phase':<12}{'told GiB':>9}{'is GiB':>9}{'off':>8}  terms (GiB)", flush=True)
        for name in args.only:
            if time.monotonic() - began > args.seconds:
                failed.append(name)
                print(f"{name}: not begun, the time is over")
                continue
            try:
                found = compare(name)
            except Exception:  # one configuration that fails must not take the others' figures away
                traceback.print_exc()
                failed.append(name)
                continue
            lines += found
            for line in found:
                show(line)
        os.chdir(back)
    if args.json:
        Path(args.json).write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    worst: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["measured"] > worst.get(line["configuration"], {"measured": 0})["measured"]:
            worst[line["configuration"]] = line
    outside = [name for name, line in worst.items() if abs(line["off"]) > BOUND]
    print(f"peaks within {BOUND:.0%}: {len(worst) - len(outside)} of {len(worst)}; outside: {', '.join(outside) or 'none'}; "
          f"failed or not begun: {', '.join(failed) or 'none'}; {time.monotonic() - began:.0f} s")  # fmt: skip
    return 1 if outside or failed else 0


if __name__ == "__main__":
    sys.exit(main())
