"""Do the online methods learn what they are paid for, and nothing where there is nothing to learn? With a real model.

    python -m benchmarks.real_runs.online_methods MODEL ppo --output runs/online
    python -m benchmarks.real_runs.online_methods MODEL online_dpo xpo --output runs/online
    python -m benchmarks.real_runs.online_methods MODEL nash_md --output runs/online
    python -m benchmarks.real_runs.online_methods MODEL gfpo --output runs/online

MODEL is a folder or Hub id of SmolLM2-135M-Instruct (`~/.cache/posttrain/smollm2-135m-instruct` after `posttrain demo`). `--steps`
counts generations (default: 60); methods may run beside each other. Answers are paid for having 12 words: -|words - 12|.

PPO (half of the prompts ask for a story, so that there is something to foresee): the reward rises by more than 3 standard errors,
explained variance of the values from 0 to above 0.5, divergence from the reference inside of 3..9 in the last third, with the
adaptive controller's target of 6. Control: `vf_coef=0`, no variance explained. Online DPO and XPO: the reward of the policy's
answers rises by more than 3 standard errors, and Online DPO's divergence grows. Control: a hash of the answer is the reward; no
trend. Nash-MD: a pairwise judge prefers the answer that is nearer to 12 words; the trained model beats its start in more than 0.7
of held-out prompts, ties counted half. Control: trained by a judge that tosses coins, 0.5.
GFPO: paid for a digit in the answer; of 16 answers the 4 shortest are trained on. Held-out answers are shorter than GRPO's, and
right as often.
"""

from __future__ import annotations

import argparse
import math
import random
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from peft import LoraConfig

from posttrain import GFPOConfig, GFPOTrainer
from posttrain.methods.table import METHODS
from posttrain.rewards.judging import TIE, BasePairwiseJudge
from posttrain.trainer.online.win_rate import WinRateCallback

TOPICS = (
    "rain bread maps clocks glass paper radio bees salt rivers bridges snow trains tea violins stars horses coal apples ships sand "
    "chess ice wool gold moths tides corn bells kites candles wind owls bricks copper dolphins forests gardens honey islands "
    "jackets keys lamps mirrors needles oceans pianos quilts rockets shoes tents umbrellas valleys wheels yarn zebras"
)
HELD_OUT_TOPICS = (
    "milk lightning wolves pencils cheese sugar tigers castles drums feathers grapes hammers ink jungles ladders mountains nests "
    "oranges pumpkins roses soap towers volcanoes windows anchors baskets camels doors eagles flutes gates hats"
)
SENTENCE = "Say something about {} in one short sentence."
FACT = "Tell me one short fact about {}."
STORY = "Write a long story about {}."
WANTED_WORDS = 12
WINDOW = 5  # generations at the beginning and at the end that are compared


def prompts(topics: str, *forms: str) -> Dataset:
    asked = [form.format(topic) for topic in topics.split() for form in forms]
    random.Random(0).shuffle(asked)
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in asked])


# ---- what is paid for -------------------------------------------------------------------------------------------------------


def distance(text: str) -> int:
    return abs(len(text.split()) - WANTED_WORDS)


def near_twelve_words(completions: list[Any], **columns: Any) -> list[float]:
    return [-float(distance(answer[-1]["content"])) for answer in completions]


def at_random(completions: list[Any], **columns: Any) -> list[float]:
    """Between 0 and 1, the same for the same answer, and about nothing that could be learned from others."""
    return [zlib.crc32(answer[-1]["content"].encode()) / 2**32 for answer in completions]


def words(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(answer[-1]["content"].split())) for answer in completions]


def has_a_digit(completions: list[Any], **columns: Any) -> list[float]:
    return [float(any(letter.isdigit() for letter in answer[-1]["content"])) for answer in completions]


def shorter_is_better(group_completions: list[Any], group_rewards: list[Any], **columns: Any) -> list[list[float]]:
    return [[-float(len(answer[-1]["content"].split())) for answer in group] for group in group_completions]


class NearerTwelveWords(BasePairwiseJudge):
    """Judges are shown a conversation as lines "Role: content": the role is no word of the answer."""

    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[float]:
        first_and_second = [[distance(text.removeprefix("Assistant: ")) for text in pair] for pair in completions]
        return [TIE if a == b else float(a > b) for a, b in first_and_second]


class Coin(BasePairwiseJudge):
    def judge(self, prompts: list[str], completions: list[list[str]], shuffle_order: bool = True) -> list[float]:
        return [float(zlib.crc32(repr(pair).encode()) % 2) for pair in completions]


# ---- training, and what its log says ----------------------------------------------------------------------------------------


