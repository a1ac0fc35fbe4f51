"""What can be wrong with a conversation: with each message, with the order of turns, with tools; and its clean form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from posttrain.data.images.row_image import RowImage
from posttrain.data.rows.checks import Finding, check_characters, describe, without_nones
from posttrain.data.rows.foreign_formats import SHAREGPT_ROLES

SYSTEM_ROLES = ("system", "developer")
TOOL_ROLES = ("tool", "ipython")
ROLES = (*SYSTEM_ROLES, "user", "assistant", *TOOL_ROLES)
MESSAGE_KEYS = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "thinking", "reasoning", "reasoning_content", "channel")
    + ("recipient", "content_type", "tool_plan", "citations", "documents", "weight")
)
IMAGE_BLOCKS = frozenset(("image", "image_url", "input_image"))
MEDIA_BLOCKS = frozenset(("video", "video_url", "input_video", "audio", "audio_url", "input_audio"))
FOR_TEXT_MODEL = "images_for_text_model"
NO_VISION = "the model reads text only: choose one that sees images"
Refuse = Callable[[str, str], Any]
"""(kind, the rest of a sentence that begins with the place of the message) -> a finding."""
BLANK_USER = "blank_user"
"""A user's turn without words: the only finding that leaves a message usable (see PrepareOptions.allow_blank_prompts)."""
CALL_IN_TEXT = re.compile(r'tool_call|<function|<\|python_tag\|>|\[TOOL|"name"\s*:|functions\.|Action\s*:')


def read_messages(
    value: Any, column: str, found: list[Finding], unknown_keys: set[tuple[str, str]] | None = None
) -> list[dict[str, Any]] | None:
    """A list of messages in the one form that templates take: text content, tool arguments as dicts, no None.

    None when a message has no usable form; the reason is then in `found`. Order of turns is `check_turns`'s business.
    Keys of messages that no template knows are added to `unknown_keys`, as (column, key).
    """
    if isinstance(value, dict):
        value = [value]  # a single message, as in several preference sets
    if value is None:
        found.append(Finding("null", column, "is missing or null, a list of messages is needed"))
        return None
    if not isinstance(value, list):
        found.append(Finding("wrong_type", column, f"is {describe(value)}, a list of messages is needed"))
        return None
    if not value:
        found.append(Finding("empty", column, "is an empty list, at least one message is needed"))
        return None
    before = len(found)
    messages = [_read_message(message, f"message {i}", column, found) for i, message in enumerate(value)]
    if any(finding.kind != BLANK_USER for finding in found[before:]):
        return None
    if unknown_keys is not None:
        for message in messages:
            if not message.keys() <= MESSAGE_KEYS:
                unknown_keys.update((column, str(key)) for key in message.keys() - MESSAGE_KEYS)
    return messages


def _read_message(message: Any, place: str, column: str, found: list[Finding]) -> dict[str, Any]:
    def refuse(kind: str, reason: str) -> dict[str, Any]:
        found.append(Finding(kind, column, f"{place}{reason}"))
        return {}

    if not isinstance(message, dict):
        return refuse("message_not_dict", f" is {describe(message)}, not a dict with 'role' and 'content'")
    clean = {key: without_nones(item) for key, item in message.items() if item is not None}
    role = clean.get("role")
    if role is None:
        if "from" in clean and "value" in clean:
            return refuse("mixed_message_keys", " has the keys 'from' and 'value' (ShareGPT) where 'role' is used")
        return refuse("missing_role", f" has no 'role'; its keys are {_listed(clean) or 'none'}")
    if not isinstance(role, str):
        return refuse("wrong_type", f" has the role {describe(role)}, text is needed")
    plain = role.strip().lower()
    if plain == "function" or plain in ROLES:
        clean["role"] = role = "tool" if plain == "function" else plain  # `function` is OpenAI's older name
    if role not in ROLES:
        hint = f" (write {SHAREGPT_ROLES[plain]!r})" if plain in SHAREGPT_ROLES else ""
        return refuse("unknown_role", f" has the role {role!r}{hint}; roles are {', '.join(ROLES)}")
    weight = clean.pop("weight", 1)
    if weight not in (0, 1) or (weight == 0 and role != "assistant"):
        return refuse(
            "weight", f" ({role}) has the weight {weight!r}; 0 (not trained) and 1 are read, of the assistant's turns"
        )
    if weight == 0:
        clean["weight"] = 0
    _read_tool_calls(clean, refuse)
    _read_content(clean, role, refuse)
    return clean


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(str(name)) for name in names)


