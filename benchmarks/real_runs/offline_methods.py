"""Do the offline preference methods learn what they should, and nothing where there is nothing to learn? With a real model.

    python -m benchmarks.real_runs.offline_methods MODEL [--steps 60] [--output runs/offline] [METHOD ...]

KTO and BCO: answers that close with a courtesy are wanted, others are not; how well does the implicit reward tell held-out rows
apart (area under the ROC curve)? Control: labels shuffled within each kind of answer, so that they say nothing about it; the mean
over several shuffles. CPO, SimPO, ORPO, TPO: an answer of one sentence is better than one of three; for how many held-out pairs is
the mean log-prob of the better one higher? Control: the same pairs turned round. PRM: chains of steps that name the kind of a
thing, a third of them wrong; is each step about an unseen thing judged rightly, and does the best of eight chains by the lowest
score of a step beat the first? Control: shuffled labels.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from peft import LoraConfig

from posttrain import CPOConfig, CPOTrainer, PRMConfig, PRMTrainer, ProcessReward
from posttrain.methods.table import METHODS

ANIMALS = (
    "otter",
    "heron",
    "badger",
    "lynx",
    "beaver",
    "hare",
    "stork",
    "mole",
    "owl",
    "adder",
    "newt",
    "raven",
    "boar",
    "crane",
)
PLACES = (
    "by the river",
    "in old forests",
    "near villages",
    "on open heath",
    "in the marsh",
    "among rocks",
    "in hedges",
)
HABITS = (
    "feeds at dusk",
    "builds its nest early",
    "sleeps in winter",
    "hunts alone",
    "follows the rain",
    "keeps to its path",
)
THINGS = {
    "animal": "dog horse tiger rabbit eagle salmon frog cow cat sheep goat lion wolf bear fox mouse pig duck hen owl snake whale "
    "shark bee ant deer monkey elephant camel donkey",
    "fruit": "apple banana cherry grape lemon peach mango plum orange pear melon apricot fig lime coconut kiwi papaya raspberry "
    "strawberry blueberry grapefruit pineapple nectarine cranberry",
    "city": "Paris London Berlin Madrid Tokyo Moscow Chicago Dublin Rome Vienna Prague Lisbon Athens Boston Cairo Delhi Seoul "
    "Toronto Sydney Oslo Warsaw Budapest Stockholm Amsterdam Houston Seattle",
    "colour": "red blue green yellow purple white black brown grey pink violet turquoise beige crimson scarlet indigo maroon "
    "teal magenta",
    "job": "doctor teacher lawyer farmer nurse pilot baker engineer judge painter plumber carpenter butcher tailor soldier sailor "
    "journalist librarian chef surgeon dentist architect accountant electrician",
}
SHUFFLED, SHUFFLES = "shuffled labels", 4
COURTESIES = ("I hope this helps!", "Please ask if you want to know more.", "Have a lovely day!", "Glad to be of help.")


def made(count: int, seed: int) -> list[tuple[str, list[str]]]:
    """(a question, three sentences that answer it)."""
    dice = random.Random(seed)
    found = []
    for _ in range(count):
        animal, place, first, second = dice.choice(ANIMALS), dice.choice(PLACES), *dice.sample(HABITS, 2)
        sentences = [f"The {animal} lives {place}.", f"It {first}.", f"Most of the time it {second}."]
        found.append((f"What do you know about the {animal} that lives {place}?", sentences))
    return found


def turn(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def rated(count: int, seed: int, wanted_share: float = 0.5, shuffled: int | None = None) -> Dataset:
    """`shuffled`: the seed of labels of which half are wanted in either kind of answer."""
    dice, rows = random.Random(seed + 1), []
    for question, sentences in made(count, seed):
        is_wanted = dice.random() < wanted_share
        answer = " ".join([*sentences[:2], dice.choice(COURTESIES) if is_wanted else sentences[2]])
        asked, answered = turn("user", question), turn("assistant", answer)
        rows.append({"prompt": asked, "completion": answered, "label": is_wanted, "was": is_wanted})
    if shuffled is not None:
        for kind in (True, False):
            same = [row for row in rows if row["was"] == kind]
            random.Random(shuffled).shuffle(same)
            for place, row in enumerate(same):
                row["label"] = place % 2 == 0
    return Dataset.from_list(rows).remove_columns("was")


def pairs(count: int, seed: int, turned: bool = False) -> Dataset:
    rows = []
    for question, sentences in made(count, seed):
        short, long = turn("assistant", sentences[0]), turn("assistant", " ".join(sentences))
        chosen, rejected = (long, short) if turned else (short, long)
        rows.append({"prompt": turn("user", question), "chosen": chosen, "rejected": rejected, "reference": chosen})
    return Dataset.from_list(rows)


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Share of (wanted, unwanted) pairs of rows in which the wanted one has the higher score; ties count half."""
    wanted, others = scores[labels == 1], scores[labels == 0]
    return float(np.mean((wanted[:, None] > others) + 0.5 * (wanted[:, None] == others)))


