"""`posttrain doctor`: what works on this machine, in one screen, and what to type next."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.running.run_record import version_of

if TYPE_CHECKING:
    import torch

NO_VERSION = "(no version)"
GOOD, MISSING, WARNED, BAD = "ok", "-", "!", "!!"
NEEDED = ("torch", "transformers", "accelerate", "datasets", "peft", "safetensors", "pyarrow", "rich", "yaml")
OPTIONAL = {
    "liger_kernel": ("faster layers on a GPU", "pip install 'posttrain[gpu]'"),
    "bitsandbytes": ("4- and 8-bit weights (QLoRA)", "pip install 'posttrain[quant]'"),
    "vllm": ("vLLM in the training process (`vllm_mode='colocate'`)", "pip install 'posttrain[vllm]'"),
    "gguf": ("export to GGUF", "pip install 'posttrain[gguf]'"),
    "ray": ("rollout workers on several machines (`rollout_workers='ray'`)", "pip install 'posttrain[ray]'"),
    "deepspeed": ("ZeRO-2 and ZeRO-3", "pip install 'posttrain[deepspeed]'"),
    "matplotlib": ("reports as PNG", "pip install 'posttrain[view]'"),
}
"""Package -> (what it is for, how to get it)."""


@dataclass(frozen=True)
class Line:
    mark: str
    name: str
    text: str


def main(words: list[str]) -> int:
    if any(word in ("-h", "--help") for word in words):
        print(
            "usage: posttrain doctor\n\nSays what works on this machine and what to type next. Exit code 1: something is broken."
        )
        return 0
    lines = [line for part in (packages, devices, network, kernels, engines, disk) for line in part()]
    for line in lines:
        print(f"{line.mark:>2}  {line.name:<18} {line.text}")
    broken = [line for line in lines if line.mark == BAD]
    print()
    for advice in next_steps(broken):
        print(advice)
    return 1 if broken else 0


def packages() -> list[Line]:
    lines = [Line(GOOD, "python", f"{platform.python_version()} on {platform.platform()}")]
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            lines.append(Line(BAD, name, "is missing: pip install posttrain"))
    versions = ", ".join(f"{name} {version_of(name, NO_VERSION)}" for name in ("posttrain", *NEEDED[:5]))
    lines.append(Line(GOOD, "packages", versions))
    if others := untested():
        shown = ", ".join(f"{name} {installed} (CI: {tested})" for name, (installed, tested) in others.items())
        how = f"pip install -c {constraints_file()} posttrain"
        lines.append(Line(WARNED, "versions", f"not those that CI tests: {shown}. `{how}` installs those."))
    for name, (purpose, how) in OPTIONAL.items():
        there = importlib.util.find_spec(name) is not None
        text = f"{version_of(name.replace('_', '-'), NO_VERSION)}: {purpose}" if there else f"for {purpose}: {how}"
        lines.append(Line(GOOD if there else MISSING, name, text))
    return lines


def constraints_file() -> Path:
    return Path(str(files("posttrain").joinpath("constraints.txt")))


def untested() -> dict[str, tuple[str, str]]:
    """Direct requirements that are installed in another version than CI's: name -> (installed, CI's)."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    pins = (Requirement(line) for line in constraints_file().read_text().splitlines() if not line.startswith("#"))
    tested = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    found = {}
    for name in (Requirement(line).name for line in _requirements()):
        installed, pinned = version_of(name), tested.get(canonicalize_name(name))
        if pinned and installed and Version(installed).public != pinned:  # 2.13.0+cpu is 2.13.0
            found[name] = (installed, pinned)
    return found


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires("posttrain") or []
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is on the path and not installed
        return []


