"""GRPO on GSM8K with rollouts from vLLM on a CUDA device: do weights arrive, and how long does sending them take?

    python -m benchmarks.real_runs.grpo_vllm MODEL GSM8K OUTPUT --mode colocate [--steps 4] [--option vllm_sleep_level=2 ...]
    python -m benchmarks.real_runs.grpo_vllm MODEL GSM8K OUTPUT --mode server --option vllm_server_base_url=http://127.0.0.1:8000

Prints one line per step: loss, reward, seconds of the sync, and how far log-probs of the two sides are apart, for the probe and for
what was sampled. MODEL is a folder or `PARAMETERS,TOKENIZER` such as `0.5b,FOLDER`: random weights of that shape.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.real_runs.grpo_gsm8k import correct, number_after_mark, question, read

SHOWN = (
    "step", "loss", "reward", "sync/seconds", "sync/logp_difference/mean", "sync/logp_difference/max",
    "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "step_time",
)  # fmt: skip
SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
COMMON = {
    "per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 128, "learning_rate": 1e-5,
    "logging_steps": 1, "save_strategy": "no", "report_to": "none", "bf16": True, "use_vllm": True,
}  # fmt: skip
OF_MODE = {
    "colocate": {"vllm_gpu_memory_utilization": 0.25, "vllm_enable_sleep_mode": True, "vllm_max_model_length": 1024},
    "server": {},
}


def made_model(named: str, folder: Path) -> str:
    """The folder of the model; of a shape with random weights, written first."""
    shape, comma, tokenizer_folder = named.partition(",")
    if not comma:
        return named
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = Qwen2Config(
        **SHAPES[shape], vocab_size=len(tokenizer), num_key_value_heads=2, tie_word_embeddings=True,
        max_position_embeddings=4096, **ids,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def option_of(pair: str) -> tuple[str, Any]:
    name, _, value = pair.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--mode", choices=OF_MODE, default="colocate")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lora", action="store_true", help="rank 8 on q_proj and v_proj: only adapters are sent")
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE", help="further options of GRPOConfig")
    parser.add_argument("--only-model", action="store_true", help="write the model of a shape to OUTPUT and stop")
    args = parser.parse_args()
    if args.only_model:
        print(made_model(args.model, args.output))
        return

    from datasets import Dataset
    from peft import LoraConfig

    from posttrain import GRPOConfig, GRPOTrainer

    rows = [
        {"prompt": question(row), "answer": number_after_mark(row["answer"])}
        for row in read(args.data / "train.jsonl", 400)
    ]
    options = {**COMMON, **OF_MODE[args.mode], **dict(map(option_of, args.option))}
    config = GRPOConfig(output_dir=str(args.output), max_steps=args.steps, vllm_mode=args.mode, **options)
    adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj"]) if args.lora else None
    began = time.perf_counter()
    model = made_model(args.model, args.output / "model")
    trainer = GRPOTrainer(model, correct, config, train_dataset=Dataset.from_list(rows), peft_config=adapter)
    print(f"constructed in {time.perf_counter() - began:.1f} s", flush=True)
    trainer.train()
    for entry in trainer.state.log_history:
        print({name: round(entry[name], 5) for name in SHOWN if name in entry}, flush=True)


if __name__ == "__main__":
    main()
