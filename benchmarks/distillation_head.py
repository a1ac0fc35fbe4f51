"""Two language heads and their divergence against one head and its log-probs: forward and backward, milliseconds and bytes.

    python -m benchmarks.distillation_head [--tokens 16384] [--width 896] [--vocabulary 151936] [--device cuda]

Hidden states of a student and of a teacher of equal width. Every way makes the gradient of the student's hidden states and of its
weight. Memory is the peak above both weights and both hidden states; `besides gradients` leaves out those that are asked for.
Goals: at most 2.2 times the time and 1.2 times the memory of log-probs, whose gradient is computed as a loss of any kind needs it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.speed.head_side import Identity, wait
from benchmarks.speed.measure import peak_memory, reset_peak_memory
from posttrain.losses.distributions import Divergence
from posttrain.models.scoring.token_scores import Question, ScoreRequest, TokenQuestion, install_scores
from posttrain.models.scoring.two_heads import DivergenceQuestion, TeacherRows

TIMES, MEMORY = 2.2, 1.2
LOG_PROBS = "log-probs"


class Heads(NamedTuple):
    hidden: Tensor
    student: nn.Linear
    targets: Tensor
    taught: Tensor
    teacher: nn.Module


Loss = Callable[[Heads], Tensor]


def answers(heads: Heads, question: Question) -> dict[str, Tensor]:
    model = Identity(heads.hidden, heads.student)
    install_scores(model)
    return model(score=ScoreRequest((question,), len(heads.hidden)))


def log_probs(heads: Heads) -> Tensor:
    return -answers(heads, TokenQuestion(positions(heads), heads.targets))["logps"].sum()


def summed(heads: Heads) -> Tensor:
    return answers(heads, TokenQuestion(positions(heads), heads.targets, summed=True))["nll_sum"]


def divergence(what: Divergence, any_loss: bool = False) -> Loss:
    def loss(heads: Heads) -> Tensor:
        teacher = TeacherRows(heads.taught, heads.teacher)
        question = DivergenceQuestion(positions(heads), heads.targets, teacher=teacher, divergence=what)
        found = answers(heads, question)["divergences"]
        return found.square().sum() if any_loss else found.sum()

    return loss


def positions(heads: Heads) -> Tensor:
    return torch.arange(len(heads.hidden), device=heads.hidden.device)


WAYS: dict[str, Loss] = {
    LOG_PROBS: log_probs,
    "log-probs, summed (SFT)": summed,
    "forward KL": divergence(Divergence(0)),
    "reverse KL": divergence(Divergence(1)),
    "Jensen-Shannon, beta 0.5": divergence(Divergence(0.5)),
    "skewed forward KL": divergence(Divergence(kind="skew_forward")),
    "skewed reverse KL": divergence(Divergence(kind="skew_reverse")),
    "Jensen-Shannon, beta 0.5, of any loss": divergence(Divergence(0.5), any_loss=True),
}


def made(tokens: int, width: int, vocabulary: int, device: str) -> Heads:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)

    def head() -> nn.Linear:
        linear = nn.Linear(width, vocabulary, bias=False, device=device)
        nn.init.normal_(linear.weight, std=0.02)
        linear.weight.data = linear.weight.data.to(dtype)
        return linear

    def rows() -> Tensor:
        return torch.randn(tokens, width, device=device).to(dtype)

    targets = torch.randint(vocabulary, (tokens,), device=device)
    taught = rows()
    return Heads(rows().requires_grad_(), head(), targets, taught, Identity(taught, head().requires_grad_(False)))


def measured(way: Loss, heads: Heads, device: str, repeats: int) -> dict[str, float]:
    seconds, loss = [], None
    for repeat in range(2 + repeats):
        heads.hidden.grad = heads.student.weight.grad = None
        wait(device)
        reset_peak_memory(device)
        before = torch.cuda.memory_allocated() if device == "cuda" else peak_memory(device)
        start = time.perf_counter()
        loss = way(heads)
        loss.backward()
        wait(device)
        if repeat >= 2:
            seconds.append(time.perf_counter() - start)
    extra = max(peak_memory(device) - before, 0)
    gradients = heads.hidden.grad.nbytes + heads.student.weight.grad.nbytes
    return {
        "milliseconds": 1000 * statistics.median(seconds),
        "gib": extra / 2**30,
        "besides_gradients_gib": max(extra - gradients, 0) / 2**30,
        "loss": loss.item(),
        "gradient_norm": heads.hidden.grad.float().norm().item(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="one line of JSON for each way instead of a table")
    given = parser.parse_args()
    heads = made(given.tokens, given.width, given.vocabulary, given.device)
    results: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():
        results[name] = measured(way, heads, given.device, given.repeats)
        one, base = results[name], results[LOG_PROBS]
        one["times"] = one["milliseconds"] / base["milliseconds"]
        one["memory"] = one["gib"] / base["gib"] if base["gib"] else float("nan")
        gc.collect()
        if given.json:
            print(json.dumps({"way": name, **one}), flush=True)
            continue
        print(
            f"{name:40} {one['milliseconds']:9.2f} ms ({one['times']:.2f}x, at most {TIMES})   {one['gib']:7.3f} GiB "
            f"({one['memory']:.2f}x, at most {MEMORY}; {one['besides_gradients_gib']:.3f} besides gradients)   "
            f"loss {one['loss']:.6g}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
