"""Does a student come nearer to its teacher, in the way that the divergence says? With a real model.

    python -m benchmarks.real_runs.distillation MODEL [gkd-forward gkd-reverse distillation iw_opd minillm] [--steps 100]

The teacher is MODEL (SmolLM2-135M-Instruct), the student its first 20 of 30 layers. Measured before and after, on held-out prompts:
the reverse KL on what the student writes, the forward KL on what the teacher writes, and the entropy of the student on the latter.
The divergence that is trained must fall to less than half; forward KL covers (the entropy rises above that of reverse KL), reverse
KL seeks. Control: the teacher is the student itself, whose loss is 0 and whose weights stay where they are.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_runs.online_methods import HELD_OUT_TOPICS, SENTENCE, TOPICS
from posttrain.methods.table import METHODS

LAYERS = 20
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "gkd-forward": ("gkd", {"beta": 0.0, "lmbda": 0.5, "seq_kd": True}),
    "gkd-reverse": ("gkd", {"beta": 1.0, "lmbda": 0.5, "seq_kd": True}),
    "distillation": ("distillation", {"beta": 1.0}),
    "iw_opd": ("iw_opd", {"lmbda": 1.0}),
    "minillm": ("minillm", {"num_generations": 1, "scale_rewards": "none"}),
}
CONTROL = "teacher = student"


def student_of(model: str) -> Any:
    """The first layers of a model, its last norm and its head."""
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made.model.layers = made.model.layers[:LAYERS]
    made.config.num_hidden_layers = LAYERS
    if getattr(made.config, "layer_types", None):
        made.config.layer_types = made.config.layer_types[:LAYERS]
    return made


def prompts(topics: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": SENTENCE.format(topic)}] for topic in topics.split()]


@torch.no_grad()
def measured(student: Any, teacher: Any, tokenizer: Any) -> dict[str, float]:
    """Means over the tokens that were drawn."""
    device, found = next(student.parameters()).device, {}
    teacher = teacher.to(device).eval()
    student.eval()
    chats = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in prompts(HELD_OUT_TOPICS)]
    chats = [chat if isinstance(chat, list) else chat["input_ids"] for chat in chats]
    width = max(map(len, chats))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(chat)) + chat for chat in chats], device=device)
    mask = torch.tensor([[0] * (width - len(chat)) + [1] * len(chat) for chat in chats], device=device)
    for name, writer in (("reverse", student), ("forward", teacher)):
        torch.manual_seed(0)
        ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        written = writer.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=32, **ends)
        ended = (written[:, width:] == tokenizer.eos_token_id).cumsum(-1)
        real = (ended == 0) | ((ended == 1) & (written[:, width:] == tokenizer.eos_token_id))
        seen = torch.cat([mask, real.long()], -1)
        logps = [
            one(written, attention_mask=seen).logits[:, width - 1 : -1].float().log_softmax(-1)[real]
            for one in (student, teacher)
        ]
        p, q = logps
        first, second = (p, q) if name == "reverse" else (q, p)
        found[name] = float((first.exp() * (first - second)).sum(-1).mean())
        if name == "forward":
            found["entropy"] = float(-(p.exp() * p).sum(-1).mean())
    return found


def trained(run: str, student: Any, teacher: Any, tokenizer: Any, folder: Path, steps: int) -> Any:
    method, options = RUNS[run]
    shared = {"max_steps": steps, "per_device_train_batch_size": 16, "learning_rate": 1e-4, "logging_steps": 1}
    shared |= {"max_completion_length": 32, "temperature": 1.0, "lr_scheduler_type": "constant", "save_strategy": "no"}
    shared |= {"report_to": "none", "verbosity": "quiet", "seed": 1}
    trainer = METHODS[method].trainer_class(
        model=student,
        teacher_model=teacher,
        args=METHODS[method].config_class(output_dir=str(folder), **shared | options),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts(TOPICS)]),
        processing_class=tokenizer,
        teacher_processing_class=tokenizer,
    )
    trainer.train()
    return trainer


def results(names: list[str], model: str, folder: Path, steps: int) -> Iterator[str]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
    before = measured(student_of(model).to(device), teacher, tokenizer)
    entropies = {}
    for name in names:
        began = time.perf_counter()
        trainer = trained(name, student_of(model), copy.deepcopy(teacher), tokenizer, folder / name, steps)
        after = measured(trainer.model, teacher, tokenizer)
        entropies[name] = after["entropy"]
        which = "forward" if name == "gkd-forward" else "reverse"
        holds = "holds" if after[which] < before[which] / 2 else "does not hold"
        said = ", ".join(f"{key} {before[key]:.3f} -> {after[key]:.3f}" for key in before)
        yield f"{name}: {said}; {steps} steps in {time.perf_counter() - began:.0f} s; {holds}"
    if {"gkd-forward", "gkd-reverse"} <= entropies.keys():
        holds = "holds" if entropies["gkd-forward"] > entropies["gkd-reverse"] else "does not hold"
        yield f"entropy after forward KL above that after reverse KL: {holds}"
    student = student_of(model)
    start = {key: value.detach().clone() for key, value in student.named_parameters()}
    trainer = trained(
        "gkd-reverse", student, copy.deepcopy(student), tokenizer, folder / "control", max(steps // 20, 2)
    )
    moved = max(
        float((value.detach().cpu() - start[key]).abs().max()) for key, value in trainer.model.named_parameters()
    )
    loss = max(abs(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)
    holds = "holds" if loss < 1e-4 else "does not hold"
    yield f"{CONTROL}: largest loss {loss:.1e}, largest change of a weight {moved:.1e}; {holds}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("runs", nargs="*", metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("runs/distillation"))
    asked = parser.parse_args()
    for line in results(asked.runs or list(RUNS), asked.model, asked.output, asked.steps):
        print(line, flush=True)


if __name__ == "__main__":
    main()