def devices() -> list[Line]:
    import torch

    from posttrain.core.machine import usable_cores

    lines = [Line(GOOD, "cpu", f"{usable_cores()} cores, {torch.get_num_threads()} threads of torch")]
    if not torch.cuda.is_available():
        return [*lines, Line(MISSING, "gpu", "none: small models train on the CPU, in float32")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        bf16 = "bfloat16" if torch.cuda.is_bf16_supported() else "no bfloat16: trains in float16 or float32"
        text = f"{properties.name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free, {bf16}"
        lines.append(_tried(f"gpu {index}", text, lambda i=index: torch.ones(8, device=f"cuda:{i}").sum().item()))
    if torch.cuda.device_count() > 1:
        nccl = torch.distributed.is_nccl_available()
        text = "several GPUs can train together" if nccl else "torch has none"
        lines.append(Line(GOOD if nccl else BAD, "nccl", text))
    return lines


def network(root: Path = Path("/")) -> list[Line]:
    """What machines that train together reach each other by: InfiniBand or RoCE, and whether GPUs use it without the host."""
    adapters = sorted(root.glob("sys/class/infiniband/*"))
    if not adapters:
        return [Line(MISSING, "infiniband", "none: several machines would talk over Ethernet (NCCL_SOCKET_IFNAME)")]
    lines = [_adapter(adapter) for adapter in adapters]
    modules = [name for name in ("nvidia_peermem", "nv_peer_mem") if (root / "sys/module" / name).exists()]
    if modules:
        text = f"{modules[0]} is loaded: GPUs reach the network without a copy in host memory"
        lines.append(Line(GOOD, "gpudirect", text))
    elif (root / "sys/module/nvidia").exists():
        how = "modprobe nvidia_peermem (drivers with open kernel modules can do without, by DMA-BUF)"
        text = f"nvidia_peermem is not loaded, so data may go through host memory: {how}"
        lines.append(Line(WARNED, "gpudirect", text))
    return lines


def _adapter(folder: Path) -> Line:
    """`state` is "4: ACTIVE", `rate` "400 Gb/sec (4X NDR)", `link_layer` "InfiniBand" or "Ethernet" (RoCE)."""
    ports = sorted(folder.glob("ports/*"))
    state, rate, layer = (
        [(port / name).read_text().strip() for port in ports] for name in ("state", "rate", "link_layer")
    )
    up = [place for place, text in enumerate(state) if "ACTIVE" in text]
    if not up:
        return Line(WARNED, folder.name, f"no port is active ({', '.join(state) or 'it has none'}): ibstat says more")
    kinds = {"Ethernet": "RoCE"}
    shown = [f"{kinds.get(layer[place], layer[place])}, {rate[place].partition(' (')[0]}" for place in up]
    return Line(GOOD, folder.name, "; ".join(shown))


def kernels() -> list[Line]:
    """Attention and Triton, tried, not only imported."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" and torch.cuda.is_bf16_supported() else torch.float32

    def attend() -> None:
        one = torch.randn(1, 2, 8, 64, device=device, dtype=dtype)
        torch.nn.functional.scaled_dot_product_attention(one, one, one, is_causal=True)

    lines = [_tried("attention", f"torch's, in {str(dtype).removeprefix('torch.')} on {device}", attend)]
    if device == "cuda":
        from posttrain.models.triton_support import runs_triton

        works = runs_triton(torch.zeros(1, device="cuda"))
        text = "fused head, AdamW and decoding" if works else "no Triton: everything runs in plain torch, slower"
        lines.append(Line(GOOD if works else MISSING, "triton", text))
        lines += attention_by_shape(dtype)
    return lines


def attention_by_shape(dtype: torch.dtype) -> list[Line]:
    """Which kernel attends to ragged rows on the GPU, measured."""
    import torch

    from posttrain.models.attention import flash_choice
    from posttrain.models.attention.ragged import long_gain

    device, lines = torch.device("cuda"), []
    if not flash_choice.INSTALLED:
        purpose = "for attention that is faster on Hopper and Blackwell GPUs"
        lines.append(Line(MISSING, "flash-attn-4", f"{purpose}: pip install 'posttrain[flash4]'"))
    for heads, key_heads, width in ((32, 8, 128), (14, 2, 64)):  # usual shapes of 8B and of 0.5B
        name, shape = f"{heads}/{key_heads} heads of {width}", (heads, key_heads, width, dtype)
        if flash_choice.INSTALLED:
            lines.append(Line(GOOD, name, str(flash_choice.decide(flash_choice.Variant(*shape), device))))
        lines.append(Line(GOOD, name, str(long_gain(*shape, device))))
    return lines


def engines() -> list[Line]:
    lines = [Line(GOOD, "rollouts", "the native engine: GRPO and RLOO need nothing else")]
    python = os.environ.get("POSTTRAIN_VLLM_PYTHON")
    if python:
        there = shutil.which(python) is not None
        text = f"servers run with {python}" if there else f"POSTTRAIN_VLLM_PYTHON names {python}, which is not there"
        lines.append(Line(GOOD if there else BAD, "vllm server", text))
    return lines


def disk() -> list[Line]:
    cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(place).free / 2**30
    lines = [Line(GOOD if free > 5 else BAD, "disk", f"{free:.0f} GiB free at {place} (models and prepared data)")]
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        lines.append(Line(MISSING, "hub", "HF_HUB_OFFLINE=1: models and datasets come from this machine only"))
    return lines


def _tried(name: str, text: str, attempt: Callable[[], object]) -> Line:
    try:
        attempt()
    except Exception as error:  # whatever a driver or a kernel raises is what the person has to read
        return Line(BAD, name, f"{text}; it fails: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    return Line(GOOD, name, text)


def next_steps(broken: list[Line]) -> list[str]:
    if broken:
        return [f"Fix first: {', '.join(line.name for line in broken)}."]
    return [
        "Next: posttrain demo                                     a real model, three minutes",
        "      posttrain check sft --model_name_or_path MODEL --dataset_name FILE.jsonl",
        "      posttrain sft --model_name_or_path MODEL --dataset_name FILE.jsonl --output_dir runs/first",
        "      posttrain view runs/first",
    ]
