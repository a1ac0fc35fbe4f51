"""Rollouts alone: groups of completions whose lengths are prescribed, written in one way.

    python -m benchmarks.speed.rollout_side PLAN.json RESULTS.jsonl

Every way writes the same number of tokens after the same prompts with the same random weights, at temperature 1: a random model
does not stop by itself, so a table says where each completion ends. Two workloads: `ragged`, the table, and `steady`, as many
completions as there are slots, all of the greatest length. The time to write one token of the steady ones is that of the prompts.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from benchmarks.speed import materials
from benchmarks.speed.measure import limited, peak_memory, reset_peak_memory
from benchmarks.speed.rows import FIRST_TOKEN, Row, row_named, tiny

MODELS = {
    "rollouts-0.5b": "sft-0.5b",
    "rollouts-1.5b": "sft-1.5b",
    "rollouts-7b": "lora-7b",
    "rollouts-1.5b-16k": "sft-1.5b-32k",
}
"""Row -> the training row whose model it has."""


@dataclass(frozen=True)
class Workload:
    """Prompts of `prompt` tokens, `group` completions of each, `slots` of them at a time, none longer than `longest`."""

    prompts: int = 64
    group: int = 8
    slots: int = 256
    prompt: int = 256
    shortest: int = 64
    longest: int = 512

    def prompt_ids(self, vocabulary: int) -> list[list[int]]:
        rng = np.random.default_rng(0)
        return [rng.integers(FIRST_TOKEN, vocabulary, self.prompt).tolist() for _ in range(self.prompts)]

    def ragged(self) -> np.ndarray:
        """Length of each completion, group after group."""
        rng = np.random.default_rng(1)
        return rng.integers(self.shortest, self.longest + 1, self.prompts * self.group)

    def steady(self) -> np.ndarray:
        return np.full(self.slots, self.longest)

    @property
    def steady_context(self) -> float:
        """Tokens that a step of the steady workload looks back at, on average, for each row."""
        return self.prompt + self.longest / 2


WORKLOADS = {
    "rollouts-0.5b": Workload(),
    "rollouts-1.5b": Workload(),
    "rollouts-7b": Workload(prompts=32, slots=128),
    "rollouts-1.5b-16k": Workload(prompts=8, group=4, slots=32, prompt=16_128, longest=256),
}
MINIATURE = Workload(8, 4, 16, 16, 4, 32)
Write = Callable[[list[list[int]], np.ndarray], list[int]]
"""(prompt of each completion, its length) -> tokens that were really written after each."""


# ---- ways ---------------------------------------------------------------------------------------------------------------


def native(**options: Any) -> Callable[..., Write]:
    """Our engine on a model that was loaded as a trainer loads it."""

    def make(model: Any, load: Workload, device: str) -> Write:
        from posttrain.models.load.model import LoadOptions, load_model
        from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
        from posttrain.rollout.engines.select import ENGINES

        kernels = ("liger",) if device == "cuda" else ("plain",)
        loaded = load_model(model, LoadOptions(device=torch.device(device), layer_kernels=kernels)).model.eval()
        engine = ENGINES["native"](loaded, max_slots=load.slots, **options)
        if type(engine).__name__ != "NativeEngine":
            raise RuntimeError(f"the native engine does not run this model: {type(engine).__name__} came instead")
        calls = 0

        def write(prompts: list[list[int]], lengths: np.ndarray) -> list[int]:
            nonlocal calls
            calls += 1
            asked = [
                Prompt(ids, key=place // load.group, sample=place % load.group, max_tokens=int(length))
                for place, (ids, length) in enumerate(zip(prompts, lengths))
            ]
            done = generate(engine, asked, SamplingParams(max_tokens=load.longest, seed=calls))
            errors = [completion.error for completion in done if completion.error]
            if errors:
                raise RuntimeError(errors[0])
            return [len(completion.ids) for completion in done]

        return write

    return make


def plain_generate(cache: str | None = None) -> Callable[..., Write]:
    """transformers `generate` in batches of as many rows as there are slots; a batch goes on until its longest row is done."""

    def make(model: Any, load: Workload, device: str) -> Write:
        from transformers import GenerationConfig, StoppingCriteria

        class Table(StoppingCriteria):
            """A row is done when it has the length that the table prescribes."""

            def __init__(self, lengths: np.ndarray) -> None:
                self.ends = torch.as_tensor(lengths, device=device) + load.prompt

            def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
                return self.ends <= input_ids.shape[1]

        never = model.config.vocab_size  # no row says that: but with an end of text, rows that are done get padding
        model.eval()

        def write(prompts: list[list[int]], lengths: np.ndarray) -> list[int]:
            found: list[int] = []
            for start in range(0, len(prompts), load.slots):
                ids = torch.tensor(prompts[start : start + load.slots], device=device)
                wanted = lengths[start : start + load.slots]
                config = GenerationConfig(
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=load.longest,  # of every batch: a static cache has one size
                    eos_token_id=never,
                    pad_token_id=materials.PAD,
                    cache_implementation=cache,
                )
                with torch.inference_mode():
                    out = model.generate(
                        input_ids=ids,
                        attention_mask=torch.ones_like(ids),
                        generation_config=config,
                        stopping_criteria=[Table(wanted)],
                    )
                found += written_lengths(out[:, load.prompt :].cpu().numpy(), wanted)
            return found

        return write

    return make


def written_lengths(tokens: np.ndarray, wanted: np.ndarray) -> list[int]:
    """Tokens of each row; after the prescribed end there must be padding only."""
    for row, end in zip(tokens, wanted):
        if (row[end:] != materials.PAD).any():
            raise RuntimeError("a row went on after its end")
    return [min(int(end), tokens.shape[1]) for end in wanted]


def continuous(model: Any, load: Workload, device: str) -> Write:
    """transformers' continuous batching, each request with its own `max_new_tokens`."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=load.longest,
        eos_token_id=-1,
        pad_token_id=materials.PAD,
    )
    batching = ContinuousBatchingConfig(max_requests_per_batch=load.slots, max_memory_percent=0.3)
    model.eval()

    def write(prompts: list[list[int]], lengths: np.ndarray) -> list[int]:
        session = model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, persistent_manager=True
        )
        with session as manager:
            names = [
                manager.add_request(ids, request_id=str(place), max_new_tokens=int(n))
                for place, (ids, n) in enumerate(zip(prompts, lengths))
            ]
            written: dict[str, int] = {}
            while len(written) < len(names):
                result = manager.get_result(timeout=5)
                if result is None and not manager.is_running():
                    raise RuntimeError("the manager stopped before all requests were done")
                if result is not None:
                    if result.error:
                        raise RuntimeError(result.error)
                    written[result.request_id] = len(result.generated_tokens)
        return [written[name] for name in names]

    return write


