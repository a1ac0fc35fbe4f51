"""Renderer: conversations or plain text -> token ids and the exact mask of trained tokens; token ids -> message.

The template is the tokenizer's own and is never edited. Where nobody's text holds the text of a control token, the ids are
those of `tokenizer.apply_chat_template`; where somebody's does, that text becomes ordinary tokens (see special_tokens).
Which characters are trained is read off marked renders (see marks and provenance).
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from posttrain.core.sample import Sample
from posttrain.data.render.conversation import (
    Conversation,
    RenderError,
    assistant_turns,
    is_assistant,
    join_completion,
    with_renamed_calls,
    with_text_arguments,
)
from posttrain.data.render.marks import MarkedRender
from posttrain.data.render.provenance import Provenance, Span
from posttrain.data.render.response_parser import ResponseParser
from posttrain.data.render.skeletons import Skeletons, shape_of
from posttrain.data.render.special_tokens import ControlTokens, whole_texts
from posttrain.data.render.template_limits import TemplateLimit, bounded_template

__all__ = ["TRAIN_MODES", "Conversation", "RenderError", "Renderer"]

FindSpans = Callable[[MarkedRender], list[Span]]

BATCH = 512  # texts handed to the tokenizer at once: enough to amortise the call, little to hold in memory
ORDINARY_KEYS = frozenset(["role", "content", "type", "text", "function", "name", "arguments"])  # not worth a search
KNOWN_ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function", "ipython", "model"])


@dataclass
class Rendered:
    """A rendered chat on its way to the tokenizer."""

    text: str
    spans: list[Span] | None  # trained characters; None: all
    owned_control_tokens: list[Span] | None = None  # places of control tokens that the template wrote; None: all


class Renderer:
    """Turns chats and texts into token ids with one tokenizer and one chat template.

    `allow_control_tokens_in_content=True` lets the tokenizer parse control tokens inside messages, as TRL does.
    """

    def __init__(
        self, tokenizer: Any, chat_template: str | None = None, *, allow_control_tokens_in_content: bool = False
    ) -> None:
        if hasattr(tokenizer, "tokenizer"):  # a processor of images and text, which may hold the template
            chat_template = chat_template or getattr(tokenizer, "chat_template", None)
            tokenizer = tokenizer.tokenizer
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise TypeError(
                f"{type(tokenizer).__name__} is not backed by the `tokenizers` library, so characters cannot be mapped to "
                "tokens. Load the fast version of the tokenizer (it has a tokenizer.json), or convert it to one."
            )
        self.tokenizer = tokenizer
        self.model_type: str | None = None  # of the model it belongs to, for a tokenizer without a template
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

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that texts of messages never give."""
        return self._control.ids

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over all that decides ids and masks: the tokenizer, the template, the special tokens, the flags."""
        with whole_texts(self.tokenizer) as tokenizer:
            backend = tokenizer.to_str()
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
            return _batch_ids(backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens))

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
            raise ValueError(f"train={train!r}; it must be one of {', '.join(map(repr, TRAIN_MODES))}.")

        def render(chat: Conversation) -> Rendered:
            rendered = TRAIN_MODES[train](self, chat)
            return self._without_untrained(rendered, chat) if chat.untrained else rendered

        return self._encode(chats, render)

    def encode_prompts(self, chats: list[Conversation]) -> list[np.ndarray | RenderError]:
        """Ids of the prompts with the generation prompt, or, after an assistant message, ready to continue that message."""
        samples = self._encode(chats, self._rendered_prompt)
        return [item.input_ids if isinstance(item, Sample) else item for item in samples]

    def parse(self, ids: Any) -> dict[str, Any]:
        """Token ids of an assistant turn -> message with content and, where the turn holds them, reasoning and tool calls.

        What does not parse stays plain content.
        """
        return self.response_parser.parse(self.tokenizer.decode(ids, skip_special_tokens=False))

    @cached_property
    def response_parser(self) -> ResponseParser:
        return ResponseParser(self._render, self._provenance, self._control)

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
                "The tokenizer has no chat template. Choose one of the built-in formats (posttrain.data.render.templates."
                "use_chat_format), or give `chat_template_path`."
            )
        if not messages:
            raise RenderError("The conversation has no messages.")
        try:
            template = bounded_template(self.tokenizer.get_chat_template(self._given_template, tools))
            return template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **{"documents": None, **self.tokenizer.special_tokens_map, **(template_kwargs or {})},
            )
        except TemplateLimit as error:
            raise RenderError(f"The chat template is not run to its end: {error}.") from error
        except Exception as error:  # a template is a program of somebody else's and may raise anything
            as_texts = with_text_arguments(messages) if isinstance(error, TypeError) else None
            if as_texts is not None:  # some templates add the arguments of tool calls to a text
                return self._render(as_texts, tools, template_kwargs, add_generation_prompt)
            raise RenderError(f"The chat template refuses this conversation: {error}") from error

    def _rendered(
        self,
        chat: Conversation,
        trained_messages: frozenset[int] = frozenset(),
        mode: str = "everything",
        find_spans: FindSpans | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """A chat, the spans that `find_spans` reads off its marked render, and the control tokens that are the template's.

        The marked render is skipped where a chat has the shape of an earlier one (see skeletons).
        """
        text = self._checked_render(chat, add_generation_prompt)
        self._check_calls_are_written(chat, text, add_generation_prompt)
        if find_spans is None and self.allow_control_tokens_in_content:
            return Rendered(text, None)
        shape = shape_of(chat)
        key = None if shape is None else (shape[0], mode, trained_messages, add_generation_prompt)
        known = None if shape is None else self._skeletons.read(key, shape[1], text)
        if known is not None:
            spans, owned = known
        else:
            marked = self._marked(
                chat, text, trained_messages, add_generation_prompt, must_succeed=find_spans is not None
            )
            if marked is None:
                return Rendered(text, None)
            spans, owned = find_spans(marked) if find_spans else [], marked.owned_control_tokens
            if shape is not None:
                self._skeletons.keep(key, shape[1], marked, spans)
        return Rendered(text, spans if find_spans else None, None if self.allow_control_tokens_in_content else owned)

    def _marked(
        self,
        chat: Conversation,
        text: str,
        trained_messages: frozenset[int],
        add_generation_prompt: bool,
        must_succeed: bool,
    ) -> MarkedRender | None:
        try:
            return self._provenance.mark(chat, text, trained_messages, add_generation_prompt)
        except RenderError:
            # Without a mask to find, marks only tell whose the control tokens are: no matter where nobody could have one.
            data = (chat.messages, chat.tools, chat.template_kwargs)
            if must_succeed or _any_string(data, self._control.may_arise_from):
                raise
            return None

    def _checked_render(self, chat: Conversation, add_generation_prompt: bool = False) -> str:
        self._check_roles(chat)
        text = self._render(chat.messages, chat.tools, chat.template_kwargs, add_generation_prompt)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RenderError(f"The conversation holds half a character (a lone surrogate): {error}.") from error
        for number, message in enumerate(chat.messages):
            if isinstance(message.get("content"), list):
                _check_blocks(number, message["content"], text)
        return text

    def _check_calls_are_written(self, chat: Conversation, text: str, add_generation_prompt: bool) -> None:
        """A template that knows no tools leaves calls out, and an empty turn would be trained: it is asked to write calls that
        nothing else could have put into the text."""
        messages, renamed = with_renamed_calls(chat.messages)
        if not renamed:
            return
        probed = self._render(messages, chat.tools, chat.template_kwargs, add_generation_prompt)
        for number, what, probe in renamed:
            if probe not in probed:
                raise RenderError(
                    f"The chat template drops {what} in the assistant's message {number}: a turn without it would be trained. "
                    "Choose a template that writes tool calls (`chat_template_path`), or remove the calls from the data.",
                    text,
                )

    def _check_roles(self, chat: Conversation) -> None:
        """Templates write roles between the halves of control tokens ('<|' + role + '|>'): only known ones pass."""
        for number, message in enumerate(chat.messages):
            role = message.get("role") if isinstance(message, dict) else None
            if not isinstance(role, str):
                raise RenderError(f"Message {number} has no role: {str(message)[:200]}")
            if role not in self._role_is_safe:
                is_word = re.fullmatch(r"[\w\-]+", role) is not None
                self._role_is_safe[role] = is_word and not any(role in text for text in self._control.texts)
            if not self._role_is_safe[role] and not self.allow_control_tokens_in_content:
                raise RenderError(
                    f"The role {role!r} of message {number} is not a word, or is part of a control token."
                )

    def _assistant(self, chat: Conversation) -> Rendered:
        turns = assistant_turns(chat)
        if not turns:
            return replace(self._rendered(chat), spans=[])

        def find_spans(marked: MarkedRender) -> list[Span]:
            return self._provenance.turn_spans(chat, marked, turns)

        return self._rendered(chat, frozenset(turns), "assistant", find_spans)

    def _completion(self, chat: Conversation) -> Rendered:
        chat, turn, continued = join_completion(chat)
        turns = assistant_turns(chat, turn)

        def find_spans(marked: MarkedRender) -> list[Span]:
            for number in turns:
                self._provenance.check_unchanged(marked, number)
            start = _continuation(marked, turn, continued) or self._provenance.turn_start(chat, marked, turn)
            return [(start, len(marked.text))]

        return self._rendered(chat, frozenset(turns), f"completion {bool(continued)}", find_spans)

    def _assistant_in_completion(self, chat: Conversation) -> Rendered:
        chat, turn, continued = join_completion(chat)
        turns = assistant_turns(chat, turn)

        def find_spans(marked: MarkedRender) -> list[Span]:
            (start, end), *rest = self._provenance.turn_spans(chat, marked, turns)
            return [(_continuation(marked, turn, continued) or start, end), *rest]

        return self._rendered(chat, frozenset(turns), f"assistant_in_completion {bool(continued)}", find_spans)

    def _without_untrained(self, rendered: Rendered, chat: Conversation) -> Rendered:
        """The same, and the turns that the chat names as context only are not trained."""
        turns = sorted(chat.untrained)
        left_out = self._rendered(
            chat, chat.untrained, "assistant", lambda marked: self._provenance.turn_spans(chat, marked, turns)
        )
        if left_out.text != rendered.text:  # the completion continues a message of the prompt
            raise RenderError("An assistant's message of weight 0 is continued by the completion.", rendered.text)
        spans = [(0, len(rendered.text))] if rendered.spans is None else rendered.spans
        for start, end in left_out.spans:
            parts = [part for a, b in spans for part in ((a, min(b, start)), (max(a, end), b))]
            spans = [(a, b) for a, b in parts if a < b]
        return replace(rendered, spans=spans)

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

        rendered = self._rendered(chat, frozenset([last]), "prompt", find_end)
        ((_, end),) = rendered.spans
        owned = rendered.owned_control_tokens
        kept = None if owned is None else [span for span in owned if span[1] <= end]
        return Rendered(rendered.text[:end], None, kept)

    # -------------------------------------------------------------------------------------------- inside: encoding

    def _encode(
        self, chats: list[Conversation], render: Callable[[Conversation], Rendered]
    ) -> list[Sample | RenderError]:
        results: list[Any] = []
        for chat in chats:
            try:
                results.append(render(chat))
            except RenderError as error:
                results.append(error)
        numbers = [number for number, item in enumerate(results) if isinstance(item, Rendered)]
        for begin in range(0, len(numbers), BATCH):
            chunk = numbers[begin : begin + BATCH]
            for number, sample in zip(chunk, self._encode_chunk([results[number] for number in chunk])):
                results[number] = sample
        return results

    def _encode_chunk(self, chunk: list[Rendered]) -> list[Sample | RenderError]:
        """Every text as a whole: what a tokenizer makes of a part of a text says nothing certain about the text."""
        texts = [item.text for item in chunk]
        masks: list[np.ndarray | None] = [None] * len(chunk)
        with whole_texts(self.tokenizer) as backend:
            if any(item.spans for item in chunk):
                encodings = backend.encode_batch(texts, add_special_tokens=False)
                masks = [trained_tokens(one, item.spans or []) for one, item in zip(encodings, chunk)]
            else:  # offsets, which cost a third more, are not needed
                encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [self._sample(item, one, mask) for item, one, mask in zip(chunk, _batch_ids(encodings), masks)]

    def _sample(self, item: Rendered, ids: np.ndarray, trained: np.ndarray | None) -> Sample | RenderError:
        if not self.allow_control_tokens_in_content and not self._has_expected_control_tokens(item, ids):
            try:
                encoding = self._literal_encoding(item)
            except RenderError as error:
                return error
            ids = np.array(encoding.ids, dtype=np.int32)
            trained = trained_tokens(encoding, item.spans or [])
        if not item.spans:  # None: all of it is trained; an empty list: nothing
            trained = np.full(len(ids), item.spans is None)
        return Sample(ids, trained)

    def _has_expected_control_tokens(self, item: Rendered, ids: np.ndarray) -> bool:
        """Whether the control tokens of the text and of the ids are those that the template wrote."""
        found = self._control.find(item.text)
        owned = found if item.owned_control_tokens is None else item.owned_control_tokens
        return owned == found and self._control.count_ids(ids) == self._expected_control_tokens(item.text, owned)

    def _expected_control_tokens(self, text: str, owned: list[Span]) -> int:
        return sum(text[start:end] != self._control.unknown for start, end in owned)

    def _literal_encoding(self, item: Rendered) -> Any:
        """The encoding in which nothing but the template's control tokens are control tokens."""
        control, text = self._control, item.text
        owned = control.find(text) if item.owned_control_tokens is None else item.owned_control_tokens
        # Texts that are not control tokens may be taken for some, as the tokenizer normalises them; aliases cannot.
        encoding = control.literal_backend.encode(control.with_aliases(text, owned), add_special_tokens=False)
        count, expected = control.count_ids(encoding.ids), self._expected_control_tokens(text, owned)
        if count != expected:
            raise RenderError(f"The tokenizer gives {count} control tokens where the template wrote {expected}.", text)
        return encoding


