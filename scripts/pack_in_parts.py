"""vLLM, or FlashAttention 3 and 4, for a machine with CUDA and without network, to which little can be sent at a time: stripped,
packed and cut in parts.

    python scripts/pack_in_parts.py vllm .carry_vllm      here: .carry_vllm0, .carry_vllm1, ... each with a part of less than 50 MiB
    python scripts/pack_in_parts.py flash .carry_flash

There, one call after the other while the machine is kept, `cp .carry_vllm0/part /tmp/part0` and so on, and at the end

    mkdir /tmp/vllm; cat /tmp/part? | xz -dc | tar x -C /tmp/vllm; PYTHONPATH=/tmp/vllm:.carry python3 -c "from vllm import LLM"

The rest can be sent while tests run: `.carry` first, then `cp -a . /tmp/tree && cd /tmp/tree && PYTHONPATH=.carry setsid nohup
python3 scripts/gpu_receipt.py > /tmp/cuda.log &`, and the parts after it. What waits for a result there should give up where
/tmp/tree is missing: a machine that stood idle was replaced by a bare one.

(`.carry` is that of `scripts/gpu_receipt.py --pack`; take transformers 5.19 out of its wheels for models with images.
FlashAttention 4 wants /tmp/flash/nvidia_cutlass_dsl/dsl_packages on the path, too; 3 the CUDA runtime that it was linked with:
LD_LIBRARY_PATH=/tmp/flash/nvidia/cuda_runtime/lib.) What is left out of vLLM was not missed on an H200: flash attention 2 (3 is
there), kernels of other cards, OpenCV, gRPC, and numba, whose decorators do nothing here, since only drafts by n-grams are compiled
with it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts.gpu_receipt import download

VLLM = (
    "vllm==0.24.0",
    "aiohappyeyeballs==2.7.1", "aiohttp==3.14.5", "aiosignal==1.4.0", "annotated-doc==0.0.6", "anthropic==2.8.0",
    "apache-tvm-ffi==0.1.15.post2", "astor==0.8.1", "attrs==26.1.0", "blake3==1.0.11", "cachetools==8.0.0", "cbor2==6.2.1",
    "compressed-tensors==0.17.0", "depyf==0.20.0", "diskcache==5.6.3", "distro==1.9.0", "dnspython==2.9.2",
    "docstring-parser==0.18.0", "einops==0.8.2", "email-validator==2.4.0", "fastapi-cli==0.0.34", "fastapi==0.136.3",
    "frozendict==2.5.1", "frozenlist==1.8.0", "googleapis-common-protos==1.76.0", "httpcore2==2.16.0", "httptools==0.9.0",
    "httpx-sse==0.4.3", "httpx2==2.16.0", "httpx==0.28.1", "ijson==3.6.0", "importlib-metadata==10.2.0", "interegular==0.3.3",
    "jiter==0.19.0", "jmespath==1.1.0", "jsonschema-specifications==2025.9.1", "jsonschema==4.26.0", "lark==1.2.2",
    "llguidance==1.6.1", "lm-format-enforcer==0.11.3", "loguru==0.7.3", "mcp-types==2.3.0", "mcp==2.3.0",
    "mistral-common==1.13.0", "model-hosting-container-standards==0.1.16", "msgspec==0.22.0", "multidict==7.2.1",
    "ninja==1.13.2", "openai-harmony==0.0.8", "openai==3.49.0", "opentelemetry-api==1.45.2",
    "opentelemetry-exporter-http-transport==0.66b1", "opentelemetry-exporter-otlp-common==0.66b1",
    "opentelemetry-exporter-otlp-proto-common==1.45.2", "opentelemetry-exporter-otlp-proto-grpc==1.45.2",
    "opentelemetry-exporter-otlp-proto-http==1.45.2", "opentelemetry-exporter-otlp==1.45.2", "opentelemetry-proto==1.45.2",
    "opentelemetry-sdk==1.45.2", "opentelemetry-semantic-conventions-ai==0.5.1", "opentelemetry-semantic-conventions==0.66b2",
    "oss-harmony==0.0.11", "outlines-core==0.2.14", "partial-json-parser==0.2.1.1.post7",
    "prometheus-fastapi-instrumentator==8.1.0", "propcache==0.5.4", "protobuf==7.36.2", "py-cpuinfo==9.0.0", "pybase64==1.5.1",
    "pycountry==26.2.16", "pydantic-extra-types==2.11.1", "pydantic-settings==2.16.3", "pyjwt==2.15.1", "python-dotenv==1.2.4",
    "python-json-logger==4.2.0", "python-multipart==0.0.33", "pyzmq==27.3.0", "referencing==0.37.0", "rpds-py==2026.9.1",
    "setproctitle==1.3.8", "sniffio==1.3.1", "sse-starlette==3.7.0", "supervisor==4.3.0", "tiktoken==0.14.0",
    "truststore==0.10.5", "typer==0.29.1", "uvloop==0.23.0", "watchfiles==1.3.0", "websockets==17.4", "xgrammar==0.2.8",
    "yarl==1.25.1", "zipp==4.1.2",
)  # fmt: skip
"""With what it imports and scripts/gpu_receipt.py does not pack, in versions with which TRL 1.16 and we wrote completions."""
FLASH3 = ("xformers==0.0.34", "nvidia-cuda-runtime-cu12==12.8.90")
"""The library of FlashAttention 3, in the only wheel of PyPI that has it, and the CUDA runtime that it was linked with."""
FLASH4 = (
    "flash-attn-4==4.0.0b36", "nvidia-cutlass-dsl==4.8.1", "nvidia-cutlass-dsl-libs-base==4.8.1",
    "nvidia-cutlass-dsl-libs-core==4.8.1", "nvidia-cutlass-dsl-libs-cu13==4.8.1", "apache-tvm-ffi==0.1.15.post2",
    "torch-c-dlpack-ext==0.1.5", "quack-kernels==0.6.5", "cuda-bindings==13.5.0", "cuda-pathfinder==1.9.0", "einops==0.8.2",
    "protobuf==7.36.2",
)  # fmt: skip
PACKAGES = {"vllm": VLLM, "flash": (*FLASH3, *FLASH4)}
LEFT_OUT = (
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "vllm/third_party/fmha_sm100", "vllm/vllm-rs", "vllm/_qutlass_C.abi3.so",
    "vllm/third_party/deep_gemm/_C.cpython-310*", "vllm/third_party/deep_gemm/_C.cpython-311*",
    "vllm/third_party/deep_gemm/_C.cpython-313*", "vllm/third_party/deep_gemm/_C.cpython-314*", "pycountry/locales",
    "mistral_common/data/*.json", "mistral_common/data/*.model*", "uvloop/loop.c", "xformers/_C.so", "nvidia/__init__.py",
)  # fmt: skip
PART = 49 * 2**20
NUMBA = """
def jit(*given, **options):
    return given[0] if given and callable(given[0]) else lambda function: function
