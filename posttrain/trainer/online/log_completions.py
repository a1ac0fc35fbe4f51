"""LogCompletionsCallback: what the model says to some prompts, every so many steps."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from accelerate import Accelerator
from torch import nn
from transformers import GenerationConfig, TrainerCallback

from posttrain.core.sample import Sample
from posttrain.data.render.byte_decoding import text_decoder
from posttrain.models.load.vocabulary import tokenizer_of
from posttrain.rollout.prompt_rows import PromptRow
from posttrain.trainer.checkpoints.checkpoint import best_effort
from posttrain.trainer.options.base import BaseConfig, check_range
from posttrain.trainer.report.progress import cut, show_table
from posttrain.trainer.report.trackers import table_to_trackers

logger = logging.getLogger(__name__)

FOLDER = "completions"
MAX_PROMPTS = 128
"""However many rows the evaluation set has, no more of them are answered each time."""
PROMPTS_AT_ONCE = 16
PRINTED_ROWS, PRINTED_CHARACTERS = 4, 300
DEFAULT_NEW_TOKENS = 128


@dataclass
class Answers:
    """A table of fixed size: one row for each prompt, of one step."""

    step: int
    prompts: list[str]
    completions: list[str]

    def columns(self) -> dict[str, list[Any]]:
        return {"step": [self.step] * len(self.prompts), "prompt": self.prompts, "completion": self.completions}


class AnsweringRun(Protocol):
    """What is asked of the trainer."""

    args: BaseConfig
    accelerator: Accelerator
    processing_class: Any
    eval_dataset: Any


class LogCompletionsCallback(TrainerCallback):
    """Answers evaluation prompts every `freq` steps: shown, and kept in `<output_dir>/completions/step_N.parquet`.

    Args:
        trainer: the trainer it is added to.
        generation_config: how to generate; None is greedy, at most 128 new tokens.
        num_prompts: the first so many evaluation prompts; None is all of them, at most 128.
        freq: optimizer steps between two looks; None is `eval_steps`, which needs `eval_strategy="steps"`.
        prompts: texts to answer in place of the evaluation set's, or conversations (lists of messages).
    """

    def __init__(
        self,
        trainer: AnsweringRun,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        freq: int | None = None,
        prompts: Sequence[Any] | None = None,
    ) -> None:
        self.trainer = trainer
        self.freq = freq
        if num_prompts is not None:
            check_range("num_prompts", num_prompts, 1, MAX_PROMPTS)
        if freq is not None:
            check_range("freq", freq, 1)
        elif trainer.args.eval_strategy.value != "steps":
            raise ValueError(
                f"`freq` is missing, and eval_strategy={trainer.args.eval_strategy.value!r} gives none: pass `freq`, the number "
                "of optimizer steps between two looks."
            )
        if trainer.args.sharding is not None:
            raise ValueError("LogCompletionsCallback generates on one process; sharded weights cannot. Leave it out.")
        self.generation = generation_config or GenerationConfig(do_sample=False, max_new_tokens=DEFAULT_NEW_TOKENS)
        if prompts is not None and len(prompts) > MAX_PROMPTS:
            raise ValueError(f"`prompts` holds {len(prompts)} prompts; it must hold 1 to {MAX_PROMPTS}.")
        rows = evaluation_prompts(trainer, prompts, num_prompts, MAX_PROMPTS)
        self.prompts = [row.ids.tolist() for row in rows]

    # ---- the run -----------------------------------------------------------------------------------------------------

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        freq = self.freq or int(state.eval_steps)
        if not state.is_world_process_zero or state.global_step % freq:
            return
        answers = self.answer(self.trainer.accelerator.unwrap_model(model), state.global_step)
        self.write(answers, Path(args.output_dir))
        show(answers, args.disable_tqdm)
        columns = answers.columns()
        rows = [list(row) for row in zip(*columns.values())]
        table_to_trackers(args.report_to, "completions", list(columns), rows)

    def answer(self, model: nn.Module, step: int) -> Answers:
        """Generate for all prompts. Neither the mode of the model nor any random generator is changed by it."""
        tokenizer = tokenizer_of(self.trainer.processing_class)
        completions: list[str] = []
        was_training = model.training
        devices = [self.trainer.args.device] if self.trainer.args.device.type == "cuda" else []
        model.eval()
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                for start in range(0, len(self.prompts), PROMPTS_AT_ONCE):
                    ids = self._generate(model, self.prompts[start : start + PROMPTS_AT_ONCE])
                    completions += [tokenizer.decode(one) for one in ids]  # with the tokens around a tool call
        finally:
            model.train(was_training)
        return Answers(step, [tokenizer.decode(prompt) for prompt in self.prompts], completions)

    def _generate(self, model: nn.Module, prompts: list[list[int]]) -> list[list[int]]:
        """The new tokens, up to the one that ends them. Prompts are padded on the left here, so the tokenizer's padding side is
        never touched."""
        device, width = self.trainer.args.device, max(map(len, prompts))
        padding = tokenizer_of(self.trainer.processing_class).pad_token_id
        ids = torch.tensor([[padding] * (width - len(p)) + list(p) for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        config = copy.deepcopy(self.generation)
        config.pad_token_id = padding
        if config.eos_token_id is None:
            config.eos_token_id = (
                model.generation_config.eos_token_id or tokenizer_of(self.trainer.processing_class).eos_token_id
            )
        output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        written = output[:, width:].tolist()
        return [list(itertools.takewhile(lambda token: token not in (*ends, padding), one)) for one in written]

    def write(self, answers: Answers, output_dir: Path) -> Path:
        path = output_dir / FOLDER / f"step_{answers.step}.parquet"
        write_columns(path, answers.columns())
        return path


def write_columns(path: Path, columns: dict[str, list[Any]]) -> None:
    """A parquet file that is there whole or not at all; where it cannot be written, the run continues."""
    with best_effort(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}")
        pyarrow.parquet.write_table(pyarrow.table(columns), unfinished)
        unfinished.replace(path)


# ---- which prompts are answered ------------------------------------------------------------------------------------------


def evaluation_prompts(
    trainer: AnsweringRun, prompts: Sequence[Any] | None, num_prompts: int | None, most: int | None = None
) -> list[PromptRow]:
    """The given prompts, else the first `num_prompts` (None: all, at most `most`) of the trainer's evaluation set."""
    if prompts is not None:
        return _given_prompts(tokenizer_of(trainer.processing_class), prompts)
    dataset = trainer.eval_dataset
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    if dataset is None or not hasattr(dataset, "__len__"):
        raise ValueError(
            "There is no evaluation set of a known length to take prompts from: pass `prompts`, or give the trainer an "
            "`eval_dataset`."
        )
    wanted = min(len(dataset), num_prompts or most or len(dataset))
    if num_prompts is None and wanted < len(dataset):
        logger.info(f"The first {wanted} of {len(dataset)} evaluation prompts are answered; see `num_prompts`.")
    tokenizer = tokenizer_of(trainer.processing_class)
    marker, decode = answer_marker(tokenizer), text_decoder(tokenizer)
    rows = [dataset[i] for i in range(wanted)]
    if any(row.images if isinstance(row, PromptRow) else row[0].images for row in rows):
        raise ValueError("Evaluation prompts have images, which are not shown here: pass `prompts` of texts.")
    kept = [row for row in (_prompt_row(row, i, marker, decode) for i, row in enumerate(rows)) if len(row.ids)]
    if not kept:
        raise ValueError(
            "The evaluation rows are plain texts, in which nothing says where an answer begins: pass `prompts`."
        )
    return kept


