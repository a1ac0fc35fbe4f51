"""The language head alone: hidden states to the summed loss and back, forward and backward, in milliseconds and bytes.

    python -m benchmarks.speed.head_side PLAN.json RESULTS.jsonl

N hidden states of width H against V words. Every way makes the gradient of the hidden states and of the weight; memory is what
is allocated besides these, the inputs and the weight. The results of all ways are compared: loss, and norm of both gradients.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.speed.measure import peak_memory, reset_peak_memory

TOKENS, WIDTHS, VOCABULARY = 16_384, (896, 1536, 3584), 151_936
TINY = 256, (64, 96), 1024
REPEATS = 10
TRL_TILE = 32_768  # words whose logits exist at once in TRL's trainers
Loss = Callable[[Tensor, nn.Linear, Tensor], Tensor]


def naive(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(head(hidden).float(), targets, reduction="sum")


def liger(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(hidden, head.weight, targets, reduction="sum")


def trl(outputs: tuple[str, ...] = ()) -> Loss:
    def loss(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        answer = ChunkedLogProbFunction.apply(hidden, head.weight, None, targets, 1.0, TRL_TILE, None, 1.0, outputs)
        return -answer[0].sum()

    return loss


class Identity(nn.Module):
    """A causal LM whose body returns the hidden states it was made with."""

    base_model_prefix = "body"

    def __init__(self, hidden: Tensor, head: nn.Linear) -> None:
        super().__init__()
        from transformers import Qwen2Config

        self.hidden, self.lm_head = hidden, head
        self.config = Qwen2Config(vocab_size=head.out_features, hidden_size=head.in_features)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def body(self, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(last_hidden_state=self.hidden[None])

    def forward(self, **_: Any) -> Any:
        raise NotImplementedError("only `score` is asked")


def posttrain(stats: tuple[str, ...] = ()) -> Loss:
    def loss(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
        from posttrain.models.scoring.token_scores import (
            TOKEN_STATS,
            Measure,
            ScoreRequest,
            TokenQuestion,
            install_scores,
        )

        model = Identity(hidden, head)
        install_scores(model)
        positions = torch.arange(len(hidden), device=hidden.device)
        measures = {name: Measure(TOKEN_STATS[name]) for name in stats}
        question = TokenQuestion(positions, targets, measures, summed=True)
        return model(score=ScoreRequest((question,), len(hidden)))["nll_sum"]

    return loss


WAYS: dict[str, dict[str, Loss]] = {
    "posttrain": {
        "posttrain": posttrain(),
        "posttrain, on a step that logs": posttrain(("entropy", "is_most_likely")),
        "Liger": liger,
        "naive": naive,
    },
    "trl": {"TRL": trl(), "TRL, as SFT calls it at every step": trl(("entropy", "is_top1"))},
}


def measure(way: Loss, width: int, device: str, tiny: bool) -> dict[str, Any]:
    tokens, vocabulary = (TINY[0], TINY[2]) if tiny else (TOKENS, VOCABULARY)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device).to(dtype).requires_grad_()
    head = nn.Linear(width, vocabulary, bias=False, device=device)
    nn.init.normal_(head.weight, std=0.02)
    head.weight.data = head.weight.data.to(dtype)
    targets = torch.randint(vocabulary, (tokens,), device=device)
    seconds, loss = [], None
    for repeat in range(2 + (REPEATS if device == "cuda" else 3)):
        hidden.grad = head.weight.grad = None
        wait(device)
        reset_peak_memory(device)
        before = torch.cuda.memory_allocated() if device == "cuda" else peak_memory(device)
        start = time.perf_counter()
        loss = way(hidden, head, targets)
        loss.backward()
        wait(device)
        if repeat >= 2:
            seconds.append(time.perf_counter() - start)
    gradients = hidden.grad.nbytes + head.weight.grad.nbytes
    return {
        "milliseconds": 1000 * statistics.median(seconds),
        "extra_bytes": max(peak_memory(device) - before - gradients, 0),
        "loss": loss.item(),
        "gradient_norms": [hidden.grad.float().norm().item(), head.weight.grad.float().norm().item()],
    }


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(plan_file: Path, results: Path) -> None:
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    if plan["threads"]:
        torch.set_num_threads(plan["threads"])
    for width in TINY[1] if plan["tiny"] else WIDTHS:
        for name, way in WAYS[plan["library"]].items():
            try:
                found = measure(way, width, plan["device"], plan["tiny"])
            except Exception as error:  # Liger without a GPU, naive without memory: told, and the others go on
                found = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
            gc.collect()
            if plan["device"] == "cuda":
                torch.cuda.empty_cache()
            entry = {"row": "head", "setting": name, "width": width, "process": plan["process"], **found}
            with open(results, "a", encoding="utf-8") as out:
                out.write(json.dumps(entry) + "\n")
            print(entry, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
