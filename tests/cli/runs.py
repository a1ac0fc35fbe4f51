"""Small inputs of the command line's tests: a tiny model on disk, rows of every kind, and the command in this process."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from PIL import Image

from posttrain.cli.commands import sweep_file
from posttrain.cli.errors import UsageError
from posttrain.cli.main import main
from tests import tiny
from tests.methods import model_server
from tests.tiny_vision import vision_model


def data_url(number: int) -> str:
    """A small picture of one shade."""
    written = io.BytesIO()
    Image.new("RGB", (24, 16), (60 * number, 100, 100)).save(written, "PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


PAIRS = [{"prompt": f"What is {i}?", "chosen": f" It is {i}.", "rejected": " No."} for i in range(24)]
RATED = [
    {"prompt": f"What is {i}?", "completion": f" {i}." if i % 2 else " No.", "label": i % 2 == 1} for i in range(24)
]
QUESTIONS = [{"prompt": f"What is {i}?", "answer": str(i)} for i in range(24)]
ONLINE_METHODS = {
    "grpo": 4,
    "async_grpo": 4,
    "rloo": 4,
    "online_dpo": 2,
    "xpo": 2,
    "nash_md": 2,
    "ppo": 1,
    "a2po": 1,
    "sdpo": 4,
}
"""Method -> completions of a prompt."""
SERVED = ("server_distillation", "async_distillation")
ROWS = {
    "sft": [{"prompt": f"What is {i}?", "completion": f" It is {i}."} for i in range(24)],
    **dict.fromkeys(("dpo", "reward", "cpo", "orpo"), PAIRS),
    "tpo": [{**row, "reference": " It is so."} for row in PAIRS],
    **dict.fromkeys(("kto", "bco"), RATED),
    "prm": tiny.steps(24),
    "papo": [{"image": data_url(i), "prompt": [{"role": "user", "content": f"What is {i}?"}]} for i in range(4)],
    **dict.fromkeys((*ONLINE_METHODS, "distillation", *SERVED, "iw_opd", "minillm", "ssd"), QUESTIONS),
}
ROWS["gkd"] = ROWS["gold"] = ROWS["sft"]
ROWS["sdft"] = [{**row, "privileged_context": f"It is {row['answer']}."} for row in QUESTIONS]
TAUGHT = {"teacher_model_name_or_path": "model", "max_completion_length": 6}
UNREWARDED = {
    "gkd": TAUGHT,
    "gold": TAUGHT,
    "distillation": TAUGHT,
    "iw_opd": TAUGHT,
    "minillm": {**TAUGHT, "num_generations": 2},
    "ssd": {"max_completion_length": 6, "filter_empty": False},
    "sdft": {"max_completion_length": 6, "num_generations": 2},
}
"""Methods that write completions and need no reward -> their options."""
REWARD = '''
def length(completions, **columns):
    """Rewards that are different for different answers."""
    return [float(len(text)) for text in completions]


def said(completions, **columns):
    return [float(len(turns[-1]["content"])) for turns in completions]
'''
ONLINE = {"reward_funcs": ["rewards_of_test.py:length"], "max_completion_length": 6}
COMMON = {
    "max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "report_to": "none", "use_cpu": True,
    "save_strategy": "no", "logging_steps": 1,
}  # fmt: skip


def folder_with_inputs(folder: Path) -> Path:
    """`folder` with model/, METHOD.jsonl and rewards_of_test.py."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny.causal_lm().save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    for method, rows in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{method}.jsonl").write_text(text, encoding="utf-8")
    (folder / "rewards_of_test.py").write_text(REWARD, encoding="utf-8")
    return folder


def options_of(method: str) -> dict:
    """Options with which a method trains in a folder with inputs; a teacher's server is started, and ends with the test."""
    own = (
        {**ONLINE, "num_generations": ONLINE_METHODS[method]}
        if method in ONLINE_METHODS
        else UNREWARDED.get(method, {})
    )
    if method == "async_grpo":  # else time decides which group is trained first
        own |= {"async_order": "in_order", "async_lead": 1}
    if method in SERVED:
        teacher = tiny.causal_lm(1, vocab_size=320)  # as many rows as the student gets for its tokenizer
        teacher.save_pretrained("teacher")
        own = {**model_server.started(Path("teacher"), Path())[1], "max_completion_length": 6}
    if method == "papo":
        seeing = vision_model("llava")
        seeing.model.save_pretrained("seeing")
        seeing.processor.save_pretrained("seeing")
        own = {**ONLINE, "num_generations": 2, "reward_funcs": ["rewards_of_test.py:said"]}
    named = {
        "model_name_or_path": "seeing" if method == "papo" else "model",
        "dataset_name": f"{method}.jsonl",
        "output_dir": f"out-{method}",
    }
    return {**COMMON, **named, **own}


def flags(options: dict) -> list[str]:
    words = []
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        else:
            words += [f"--{name}", *([str(one) for one in value] if isinstance(value, list) else [str(value)])]
    return words


def posttrain(*words: str) -> int:
    return main(list(words))


def refuse_here(method: str, metric: str, trials: list, env: dict) -> None:
    """`sweep_file.refuse_impossible` without a process of its own, which costs an import of everything."""
    if problem := sweep_file.first_problem(method, metric, trials):
        raise UsageError(problem)