def _read_content(message: dict[str, Any], role: str, refuse: Refuse) -> None:
    """Make `content` text. Lists of blocks are joined; an answer that only calls tools has none.

    With images it is a list of parts, each a text or an image.
    """
    content = message.get("content")
    if isinstance(content, list):
        parts = _read_blocks(content, refuse)
        if parts is None:
            return
        has_images = any("image" in part for part in parts)
        content = "".join(part.get("text", "") for part in parts)
        message["content"] = parts if has_images else content
        if has_images:
            _check_characters(content, refuse)
            return
    if content is None:
        if not (role == "assistant" and _speaks_otherwise(message)):
            refuse("missing_content", f" ({role}) has no 'content', or it is null")
            return
        message["content"] = content = ""
    if not isinstance(content, str):
        refuse("wrong_type", f" has as content {describe(content)}, text is needed")
    elif not content or content.isspace():
        if role == "user" or (role == "assistant" and not _speaks_otherwise(message)):
            what = "holds only white space" if content else "is empty"
            refuse(f"blank_{role}", f": the content of the {role} turn {what}")
    else:
        _check_characters(content, refuse)


def _check_characters(text: str, refuse: Refuse) -> None:
    if "\x00" in text or not text.isascii():
        details: list[Finding] = []
        check_characters(text, "", details)
        for kind, _, reason in details:
            refuse(kind, f" {reason}")


