"""Conversation: one chat as the renderer takes it, its images, and the error for one that cannot be rendered safely."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from posttrain.data.images.row_image import RowImage

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
IMAGE = "image"  # the type of a part of a content
TOOL_ROLE, USER_ROLE = "tool", "user"
"""Whose turn shows images that tools return."""


class RenderError(ValueError):
    """A chat for which there are no safe ids or no safe mask: a sentence that says why, and the rendered text."""

    def __init__(self, reason: str, rendered: str = "") -> None:
        super().__init__(f"{reason} The rendered text is:\n{rendered}" if rendered else reason)
        self.reason = reason
        self.rendered = rendered


@dataclass(frozen=True)
class Conversation:
    """One chat in OpenAI's style, and the other arguments of the template. Images are parts {"type": "image", "image": RowImage}.

    `num_prompt_messages` says, for prompt + completion data, how many of `messages` are the prompt. Where the prompt ends
    with an assistant message and the completion begins with one, the completion continues that message.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None
    num_prompt_messages: int | None = None
    untrained: frozenset[int] = frozenset()  # the assistant's messages that are context only (OpenAI's weight 0)


def is_assistant(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def assistant_turns(chat: Conversation, first: int = 0) -> list[int]:
    """Numbers of the assistant's messages, from message `first` on."""
    return [number for number in range(first, len(chat.messages)) if is_assistant(chat.messages[number])]


def as_parts(content: Any) -> Any:
    """A text as a list of one part, texts in a list as parts; anything else as it is."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return content


def is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == IMAGE


def images_by_message(messages: list[dict[str, Any]]) -> dict[int, list[RowImage]]:
    """The images of each message that has any, in the order of messages and parts."""
    found: dict[int, list[RowImage]] = {}
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for part in filter(is_image, content if isinstance(content, list) else ()):
            if not isinstance(part.get("image"), RowImage):
                raise RenderError(
                    f"Message {number} has an image part without an image that was opened: {str(part)[:200]}"
                )
            found.setdefault(number, []).append(part["image"])
    return found


def for_template(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates of vision-language models take them: contents are lists, and image parts have a type only.

    Some of those templates look at `content[0].type`, or walk through a text as if its characters were parts.
    """
    converted = []
    for message in messages:
        parts = as_parts(message.get("content"))
        if isinstance(parts, list):
            message = message | {"content": list(map(_bare, parts))}
        converted.append(message)
    return converted


def _bare(part: Any) -> Any:
    """An image or a text without other fields: a null 'image' beside a text, as Arrow has it, is an image to some templates."""
    if is_image(part):
        return {"type": IMAGE}
    is_text = isinstance(part, dict) and part.get("type") == "text" and "text" in part
    return {"type": "text", "text": part["text"]} if is_text else part


def join_completion(chat: Conversation) -> tuple[Conversation, int, list[str]]:
    """The chat, the number of the message the completion begins in, and the texts that the prompt has of that message.

    An assistant message at the end of the prompt and one at the start of the completion become one message.
    """
    count, messages = chat.num_prompt_messages, chat.messages
    if count is None or not 0 <= count < len(messages):
        raise RenderError(f"A completion needs num_prompt_messages below the {len(messages)} messages, not {count}.")
    if not is_assistant(messages[count]):
        raise RenderError(
            f"The completion begins with a message of {messages[count].get('role')!r}, not the assistant's."
        )
    if count == 0 or not is_assistant(messages[count - 1]):
        return chat, count, []
    opening, continuation = messages[count - 1], messages[count]
    contents = [message.get("content") for message in (opening, continuation)]
    begun, more = (as_parts(content) if isinstance(content, (str, list)) else [] for content in contents)
    if not (begun and more and _said(begun[-1]) and _said(more[0])) or opening.get("tool_calls"):
        raise RenderError(
            "The prompt ends with an assistant message that the completion continues; both must have a text as content "
            "(or the first end and the second begin with one), and the first no tool calls."
        )
    edge = _said(begun[-1]) + _said(more[0])
    is_text = all(isinstance(content, str) for content in contents)
    content = edge if is_text else [*begun[:-1], begun[-1] | {"text": edge}, *more[1:]]
    whole = opening | continuation | {"content": content}
    joined = [*messages[: count - 1], whole, *messages[count + 1 :]]
    texts = [text for text in map(_said, begun) if text]
    return replace(chat, messages=joined, num_prompt_messages=count - 1), count - 1, texts


def _said(part: Any) -> str:
    """The text of a part; none where it is an image."""
    text = part.get("text") if isinstance(part, dict) else None
    return text if isinstance(text, str) else ""


def with_renamed_calls(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[tuple[int, str, str]]]:
    """The messages with other names and arguments in the assistant's tool calls, and (message, what, its new text) of each."""
    changed, renamed = list(messages), []
    for number, message in enumerate(messages):
        if not is_assistant(message) or not isinstance(message.get("tool_calls"), list):
            continue
        calls = []
        for place, call in enumerate(message["tool_calls"]):
            function = call.get("function", call) if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                other, found = _renamed(function, f"{number}x{place}")
                renamed += [(number, what, probe) for what, probe in found]
                call = call | {"function": other} if "function" in call else other
            calls.append(call)
        changed[number] = message | {"tool_calls": calls}
    return changed, renamed


def _renamed(function: dict[str, Any], place: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    name, arguments = function["name"], function.get("arguments")
    probes = [(f"the call of the tool {name!r}", f"called{place}")]
    other = function | {"name": probes[0][1]}
    if isinstance(arguments, dict) and arguments:
        key = next(iter(arguments))
        probes.append((f"the argument {key!r} of the tool {name!r}", f"argued{place}"))
        other["arguments"] = arguments | {key: probes[-1][1]}
    return other, probes


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with the arguments of tool calls as JSON texts; None if none of them are mappings."""
    changed = [
        message | {"tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]
    return changed if changed != messages else None


def _with_text_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return call | {"function": function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
