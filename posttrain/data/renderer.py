"""Renderer: conversations or plain text -> token ids and the exact mask of trained tokens; token ids -> message.

The template is the tokenizer's own and is never edited. Where nobody's text holds the text of a control token, the ids are
those of `tokenizer.apply_chat_template`; where somebody's does, that text becomes ordinary tokens (see special_tokens).
Which characters are trained is read off marked renders (see marks and provenance).
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from posttrain.core.sample import Sample
from posttrain.data.template_checks import probe_template
from posttrain.data.marks import REASONING_FIELDS, Conversation, MarkedRender, RenderError
from posttrain.data.provenance import Provenance, Span
from posttrain.data.response_parser import ResponseParser
from posttrain.data.special_tokens import ControlTokens, whole_texts

__all__ = ["TRAIN_MODES", "Conversation", "RenderError", "Renderer"]

BATCH = 512  # texts handed to the tokenizer at once: enough to amortise the call, little to hold in memory
KNOWN_ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function", "ipython", "model"])


@dataclass
class Rendered:
    """A rendered chat on its way to the tokenizer."""

    text: str
    spans: list[Span] | None  # trained characters; None: all
    owned_control_tokens: list[Span] | None = None  # given when content holds control tokens too


class Renderer:
    """Turns chats and texts into token ids with one tokenizer and one chat template.

    `allow_control_tokens_in_content=True` lets the tokenizer parse control tokens inside messages, as TRL does.
    """

    def __init__(
        self, tokenizer: Any, chat_template: str | None = None, *, allow_control_tokens_in_content: bool = False
    ) -> None:
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise TypeError(
                f"{type(tokenizer).__name__} is not backed by the `tokenizers` library, so characters cannot be mapped to "
                "tokens. Load the fast version of the tokenizer (it has a tokenizer.json), or convert it to one."
            )
        self.tokenizer = tokenizer
        self._given_template = chat_template
        self.allow_control_tokens_in_content = allow_control_tokens_in_content
        self._control = ControlTokens(tokenizer)
        self._provenance = Provenance(self._render, self._control)
        self._role_is_safe: dict[str, bool] = dict.fromkeys(KNOWN_ROLES, True)

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        return self._given_template if self._given_template is not None else self.tokenizer.chat_template

    @property
    def has_template(self) -> bool:
        return self.chat_template is not None

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over all that decides ids and masks: the tokenizer, the template, the special tokens, the flags."""
        backend = json.loads(self.tokenizer.backend_tokenizer.to_str())
        backend["truncation"] = backend["padding"] = None
        state = [
            backend,
            self.chat_template,
            self.tokenizer.special_tokens_map,
            sorted(self._control.texts),
            self.allow_control_tokens_in_content,
        ]
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()

    # ------------------------------------------------------------------------------------------------- plain text

    def encode_texts(self, texts: list[str], add_special_tokens: bool = True) -> list[np.ndarray]:
        """Ids of plain texts, parsed as `tokenizer(text)` parses them: control tokens in them are control tokens."""
        with whole_texts(self.tokenizer) as backend:
            encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def count_control_tokens(self, texts: list[str]) -> int:
        """How many of the texts hold the text of a control token."""
        return sum(map(self._control.occurs_in, texts))

    # ------------------------------------------------------------------------------------------------------ chats

    def render(self, chat: Conversation, add_generation_prompt: bool = False) -> str:
        """The text that `tokenizer.apply_chat_template(..., tokenize=False)` gives."""
        return self._render(chat.messages, chat.tools, chat.template_kwargs, add_generation_prompt)

    def encode_chats(self, chats: list[Conversation], train: str) -> list[Sample | RenderError]:
        """A Sample for each chat, or the RenderError that says why there is none; one bad chat does not stop the rest.

        `train` is "everything", "assistant" (assistant turns with their end-of-turn tokens), "completion" (all that
        follows the prompt) or "assistant_in_completion" (assistant turns that follow the prompt).
        """
        if train not in TRAIN_MODES:
            raise ValueError(f"train={train!r} is none of {', '.join(map(repr, TRAIN_MODES))}.")
        prepared: list[Rendered | RenderError] = []
        for chat in chats:
            try:
                prepared.append(TRAIN_MODES[train](self, chat))
            except RenderError as error:
                prepared.append(error)
        return self._encode(prepared)

    def encode_prompts(self, chats: list[Conversation]) -> list[np.ndarray | RenderError]:
        """Ids of the prompts with the generation prompt, or, after an assistant message, ready to continue that message."""
        prepared: list[Rendered | RenderError] = []
        for chat in chats:
            try:
                prepared.append(self._rendered_prompt(chat))
            except RenderError as error:
                prepared.append(error)
        return [item.input_ids if isinstance(item, Sample) else item for item in self._encode(prepared)]

    def parse(self, ids: Any) -> dict[str, Any]:
        """Token ids of an assistant turn -> message with content and, where the turn holds them, reasoning and tool calls.

        What does not parse stays plain content.
        """
        return self._response_parser.parse(self.tokenizer.decode(ids, skip_special_tokens=False))

    @cached_property
    def _response_parser(self) -> ResponseParser:
        return ResponseParser(self._render, self._provenance, self._control)

    def probe(self) -> list[str]:
        """Warnings in words about this template."""
        return probe_template(self) if self.has_template else []

    # ------------------------------------------------------------------------------------------- inside: rendering

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
        add_generation_prompt: bool,
    ) -> str:
        if not self.has_template:
            raise RenderError(
                "The tokenizer has no chat template. Choose one of the built-in formats (posttrain.data.chat_templates."
                "use_chat_format), or give `chat_template_path`."
            )
        if not messages:
            raise RenderError("The conversation has no messages.")
        try:
            texts, _ = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(self._given_template, tools),
                add_generation_prompt=add_generation_prompt,
                **{**self.tokenizer.special_tokens_map, **(template_kwargs or {})},
            )
        except Exception as error:  # a template is a program of somebody else's and may raise anything
            with_text_arguments = _with_text_arguments(messages) if isinstance(error, TypeError) else None
            if with_text_arguments is not None:  # some templates add the arguments of tool calls to a text
                return self._render(with_text_arguments, tools, template_kwargs, add_generation_prompt)
            raise RenderError(f"The chat template refuses this conversation: {error}") from error
        return texts[0]

    def _rendered(
        self, chat: Conversation, said_by: frozenset[int], add_generation_prompt: bool = False
    ) -> tuple[Rendered, MarkedRender | None]:
        """The plain render, and the marked one where the mask or a control token in the content asks for it."""
        self._check_roles(chat)
        text = self._render(chat.messages, chat.tools, chat.template_kwargs, add_generation_prompt)
        holds_control = not self.allow_control_tokens_in_content and _any_string(
            (chat.messages, chat.tools, chat.template_kwargs), self._control.may_arise_from
        )
        if not said_by and not holds_control:
            return Rendered(text, None), None
        marked = self._provenance.mark(chat, text, said_by, add_generation_prompt, holds_control)
        return Rendered(text, None, marked.owned_control_tokens if holds_control else None), marked

    def _check_roles(self, chat: Conversation) -> None:
        """Templates write roles between the halves of control tokens ('<|' + role + '|>'): only known ones pass."""
        for number, message in enumerate(chat.messages):
            role = message.get("role") if isinstance(message, dict) else None
            if not isinstance(role, str):
                raise RenderError(f"Message {number} has no role: {str(message)[:200]}")
            if role not in self._role_is_safe:
                self._role_is_safe[role] = not any(role in text or text in role for text in self._control.texts)
            if not self._role_is_safe[role] and not self.allow_control_tokens_in_content:
                raise RenderError(f"The role {role!r} of message {number} is (a part of) a control token.")

    def _everything(self, chat: Conversation) -> Rendered:
        return self._rendered(chat, frozenset())[0]

    def _assistant(self, chat: Conversation) -> Rendered:
        return self._assistant_from(chat, 0)

    def _assistant_from(self, chat: Conversation, first: int) -> Rendered:
        turns = [n for n, message in enumerate(chat.messages) if n >= first and _is_assistant(message)]
        if not turns:
            rendered, _ = self._rendered(chat, frozenset())
            return replace(rendered, spans=[])
        rendered, marked = self._rendered(chat, frozenset(turns))
        return replace(rendered, spans=self._provenance.turn_spans(chat, marked, turns))

    def _completion(self, chat: Conversation) -> Rendered:
        chat, turn, continued = self._joined(chat)
        said_by = frozenset(n for n, message in enumerate(chat.messages) if n >= turn and _is_assistant(message))
        rendered, marked = self._rendered(chat, said_by)
        for number in sorted(said_by):
            self._provenance.check_said(marked, number)
        start = self._continuation(marked, turn, continued) or self._provenance.turn_start(chat, marked, turn)
        return replace(rendered, spans=[(start, len(rendered.text))])

    def _assistant_in_completion(self, chat: Conversation) -> Rendered:
        chat, turn, continued = self._joined(chat)
        rendered = self._assistant_from(chat, turn)
        if continued:
            _, marked = self._rendered(chat, frozenset([turn]))
            (_, end), *rest = rendered.spans
            rendered = replace(rendered, spans=[(self._continuation(marked, turn, continued), end), *rest])
        return rendered

    def _joined(self, chat: Conversation) -> tuple[Conversation, int, str]:
        """The chat, the number of the message the completion begins in, and what the prompt has said of that message.

        An assistant message at the end of the prompt and one at the start of the completion become one message.
        """
        count = chat.num_prompt_messages
        if count is None or not 0 <= count < len(chat.messages):
            raise RenderError(f"A completion needs num_prompt_messages within the {len(chat.messages)} messages, not {count}.")
        if not _is_assistant(chat.messages[count]):
            raise RenderError(f"The completion begins with a message of {chat.messages[count].get('role')!r}, not of the assistant.")
        if count == 0 or not _is_assistant(chat.messages[count - 1]):
            return chat, count, ""
        opening, continuation = chat.messages[count - 1], chat.messages[count]
        texts = opening.get("content"), continuation.get("content")
        if not all(isinstance(text, str) and text for text in texts) or opening.get("tool_calls"):
            raise RenderError(
                "The prompt ends with an assistant message that the completion continues; both must have a text as content "
                "(and the first no tool calls)."
            )
        whole = opening | continuation | {"content": texts[0] + texts[1]}
        messages = [*chat.messages[: count - 1], whole, *chat.messages[count + 1 :]]
        return replace(chat, messages=messages, num_prompt_messages=count - 1), count - 1, texts[0]

    def _continuation(self, marked: MarkedRender, turn: int, continued: str) -> int | None:
        """Where the completion begins inside a message that the prompt began."""
        if not continued:
            return None
        place = next(place for place in marked.places_of(turn) if place.piece.kind == "content")
        return place.start + len(continued)

    def _rendered_prompt(self, chat: Conversation) -> Rendered:
        last = len(chat.messages) - 1
        if last < 0 or not _is_assistant(chat.messages[last]):
            return self._rendered(chat, frozenset(), add_generation_prompt=True)[0]
        rendered, marked = self._rendered(chat, frozenset([last]))
        contents = [place for place in marked.places_of(last) if place.piece.kind == "content" and place.verbatim]
        if not contents:
            raise RenderError(f"Message {last} of the assistant has no content that could be continued.", rendered.text)
        end = contents[-1].end
        owned = rendered.owned_control_tokens
        kept = None if owned is None else [span for span in owned if span[1] <= end]
        return Rendered(rendered.text[:end], None, kept)

    # -------------------------------------------------------------------------------------------- inside: encoding

    def _encode(self, prepared: Sequence[Rendered | RenderError]) -> list[Sample | RenderError]:
        results: list[Sample | RenderError] = [item for item in prepared]
        numbers = [number for number, item in enumerate(prepared) if isinstance(item, Rendered)]
        for begin in range(0, len(numbers), BATCH):
            chunk = numbers[begin : begin + BATCH]
            for number, sample in zip(chunk, self._encode_chunk([prepared[number] for number in chunk])):
                results[number] = sample
        return results

    def _encode_chunk(self, chunk: list[Rendered]) -> list[Sample | RenderError]:
        with whole_texts(self.tokenizer) as backend:
            encode = backend.encode_batch if any(item.spans for item in chunk) else backend.encode_batch_fast
            encodings = encode([item.text for item in chunk], add_special_tokens=False)
        return [self._sample(item, encoding) for item, encoding in zip(chunk, encodings)]

    def _sample(self, item: Rendered, encoding: Any) -> Sample | RenderError:
        ids = encoding.ids
        control = self._control
        if not self.allow_control_tokens_in_content:
            owned = item.owned_control_tokens
            is_mixed = owned is not None and owned != control.find(item.text)
            if is_mixed or control.count_ids(ids) != control.count_in(item.text):
                if owned is None:  # the tokenizer finds control tokens that plain search does not: it normalises text
                    owned = control.find(item.text)
                encoding = control.literal_backend.encode(control.with_aliases(item.text, owned), add_special_tokens=False)
                ids = encoding.ids
                expected = sum(item.text[start:end] != control.unknown for start, end in owned)
                if control.count_ids(ids) != expected:
                    return RenderError(
                        f"The tokenizer gives {control.count_ids(ids)} control tokens where the template wrote {expected}.",
                        item.text,
                    )
        if item.spans is None:
            return Sample(ids, np.ones(len(ids), dtype=bool))
        return Sample(ids, _trained(encoding, item.spans))