def content_text(message: dict[str, Any]) -> str:
    """What a clean message says, without its images."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _speaks_otherwise(message: dict[str, Any]) -> bool:
    """Whether an answer without content calls tools or holds reasoning."""
    thoughts = (message.get(key) for key in ("thinking", "reasoning", "reasoning_content"))
    return "tool_calls" in message or any(isinstance(text, str) and text.strip() for text in thoughts)


def _read_blocks(blocks: list[Any], refuse: Refuse) -> list[dict[str, Any]] | None:
    """Content parts, neighbouring texts joined; None with a finding where a block is neither text nor an image."""
    parts: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        kind = block.get("type", "text" if "text" in block else None) if isinstance(block, dict) else None
        text = block if isinstance(block, str) else block.get("text") if isinstance(block, dict) else None
        if kind in MEDIA_BLOCKS:
            refuse("media", f" holds a block of type {kind!r}; videos and audio are not supported, images and text are")
            return None
        if kind in IMAGE_BLOCKS and not isinstance(block.get("image"), RowImage):
            refuse(FOR_TEXT_MODEL, f" holds a block of type {kind!r}, and {NO_VISION}, or remove the images")
            return None
        if kind in IMAGE_BLOCKS:
            parts.append({"type": "image", "image": block["image"]})
        elif not isinstance(text, str) or kind not in (None, "text", "input_text", "output_text"):
            refuse("bad_block", f": content block {i} is {describe(block)}, not {{'type': 'text', 'text': ...}}")
            return None
        elif parts and "text" in parts[-1]:
            parts[-1]["text"] += text
        else:
            parts.append({"type": "text", "text": text})
    return parts


def _read_tool_calls(message: dict[str, Any], refuse: Refuse) -> None:
    """Tool calls as [{"type": "function", "function": {"name", "arguments": dict}}]; JSON text becomes a dict."""
    legacy = message.pop("function_call", None)
    if legacy is not None and "tool_calls" not in message:
        message["tool_calls"] = [{"type": "function", "function": legacy}]
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        refuse("tool_calls_not_list", f": 'tool_calls' is {describe(calls)}, not a list")
    elif not calls:
        del message["tool_calls"]
    elif message["role"] != "assistant":
        refuse("tool_calls_role", f": a {message['role']} turn has 'tool_calls'; only the assistant calls tools")
    else:
        read = [_read_tool_call(call) for call in calls]
        wrong = next((i for i, (_, reason) in enumerate(read) if reason), None)
        if wrong is not None:
            refuse("bad_tool_call", f": tool call {wrong} {read[wrong][1]}")
        else:
            message["tool_calls"] = [clean for clean, _ in read]


def _read_tool_call(call: Any) -> tuple[dict[str, Any], str | None]:
    if not isinstance(call, dict):
        return {}, f"is {describe(call)}, not a dict"
    function = call.get("function", call if "name" in call else None)
    if not isinstance(function, dict):
        return {}, f"has no 'function'; its keys are {_listed(call) or 'none'}"
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        return {}, "has no function name"
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            return {}, f"({name}) has arguments that are not JSON ({error}): {describe(arguments)}"
    if not isinstance(arguments, dict):
        return {}, f"({name}) has as arguments {describe(arguments)}, a dict (or its JSON text) is needed"
    outer = {key: item for key, item in call.items() if key not in ("name", "arguments", "function")}
    return {"type": "function", **outer, "function": {**function, "arguments": arguments}}, None


def check_turns(
    messages: list[dict[str, Any]], column_of: Callable[[int], str], found: list[Finding], answer_from: int | None = 0
) -> None:
    """The order of turns of one conversation; reports the first turn that cannot stand where it stands.

    `answer_from` is the message from which on an assistant turn is needed (None: a prompt, nobody has answered yet).
    """
    previous: dict[str, Any] | None = None
    for i, message in enumerate(messages):
        reason = _misplaced(message, previous)
        if reason:
            found.append(Finding(reason[0], column_of(i), f"message {i} ({message['role']}) {reason[1]}"))
            return
        previous = message
    last = messages[-1]["role"]
    if answer_from is None:
        if last in SYSTEM_ROLES:
            reason = f"ends on a {last} turn: there is no question to answer"
            found.append(Finding("ends_on_system", column_of(len(messages) - 1), reason))
    elif not any(message["role"] == "assistant" for message in messages[answer_from:]):
        column = column_of(len(messages) - 1)
        found.append(Finding("no_assistant", column, "has no assistant turn: there is nothing to learn from"))
    elif last in ("user", *SYSTEM_ROLES):
        found.append(Finding(f"ends_on_{last}", column_of(len(messages) - 1), f"ends on a {last} turn nobody answers"))


def _misplaced(message: dict[str, Any], previous: dict[str, Any] | None) -> tuple[str, str] | None:
    """(kind, reason) when `message` cannot follow `previous`."""
    role = message["role"]
    before = previous["role"] if previous else None
    if role in SYSTEM_ROLES:
        if before is not None and before not in SYSTEM_ROLES:
            return "system_not_first", f"comes after a {before} turn; system messages come first"
    elif role in TOOL_ROLES:
        return _misplaced_tool_result(message, previous)
    elif role == "assistant":
        if before is None or before in SYSTEM_ROLES:
            return "assistant_first", "answers before the user has said anything"
        if before == "assistant":
            return "two_assistants", "follows another assistant turn; join them into one"
    elif before == "user":
        return "two_users", "follows another user turn; join them, or put the missing answer between them"
    elif previous is not None and previous.get("tool_calls"):
        return "call_without_result", "follows a tool call that has no result"
    return None


def _misplaced_tool_result(message: dict[str, Any], previous: dict[str, Any] | None) -> tuple[str, str] | None:
    if previous is None or previous["role"] not in ("assistant", *TOOL_ROLES):
        return "result_without_call", "is a tool result, and no tool was called before it"
    if previous["role"] != "assistant":
        return None
    calls = previous.get("tool_calls")
    # Several public sets write the call into the text of the answer, in the model's own notation.
    if not calls and not CALL_IN_TEXT.search(content_text(previous)):
        return "result_without_call", "is a tool result, and the assistant turn before it calls no tool"
    ids = {call.get("id") for call in calls or ()} - {None}
    wanted = message.get("tool_call_id")
    if ids and wanted is not None and wanted not in ids:
        calls_before = ", ".join(sorted(map(str, ids)))
        return "wrong_call_id", f"answers the call {wanted!r}; the calls before it are {calls_before}"
    return None


# ----------------------------------------------------------------------------------------------------- tools and options


def read_tools(value: Any, column: str, found: list[Finding]) -> list[dict[str, Any]] | None:
    """The `tools` column: a list of JSON schemas, or the JSON text of one."""
    value = _from_json(value, column, found, "a list of tool schemas")
    if not value:
        return None
    if not isinstance(value, list):
        found.append(Finding("wrong_type", column, f"is {describe(value)}, a list of tool schemas is needed"))
        return None
    tools = []
    for i, tool in enumerate(value):
        tool = _from_json(tool, column, found, "a tool schema")
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            found.append(
                Finding("bad_tool", column, f"tool {i} is {describe(tool)}, a JSON schema with a name is needed")
            )
            return None
        tools.append(tool)
    return tools


def read_template_kwargs(value: Any, column: str, found: list[Finding]) -> dict[str, Any] | None:
    """The `chat_template_kwargs` column: a dict, or the JSON text of one."""
    value = _from_json(value, column, found, "a dict of template arguments")
    if value is None or isinstance(value, dict):
        return value or None
    found.append(Finding("wrong_type", column, f"is {describe(value)}, a dict of template arguments is needed"))
    return None


def read_trained_roles(value: Any, column: str, found: list[Finding]) -> list[str] | None:
    """The `trained_roles` column: ["assistant"] trains the assistant's turns only, and not the tool results between them."""
    if list(value) == ["assistant"] if isinstance(value, (list, tuple)) else value == "assistant":
        return ["assistant"]
    reason = f'is {describe(value)}; the one value it takes is ["assistant"]'
    found.append(Finding("unknown_value", column, reason))
    return None


def _from_json(value: Any, column: str, found: list[Finding], wanted: str) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            found.append(Finding("not_json", column, f"is text that is not the JSON of {wanted}: {error}"))
            return None
    return without_nones(value)
