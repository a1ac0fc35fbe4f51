"""GRPO on GSM8K with rollouts from vLLM on a CUDA device: do weights arrive, and how long does sending them take?

    python -m benchmarks.real_runs.grpo_vllm MODEL GSM8K OUTPUT --mode colocate [--steps 4]
        [--option vllm_sleep_level=2 ...]
    python -m benchmarks.real_runs.grpo_vllm MODEL GSM8K OUTPUT --mode server
        --option vllm_server_base_url=http://127.0.0.1:8000
    python -m benchmarks.real_runs.grpo_vllm MODEL GSM8K OUTPUT --mode server --serve vllm --python PYTHON [--ahead]

Prints one line per step: loss, reward, seconds of the sync, and how far log-probs of the two sides are apart, for the
probe and for what was sampled; then a summary, which is added to `--out`. With `--serve` the server is started here, on
the same GPU: server and trainer are two processes on one card. `--ahead` writes beside training. MODEL is a folder or
`PARAMETERS,TOKENIZER` such as `0.5b,FOLDER`: random weights of that shape.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, TrainerCallback

from benchmarks.given_options import options_of
from benchmarks.real_runs.grpo_gsm8k import correct, number_after_mark, question, read
from benchmarks.speed.watches import HeldClock
from posttrain import GRPOConfig, GRPOTrainer
from posttrain.rollout.engines.vllm.launcher import ServerProcess, new_token
from posttrain.serve.auth import TOKEN_VARIABLE

SHOWN = (
    "step", "loss", "reward", "sync/seconds", "sync/logp_difference/mean", "sync/logp_difference/max",
    "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "step_time", "async/wait_s",
    "async/token_age/mean", "async/token_age/max",
)  # fmt: skip
TIMED = ("step_time", "sync/seconds", "async/wait_s", "completions/mean_length", "async/token_age/max")
AHEAD = {"async_rollouts": True, "async_lead": 1}
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


@contextmanager
def served(engine: str | None, model: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A server on this GPU, in a process of its own; the options that lead to it."""
    if engine is None:
        yield {}
        return
    token = os.environ[TOKEN_VARIABLE] = new_token()
    words = ["--model", model, "--context-length", str(args.context)]
    words += [] if engine == "native" else ["--memory-share", str(args.memory_share)]
    words += [] if args.engine_args is None else ["--engine-args", args.engine_args]
    server = ServerProcess(words, args.output / "server.log", args.python, token=token, engine=engine)
    try:
        server.start()
        server.wait_until_healthy()
        yield {"vllm_server_base_url": f"http://127.0.0.1:{server.port}"}
    finally:
        server.close()


def summary(history: list[dict[str, float]], args: argparse.Namespace, completions: int) -> dict[str, Any]:
    """Of the steps after the warm-up."""
    logs = [line for line in history if "reward" in line][args.warm_up :]
    found: dict[str, Any] = {"model": args.model, "served_by": args.serve, "ahead": args.ahead, "steps": len(logs)}
    for name in TIMED:
        seen = [line[name] for line in logs if name in line]
        found |= {name: statistics.mean(seen), f"{name}/max": max(seen)} if seen else {}
    return found | {"completions_a_second": completions / found["step_time"], "options": args.option}


class Told(TrainerCallback):
    """Steps as they are logged: what a killed run has shown stays."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        entry = state.log_history[-1]
        if "loss" in entry:
            print({name: round(entry[name], 5) for name in SHOWN if name in entry}, flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--mode", choices=OF_MODE, default="colocate")
    parser.add_argument("--serve", choices=("vllm", "native"), help="start this server on the same GPU (--mode server)")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the server, which has vLLM")
    parser.add_argument("--memory-share", type=float, default=0.3, help="of the GPU, for a vLLM that is started")
    parser.add_argument("--context", type=int, default=1024, help="tokens, of a server that is started")
    parser.add_argument("--engine-args", help="of a server that is started: a JSON object")
    parser.add_argument("--ahead", action="store_true", help="rollouts beside training, one step ahead")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=2, help="steps that the summary leaves out")
    parser.add_argument("--lora", action="store_true", help="rank 8 on q_proj and v_proj: only adapters are sent")
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE", help="further options of GRPOConfig")
    parser.add_argument("--out", type=Path, help="file to which the summary is added as a line of JSON")
    parser.add_argument("--only-model", action="store_true", help="write the model of a shape to OUTPUT and stop")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    if args.only_model:
        print(made_model(args.model, args.output))
        return

    rows = [
        {"prompt": question(row), "answer": number_after_mark(row["answer"])}
        for row in read(args.data / "train.jsonl", 400)
    ]
    began, held = time.perf_counter(), HeldClock()
    model = made_model(args.model, args.output / "model")
    with served(args.serve, model, args) as address:
        options = {
            **COMMON,
            **OF_MODE[args.mode],
            **address,
            **(AHEAD if args.ahead else {}),
            **options_of(args.option),
        }
        config = GRPOConfig(output_dir=str(args.output), max_steps=args.steps, vllm_mode=args.mode, **options)
        adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj"]) if args.lora else None
        data, told = Dataset.from_list(rows), [Told()]
        trainer = GRPOTrainer(model, correct, config, train_dataset=data, peft_config=adapter, callbacks=told)
        print(f"constructed in {time.perf_counter() - began:.1f} s", flush=True)
        trainer.train()
        completions = config.per_device_train_batch_size * config.gradient_accumulation_steps
        found = summary(trainer.state.log_history, args, completions) | held.figures(args.warm_up)
        trainer.close()
    print(json.dumps(found), flush=True)
    if args.out is not None:
        with args.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
