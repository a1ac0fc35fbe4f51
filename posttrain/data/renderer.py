"""Renderer: conversations or plain text -> token ids and the exact mask of trained tokens; token ids -> message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.core.sample import Sample


@dataclass(frozen=True)
class Conversation:
    """One chat as OpenAI-style messages, and what the template is told besides."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    num_prompt_messages: int | None = None


class RenderError(ValueError):
    """A chat that has no safe ids or mask: a sentence that says why, and the rendered text."""

    def __init__(self, reason: str, rendered: str = "") -> None:
        super().__init__(reason)
        self.reason, self.rendered = reason, rendered


class Renderer:
    def __init__(
        self, tokenizer: Any, chat_template: str | None = None, *, allow_control_tokens_in_content: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template or tokenizer.chat_template
        self.has_template = self.chat_template is not None
        self.fingerprint = ""

    def encode_texts(self, texts: list[str], add_special_tokens: bool = True) -> list[np.ndarray]:
        raise NotImplementedError

    def count_control_tokens(self, texts: list[str]) -> int:
        raise NotImplementedError

    def encode_chats(self, chats: list[Conversation], train: str) -> list[Sample | RenderError]:
        raise NotImplementedError

    def render(self, chat: Conversation, add_generation_prompt: bool = False) -> str:
        raise NotImplementedError

    def encode_prompts(self, chats: list[Conversation]) -> list[np.ndarray | RenderError]:
        raise NotImplementedError

    def parse(self, ids: Any) -> dict[str, Any]:
        raise NotImplementedError

    def probe(self) -> list[str]:
        raise NotImplementedError