def _trained(encoding: Any, spans: list[Span]) -> np.ndarray:
    """The mask of tokens that hold at least one character of a span.

    A token across the edge of a span counts: the model has to produce it as a whole, and the prompt alone ends in other ids.
    """
    trained = np.zeros(len(encoding.ids), dtype=bool)
    tokens = range(len(trained))
    for start, end in spans:
        first = bisect_right(tokens, start, key=lambda token: encoding.token_to_chars(token)[1])
        stop = bisect_left(tokens, end, key=lambda token: _first_character(encoding, token))
        trained[first:stop] = True
    return trained


def _first_character(encoding: Any, token: int) -> int:
    """Where a token begins. Byte-level tokenizers that trim offsets leave nothing of a space but its end."""
    start, end = encoding.token_to_chars(token)
    return start if start < end else start - 1


def _with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with the arguments of tool calls as JSON texts; None if none are mappings."""
    found = False
    changed = []
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if not isinstance(calls, list):
            changed.append(message)
            continue
        text_calls = []
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
                found = True
                arguments = json.dumps(function["arguments"], ensure_ascii=False)
                call = call | {"function": function | {"arguments": arguments}}
            text_calls.append(call)
        changed.append(message | {"tool_calls": text_calls})
    return changed if found else None


def _is_assistant(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _any_string(value: Any, test: Callable[[str], bool]) -> bool:
    """Whether any string inside nested lists and dicts, keys included, passes `test`."""
    if isinstance(value, str):
        return test(value)
    if isinstance(value, dict):
        return any(_any_string(item, test) for item in value.values()) or any(
            test(key) for key in value if isinstance(key, str)
        )
    if isinstance(value, (list, tuple)):
        return any(_any_string(item, test) for item in value)
    return False


TRAIN_MODES: dict[str, Callable[[Renderer, Conversation], Rendered]] = {
    "everything": Renderer._everything,
    "assistant": Renderer._assistant,
    "completion": Renderer._completion,
    "assistant_in_completion": Renderer._assistant_in_completion,
}