njit, prange = jit, range
def get_num_threads(): return 1
def set_num_threads(n): pass
"""


def pack(what: str, prefix: str, python: str, platform: str) -> list[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        wheels, tree = Path(scratch) / "wheels", Path(scratch) / "tree"
        download(PACKAGES[what], wheels, python, platform)
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(tree)
        for pattern in LEFT_OUT:
            for path in tree.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if what == "vllm":
            (tree / "numba").mkdir()
            (tree / "numba" / "__init__.py").write_text(NUMBA, encoding="utf-8")
        libraries = [str(path) for path in tree.rglob("*.so*")]
        subprocess.run(["strip", "-s", *libraries], check=False, stderr=subprocess.DEVNULL)  # some cannot be stripped
        packed = Path(scratch) / "packed.tar.xz"
        command = f"tar c -C {tree} . | xz -T0 --lzma2=preset=9,dict=128MiB > {packed}"
        subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True)
        content = packed.read_bytes()
    parts = []
    for number, start in enumerate(range(0, len(content), PART)):
        parts.append(Path(f"{prefix}{number}") / "part")
        parts[-1].parent.mkdir(exist_ok=True)
        parts[-1].write_bytes(content[start : start + PART])
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*PACKAGES])
    parser.add_argument("prefix", help="of the folders, such as .carry_vllm")
    parser.add_argument("--python-version", default="3.12", help="of the other machine")
    parser.add_argument("--platform", default="manylinux_2_28_x86_64", help="of the other machine")
    given = parser.parse_args()
    for part in pack(given.what, given.prefix, given.python_version, given.platform):
        print(f"{part}: {part.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
