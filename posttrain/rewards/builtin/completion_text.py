"""The text of a completion that is judged: all of a plain one, the last message of a conversation."""

from __future__ import annotations

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
