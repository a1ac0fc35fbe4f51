"""How long the weights of a model take into a served vLLM, by every way that this machine allows, verified.

    python -m benchmarks.weight_transports [--size 7b] [--python PYTHON_WITH_VLLM] [--ways cuda_ipc shared_memory ...]

Starts `posttrain vllm-serve` with random numbers on the same GPU (or CPU, with `--size tiny`), makes a model of the same shape here
and sends it as a trainer does, a few versions by each way; from the second on both sides use memory again. `sent` ends when the
server has said that it serves the version, with the fingerprint of what was sent; then every tensor is compared by checksum, and
both sides score the same tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from posttrain.core.transport import ServerError
from posttrain.models.load.weight_export import exported_weights
from posttrain.rollout.engines.vllm.launcher import ServerProcess
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from posttrain.rollout.engines.vllm.sync_probe import SyncProbe, scored_by
from posttrain.rollout.engines.vllm.transport import Deadlines

SHAPES = {
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152_064,
    },
    "0.5b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1024,
    },
}  # fmt: skip
WAYS = ("cuda_ipc", "shared_memory", "collective", "http")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="7b")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--versions", type=int, default=3, help="sent by each way")
    parser.add_argument("--memory-share", type=float, default=0.3)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = Qwen2Config(**SHAPES[given.size], max_position_embeddings=2048, tie_word_embeddings=False)
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = ["Qwen2ForCausalLM"]
        config.dtype = dtype
        config.save_pretrained(folder)
        server = ServerProcess(
            ["--model", folder, "--random-weights", "--memory-share", str(given.memory_share), "--context-length", "512",
             "--dtype", str(dtype).removeprefix("torch."), "--eager", "--engine-args", json.dumps({"skip_tokenizer_init": True})],
            Path(folder) / "server.log", given.python, deadlines=Deadlines(start=400, part=120, commit=120),
        )  # fmt: skip
        try:
            began = time.perf_counter()
            server.start()
            with device:
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
            server.wait_until_healthy()
            print(f"server and model are there after {time.perf_counter() - began:.0f} s", flush=True)
            for way in given.ways:
                measure(way, server, model, given.versions)
        except BaseException:
            print((Path(folder) / "server.log").read_text()[-4000:], flush=True)
            raise
        finally:
            server.close()
    return 0


def measure(way: str, server: ServerProcess, model: torch.nn.Module, versions: int) -> None:
    from posttrain.rollout.engines.vllm.client import ServerClient

    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    client = ServerClient(server.client.name, server._token, server.deadlines, way)
    probe = SyncProbe(model.config.vocab_size, next(model.parameters()).dtype)
    try:
        with ServedVLLM([client], lambda: exported_weights(model), options=ServedOptions(server.deadlines)) as engine:
            for version in range(1, versions + 1):
                with torch.no_grad():
                    model.model.norm.weight.add_(0.01)
                _synchronise()
                began = time.perf_counter()
                engine.load_weights(None, version)
                seconds = time.perf_counter() - began
                ((scores, differing),) = engine.probed(probe.sequences)
                found = probe.check(
                    scored_by(model), lambda _, scores=scores: scores, version, engine.version, differing
                )
                verified = time.perf_counter() - began
                engine.sleep()
                kept = time.perf_counter() - began
                print(
                    f"{way}, version {version}: {nbytes / 1e9:.2f} GB sent in {seconds:.2f} s ({nbytes / seconds / 1e9:.1f} GB/s, "
                    f"by {client.channel.in_use}); every tensor compared and scored (log-probs within {found.mean:.1e}) after "
                    f"{verified:.2f} s; copy in host memory after {kept:.2f} s",
                    flush=True,
                )
    except ServerError as error:
        print(f"{way}: {error}", flush=True)


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
