"""Do the methods of distillation learn what they should, and nothing where there is nothing to learn? With a real model.

    python -m benchmarks.real_runs.distillation MODEL [RUN ...] [--steps N] [--learning-rate R] [--seed S] [--python PYTHON]

MODEL is SmolLM2-135M-Instruct. Each run prints a line of JSON with its figures, those of its control, and whether both hold.

gkd-forward, gkd-reverse, distillation, iw_opd, minillm, server_distillation: the teacher is MODEL, the student its first two
thirds of the layers. On held-out prompts, before and after: `reverse`, KL(student, teacher) on what the student writes; `forward`,
KL(teacher, student) on what the teacher writes; `forward_own`, the same on what the student writes; the student's entropy on what
the teacher writes (the teacher's own beside it). The divergence that is trained must fall to less than half. Control: the teacher
is the student itself; loss and movement of the weights (by SGD) are below 1e-6. Where both directions of GKD are run, a last line
compares their entropies: forward KL covers, so that its student has the higher one. `server_distillation` asks a `posttrain
vllm-serve` of MODEL (by PYTHON, which has vLLM) on the same device; its control is the whole MODEL as student, whose loss stays
below 1e-2 in the rounding of two engines.

sdft, sdpo, ssd: see `self_distillation.py`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_runs import self_distillation
from benchmarks.real_runs.drawn_answers import Training, draw, entropies, user
from benchmarks.real_runs.online_methods import HELD_OUT_TOPICS, SENTENCE, TOPICS
from posttrain.methods.table import METHODS
from posttrain.rollout.engines.vllm.launcher import ServerProcess, new_token
from posttrain.rollout.engines.vllm.transport import Deadlines

TAUGHT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gkd-forward": ("gkd", "forward", {"beta": 0.0, "lmbda": 0.5, "seq_kd": True}),
    "gkd-reverse": ("gkd", "reverse", {"beta": 1.0, "lmbda": 1.0}),
    "distillation": ("distillation", "reverse", {"beta": 1.0}),
    "iw_opd": ("iw_opd", "reverse", {"lmbda": 1.0, "top_p": 1.0, "num_generations": 4}),
    "minillm": ("minillm", "reverse", {"num_generations": 4, "scale_rewards": "none"}),
    "server_distillation": ("server_distillation", "forward_own", {"beta": 0.0, "loss_top_k": 20}),
}
"""Run -> method, the measure that must fall to less than half, options. Estimates from drawn tokens have four answers a prompt."""
FROM_A_FOLDER = ("minillm",)
"""Students that are loaded by the trainer, in bfloat16: attention of ragged float32 rows is a loop on a GPU, at 3 s a step."""
ANSWER_TOKENS, PROMPTS_A_STEP, CONTROL_STEPS = 32, 16, 5


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def loaded(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device())


def student_of(model: str) -> Any:
    """The first two thirds of the layers of a model, its last norm and its head."""
    made = loaded(model)
    kept = max(len(made.model.layers) * 2 // 3, 1)
    made.model.layers = made.model.layers[:kept]
    made.config.num_hidden_layers = kept
    if getattr(made.config, "layer_types", None):
        made.config.layer_types = made.config.layer_types[:kept]
    return made


def saved(model: Any, tokenizer: Any, folder: Path) -> str:
    for one in (model, tokenizer):
        one.save_pretrained(folder)
    return str(folder)


def divergence(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum(-1)


def measured(student: Any, teacher: Any, tokenizer: Any) -> dict[str, float]:
    """Means over the tokens that were drawn."""
    chats = [user(SENTENCE.format(topic)) for topic in HELD_OUT_TOPICS.split()]
    own, theirs = (draw(writer, tokenizer, chats, ANSWER_TOKENS) for writer in (student, teacher))
    return {
        "reverse": own.mean(lambda p, q, _: divergence(p, q), student, teacher),
        "forward_own": own.mean(lambda p, q, _: divergence(q, p), student, teacher),
        "forward": theirs.mean(lambda p, q, _: divergence(q, p), student, teacher),
        "entropy": theirs.mean(entropies, student),
        "entropy_of_teacher": theirs.mean(entropies, teacher),
    }


def trained(
    run: str, student: Any, tokenizer: Any, folder: Path, how: Training, named: dict[str, Any], **more: Any
) -> Any:
    """`named` are arguments of the trainer, `more` further options."""
    method, _, options = TAUGHT[run]
    shared = {
        "max_steps": how.steps,
        "learning_rate": how.learning_rate,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "seed": how.seed,
    }
    shared |= {"per_device_train_batch_size": PROMPTS_A_STEP * options.get("num_generations", 1), "temperature": 1.0}
    shared |= {"max_completion_length": ANSWER_TOKENS, "save_strategy": "no", "report_to": "none", "verbosity": "quiet"}
    shared |= {"bf16": isinstance(student, str) and device() == "cuda"}  # a control that is 0 to rounding needs float32
    trainer = METHODS[method].trainer_class(
        model=student,
        args=METHODS[method].config_class(output_dir=str(folder), **shared | options | more),
        train_dataset=Dataset.from_list([{"prompt": user(SENTENCE.format(topic))} for topic in TOPICS.split()]),
        processing_class=tokenizer,
        teacher_processing_class=tokenizer,
        **named,
    )
    trainer.train()
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def control(run: str, student: Any, tokenizer: Any, folder: Path, how: Training) -> dict[str, Any]:
    """The teacher is the student. By SGD: Adam would make full-size steps of the rounding of a gradient."""
    start = {key: value.detach().clone() for key, value in student.named_parameters()}
    given = {"teacher_model": copy.deepcopy(student)}
    trainer = trained(run, student, tokenizer, folder, how.at_most(CONTROL_STEPS), given, optim="sgd")
    moved = max(float((value.detach() - start[key]).abs().max()) for key, value in trainer.model.named_parameters())
    loss = max(map(abs, logged(trainer, "loss")))
    norm = max(logged(trainer, "grad_norm"))
    return {"largest_loss": loss, "largest_move": moved, "grad_norm": norm, "holds": loss < 1e-6 and moved < 1e-6}


@contextmanager
def served(model: str, folder: Path, python: str) -> Iterator[dict[str, Any]]:
    """Options of a trainer whose teacher is a server of ours, which runs meanwhile."""
    token, file = new_token(), folder / "token"
    folder.mkdir(parents=True, exist_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as written:
        written.write(token)
    words = ["--model", model, "--context-length", "512", "--memory-share", "0.2", "--eager"]
    server = ServerProcess(words, folder / "server.log", python, token=token, deadlines=Deadlines(start=300))
    try:
        server.start()
        server.wait_until_healthy()
        yield {
            "teacher_model_server_url": f"http://127.0.0.1:{server.port}",
            "teacher_server_token_file": str(file),
            "teacher_max_unanswered": 0.0,
        }
    finally:
        server.close()


def from_a_server(run: str, model: str, tokenizer: Any, folder: Path, how: Training) -> tuple[Any, dict[str, Any]]:
    """(the trainer, the control: a student that is its teacher, and has nothing to learn)."""
    with served(model, folder, how.python) as options:
        trainer = trained(run, student_of(model), tokenizer, folder / "run", how, {}, **options)
        few, options = how.at_most(CONTROL_STEPS), options | {"optim": "sgd"}
        same = trained(run, loaded(model), tokenizer, folder / "control", few, {}, **options)
    loss = max(map(abs, logged(same, "loss")))
    return trainer, {"largest_loss": loss, "holds": loss < 1e-2}


def taught(run: str, model: str, folder: Path, how: Training) -> dict[str, Any]:
    """A student before and after, and the control."""
    tokenizer, teacher = AutoTokenizer.from_pretrained(model), loaded(model)
    before = measured(student_of(model), teacher, tokenizer)
    if run == "server_distillation":
        trainer, without = from_a_server(run, model, tokenizer, folder, how)
    else:
        student, taught_by = student_of(model), copy.deepcopy(teacher)
        if run in FROM_A_FOLDER:
            student, taught_by = saved(student, tokenizer, folder / "student"), model
        trainer = trained(run, student, tokenizer, folder / "run", how, {"teacher_model": taught_by})
        without = control(run, student_of(model), tokenizer, folder / "control", how)
    after, trains = measured(trainer.model.float(), teacher, tokenizer), TAUGHT[run][1]
    falls, norm = after[trains] < before[trains] / 2, logged(trainer, "grad_norm")[0]
    figures = {"trains": trains, "before": before, "after": after, "first_grad_norm": norm, "control": without}
    return figures | {"holds": falls and without["holds"]}


Proof = Callable[[str, str, Path, Training], dict[str, Any]]
RUNS: dict[str, tuple[Proof, int, float]] = (
    dict.fromkeys(TAUGHT, (taught, 100, 1e-4)) | {"minillm": (taught, 100, 1e-5)} | self_distillation.RUNS
)
"""Name -> what runs it, its steps and its learning rate."""


def results(names: list[str], asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    entropy = {}
    for name in names:
        began, (proof, steps, rate) = time.perf_counter(), RUNS[name]
        how = Training(asked.steps or steps, asked.learning_rate or rate, asked.python, asked.seed)
        found = proof(name, asked.model, asked.output / name, how)
        entropy[name] = found["after"].get("entropy")
        said = {"run": name, "steps": how.steps, "learning_rate": how.learning_rate, "seed": how.seed}
        yield said | {"seconds": round(time.perf_counter() - began, 1)} | found
        gc.collect()
        torch.cuda.empty_cache()
    pair = {name: entropy[name] for name in ("gkd-forward", "gkd-reverse") if name in entropy}
    if len(pair) == 2:
        yield {"run": "gkd-entropies", **pair, "holds": pair["gkd-forward"] > pair["gkd-reverse"]}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("runs", nargs="*", metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--steps", type=int, help="default: those of each run")
    parser.add_argument("--learning-rate", type=float, help="default: that of each run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--python", default=sys.executable, help="interpreter that has vLLM, for server_distillation")
    return parser


def main() -> None:
    asked = parser().parse_args()
    for found in results(asked.runs or list(RUNS), asked):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
