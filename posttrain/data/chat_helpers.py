"""TRL's public chat helpers, under their names.

Differences: nothing depends on recognising a template by its exact text. Masks come from provenance, so there are no edited
"training" templates; responses are parsed with a syntax learned from the template, so there are no response schemas.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from posttrain.data.render import template_checks
from posttrain.data.render.conversation import Conversation, RenderError, is_assistant, join_completion
from posttrain.data.render.marks import common_prefix
from posttrain.data.render.renderer import Renderer

Messages = list[dict[str, Any]]

COMPLETION_COLUMNS = ("completion", "chosen", "rejected")
KNOWN_COLUMNS = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "completion", "label"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
)
PROMPT_ENDINGS = ("user", "tool", "function", "ipython")

_renderers: WeakKeyDictionary[Any, tuple[Any, Renderer]] = WeakKeyDictionary()


def _renderer_of(processing_class: Any) -> Renderer:
    """One renderer per tokenizer, made anew when its template or its tokens have changed."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    state = (tokenizer.chat_template, len(tokenizer), tuple(tokenizer.special_tokens_map.items()))
    kept = _renderers.get(tokenizer)
    if kept is None or kept[0] != state:
        kept = _renderers[tokenizer] = (state, Renderer(tokenizer))
    return kept[1]


def apply_chat_template(
    example: dict[str, Any], tokenizer: Any, tools: list[Any] | None = None, **template_kwargs: Any
) -> dict[str, str]:
    """A conversational example as plain text columns; `messages` becomes `text`, `label` is kept.

    A prompt ends with the generation prompt, or, where its last message is the assistant's, with that message, which the
    completion continues. The prompt's text is cut to what all of its completions share, so prompt + completion is exactly
    the rendered whole.
    """
    columns = {key for key in example if key in {"messages", "prompt", "label", *COMPLETION_COLUMNS}}
    if columns not in KNOWN_COLUMNS:
        sets = "; ".join(", ".join(sorted(known)) for known in KNOWN_COLUMNS)
        raise KeyError(
            f"The example has the columns {sorted(columns)}; apply_chat_template takes one of these sets: {sets}."
        )
    renderer = _renderer_of(tokenizer)
    base = Conversation([], tools, {**template_kwargs, **(example.get("chat_template_kwargs") or {})} or None)
    if "messages" in columns:
        return {"text": renderer.render(replace(base, messages=example["messages"]))}
    if "prompt" not in columns:
        return {key: renderer.render(replace(base, messages=example[key])) for key in ("chosen", "rejected")}
    prompt: Messages = example["prompt"]
    last_role = prompt[-1].get("role") if prompt else None
    if last_role not in (*PROMPT_ENDINGS, "assistant"):
        raise ValueError(
            f"A prompt ends with a message of the user, of a tool or of the assistant, not of {last_role!r}."
        )
    prompt_text = renderer.render_prompt(replace(base, messages=prompt))
    wholes = {
        key: _render_whole(renderer, replace(base, messages=[*prompt, *example[key]], num_prompt_messages=len(prompt)))
        for key in COMPLETION_COLUMNS
        if key in columns
    }
    prompt_text = common_prefix(prompt_text, *wholes.values())
    texts = {"prompt": prompt_text, **{key: whole[len(prompt_text) :] for key, whole in wholes.items()}}
    return texts | ({"label": example["label"]} if "label" in columns else {})


def _render_whole(renderer: Renderer, chat: Conversation) -> str:
    if is_assistant(chat.messages[chat.num_prompt_messages - 1]):
        chat = join_completion(chat)[0]
    return renderer.render(chat)


def maybe_apply_chat_template(
    example: dict[str, Any], tokenizer: Any, tools: list[Any] | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """`apply_chat_template` for conversational examples; others are handed back as they are."""
    for key in ("messages", "prompt", *COMPLETION_COLUMNS):
        value = example.get(key)
        if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
            return apply_chat_template(example, tokenizer, tools, **template_kwargs)
    return example


def supports_tool_calling(processing_class: Any) -> bool:
    """Whether signatures of tools, calls and results all reach the rendered text."""
    renderer = _renderer_of(processing_class)
    return template_checks.shows_tools(renderer) and template_checks.tool_dialogue(renderer) is not None


def get_training_chat_template(processing_class: Any) -> None:
    """None: the template can be trained with as it is. Raises where no safe mask can be had from it.

    TRL returns an edited copy for the templates it knows. There are no such copies here, as masks come from provenance.
    """
    chat = Conversation([template_checks.USER, template_checks.ANSWER])
    (sample,) = _renderer_of(processing_class).encode_chats([chat], train="assistant")
    if isinstance(sample, RenderError):
        raise ValueError(f"No mask of what the assistant says can be had from this chat template. {sample}")


def has_generation_markers(processing_class: Any) -> bool:
    """Whether the template (of a tokenizer, or given as text) marks what the assistant says. Our masks do not need it."""
    template = processing_class if isinstance(processing_class, str) else processing_class.get_chat_template()
    return template_checks.has_generation_markers(template)


def is_chat_template_prefix_preserving(processing_class: Any) -> bool:
    """Whether what has been rendered stays as it is when turns are added."""
    return template_checks.is_prefix_preserving(_renderer_of(processing_class))


def is_chat_template_stop_token_trained(processing_class: Any) -> bool:
    """Whether the last trained token of an assistant turn is one of the tokenizer's added tokens."""
    return template_checks.trained_stop_token(_renderer_of(processing_class)) is not None


def add_response_schema(processing_class: Any) -> Any:
    """The tokenizer unchanged, after a check that tool calls of its template can be parsed; raises if they cannot.

    TRL attaches a schema here for the templates it knows. `parse_response` learns the syntax from the template and needs
    none, so all that is left to do is to find out early that there is something to learn.
    """
    if not _renderer_of(processing_class).response_parser.knows_tool_calls:
        raise ValueError(
            "The chat template writes no tool calls, or in a way that cannot be read back, so none can be parsed."
        )
    return processing_class


def parse_response(
    tokenizer: Any, ids: Any, prefix: Any = None, tools: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Token ids of an assistant turn -> message {role, content, reasoning_content?, tool_calls?}.

    `prefix` (ids or text) is the end of the prompt, for templates whose generation prompt opens the reasoning. With `tools`
    (JSON schemas), arguments get the types the schemas ask for. A turn with malformed calls becomes plain content.
    """
    renderer = _renderer_of(tokenizer)
    decode = renderer.tokenizer.decode
    before = prefix if isinstance(prefix, str) else decode(prefix) if prefix is not None else ""
    functions = [tool.get("function", tool) for tool in tools or []]
    schemas = {function["name"]: function.get("parameters", {}).get("properties", {}) for function in functions}
    message = renderer.response_parser.parse(decode(ids, skip_special_tokens=False), before, schemas)
    for call in message.get("tool_calls", ()):
        function = call["function"]
        wanted = schemas.get(function["name"], {})
        function["arguments"] = {
            key: _typed(value, wanted.get(key, {}).get("type")) for key, value in function["arguments"].items()
        }
    return message


JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def _typed(value: Any, wanted: Any) -> Any:
    """`value` as the type of a JSON schema, where it can be read as one; else as it is."""
    if wanted == "string" and not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if wanted in JSON_TYPES and isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        return parsed if isinstance(parsed, JSON_TYPES[wanted]) else value
    return value
