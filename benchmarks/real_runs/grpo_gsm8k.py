"""GRPO on GSM8K with a real 135M model on one GPU: does it answer more held-out questions, by more than its error?

    python -m benchmarks.real_runs.grpo_gsm8k MODEL GSM8K_FOLDER OUTPUT [--steps 100] [--sft OTHER_OUTPUT/sft]
        [--option async_rollouts=true async_lead=1]

GSM8K_FOLDER holds train.jsonl and test.jsonl with `question` and `answer`. A model of this size answers next to nothing of GSM8K as
it comes and does not know where its answer belongs, so SFT on the training answers comes first; what is compared is before and
after GRPO. Writes OUTPUT/result.json: the curve, the accuracies (the most likely answer, and four that were drawn), three rollouts:
the first two questions that came to be answered right and the first that came to be answered wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.given_options import options_of
from posttrain import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate

MARK = "####"  # of the answer, in GSM8K
COMPLETION = 256
DRAWN = 4


def number_after_mark(text: str) -> str | None:
    """The number that a text gives as its answer; None: none."""
    _, mark, end = text.rpartition(MARK)
    words = end.split()
    return words[0].replace(",", "").rstrip(".") if mark and words else None


def correct(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    return [float(number_after_mark(each[0]["content"]) == wanted) for each, wanted in zip(completions, answer)]


def read(path: Path, count: int | None) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]


def question(row: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": row["question"]}]


def fine_tuned(words: argparse.Namespace, rows: list[dict[str, str]], common: dict[str, Any]) -> str:
    """SFT on the training answers, unless an earlier run has done it; where the model was saved."""
    if words.sft is not None:
        return words.sft
    data = [{"prompt": question(row), "completion": [{"role": "assistant", "content": row["answer"]}]} for row in rows]
    config = SFTConfig(
        output_dir=f"{words.output}/sft",
        num_train_epochs=words.sft_epochs,
        per_device_train_batch_size=32,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        logging_steps=50,
        **common,
    )
    trainer = SFTTrainer(words.model, config, train_dataset=Dataset.from_list(data))
    trainer.train()
    trainer.save_model(config.output_dir)
    return config.output_dir


class EndsAfter(TrainerCallback):
    """Ends a run that has had its time, after a whole step."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began = seconds, time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= time.monotonic() - self.began > self.seconds


class HeldOut:
    """Answers to the test questions, straight from the trainer's engine."""

    def __init__(self, trainer: GRPOTrainer, rows: list[dict[str, str]]) -> None:
        self.trainer, self.rows = trainer, rows
        template = trainer.processing_class.apply_chat_template
        self.prompts = [
            np.asarray(template(question(row), add_generation_prompt=True, return_dict=True)["input_ids"], np.int32)
            for row in rows
        ]
        self.wanted = [number_after_mark(row["answer"]) for row in rows]

    def texts(self, temperature: float, samples: int) -> list[str]:
        tokenizer = self.trainer.processing_class
        params = SamplingParams(COMPLETION, temperature, stop_ids=(tokenizer.eos_token_id,), seed=1)
        asked = [Prompt(ids, key, sample) for key, ids in enumerate(self.prompts) for sample in range(samples)]
        found = generate(self.trainer.engine, asked, params)
        return [tokenizer.decode(each.ids, skip_special_tokens=True) for each in found]

    def accuracy(self, temperature: float, samples: int) -> tuple[float, float]:
        """(share of right answers, its standard error over the questions)."""
        right = [number_after_mark(text) for text in self.texts(temperature, samples)]
        share = (np.reshape(right, (-1, samples)) == np.asarray(self.wanted)[:, None]).mean(1)
        return float(share.mean()), float(share.std() / math.sqrt(len(share)))

    def both(self, name: str) -> dict[str, tuple[float, float]]:
        found = {"greedy": self.accuracy(0.0, 1), "drawn": self.accuracy(1.0, DRAWN)}
        told = ", ".join(f"{way} {mean:.4f} +- {error:.4f}" for way, (mean, error) in found.items())
        print(f"{name}: accuracy on {len(self.rows)} held-out questions: {told}", flush=True)
        return found


def changed(held_out: HeldOut, before: list[str], after: list[str]) -> tuple[list[int], list[int]]:
    """(questions answered right only after, questions answered right only before)."""
    right = [
        [number_after_mark(text) == wanted for text, wanted in zip(texts, held_out.wanted)] for texts in (before, after)
    ]
    pairs = list(enumerate(zip(*right)))
    return [n for n, (old, new) in pairs if new and not old], [n for n, (old, new) in pairs if old and not new]


def grpo_trainer(
    words: argparse.Namespace, model: str, rows: list[dict[str, str]], common: dict[str, Any]
) -> GRPOTrainer:
    data = [{"prompt": question(row), "answer": number_after_mark(row["answer"])} for row in rows]
    options = {
        "output_dir": f"{words.output}/grpo",
        "max_steps": words.steps,
        "per_device_train_batch_size": min(words.samples, 256),
        "gradient_accumulation_steps": max(words.samples // 256, 1),
        "num_generations": words.group,
        "max_completion_length": COMPLETION,
        "learning_rate": words.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 5,
        "logging_steps": 1,
        "log_completions": False,
    }
    config = GRPOConfig(**options | common | options_of(words.option))
    ends = [EndsAfter(words.seconds)] if words.seconds else []
    return GRPOTrainer(model, correct, config, train_dataset=Dataset.from_list(data), callbacks=ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("output")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, help="of training with GRPO, after which it ends early")
    parser.add_argument("--samples", type=int, default=1024, help="completions of a step")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--sft-epochs", type=float, default=2)
    parser.add_argument("--sft", metavar="FOLDER", help="a model after SFT, such as OUTPUT/sft of an earlier run")
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE", help="further options of GRPOConfig")
    parser.add_argument("--rows", type=int, help="of train.jsonl; all by default")
    parser.add_argument("--held-out", type=int, help="rows of test.jsonl; all by default")
    words = parser.parse_args()
    common = {"save_strategy": "no", "report_to": "none"}
    train, test = read(words.data / "train.jsonl", words.rows), read(words.data / "test.jsonl", words.held_out)
    began = time.monotonic()
    trainer = grpo_trainer(words, fine_tuned(words, train, common), train, common)
    print(f"SFT and loading: {time.monotonic() - began:.0f} s", flush=True)
    held_out = HeldOut(trainer, test)
    before, texts_before = held_out.both("before GRPO"), held_out.texts(0.0, 1)
    began = time.monotonic()
    trainer.train()
    seconds = time.monotonic() - began
    after, texts_after = held_out.both("after GRPO"), held_out.texts(0.0, 1)
    names = ("step", "reward", "completions/mean_length", "entropy", "frac_reward_zero_std", "step_time")
    curve = [{name: each.get(name) for name in names} for each in trainer.state.log_history if "reward" in each]
    gained, lost = changed(held_out, texts_before, texts_after)
    rollouts = [
        test[row] | {"before": texts_before[row], "after": texts_after[row]} for row in (*gained[:2], *lost[:1])
    ]
    result = {"before": before, "after": after, "seconds": seconds, "curve": curve, "rollouts": rollouts}
    result |= {"answered right only before": len(lost), "answered right only after": len(gained)}
    Path(words.output, "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    for way in before:
        gain, error = after[way][0] - before[way][0], math.hypot(before[way][1], after[way][1])
        print(f"{way}: {gain:+.4f} +- {error:.4f}")
    print(f"{len(curve)} steps in {seconds:.0f} s")


if __name__ == "__main__":
    main()
