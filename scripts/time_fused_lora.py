"""Time one transformer layer's LoRA linears, forward and backward: PEFT's forwards against the fused ones.

    python scripts/time_fused_lora.py                      # a small layer on the CPU
    python scripts/time_fused_lora.py --device cuda --hidden 3584 --inner 18944 --tokens 16384 --dtype bfloat16

Order fused - PEFT - fused, medians, and the memory that the forward keeps (on CUDA also the peak).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from posttrain.models.layers.fused_lora import fuse_lora

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Linears(nn.Module):
    """The linears of a layer without its attention: o(q + k + v), then the MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(hidden, hidden))
        self.mlp = Qwen2MLP(Qwen2Config(hidden_size=hidden, intermediate_size=inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.o_proj(self.q_proj(x) + self.k_proj(x) + self.v_proj(x)))


def seconds(step: Callable[[], None], repeats: int, device: str) -> float:
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    del output
    return sum(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--inner", type=int, default=1536)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    with torch.device(args.device):
        base = Linears(args.hidden, args.inner).to(getattr(torch, args.dtype))
    config = LoraConfig(r=args.rank, target_modules=TARGETS, init_lora_weights=False)
    plain = get_peft_model(base, config, autocast_adapter_dtype=False)
    plain = plain.to(args.device, getattr(torch, args.dtype))
    fused = copy.deepcopy(plain)
    print(f"{fuse_lora(fused)} linears fused")
    x = torch.randn(1, args.tokens, args.hidden, device=args.device, dtype=getattr(torch, args.dtype)).requires_grad_()
    slope = torch.randn_like(x)
    for name, model in (("fused", fused), ("PEFT", plain), ("fused", fused)):
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        taken = seconds(lambda model=model: model(x).backward(slope), args.repeats, args.device)
        peak = f", peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB" if args.device == "cuda" else ""
        print(f"{name:6s} {1e3 * taken:9.2f} ms a step, keeps {saved_bytes(model, x) / 2**20:.1f} MiB{peak}")


if __name__ == "__main__":
    main()
