"""Runs whose tools and environments return images. A grammar makes tiny models call them in every turn."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.tiny_vision import BUILDERS
from tests.trainer.resumable_run import checksum
from tests.trainer.vision_runs import PICTURES, question, trainer_of

CALL = '<tool_call>\n{"name": "draw", "arguments": {"number": #}}\n</tool_call>'
SIDES = ((60, 40), (30, 90), (50, 50))


def draw(number: int) -> Image.Image:
    """
    Draw a picture.

    Args:
        number: Which one.
    """
    random = np.random.default_rng(number)
    return Image.fromarray(random.integers(0, 256, (*SIDES[number % 3], 3), dtype=np.uint8))


def deadly_draw(last: int) -> Any:
    """`draw`, whose call number `last` kills the process."""
    calls = itertools.count(1)

    def draw_or_die(number: int) -> Image.Image:
        """
        Draw a picture.

        Args:
            number: Which one.
        """
        if next(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(number)

    draw_or_die.__name__ = "draw"
    return draw_or_die


class Room:
    """An environment that is looked at."""

    def reset(self, **row: Any) -> list[str | Image.Image]:
        return ["You see ", draw(7), "."]

    def draw(self, number: int) -> list[dict[str, Any]]:
        """
        Draw a picture.

        Args:
            number: Which one.
        """
        return [{"type": "text", "text": "Here: "}, {"type": "image", "image": draw(number)}]


def with_tools(mark: str, drops_images: bool = False) -> str:
    """ChatML with tools, written for models that see; one that `drops_images` of tools, as most do."""
    in_tools = "" if drops_images else mark
    return (
        "{% macro shown(content, mark) %}{% if content is string %}{{ content }}{% else %}{% for p in content %}"
        "{% if p.type == 'image' %}{{ mark }}{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
        "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ shown(m.content, '" + in_tools + "' if m.role == 'tool' else '" + mark + "') }}{% for call in m.tool_calls or [] %}"
        "{{ '<tool_call>\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) "
        "+ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )  # fmt: skip


def template_file(family: str, folder: Path, drops_images: bool = False) -> str:
    mark = BUILDERS[family](family, {})[3]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tools.jinja").write_text(with_tools(mark, drops_images))
    return str(folder / "tools.jinja")


class CallGrammar:
    """In the place of that of outlines-core, which need not be installed: every turn is CALL with a digit that is drawn."""

    def __init__(self, params: Any, decode: Any, vocabulary: int) -> None:
        texts = {decode([token]): token for token in reversed(range(vocabulary))}
        digits = [texts[digit] for digit in "0123456789"]
        allowed = [digits if letter == "#" else [texts[letter]] for letter in CALL] + [list(params.stop_ids)]
        self.masks = torch.zeros(len(allowed) + 1, vocabulary, dtype=torch.bool)
        for place, tokens in enumerate([*allowed, list(params.stop_ids)]):
            self.masks[place, tokens] = True

    def reader(self) -> CallReader:
        return CallReader(self.masks)


class CallReader:
    def __init__(self, masks: torch.Tensor) -> None:
        self.masks, self.place = masks, 0

    def allowed(self) -> torch.Tensor:
        return self.masks[min(self.place, len(self.masks) - 1)]

    def take(self, token: int) -> None:
        self.place += 1


OPTIONS: dict[str, Any] = {
    "num_generations": 2,
    "max_completion_length": 500,
    "per_device_train_batch_size": 4,
    "max_tool_calling_iterations": 2,
    "reward_workers": 0,
    "beta": 0.1,
    "vllm_structured_outputs_regex": CALL.replace("#", "[0-9]"),
}


NOT_TAKEN = {"ppo": ("num_generations", "beta")}


def tool_trainer(family: str, folder: Path, *, drops_images: bool = False, method: str = "grpo", **options: Any) -> Any:
    """A trainer whose model looks at two drawings in every episode; every second prompt has an image of its own."""
    made = OPTIONS | {"chat_template_path": template_file(family, folder, drops_images)}
    if "environment_factory" not in options:
        made |= {"tools": [draw]}
    made |= {"reward_funcs": checksum, "train_dataset": prompts()}
    made = {name: value for name, value in made.items() if name not in NOT_TAKEN.get(method, ())}
    return trainer_of(method, family, folder, torch.float32, **made | options)


def prompts() -> list[dict[str, Any]]:
    asked = [question("Draw one."), question("Like this?", PICTURES[0])]
    return [{"prompt": [asked[number % 2]], "nth": number} for number in range(4)]