def _batch_ids(encodings: list[Any]) -> list[np.ndarray]:
    return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]


def trained_tokens(encoding: Any, spans: list[Span]) -> np.ndarray:
    """The mask of tokens that hold at least one character of a span.

    A token across the edge of a span counts: the model has to produce it as a whole, and the prompt alone ends in other ids.
    """

    def first_character(token: int) -> int:
        """Byte-level tokenizers that trim offsets leave nothing of a space but its end."""
        start, stop = encoding.token_to_chars(token)
        return start if start < stop else start - 1

    tokens = range(len(encoding.ids))
    trained = np.zeros(len(tokens), dtype=bool)
    for start, end in spans:
        first = bisect_right(tokens, start, key=lambda token: encoding.token_to_chars(token)[1])
        trained[first : bisect_left(tokens, end, key=first_character)] = True
    return trained


def _continuation(marked: MarkedRender, turn: int, continued: str) -> int | None:
    """Where the completion begins inside a message that the prompt began; None if it begins with a message."""
    if not continued:
        return None
    place = next(place for place in marked.places_of(turn) if place.piece.kind == "content")
    return place.start + len(continued)


def _check_blocks(number: int, blocks: list[Any], text: str) -> None:
    """Templates that know texts only drop a list of text blocks, or print it as data: both lose what was said."""
    if str(blocks) in text or json.dumps(blocks, ensure_ascii=False) in text:
        reason = "prints the list of text blocks in message {} as data"
    elif any(isinstance(b, dict) and isinstance(b.get("text"), str) and b["text"].strip() not in text for b in blocks):
        reason = "drops text blocks of message {}"
    else:
        return
    raise RenderError(
        f"The chat template {reason.format(number)}; it knows texts only. Join the blocks to one text.", text
    )


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
    "everything": Renderer._rendered,
    "assistant": Renderer._assistant,
    "completion": Renderer._completion,
    "assistant_in_completion": Renderer._assistant_in_completion,
}
