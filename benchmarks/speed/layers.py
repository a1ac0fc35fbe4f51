"""Forward and backward of a few decoder layers, in bfloat16 and with products in 8 bits.

    python -m benchmarks.speed.layers [--shape 7b|1.5b|0.5b] [--layers 4] [--segments 2048x8 32768x1]
        [--ways bf16 varlen dense fp8] [--profile 25] [--tiny]

Random weights, bfloat16, `compile_layers`. `varlen` is bfloat16 by torch's ragged kernel alone, `dense` with the dense attention of
long segments and without packages; the others may take both. A line of JSON for each: median milliseconds, tokens a
second, peak memory, the loss (one feature of each token, times a random number), and how far its gradient is from that of the first
way, as the sine of the angle between the two. `--profile` adds the kernels that take longest.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.speed.measure import peak_memory, reset_peak_memory
from posttrain.core.batch import LongSegments
from posttrain.models.attention import flash_choice
from posttrain.models.attention.dense import dense_gain
from posttrain.models.attention.ragged import segment_kwargs
from posttrain.models.layers.kernels import COMPILED, PLAIN
from posttrain.models.load.model import LoadOptions, load_model

SHAPES = {  # hidden, MLP, heads, heads of keys
    "7b": (3584, 18_944, 28, 4),
    "1.5b": (1536, 8960, 12, 2),
    "0.5b": (896, 4864, 14, 2),
    "tiny": (64, 96, 4, 2),
}
WAYS = ("bf16", "varlen", "dense", "fp8")
REPEATS, WARM_UP = 5, 3


def built(shape: str, layers: int, device: torch.device) -> Any:
    hidden, mlp, heads, key_heads = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=mlp, num_attention_heads=heads, num_key_value_heads=key_heads,
        num_hidden_layers=layers, vocab_size=512, max_position_embeddings=1 << 18,
    )  # fmt: skip
    with device:
        return AutoModelForCausalLM.from_config(config).bfloat16()


def measured(
    model: Any, lengths: list[int], device: torch.device, long: LongSegments | None, kernels: int = 0
) -> dict[str, Any]:
    total, bounds = sum(lengths), torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    given = {"input_ids": torch.arange(total, device=device)[None] % 512}
    given["position_ids"] = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    given |= segment_kwargs(bounds, max(lengths), long=long)
    flows, durations = torch.randn(total, generator=torch.Generator().manual_seed(0)).to(device), []

    def step() -> torch.Tensor:
        model.zero_grad()
        loss = (model.model(**given, use_cache=False).last_hidden_state[0, :, 0] * flows).float().mean()
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return loss

    for number in range(WARM_UP + REPEATS):
        if number == WARM_UP:
            reset_peak_memory(device.type)
        began = time.perf_counter()
        loss = step()
        durations.append(time.perf_counter() - began)
    if kernels:
        with torch.profiler.profile() as profile:
            step()
        order = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
        print(profile.key_averages().table(order, row_limit=kernels, max_name_column_width=90), flush=True)
    seconds = statistics.median(durations[WARM_UP:])
    return {
        "milliseconds": round(1e3 * seconds, 2),
        "tokens_per_second": round(total / seconds),
        "peak_gib": round(peak_memory(device.type) / 2**30, 2),
        "loss": loss.item(),
    }


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.model.layers.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--segments", nargs="+", default=["2048x8"], help="tokens x how many")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["bf16", "fp8"])
    parser.add_argument("--profile", type=int, default=0, metavar="KERNELS")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = (PLAIN if asked.tiny else COMPILED,)
    installed = flash_choice.INSTALLED
    whole = built("tiny" if asked.tiny else asked.shape, asked.layers, device)
    for each in asked.segments:
        length, count = map(int, each.split("x"))
        first = None
        for name in asked.ways:
            torch.compiler.reset()
            flash_choice.INSTALLED = () if name in ("varlen", "dense") else installed
            dense_gain.cache_clear()  # over the ragged kernel of this way
            options = LoadOptions(layer_kernels=kernels, device=device, fp8=name == "fp8")
            model = load_model(copy.deepcopy(whole), options).model.train()
            lengths = [length] * count
            long = None if name == "varlen" else LongSegments.of(lengths)
            found = measured(model, lengths, device, long, asked.profile)
            own = gradient(model)
            first = own if first is None else first
            cosine = torch.nn.functional.cosine_similarity(own.float(), first.float(), dim=0).item()
            found["gradient_apart"] = max(1 - cosine**2, 0.0) ** 0.5
            print(
                json.dumps({"way": name, "segments": each, "shape": asked.shape, "layers": asked.layers} | found),
                flush=True,
            )
            del model


if __name__ == "__main__":
    main()