def vllm(model: Any, load: Workload, device: str) -> Write:
    """vLLM on saved weights, with the log-prob of each token, as a trainer needs them."""
    import tempfile

    from vllm import LLM, SamplingParams

    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_num_seqs=load.slots,
        max_model_len=load.prompt + load.longest,
        gpu_memory_utilization=0.5,
    )

    def write(prompts: list[list[int]], lengths: np.ndarray) -> list[int]:
        params = [
            SamplingParams(temperature=1.0, max_tokens=int(n), ignore_eos=True, logprobs=0, detokenize=False)
            for n in lengths
        ]
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        return [len(one.outputs[0].token_ids) for one in llm.generate(asked, params, use_tqdm=False)]

    return write


@dataclass(frozen=True)
class Way:
    make: Callable[..., Write]
    seconds: float  # after which it is given up, but for what it has told by then
    repeats: int = 1  # of everything, after a call that warms up


WAYS = {
    "posttrain": Way(native(), 75.0, repeats=3),
    "weights in 8 bits": Way(native(weight_dtype="fp8"), 75.0, repeats=2),
    "keys and values in 8 bits": Way(native(kv_dtype="fp8"), 75.0, repeats=2),
    "generate": Way(plain_generate(), 90.0),
    "generate, static cache": Way(plain_generate("static"), 100.0),
    "continuous batching": Way(continuous, 170.0),
    "vllm": Way(vllm, 150.0, repeats=2),
}


# ---- measurement --------------------------------------------------------------------------------------------------------


def row_of(name: str, is_tiny: bool) -> Row:
    row = row_named(MODELS[name])
    return tiny(row) if is_tiny else row


def measure(name: str, plan: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    """Tells each number as soon as it is known: a limit may cut off the rest."""
    device, load = plan["device"], MINIATURE if plan["tiny"] else WORKLOADS[plan["row"]]
    row = row_of(plan["row"], plan["tiny"])
    model = materials.build_model(row, device, torch.bfloat16 if device == "cuda" else torch.float32)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    checksum = materials.checksum(model)
    prompts = load.prompt_ids(row.shape.vocabulary)
    ragged = [prompt for prompt in prompts for _ in range(load.group)]
    steady = ragged[: load.slots]
    write = WAYS[name].make(model, load, device)
    first = timed(write, steady, np.full(load.slots, 2), device)
    for repeat in range(WAYS[name].repeats):
        reset_peak_memory(device)
        for kind, given, lengths in (
            ("ragged", ragged, load.ragged()),
            ("prompts", steady, np.ones(load.slots, int)),
            ("steady", steady, load.steady()),
        ):
            took = timed(write, given, lengths, device)
            report(
                {
                    "kind": kind,
                    "repeat": repeat,
                    **took,
                    "first_call_seconds": first["seconds"],
                    "peak_bytes": peak_memory(device),
                    "weight_bytes": weights,
                    "context_bytes": load.slots * load.steady_context * token_bytes(model),
                    "checksum": checksum,
                }
            )


def token_bytes(model: Any) -> int:
    """Of the keys and values of one token."""
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * width * next(model.parameters()).itemsize


def timed(write: Write, prompts: list[list[int]], lengths: np.ndarray, device: str) -> dict[str, Any]:
    wait(device)
    start = time.perf_counter()
    written = write(prompts, lengths)
    wait(device)
    seconds = time.perf_counter() - start
    if written != lengths.tolist():
        raise RuntimeError(f"{sum(written)} tokens were written where {lengths.sum()} were prescribed")
    return {"seconds": seconds, "tokens": int(lengths.sum()), "longest": int(lengths.max())}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(plan_file: Path, results: Path) -> None:
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    if plan["threads"]:
        torch.set_num_threads(plan["threads"])

    def report(found: dict[str, Any]) -> None:
        entry = {"row": plan["row"], "setting": plan["way"], "process": plan["process"], **found}
        with open(results, "a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")
        print(entry, flush=True)

    try:
        with limited(None if plan["tiny"] else WAYS[plan["way"]].seconds):
            measure(plan["way"], plan, report)
    except Exception as error:  # a way that this machine cannot go is a result, too
        traceback.print_exc()
        report({"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"})
    gc.collect()
    os._exit(0)  # engines of other libraries may leave threads behind


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
