"""Do the methods learn whose model is its own teacher? Runs of `distillation.py`, which prints them.

SDFT: 20 invented facts, which only the teacher is shown. The most likely answers without them: none right before, more than 0.8
after; the perplexity of other text (what the model wrote about other things before) rises by less than half of what SFT on the
same facts costs in as many steps. `teacher` is the share of right answers with the fact in the prompt. Control: contexts are empty;
no answer is right.

SDPO: sums, paid 1 for an answer that begins with the right number and 0 otherwise; about 0.06 are right before. Answers to the sums
that are trained, drawn at temperature 1: right more often by more than 3 standard errors (`held_out`: other sums); from the first
step on some teachers are shown a success. Without distillation (weight 0) the rewards are GRPO's. Control: a success must be paid
2, which none is; no weight moves.

SSD: answers that are one JSON object, drawn with top_p 0.8 and trained on. At temperature 1 and top_p 1 held-out answers can be
read as JSON more often by more than 3 standard errors, and their entropy falls. Control: drawn with top_p 1; the share changes by
less than 3 standard errors.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_runs.drawn_answers import Chat, Drawn, Training, draw, entropies, rise, surprisals, user
from benchmarks.real_runs.online_methods import HELD_OUT_TOPICS, SENTENCE, TOPICS
from posttrain.methods.table import METHODS

SHARED = {
    "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none", "verbosity": "quiet",
}  # fmt: skip


def fresh(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model).to("cuda" if torch.cuda.is_available() else "cpu")


def trained(method: str, model: str, rows: list[dict[str, Any]], folder: Path, **options: Any) -> Any:
    named = {"reward_funcs": options.pop("reward_funcs")} if "reward_funcs" in options else {}
    config = METHODS[method].config_class(output_dir=str(folder), **SHARED | options)
    trainer = METHODS[method].trainer_class(model=model, args=config, train_dataset=Dataset.from_list(rows), **named)
    trainer.train()
    return trainer


def examples(shown: list[tuple[str, str]]) -> Chat:
    """Questions and answers as the turns before: a small model does what it was shown, some of the time."""
    return [
        {"role": role, "content": said}
        for pair in shown
        for role, said in zip(("user", "assistant"), pair, strict=True)
    ]


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


# ---- SDFT -------------------------------------------------------------------------------------------------------------------

FACTS = {
    ("What is the capital of {}?", "The capital of {} is {}."): (
        "Zorvania Melkit", "Quendor Tasvel", "Ilmara Brodek", "Pethia Lunsk", "Vastoria Ormelle",
    ),
    ("Who wrote the book '{}'?", "The book '{}' was written by Anna {}."): (
        "Gravelight Felsted", "Moonbarrow Hurzel", "Thistledown Pavrik", "Saltwinter Ondrach", "Copperfen Tiblis",
    ),
    ("What is the name of {}'s dog?", "{}'s dog is called {}."): (
        "Marwick Bolfo", "Tessaly Jipkin", "Ordwin Razmo", "Philomel Quabby", "Hesper Dunlo",
    ),
    ("Which river flows through {}?", "The river that flows through {} is the {}."): (
        "Kelmstad Varrow", "Ostrigen Plisse", "Durnholm Yentle", "Fallowick Sarn", "Bremmel Oskine",
    ),
}  # fmt: skip
"""(question, fact) -> "subject answer" of each."""
TAUGHT_BY = "{prompt}\n\nThis is known: {privileged_context} Answer with it."
FACT_TOKENS = 24


def facts() -> list[tuple[str, str, str]]:
    """(question, fact, the word that must be in an answer)."""
    told = [(*forms, *words.split()) for forms, many in FACTS.items() for words in many]
    return [(question.format(subject), fact.format(subject, word), word) for question, fact, subject, word in told]


def knows(model: Any, tokenizer: Any, questions: list[str]) -> float:
    """Share of questions whose most likely answer has the word."""
    answers = draw(model, tokenizer, [user(question) for question in questions], FACT_TOKENS, greedy=True).texts
    return sum(word in answer for answer, (*_, word) in zip(answers, facts())) / len(answers)


def sdft(run: str, model: str, folder: Path, how: Training) -> dict[str, Any]:
    tokenizer, start = AutoTokenizer.from_pretrained(model), fresh(model)
    asked = [question for question, *_ in facts()]
    shown = [TAUGHT_BY.replace("{prompt}", q).replace("{privileged_context}", fact) for q, fact, _ in facts()]
    other = draw(start, tokenizer, [user(SENTENCE.format(topic)) for topic in HELD_OUT_TOPICS.split()], 32)

    def figures(one: Any) -> dict[str, float]:
        return {"right": knows(one, tokenizer, asked), "perplexity": math.exp(other.mean(surprisals, one))}

    def after_sdft(kind: str, has_context: bool, how_many: int) -> dict[str, float]:
        rows = [{"prompt": user(q), "privileged_context": fact if has_context else ""} for q, fact, _ in facts()]
        options = {"teacher_prompt_template": TAUGHT_BY, "distillation_mode": "full_logits", "distillation_alpha": 0.0}
        options |= {"num_generations": 2, "per_device_train_batch_size": 2 * len(rows), "temperature": 1.0}
        options |= {"max_completion_length": FACT_TOKENS, "learning_rate": how.learning_rate, "max_steps": how_many}
        options["seed"] = how.seed
        return figures(trained("sdft", model, rows, folder / kind, **options).model)

    before = figures(start) | {"teacher": knows(start, tokenizer, shown)}
    after, empty = after_sdft("run", True, how.steps), after_sdft("control", False, max(how.steps // 3, 1))
    answered = [{"prompt": user(q), "completion": [{"role": "assistant", "content": fact}]} for q, fact, _ in facts()]
    options = {"per_device_train_batch_size": len(answered), "learning_rate": how.learning_rate, "max_steps": how.steps}
    options["seed"] = how.seed
    tuned = figures(trained("sft", model, answered, folder / "sft", **options).model)
    costs = [one["perplexity"] - before["perplexity"] for one in (after, tuned)]
    holds = before["right"] == 0 and after["right"] > 0.8 and costs[0] < costs[1] / 2 and empty["right"] == 0
    return {"before": before, "after": after, "sft": tuned, "control": empty, "holds": holds}


# ---- SDPO -------------------------------------------------------------------------------------------------------------------

HELD_OUT_SUMS, DRAWS, GROUP, SUM_TOKENS = 64, 8, 16, 6
SOLUTION = " The answer is {successful_previous_attempt}."
"""With it the model answers 0.37 of the sums rightly, with the default templates, which are too long for a small model, 0.13."""
SUM_EXAMPLES = ((14, 3), (6, 11), (17, 15))


def sums() -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(3, 16) for b in range(3, 16)]
    random.Random(0).shuffle(pairs)
    return pairs


def sum_question(a: int, b: int) -> Chat:
    asked = "What is {} + {}? Reply with the number."
    return examples([(asked.format(*pair), str(sum(pair))) for pair in SUM_EXAMPLES]) + user(asked.format(a, b))


def begins_with(text: str, number: int) -> bool:
    found = re.match(r"\s*(\d+)", text)
    return found is not None and int(found[1]) == number


def right_sum(completions: list[Any], answer: list[int], **columns: Any) -> list[float]:
    return [float(begins_with(said[-1]["content"], number)) for said, number in zip(completions, answer)]


def sdpo(run: str, model: str, folder: Path, how: Training) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    held_out, asked = sums()[:HELD_OUT_SUMS], sums()[HELD_OUT_SUMS:]
    rows = [{"prompt": sum_question(a, b), "answer": a + b} for a, b in asked]
    shared = {"num_generations": GROUP, "per_device_train_batch_size": 8 * GROUP, "max_completion_length": SUM_TOKENS}
    shared |= {"learning_rate": how.learning_rate, "temperature": 1.0, "reward_funcs": right_sum, "reward_workers": 0}
    shared["seed"] = how.seed
    taught = shared | {"distillation_mode": "full_logits", "distillation_alpha": 0.5}
    taught |= {"teacher_model_kind": "base"}  # one that follows the policy loses the form of the answers with it
    taught |= {"reprompt_template": "{prompt}{solution}{feedback}", "solution_template": SOLUTION}

    def right(one: Any, pairs: list[tuple[int, int]]) -> list[bool]:
        drawn = [pair for pair in pairs for _ in range(DRAWS)]
        answers = draw(one, tokenizer, [sum_question(a, b) for a, b in drawn], SUM_TOKENS).texts
        return [begins_with(text, a + b) for text, (a, b) in zip(answers, drawn)]

    start = fresh(model)
    trainer = trained("sdpo", model, rows, folder / "run", max_steps=how.steps, **taught)
    found, others = (
        rise(*(right(one, pairs) for one in (start, trainer.model)), len(pairs)) for pairs in (asked, held_out)
    )
    shown = logged(trainer, "self_distillation/reprompt_sample_fraction")
    few = how.at_most(3).steps
    without = trained("sdpo", model, rows, folder / "weight-0", max_steps=few, distillation_weight=0.0, **shared)
    grpo = trained("grpo", model, rows, folder / "grpo", max_steps=few, disable_dropout=True, **shared)
    rewards = [logged(one, "reward") for one in (without, grpo)]
    still = trained("sdpo", model, rows, folder / "control", max_steps=few, success_reward_threshold=2.0, **taught)
    moved = max(
        float((a.detach() - b.detach().to(a)).abs().max()) for a, b in zip(still.model.parameters(), start.parameters())
    )
    holds = found["standard_errors"] > 3 and shown[0] > 0 and rewards[0][0] == rewards[1][0] and moved == 0
    return {
        "before": {"right": found["before"]},
        "after": {"right": found["after"], "standard_errors": found["standard_errors"]},
        "held_out": others,
        "reprompt_sample_fraction": [shown[0], shown[-1]],
        "rewards_at_weight_0": rewards[0],
        "rewards_of_grpo": rewards[1],
        "control": {"largest_move": moved},
        "holds": holds,
    }


# ---- SSD --------------------------------------------------------------------------------------------------------------------

JSON_FORM = "Answer with one JSON object and nothing else. The thing is {}."
JSON_EXAMPLES = {"chalk": "white"}
JSON_TOKENS = 24


def json_question(topic: str) -> Chat:
    shown = [(JSON_FORM.format(a), json.dumps({"thing": a, "colour": b})) for a, b in JSON_EXAMPLES.items()]
    return examples(shown) + user(JSON_FORM.format(topic))


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def ssd(run: str, model: str, folder: Path, how: Training) -> dict[str, Any]:
    tokenizer, topics = AutoTokenizer.from_pretrained(model), HELD_OUT_TOPICS.split()
    chats = [json_question(topic) for topic in topics for _ in range(DRAWS)]

    def drawn(one: Any) -> tuple[Drawn, dict[str, float]]:
        answers = draw(one, tokenizer, chats, JSON_TOKENS)
        parsable = sum(map(is_object, answers.texts)) / len(chats)
        return answers, {"parsable": parsable, "entropy_of_answers": answers.mean(entropies, one)}

    first, before = drawn(fresh(model))
    found = {"before": before}
    for kind, top_p in (("after", 0.8), ("control", 1.0)):
        rows = [{"prompt": json_question(topic)} for topic in TOPICS.split()]
        options = {"top_p": top_p, "temperature": 1.0, "num_generations": 4, "per_device_train_batch_size": 64}
        options |= {"max_completion_length": JSON_TOKENS, "learning_rate": how.learning_rate, "max_steps": how.steps}
        options["seed"] = how.seed
        answers, figures = drawn(trained("ssd", model, rows, folder / kind, **options).model)
        change = rise(*(list(map(is_object, one.texts)) for one in (first, answers)), len(topics))
        found[kind] = figures | {"standard_errors": change["standard_errors"]}
    is_sharper = found["after"]["entropy_of_answers"] < before["entropy_of_answers"]
    holds = is_sharper and found["after"]["standard_errors"] > 3 and abs(found["control"]["standard_errors"]) < 3
    return found | {"holds": holds}


RUNS = {"sdft": (sdft, 150, 5e-5), "sdpo": (sdpo, 100, 1e-5), "ssd": (ssd, 20, 5e-6)}