def trainer_of(method: str, model: str, reward: Any, folder: Path, data: Dataset, options: dict[str, Any]) -> Any:
    trainer_class, config_class = METHODS[method].trainer_class, METHODS[method].config_class
    if method == "grpo" and "num_remains_in_group" in options:
        trainer_class, config_class = GFPOTrainer, GFPOConfig
    shared = {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "verbosity": "quiet", "reward_workers": 0}
    shared |= {"lr_scheduler_type": "constant", "max_completion_length": 48, "temperature": 1.0, "seed": 1}
    named = {
        name: options.pop(name) for name in ("peft_config", "group_filter_func", "eval_dataset") if name in options
    }
    args = config_class(output_dir=str(folder), **shared | options)
    return trainer_class(model=model, reward_funcs=reward, args=args, train_dataset=data, **named)


def logged(trainer: Any, name: str) -> np.ndarray:
    return np.asarray([entry[name] for entry in trainer.state.log_history if name in entry])


def ends(curve: np.ndarray) -> tuple[float, float, float]:
    """(mean of the first generations, of the last ones, their difference in standard errors)."""
    size = min(WINDOW, max(len(curve) // 2, 1))
    first, last = curve[:size], curve[-size:]
    error = math.hypot(*(part.std(ddof=min(1, size - 1)) / size**0.5 for part in (first, last)))
    change = last.mean() - first.mean()
    return first.mean(), last.mean(), change / error if error else math.copysign(math.inf, change) if change else 0.0


def result(name: str, said: str, holds: bool) -> str:
    return f"{name}: {said}; {'holds' if holds else 'does not hold'}"


# ---- the runs ---------------------------------------------------------------------------------------------------------------


def ppo(method: str, model: str, folder: Path, steps: int) -> Iterator[str]:
    """Scores are weighed 0.1, so that values are of the order of 1; advantages are scaled to deviation 1 in any case."""
    epochs, parts = 4, 2
    for kind, weight in (("", 1.0), ("control, vf_coef=0", 0.0)):
        generations = steps if weight else max(steps // 4, 2)
        options = {"max_steps": generations * epochs * parts, "per_device_train_batch_size": 128}
        options |= {"num_generations": 2, "num_ppo_epochs": epochs, "num_mini_batches": parts, "learning_rate": 3e-4}
        options |= {"vf_coef": weight, "cliprange_value": 1.0, "reward_weights": [0.1], "adap_kl_ctrl": True}
        options |= {
            "kl_coef": 0.05,
            "target": 6.0,
            "horizon": 600.0,
            "peft_config": LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        }
        trainer = trainer_of(
            method, model, near_twelve_words, folder / f"ppo-{weight}", prompts(TOPICS, SENTENCE, STORY), options
        )
        trainer.train()
        first, last, errors = ends(logged(trainer, "rewards/near_twelve_words/mean"))
        explained, kl = logged(trainer, "val/explained_variance"), logged(trainer, "objective/kl")
        third = kl[-max(len(kl) // 3, 1) :]
        at_end = explained[-WINDOW:].mean()
        if weight:
            holds = errors > 3 and explained[0] <= 0 and at_end > 0.5 and third.min() >= 3 and third.max() <= 9
        else:
            holds = explained.max() <= 0.1
        yield (
            result(
                f"ppo {kind or 'target 6'}",
                f"reward {first:.2f} -> {last:.2f}, {errors:+.1f} standard errors; explained variance {explained[0]:.3f} -> "
                f"{at_end:.3f} (at most {explained.max():.3f}); KL in the last third {third.mean():.2f} ({third.min():.2f} to "
                f"{third.max():.2f}), kl_coef {logged(trainer, 'objective/kl_coef')[-1]:.3f}; {generations} generations",
                holds,
            )
        )


def pairs(method: str, model: str, folder: Path, steps: int) -> Iterator[str]:
    """XPO's log has the scores of the policy's own answers apart from those of the reference's."""
    curve = "objective/model_scores" if method == "xpo" else "reward"
    for kind, reward in (("", near_twelve_words), ("control, random reward", at_random)):
        options = {"max_steps": steps, "per_device_train_batch_size": 16, "learning_rate": 2e-5, "beta": 0.1}
        trainer = trainer_of(
            method, model, reward, folder / f"{method}-{reward.__name__}", prompts(TOPICS, SENTENCE), options
        )
        trainer.train()
        first, last, errors = ends(logged(trainer, curve))
        kl = ends(logged(trainer, "objective/kl"))
        # XPO's divergence is the mean over the policy's answer and the reference's, whose log-ratio falls below 0
        holds = abs(errors) < 3 if kind else errors > 3 and (kl[1] > kl[0] or method == "xpo")
        said = f"reward {first:.2f} -> {last:.2f}, {errors:+.1f} standard errors; KL {kl[0]:.2f} -> {kl[1]:.2f}; {steps} steps"
        yield result(f"{method} {kind or 'near 12 words'}", said, holds)


def nash_md(method: str, model: str, folder: Path, steps: int) -> Iterator[str]:
    """The win rate is measured by words in both: a model that was trained by coins should be no nearer to 12 of them."""
    asked = [row["prompt"] for row in prompts(HELD_OUT_TOPICS, SENTENCE) for _ in range(4)]
    for judge in (NearerTwelveWords(), Coin()):
        kind = type(judge).__name__
        options = {"max_steps": steps, "per_device_train_batch_size": 32, "learning_rate": 2e-5, "beta": 0.02}
        options |= {"eval_strategy": "steps", "eval_steps": steps, "eval_dataset": prompts(HELD_OUT_TOPICS, SENTENCE)}
        trainer = trainer_of(method, model, judge, folder / f"{method}-{kind}", prompts(TOPICS, SENTENCE), options)
        trainer.add_callback(WinRateCallback(NearerTwelveWords(), trainer, prompts=asked))
        trainer.train()
        ties, decided = (logged(trainer, f"eval_{name}") for name in ("judge_ties", "win_rate"))
        wins = (decided[-1] * (1 - ties[-1]) if len(decided) else 0.0) + ties[-1] / 2
        kl = ends(logged(trainer, "loss/kl"))
        said = f"win rate against the start, by words, {wins:.3f} on {len(asked)} held-out answers, of which {ties[-1]:.3f} ties; "
        said += f"KL {kl[0]:.2f} -> {kl[1]:.2f}; {steps} steps"
        yield result(f"{method} trained by {kind}", said, 0.4 <= wins <= 0.6 if kind == "Coin" else wins > 0.7)


def gfpo(method: str, model: str, folder: Path, steps: int) -> Iterator[str]:
    """Words are counted by a second reward of weight 0, on held-out prompts at the end."""
    groups, size = 8, 16
    options = {"max_steps": steps, "per_device_train_batch_size": groups * size, "num_generations": size, "beta": 0.0}
    options |= {
        "learning_rate": 1e-5,
        "max_completion_length": 64,
        "reward_weights": [1.0, 0.0],
        "eval_strategy": "steps",
    }
    options |= {"eval_steps": steps, "per_device_eval_batch_size": groups * size}
    held_out = prompts(HELD_OUT_TOPICS, FACT)
    kinds = {"grpo": {}, "gfpo": {"num_remains_in_group": 4, "group_filter_func": shorter_is_better}}
    measured = {}
    for kind, own in kinds.items():
        given = options | own | {"eval_dataset": held_out}
        trainer = trainer_of("grpo", model, [has_a_digit, words], folder / f"gfpo-{kind}", prompts(TOPICS, FACT), given)
        trainer.train()
        answers = len(held_out) * size
        measured[kind] = [
            (
                logged(trainer, f"eval_rewards/{name}/mean")[-1],
                logged(trainer, f"eval_rewards/{name}/std")[-1] / answers**0.5,
            )
            for name in ("has_a_digit", "words")
        ]
        begin = logged(trainer, "rewards/has_a_digit/mean")[0], logged(trainer, "rewards/words/mean")[0]
    (reward, length), (filtered_reward, filtered_length) = measured["grpo"], measured["gfpo"]
    shorter = length[0] - filtered_length[0]
    shorter_error, reward_error = (
        math.hypot(a[1], b[1]) for a, b in ((length, filtered_length), (reward, filtered_reward))
    )
    said = (
        f"held-out answers, {answers} each: {filtered_length[0]:.2f} +- {filtered_length[1]:.2f} words and a digit in "
        f"{filtered_reward[0]:.3f} +- {filtered_reward[1]:.3f}; GRPO {length[0]:.2f} +- {length[1]:.2f} and {reward[0]:.3f} +- "
        f"{reward[1]:.3f} (first step {begin[1]:.2f} and {begin[0]:.3f}); {steps} steps"
    )
    holds = shorter > 3 * shorter_error and filtered_reward[0] > reward[0] - max(3 * reward_error, 0.02)
    yield result("gfpo, the 4 shortest of 16", said, holds)


RUNS = {"ppo": ppo, "online_dpo": pairs, "xpo": pairs, "nash_md": nash_md, "gfpo": gfpo}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=", ".join(RUNS))
    parser.add_argument("--steps", type=int, default=60, help="generations of a run (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/online"))
    asked = parser.parse_args()
    for name in asked.methods or RUNS:
        began = time.perf_counter()
        for line in RUNS[name](name, asked.model, asked.output, asked.steps):
            print(line, flush=True)
        print(f"  ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
