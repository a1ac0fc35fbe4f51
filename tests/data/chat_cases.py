"""The templates and the conversation shapes that the golden set covers."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.render.renderer import Conversation
from posttrain.data.render.templates import BUILT_IN_FORMATS

GOLDEN = Path(__file__).parent / "golden" / "trained_spans.json"

# Chat template of HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0), as its GGUF file carries it.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a "
    "helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\n' }}{% endif %}"
)

WHEEL = "trl-1.16.0-py3-none-any.whl"
REAL_FAMILIES = (
    "qwen2_5",
    "qwen3",
    "qwen3_6",
    "llama3",
    "llama3_1",
    "llama3_2",
    "gemma",
    "gemma3",
    "gemma4_v5",
    "phi3",
    "glm4moe",
    "deepseekv3",
    "deepseek_r1_distill",
    "gptoss",
    "cohere",
    "cohere2",
    "lfm2_v2",
    "nemotron_3_nano",
)
TEMPLATES = (*(f"built-in {name}" for name in BUILT_IN_FORMATS), "smollm2", *REAL_FAMILIES)


@cache
def trl_wheel() -> Path:
    """The wheel whose chat templates of real families are read. Downloaded into a cache, never installed."""
    cache_folder = Path(os.environ.get("POSTTRAIN_TEST_CACHE", Path.home() / ".cache" / "posttrain-tests"))
    wheel = cache_folder / WHEEL
    if not wheel.is_file():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "trl==1.16.0",
            "-d",
            str(cache_folder),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode or not wheel.is_file():
            pytest.skip(f"{WHEEL} is not in {cache_folder}, and pip cannot download it: {done.stderr.strip()[-300:]}")
    return wheel


@cache
def template_text(name: str) -> str:
    if name == "smollm2":
        return SMOLLM2
    if name.startswith("built-in "):
        return BUILT_IN_FORMATS[name.removeprefix("built-in ")].template
    with zipfile.ZipFile(trl_wheel()) as archive:
        return archive.read(f"trl/chat_templates/{name}.jinja").decode()


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def thought(reasoning: str, content: str) -> dict[str, Any]:
    """Reasoning under both names: some templates know it as `thinking`, and some transformers fill in the other name."""
    return said(content, reasoning_content=reasoning, thinking=reasoning)


def call(name: str, number: int, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": f"call0000{number}", "function": {"name": name, "arguments": arguments}}


def result(name: str, number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": f"call0000{number}", "content": content}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a place.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "Name of the place."},
                    "days": {"type": "integer", "description": "How many days ahead."},
                },
                "required": ["place"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "You are brief."}
LONG = "A long answer goes on and on. " * 150 + "End"
CALL = said("", tool_calls=[call("get_weather", 1, place="Paris", days=3)])
TWO_CALLS = [call("get_weather", 1, place="Paris"), call("get_weather", 2, place="Lima")]

SHAPES: dict[str, Conversation] = {
    "single turn": Conversation([user("Hi"), said("Hello.")]),
    "with system": Conversation([SYSTEM, user("Hi"), said("Hello.")]),
    "two turns": Conversation([user("One?"), said("First."), user("Two?"), said("Second.")]),
    "three turns": Conversation(
        [SYSTEM, user("One?"), said("First."), user("Two?"), said("Second."), user("Three?"), said("Third.")]
    ),
    "tool call, result, answer": Conversation(
        [user("Weather?"), CALL, result("get_weather", 1, "22 degrees"), said("It is warm.")], TOOLS
    ),
    "parallel tool calls": Conversation(
        [
            user("Weather?"),
            said("", tool_calls=TWO_CALLS),
            result("get_weather", 1, "22"),
            result("get_weather", 2, "18"),
            said("Paris is warmer."),
        ],
        TOOLS,
    ),
    "text and tool call at the end": Conversation(
        [user("Weather?"), said("I look it up.", tool_calls=[call("get_weather", 1, place='Zürich "Nord"')])], TOOLS
    ),
    "tool call at the end": Conversation([user("Weather?"), CALL], TOOLS),
    "reasoning": Conversation([user("2 + 2?"), thought("Two and two make four.", "4")]),
    "reasoning in an earlier turn": Conversation(
        [
            user("2 + 2?"),
            thought("Two and two make four.", "4"),
            user("3 + 3?"),
            thought("Three and three make six.", "6"),
        ]
    ),
    "think tags in the content": Conversation([user("2 + 2?"), said("<think>\nEasy.\n</think>\n\n4")]),
    "assistant first": Conversation([said("How can I help?"), user("Hi"), said("Hello.")]),
    "ends on user": Conversation([user("One?"), said("First."), user("Two?")]),
    "unicode": Conversation([user("Grüße 你好 🙂?"), said("¡Olé! 世界 👩‍👩‍👧 ok 🙂")]),
    "very long": Conversation([user("Tell me a story. " * 150), said(LONG)]),
    "white space around the answer": Conversation([user("Code?"), said("\n  print(1)\n")]),
    "white space around the question": Conversation([user("\n  Code?  \n"), said("print(1)")]),
    "text blocks": Conversation(
        [
            user([{"type": "text", "text": "One. "}, {"type": "text", "text": "Two?"}]),
            said([{"type": "text", "text": "First. "}, {"type": "text", "text": "Second."}]),
        ]
    ),
    "empty answer": Conversation([user("Say nothing."), said(""), user("Thanks."), said("Welcome.")]),
    "question repeats the answer": Conversation([user("Say Hello."), said("Hello."), user("Hello."), said("Hello.")]),
}
