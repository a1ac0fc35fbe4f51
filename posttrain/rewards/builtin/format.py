"""The text of a completion that is judged, and rewards for its form."""

from __future__ import annotations

import re
from typing import Any


def final_text(completion: str | list[dict[str, Any]]) -> str:
    """Text of a plain completion, or of the last assistant message with any (calls of tools come before it)."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        text = _content_text(message.get("content"))
        if text and message.get("role", "assistant") == "assistant":
            return text
    return ""


def _content_text(content: Any) -> str:
    if isinstance(content, list):  # blocks of text and images
        return "".join(block.get("text") or "" for block in content if isinstance(block, dict))
    return content or ""


# One <think> block at the very start, and something or nothing after it.
THINK = re.compile(r"<think>(?!.*<think>)(.*?)</think>.*", re.DOTALL)

# The same, then one <answer> block at the very end; neither kind of tag occurs a second time.
_INNER = r"(?:(?!</?think>|</?answer>).)*"
THINK_THEN_ANSWER = re.compile(rf"<think>{_INNER}</think>\s*<answer>{_INNER}</answer>\s*", re.DOTALL)


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1 where the completion starts with its only `<think>` block, else 0."""
    return [float(THINK.fullmatch(final_text(completion)) is not None) for completion in completions]


def answer_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1 where the completion is `<think>...</think>` followed by `<answer>...</answer>` and nothing else, else 0."""
    return [float(THINK_THEN_ANSWER.fullmatch(final_text(completion)) is not None) for completion in completions]