def trained(method: str, model: str, rows: Dataset, folder: Path, steps: int, **options: Any) -> Any:
    shared = {"max_steps": steps, "per_device_train_batch_size": 16, "logging_steps": 1, "save_strategy": "no"}
    shared |= {"learning_rate": 2e-4, "lr_scheduler_type": "constant", "report_to": "none", "verbosity": "quiet"}
    trainer = METHODS[method].trainer_class(
        model,
        args=METHODS[method].config_class(output_dir=str(folder), **shared, **options),
        train_dataset=rows,
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
    )
    trainer.train()
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def of_labels(method: str, model: str, folder: Path, steps: int) -> list[str]:
    held_out, found, controls = rated(120, seed=900), [], []
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "": ({}, {}),
        **{f"{SHUFFLED} {seed}": ({"shuffled": seed}, {}) for seed in range(SHUFFLES)},
    }
    if method == "kto":
        kinds["one wanted row in five, weighed 4"] = ({"wanted_share": 0.2}, {"desirable_weight": 4.0})
    for kind, (data, options) in kinds.items():
        trainer = trained(
            method, model, rated(300, seed=1, **data), folder / f"{method}-{kind or 'plain'}", steps, **options
        )
        judged = trainer.predict(held_out)
        area = area_under_curve(np.asarray(judged.predictions), np.asarray(judged.label_ids))
        sides = [f"{logged(trainer, f'rewards/{side}')[-1]:+.2f}" for side in ("chosen", "rejected")]
        more = (
            f", z at most {max(logged(trainer, 'kl')):.2f}"
            if method == "kto"
            else f", delta {logged(trainer, 'delta')[-1]:+.3f}"
        )
        found.append(f"{method} {kind}: held-out AUC {area:.3f}; last rewards {' and '.join(sides)}{more}")
        controls += [area] if kind.startswith(SHUFFLED) else []
    spread = np.std(controls, ddof=1) / len(controls) ** 0.5
    return [
        *found,
        f"{method} {SHUFFLED}: held-out AUC {np.mean(controls):.3f} +- {spread:.3f} over {SHUFFLES} shuffles",
    ]


def of_pairs(name: str, model: str, folder: Path, steps: int) -> list[str]:
    method, options = {
        "cpo": ("cpo", {}),
        "simpo": ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0}),
        "orpo": ("orpo", {}),
        "tpo": ("tpo", {"beta": 0.1}),
    }[name]
    held_out, found = pairs(80, seed=900), []
    for kind in ("", "turned round"):
        trainer = trained(
            method, model, pairs(200, 1, bool(kind)), folder / f"{name}-{kind or 'plain'}", steps, **options
        )
        with tempfile.TemporaryDirectory() as scratch:  # CPO's trainer with SimPO's loss ranks by mean log-probs
            ranking = CPOConfig(output_dir=scratch, loss_type="simpo", report_to="none", verbosity="quiet")
            judge = CPOTrainer(
                trainer.model, args=ranking, eval_dataset=held_out, processing_class=trainer.processing_class
            )
            judged = judge.evaluate()
        nll = logged(trainer, "nll_loss")
        found.append(
            f"{name} {kind}: held-out pairs in order {judged['eval_rewards/accuracies']:.3f}; nll {nll[0]:.3f} -> {nll[-1]:.3f}"
        )
    return found


def chains(count: int, words: dict[str, list[str]], seed: int, shuffled: bool = False) -> list[dict[str, Any]]:
    """Chains of three steps, each of which names the kind of a thing; each is wrong with probability 1/3."""
    dice, rows = random.Random(seed), []
    for _ in range(count):
        steps, labels = [], []
        for _ in range(3):
            kind, right = dice.choice(list(words)), dice.random() < 2 / 3
            named = kind if right else dice.choice([other for other in words if other != kind])
            steps.append(f"{dice.choice(words[kind])}: {named}")
            labels.append(dice.random() < 2 / 3 if shuffled else right)
        rows.append({"prompt": "Sort these words.\n", "completions": steps, "labels": labels})
    return rows


def of_steps(method: str, model: str, folder: Path, steps: int) -> list[str]:
    """Every weight is trained; words that are judged in the end were never seen with a label."""
    held_out = {kind: words.split()[:8] for kind, words in THINGS.items()}
    seen = {kind: words.split()[8:] for kind, words in THINGS.items()}
    batch, found = 16, []
    for kind in ("", SHUFFLED):
        options = {"max_steps": steps, "per_device_train_batch_size": batch, "learning_rate": 5e-5, "warmup_steps": 20}
        options |= {"lr_scheduler_type": "cosine", "logging_steps": 10, "save_strategy": "no", "report_to": "none"}
        trainer = PRMTrainer(
            model,
            args=PRMConfig(output_dir=str(folder / f"prm-{kind or 'plain'}"), verbosity="quiet", **options),
            train_dataset=Dataset.from_list(chains(steps * batch, seen, 1, bool(kind))),
            eval_dataset=Dataset.from_list(chains(200, held_out, 2)),
        )
        trainer.train()
        accuracy = trainer.evaluate()["eval_accuracy"]
        score = ProcessReward(trainer.model, trainer.processing_class, aggregate="min")
        gains = []
        for trial in range(100):
            eight = chains(8, held_out, 1000 + trial)
            texts = ["\n".join(chain["completions"]) + "\n" for chain in eight]
            best = int(np.argmax(score([chain["prompt"] for chain in eight], texts)))
            gains.append(float(all(eight[best]["labels"])) - float(all(eight[0]["labels"])))
        mean, error = np.mean(gains), np.std(gains, ddof=1) / len(gains) ** 0.5
        found.append(
            f"prm {kind}: held-out step accuracy {accuracy:.3f} (majority 0.667); best of 8 over first of 8 "
            f"{mean:+.3f} +- {error:.3f}, {mean / error:.1f} standard errors"
        )
    return found


RUNS = {**dict.fromkeys(("kto", "bco"), of_labels), **dict.fromkeys(("cpo", "simpo", "orpo", "tpo"), of_pairs)}
RUNS["prm"] = of_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=", ".join(RUNS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path("runs/offline"))
    asked = parser.parse_args()
    for name in asked.methods or RUNS:
        began = time.perf_counter()
        for line in RUNS[name](name, asked.model, asked.output, asked.steps):
            print(line, flush=True)
        print(f"  ({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
