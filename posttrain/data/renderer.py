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
from posttrain.data.conversation import (
    Conversation,
    RenderError,
    assistant_turns,
    is_assistant,
    join_completion,
    with_text_arguments,
)
from posttrain.data.marks import MarkedRender
from posttrain.data.provenance import Provenance, Span
from posttrain.data.response_parser import ResponseParser
from posttrain.data.skeletons import Skeletons, shape_of
from posttrain.data.special_tokens import ControlTokens, whole_texts
from posttrain.data.template_checks import probe_template

__all__ = ["TRAIN_MODES", "Conversation", "RenderError", "Renderer"]

BATCH = 512  # texts handed to the tokenizer at once: enough to amortise the call, little to hold in memory
ORDINARY_KEYS = frozenset(["role", "content", "type", "text", "function", "name", "arguments"])  # not worth a search
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
        self._skeletons = Skeletons()
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

    def render_prompt(self, chat: Conversation) -> str:
        """The text of a prompt: with the generation prompt, or, after an assistant message, up to the end of its content."""
        return self._rendered_prompt(chat).text

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
        return self.response_parser.parse(self.tokenizer.decode(ids, skip_special_tokens=False))

    @cached_property
    def response_parser(self) -> ResponseParser:
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
            as_texts = with_text_arguments(messages) if isinstance(error, TypeError) else None
            if as_texts is not None:  # some templates add the arguments of tool calls to a text
                return self._render(as_texts, tools, template_kwargs, add_generation_prompt)
            raise RenderError(f"The chat template refuses this conversation: {error}") from error
        return texts[0]

    def _rendered(self, chat: Conversation, add_generation_prompt: bool = False) -> Rendered:
        """A chat of which all is trained, or nothing: marks are needed only where a message may hold control tokens."""
        text = self._checked_render(chat, add_generation_prompt)
        if not self._may_hold_control_tokens(chat):
            return Rendered(text, None)
        marked = self._provenance.mark(chat, text, frozenset(), add_generation_prompt, find_control_tokens=True)
        return Rendered(text, None, marked.owned_control_tokens)

    def _rendered_with_spans(
        self, chat: Conversation, said_by: frozenset[int], mode: str, find_spans: Callable[[MarkedRender], list[Span]]
    ) -> Rendered:
        """A chat with the spans that `find_spans` reads off its marked render, or off that of an earlier chat like it."""
        text = self._checked_render(chat)
        if self._may_hold_control_tokens(chat):
            marked = self._provenance.mark(chat, text, said_by, find_control_tokens=True)
            return Rendered(text, find_spans(marked), marked.owned_control_tokens)
        found = shape_of(chat)
        shape, pieces = ((found[0], mode, said_by), found[1]) if found else (None, [])
        spans = self._skeletons.spans(shape, pieces, text) if found else None
        if spans is None:
            marked = self._provenance.mark(chat, text, said_by)
            spans = find_spans(marked)
            if found:
                self._skeletons.keep(shape, pieces, marked, spans)
        return Rendered(text, spans)

    def _may_hold_control_tokens(self, chat: Conversation) -> bool:
        return not self.allow_control_tokens_in_content and _any_string(
            (chat.messages, chat.tools, chat.template_kwargs), self._control.may_arise_from
        )

    def _checked_render(self, chat: Conversation, add_generation_prompt: bool = False) -> str:
        self._check_roles(chat)
        text = self._render(chat.messages, chat.tools, chat.template_kwargs, add_generation_prompt)
        for number, message in enumerate(chat.messages):
            blocks = message.get("content")
            if isinstance(blocks, list) and (str(blocks) in text or json.dumps(blocks, ensure_ascii=False) in text):
                raise RenderError(
                    f"The chat template prints the list of text blocks in message {number} as data; it knows texts only. "
                    "Join the blocks to one text.",
                    text,
                )
        return text

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
        return self._rendered(chat)

    def _assistant(self, chat: Conversation) -> Rendered:
        turns = assistant_turns(chat)
        if not turns:
            return replace(self._rendered(chat), spans=[])
        return self._rendered_with_spans(
            chat, frozenset(turns), "assistant", lambda marked: self._provenance.turn_spans(chat, marked, turns)
        )

    def _completion(self, chat: Conversation) -> Rendered:
        chat, turn, continued = join_completion(chat)
        turns = assistant_turns(chat, turn)

        def find_spans(marked: MarkedRender) -> list[Span]:
            for number in turns:
                self._provenance.check_said(marked, number)
            start = self._continuation(marked, turn, continued) or self._provenance.turn_start(chat, marked, turn)
            return [(start, len(marked.text))]

        return self._rendered_with_spans(chat, frozenset(turns), "completion", find_spans)

    def _assistant_in_completion(self, chat: Conversation) -> Rendered:
        chat, turn, continued = join_completion(chat)
        turns = assistant_turns(chat, turn)

        def find_spans(marked: MarkedRender) -> list[Span]:
            (start, end), *rest = self._provenance.turn_spans(chat, marked, turns)
            return [(self._continuation(marked, turn, continued) or start, end), *rest]

        return self._rendered_with_spans(chat, frozenset(turns), "assistant_in_completion", find_spans)

    def _continuation(self, marked: MarkedRender, turn: int, continued: str) -> int | None:
        """Where the completion begins inside a message that the prompt began."""
        if not continued:
            return None
        place = next(place for place in marked.places_of(turn) if place.piece.kind == "content")
        return place.start + len(continued)

    def _rendered_prompt(self, chat: Conversation) -> Rendered:
        last = len(chat.messages) - 1
        if last < 0 or not is_assistant(chat.messages[last]):
            return self._rendered(chat, add_generation_prompt=True)

        def find_end(marked: MarkedRender) -> list[Span]:
            ends = [p.end for p in marked.places_of(last) if p.piece.kind == "content" and p.verbatim]
            if not ends:
                raise RenderError(
                    f"Message {last} of the assistant has no content that could be continued.", marked.text
                )
            return [(0, ends[-1])]

        rendered = self._rendered_with_spans(chat, frozenset([last]), "prompt", find_end)
        end = rendered.spans[0][1]
        owned = rendered.owned_control_tokens
        kept = None if owned is None else [span for span in owned if span[1] <= end]
        return Rendered(rendered.text[:end], None, kept)

    # -------------------------------------------------------------------------------------------- inside: encoding

    def _encode(self, prepared: Sequence[Rendered | RenderError]) -> list[Sample | RenderError]:
        results: list[Sample | RenderError] = list(prepared)
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
                encoding = control.literal_backend.encode(
                    control.with_aliases(item.text, owned), add_special_tokens=False
                )
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


def _any_string(value: Any, test: Callable[[str], bool]) -> bool:
    """Whether any string inside nested lists and dicts, keys included, passes `test`."""
    if isinstance(value, str):
        return test(value)
    if isinstance(value, dict):
        for key, item in value.items():
            if (key not in ORDINARY_KEYS and isinstance(key, str) and test(key)) or _any_string(item, test):
                return True
    elif isinstance(value, (list, tuple)):
        for item in value:
            if _any_string(item, test):
                return True
    return False


TRAIN_MODES: dict[str, Callable[[Renderer, Conversation], Rendered]] = {
    "everything": Renderer._everything,
    "assistant": Renderer._assistant,
    "completion": Renderer._completion,
    "assistant_in_completion": Renderer._assistant_in_completion,
}