def _given_prompts(tokenizer: Any, prompts: Sequence[Any]) -> list[PromptRow]:
    if not prompts:
        raise ValueError("`prompts` holds 0 prompts; give at least one.")
    ids = [
        tokenizer(prompt)["input_ids"]
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        for prompt in prompts
    ]
    return [PromptRow(np.asarray(one, np.int32), prompt, {}, i) for i, (one, prompt) in enumerate(zip(ids, prompts))]


def _prompt_row(row: Any, number: int, marker: list[int], decode: Any) -> PromptRow:
    """Of a row of an online trainer, which is one, or of an encoded unit, whose prompt is known by its tokens only."""
    if isinstance(row, PromptRow):
        return row
    ids = prompt_of(row[0], marker)
    return PromptRow(np.asarray(ids, np.int32), decode(ids), {}, number)


def prompt_of(sample: Sample, marker: list[int]) -> list[int]:
    """The tokens an answer follows: what is not trained at the beginning, else all up to the last begin of an answer."""
    ids = sample.input_ids.tolist()
    untrained = int(sample.trained.argmax()) if sample.trained.any() else len(ids)
    if untrained > 1:  # the very first token is never predicted, trained or not
        return ids[:untrained]
    for end in range(len(ids), len(marker) - 1, -1):
        if marker and ids[end - len(marker) : end] == marker:
            return ids[:end]
    return []


def answer_marker(tokenizer: Any) -> list[int]:
    """The tokens a chat template writes where the assistant begins to speak; none without a template."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    asked = [{"role": "user", "content": "?"}]
    without, with_marker = (
        tokenizer.apply_chat_template(asked, add_generation_prompt=begins, return_dict=True)["input_ids"]
        for begins in (False, True)
    )
    return list(with_marker[len(without) :]) if with_marker[: len(without)] == without else []


def show(answers: Answers, disable_tqdm: bool) -> None:
    """The first few rows. The file has all of them."""
    shown = zip(answers.prompts[:PRINTED_ROWS], answers.completions)
    rows = [[cut(text, PRINTED_CHARACTERS) for text in row] for row in shown]
    title = f"completions at step {answers.step}"
    lines = [f"{title} (all {len(answers.prompts)} in {FOLDER}/step_{answers.step}.parquet)"]
    for prompt, completion in rows:
        lines += [f"  > {prompt!r}", f"    {completion!r}"]
    show_table(title, ("prompt", "completion"), rows, lines, disable_tqdm)
