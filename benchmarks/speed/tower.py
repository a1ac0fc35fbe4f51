"""Forward and backward of a vision tower on 16 photos of unequal sizes, with our attention and with transformers' own.

    python -m benchmarks.speed.tower [--repeats 5] [--tiny]

Qwen2.5-VL's tower (32 layers of 1280) with random weights in bfloat16; images of `image_step.py`. Prints a line of JSON: the median
milliseconds of each, patches, peak memory, and the largest difference of the features relative to the largest of them.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.speed import image_step
from benchmarks.speed.measure import peak_memory, reset_peak_memory
from posttrain.models.vision.tower import TOWER_ATTENTION, tower_attention

PHOTOS = 16


def photos(processor: Any, is_tiny: bool) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(11)
    pictures = [Image.open(io.BytesIO(image_step.picture(rng, is_tiny))) for _ in range(PHOTOS)]
    return dict(processor.image_processor(images=pictures, return_tensors="pt"))


def milliseconds(tower: Any, given: dict[str, torch.Tensor], repeats: int) -> tuple[float, torch.Tensor, float]:
    times, device = [], given["pixel_values"].device.type
    reset_peak_memory(device)
    for _ in range(repeats + 2):
        started = time.perf_counter()
        features = tower(given["pixel_values"], grid_thw=given["image_grid_thw"]).pooler_output
        features.float().square().mean().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
        tower.zero_grad()
    return statistics.median(times[2:]), features.detach().float(), peak_memory(device) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    from transformers import AttentionInterface

    AttentionInterface.register(TOWER_ATTENTION, tower_attention)
    model, processor = image_step.model_and_processor(image_step.FAMILY, asked.tiny, dtype, device)
    tower, given = model.model.visual, {name: x.to(device) for name, x in photos(processor, asked.tiny).items()}
    given["pixel_values"] = given["pixel_values"].to(dtype)
    found: dict[str, Any] = {"device": device, "photos": PHOTOS, "patches": len(given["pixel_values"])}
    features = {}
    for name, attention in (("ours", TOWER_ATTENTION), ("sdpa", "sdpa")):
        model.set_attn_implementation({"vision_config": attention})
        found[f"{name}_ms"], features[name], found[f"{name}_gib"] = milliseconds(tower, given, asked.repeats)
    gap = (features["ours"] - features["sdpa"]).abs().max() / features["sdpa"].abs().max()
    print(json.dumps(found | {"ratio": found["sdpa_ms"] / found["ours_ms"], "gap": float(gap)}), flush=True)


if __name__ == "__main__":
    main()
