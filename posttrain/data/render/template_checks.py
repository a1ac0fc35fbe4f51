"""Checks of any chat template: what a renderer finds out by rendering short conversations with it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from posttrain.core.sample import Sample
from posttrain.data.render.conversation import Conversation, RenderError

if TYPE_CHECKING:
    from posttrain.data.render.renderer import Renderer

USER = {"role": "user", "content": "What is the weather in Paris?"}
ANSWER = {"role": "assistant", "content": "It is sunny."}
THANKS = {"role": "user", "content": "Thank you."}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Name of the place."}},
            "required": ["place"],
        },
    },
}


def tool_call_turn(arguments: dict[str, Any] | str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "call00001", "function": function}],
    }


TOOL_RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": "22 degrees"}
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


def has_generation_markers(template: str) -> bool:
    """Whether the template itself marks what the assistant says. Our masks do not need it."""
    return GENERATION_MARKER.search(template) is not None


def rendered(renderer: Renderer, messages: list[dict[str, Any]], prompt: bool = False, tools: Any = None) -> str | None:
    """The rendered text, or None if the template refuses the messages."""
    try:
        return renderer.render(Conversation(messages, tools), add_generation_prompt=prompt)
    except RenderError:
        return None


def tool_dialogue(renderer: Renderer) -> list[dict[str, Any]] | None:
    """user, call, result, answer in the form of arguments that the template takes; None if it takes no tool calls.

    All of the call and of the result must be found in the render: a template that silently drops them does not take them.
    """
    for arguments in ({"place": "Paris-Zzq"}, '{"place": "Paris-Zzq"}'):
        messages = [USER, tool_call_turn(arguments), TOOL_RESULT]
        text = rendered(renderer, messages, tools=[TOOL])
        if text is not None and all(part in text for part in ("get_weather", "Paris-Zzq", "22 degrees")):
            without_call = rendered(renderer, [USER, {"role": "assistant", "content": ""}, TOOL_RESULT], tools=[TOOL])
            if without_call is None or without_call.count("get_weather") < text.count("get_weather"):
                return [*messages, ANSWER]
    return None


def shows_tools(renderer: Renderer) -> bool:
    """Whether the signatures of the tools reach the rendered text."""
    text = rendered(renderer, [USER], tools=[TOOL])
    return text is not None and "get_weather" in text and "Name of the place." in text


def is_prefix_preserving(renderer: Renderer, whole_text: bool = True) -> bool:
    """Whether what has been rendered stays as it is when turns are added, and a prompt begins its completion.

    `whole_text=False` looks away from what a template writes after the last message only (Phi-3's EOS).
    """
    dialogues = [[USER, ANSWER, THANKS, ANSWER]]
    with_tools = tool_dialogue(renderer)
    if with_tools is not None:
        dialogues.append([*with_tools, THANKS, ANSWER])
    return all(
        _grows(renderer, dialogue, size, tools, whole_text)
        for dialogue, tools in zip(dialogues, (None, [TOOL]))
        for size in range(1, len(dialogue))
    )


def _grows(renderer: Renderer, dialogue: list[dict[str, Any]], size: int, tools: Any, whole_text: bool) -> bool:
    prompt_follows = dialogue[size]["role"] == "assistant"
    shorter = rendered(renderer, dialogue[:size], prompt_follows, tools)
    longer = rendered(renderer, dialogue[: size + 1], False, tools)
    if shorter is None or longer is None:
        return True
    content = dialogue[size - 1]["content"]
    if not whole_text and not prompt_follows and content in shorter:
        shorter = shorter[: shorter.rindex(content) + len(content)]
    return longer.startswith(shorter)


def trained_stop_token(renderer: Renderer) -> int | None:
    """The last trained token of an assistant turn, if it is one of the tokenizer's added tokens."""
    (sample,) = renderer.encode_chats([Conversation([USER, ANSWER])], train="assistant")
    if not isinstance(sample, Sample) or not sample.trained.any():
        return None
    last = int(sample.input_ids[sample.trained][-1])
    return last if last in renderer.tokenizer.added_tokens_decoder else None


def probe_template(renderer: Renderer) -> list[str]:
    """Warnings in words about what may go wrong with this template and this tokenizer."""
    tokenizer, warnings = renderer.tokenizer, []
    prompt, whole = rendered(renderer, [USER], prompt=True), rendered(renderer, [USER, ANSWER])
    if prompt is None or whole is None:
        return [f"The chat template refuses a plain question and answer: {_refusal(renderer)}"]
    (sample,) = renderer.encode_chats([Conversation([USER, ANSWER])], train="assistant")
    if isinstance(sample, RenderError):
        warnings.append(f"The assistant's turns cannot be located: {sample.reason}")
    elif trained_stop_token(renderer) is None:
        warnings.append(
            "No end-of-turn token is trained: after what the assistant says the template writes "
            f"{whole[whole.rfind(ANSWER['content']) + len(ANSWER['content']) :]!r}, which holds no token of the tokenizer's. "
            "A model trained with it does not learn to stop."
        )
    header = _trained_header(renderer)
    if header:
        warnings.append(f"The template has no generation prompt, so the model is trained to write {header!r} itself.")
    bos = tokenizer.bos_token
    if bos and whole.startswith(bos + bos):
        warnings.append(f"The template writes {bos!r} twice at the start.")
    if not whole.startswith(prompt):
        warnings.append(
            f"The prompt is not the beginning of prompt + completion: the prompt ends with {prompt[-40:]!r}, but the whole "
            f"is {whole[-80:]!r}. The completion is taken to begin where the two part."
        )
    elif not is_prefix_preserving(renderer, whole_text=False):
        warnings.append(
            "The template changes earlier turns when later ones are added (for example, it removes their reasoning): the "
            "model sees other text in training than while it writes a dialogue."
        )
    if not shows_tools(renderer) or tool_dialogue(renderer) is None:
        warnings.append("The template does not write tools or tool calls; rows with tools lose them or are refused.")
    return warnings


def _trained_header(renderer: Renderer) -> str:
    """What a template without generation prompt writes between a question and its answer that names a role."""
    prompt, question = rendered(renderer, [USER], prompt=True), rendered(renderer, [USER])
    whole = rendered(renderer, [USER, ANSWER])
    if prompt is None or prompt != question or whole is None or not whole.startswith(prompt):
        return ""
    header = whole[len(prompt) : whole.rfind(ANSWER["content"])]
    return header if any(map(str.isalpha, header)) else ""


def _refusal(renderer: Renderer) -> str:
    try:
        renderer.render(Conversation([USER, ANSWER]))
        renderer.render(Conversation([USER]), add_generation_prompt=True)
    except RenderError as error:
        return str(error)
    return "it gave no reason"
