"""The whole step of GKD: a 0.5B student, a 1.5B teacher, half of the completions written by the student. Run by `whole_step.py`.

64 prompts of 256 tokens a step; the dataset's completions have a median of 200 tokens and 512 at most, the student writes 512
(random weights do not end). Divergence at beta 0.5, temperature 1, `seq_kd` off.

Who writes is a coin for each prompt in posttrain and one for each micro-batch in TRL. A coin that falls otherwise would be
measured as speed, so both have the same share: the first half of a step's rows keeps the dataset's completions, the second half is
written by the student. Averaging runs at `lmbda` 0 and 1 would flatter posttrain, which writes 64 completions in hardly more time
than 32. The first step keeps all completions of the dataset (its loss is that of the same rows and weights in both libraries:
`first_loss`), the second writes for the first time; those after them are timed.

TRL's work is that of its micro-batches, so that a step of two is measured and reported for 64 rows. TRL 1.16 has no fused loss in
GKD: `use_liger_kernel` replaces layers. As it comes, it checkpoints activations and then generates without a cache. In bfloat16 its
log-probs of about -12 are rounded to 1/16, so that `first_loss` of tuned is coarse (--tiny, in float32: all agree to 1e-6); its
later losses divide by the tokens of the dataset's completions also where the student wrote others.
`matched` is posttrain with the rows and the micro-batch of TRL tuned, as last written to `--out`: for memory and for `first_loss`.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset

from benchmarks.speed import materials
from benchmarks.speed.rows import QWEN_05B, QWEN_15B, Lengths, Row, Shape, tiny

ROWS = 64
SETTINGS: dict[str, list[dict[str, int]]] = {
    "ours": [{"samples": 64, "micro": 64}, {"samples": 64, "micro": 16}],
    "tuned": [
        {"samples": 64, "micro": 32},
        {"samples": 32, "micro": 16},
        {"samples": 16, "micro": 8},
        {"samples": 8, "micro": 4},
    ],
    "default": [{"samples": 16, "micro": 8}],
}
TINY_TEACHER = Shape(96, 3, 192, (4, 2), vocabulary=1024)
TEMPLATE = (
    "{% for message in messages %}{{ message.content }} "
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""A question and its answer as bare words: the tokens are those of the table."""


def row_of(is_tiny: bool) -> Row:
    row = Row("gkd", "grpo", QWEN_05B, ROWS, Lengths(200, 0.7, 16, 512, prompt=256, seed=4), 1e-6, (), group=1)
    return replace(tiny(row), rows=8, group=1) if is_tiny else row


def messages(row: Row, steps: int) -> Dataset:
    """Conversations of one question and one answer, in the order of the table; the template puts the end after the answer."""
    turns = [
        [("user", materials.text_of(prompt)), ("assistant", materials.text_of(answer[:-1]))]
        for prompt, (answer,) in materials.groups(row, steps)
    ]
    return Dataset.from_list([{"messages": [{"role": who, "content": said} for who, said in one]} for one in turns])


def student_writes(place: int, step_size: int) -> bool:
    """Whether the `place`-th row (or micro-batch) of the run, in steps of `step_size`, is written by the student."""
    step, within = divmod(place, step_size)
    return step > 0 and within >= step_size // 2


def ours(library: Any, samples: int) -> type:
    class HalfWritten(library.GKDTrainer):
        def author_of(self, request: Any) -> str:
            return "policy" if student_writes(request.number, samples) else "dataset"

    return HalfWritten


def theirs(library: Any, micro_batches: int) -> type:
    class HalfWritten(library.GKDTrainer):
        seen = 0

        def training_step(self, *given: Any, **named: Any) -> Any:
            self.lmbda = 1.0 if student_writes(self.seen, micro_batches) else -1.0  # it asks: random() <= lmbda
            self.seen += 1
            return super().training_step(*given, **named)

    return HalfWritten


def trainer_of(
    row: Row,
    setting: str,
    sizes: dict[str, int],
    options: dict[str, Any],
    steps: int,
    dtype: torch.dtype,
    **shared: Any,
) -> Any:
    """`options` are those of every whole step, `shared` arguments of every trainer."""
    is_ours = setting in ("ours", "matched")
    library = importlib.import_module("posttrain" if is_ours else "trl.experimental.gkd")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = replace(row, shape=QWEN_15B if row.shape == QWEN_05B else TINY_TEACHER)
    options = options | {"max_new_tokens": row.lengths.high, "lmbda": 0.5, "beta": 0.5, "seq_kd": False}
    options |= {"max_steps": steps, "max_length": 1024}
    options |= {"shuffle_dataset": False} if is_ours else {"train_sampling_strategy": "sequential"}
    options |= {"use_liger_kernel": True} if setting == "tuned" and device == "cuda" else {}
    options |= {"bf16": False} if setting == "default" and device == "cpu" else {}  # its rounding would hide other rows
    trainer = ours(library, sizes["samples"]) if is_ours else theirs(library, sizes["samples"] // sizes["micro"])
    shared["processing_class"].chat_template = TEMPLATE
    return trainer(
        args=library.GKDConfig(**options),
        teacher_model=materials.build_model(teacher, device, dtype),
        train_dataset=messages(replace(row, rows=sizes["samples"]), steps),
        **shared,
        **({"teacher_processing_class": shared["processing_class"]} if is_ours else {}),
    )


def figures(row: Row, samples: int, logs: list[dict[str, float]]) -> dict[str, Any]:
    """Losses, and the real tokens of the second step, prompts included; completions that are written have full length."""
    losses = [entry["loss"] for entry in logs if "loss" in entry]
    half = samples // 2
    kept = int(replace(row, rows=samples).sequence_lengths(2)[samples : samples + half].sum())
    real = samples * row.lengths.prompt + kept + (samples - half) * row.lengths.high
    return {"real_tokens_second_step": real, "first_loss": losses[0], "losses": losses}
