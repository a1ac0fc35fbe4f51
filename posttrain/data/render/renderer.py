"""Renderer: conversations or plain text -> token ids and the exact mask of trained tokens; token ids -> message.

The template is the tokenizer's own and is never edited. Where no text of a message is that of a control token, the ids are
those of `tokenizer.apply_chat_template`, and with images those of the processor; where one is, that text becomes
ordinary tokens (see special_tokens). What stands for images is never trained, unless asked for (see image_text).
Which characters are trained is read off marked renders (see marks and provenance).
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from posttrain.core.sample import Sample
from posttrain.data.images.row_image import RowImage
from posttrain.data.render.conversation import (
    IMAGE,
    Conversation,
    RenderError,
    assistant_turns,
    for_template,
    images_by_message,
    is_assistant,
    join_completion,
    with_renamed_calls,
    with_text_arguments,
)
from posttrain.data.render.image_text import ImageText, PlacedImage
from posttrain.data.render.marks import MarkedRender
from posttrain.data.render.provenance import Provenance, Span
from posttrain.data.render.response_parser import ResponseParser
from posttrain.data.render.skeletons import Skeletons, shape_of
from posttrain.data.render.special_tokens import ControlTokens, whole_texts
from posttrain.data.render.template_limits import TemplateLimit, bounded_template
from posttrain.data.vision.layouts import ImageLayouts

__all__ = ["TRAIN_MODES", "Conversation", "RenderError", "Renderer"]

FindSpans = Callable[[MarkedRender], list[Span]]

BATCH = 512  # texts handed to the tokenizer at once: enough to amortise the call, little to hold in memory
ORDINARY_KEYS = frozenset(["role", "content", "type", "text", "function", "name", "arguments"])  # not worth a search
NO_IMAGES = "{} has an image, and this model reads texts only. Take a vision-language model, or remove the images from the data."
KNOWN_ROLES = frozenset(["system", "developer", "user", "assistant", "tool", "function", "ipython", "model"])


@dataclass
class Rendered:
    """A rendered chat on its way to the tokenizer."""

    text: str
    spans: list[Span] | None  # trained characters; None: all
    owned_control_tokens: list[Span] | None = None  # places of control tokens that the template wrote; None: all
    image_marks: list[Span] = field(default_factory=list)  # what the template wrote for images, before it is expanded
    images: list[PlacedImage] = field(default_factory=list)  # what stands for them afterwards


class Renderer:
    """Turns chats and texts into token ids with one tokenizer (or processor, which has one) and one chat template.

    `allow_control_tokens_in_content=True` lets the tokenizer parse control tokens inside messages, as TRL does. `layouts` say what
    images become; without them, chats with images are refused. `train_images` leaves what stands for an image in the mask of
    trained tokens where the text around it is trained.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        allow_control_tokens_in_content: bool = False,
        layouts: ImageLayouts | None = None,
        train_images: bool = False,
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
        self.layouts = layouts
        self._control = ControlTokens(tokenizer, layouts.family if layouts else None)
        self._image_text = ImageText(layouts, self._control, train_images) if layouts else None
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
        state = [backend, self.chat_template, self.tokenizer.special_tokens_map]
        state += [sorted(self._control.texts), self.allow_control_tokens_in_content]
        if self._image_text:
            state += self._image_text.fingerprint_state()
        return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()

    # ------------------------------------------------------------------------------------------------- plain text

    def encode_texts(self, texts: list[str], add_special_tokens: bool = True) -> list[np.ndarray]:
        """Ids of plain texts, parsed as `tokenizer(text)` parses them: control tokens in them are control tokens."""
        with whole_texts(self.tokenizer) as backend:
            return [_ids(one) for one in backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]

    def encode_image_texts(self, texts: list[str], images: list[list[RowImage]]) -> list[Sample | RenderError]:
        """Plain texts, parsed as in `encode_texts`, in which the family's mark stands for each image. All else is trained."""
        if self._image_text is None:
            return [RenderError(NO_IMAGES.format("The text")) for _ in texts]
        marks_in = self._image_text.marks_in

        def render(item: tuple[str, list[RowImage]]) -> Rendered:
            return self._expanded(Rendered(item[0], None, image_marks=marks_in(item[0])), item[1])

        return self._encode(list(zip(texts, images, strict=True)), render, is_plain=True)

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
            rendered = self._without_untrained(rendered, chat) if chat.untrained else rendered
            return self._expanded(rendered, _images_of(chat))

        return self._encode(chats, render)

    def encode_prompts(self, chats: list[Conversation]) -> list[Sample | RenderError]:
        """Prompts with the generation prompt, or, after an assistant message, ready to continue it; nothing is trained."""
        return self._encode(chats, lambda chat: self._expanded(self._rendered_prompt(chat), _images_of(chat)))

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
        messages = self._shown(messages)
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
        except Exception as error:  # a template is a program of its own and may raise anything
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
        has_images = bool(_images_of(chat))
        if find_spans is None and self.allow_control_tokens_in_content and not has_images:
            return Rendered(text, None)
        shape = shape_of(chat)
        key = None if shape is None else (shape[0], mode, trained_messages, add_generation_prompt)
        known = None if shape is None else self._skeletons.read(key, shape[1], text)
        if known is not None:
            spans, owned = known
        else:
            marked = self._marked(
                chat, text, trained_messages, add_generation_prompt, find_spans is not None or has_images
            )
            if marked is None:
                return Rendered(text, None)
            spans, owned = find_spans(marked) if find_spans else [], marked.owned_control_tokens
            if shape is not None:
                self._skeletons.keep(key, shape[1], marked, spans)
        marks = [(a, b) for a, b in owned if text[a:b] == self._control.image_mark] if has_images else []
        owned = None if self.allow_control_tokens_in_content else owned
        return Rendered(text, spans if find_spans else None, owned, marks)

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
            # Without a mask to find, marks only tell whose the control tokens are: no matter where there can be none.
            data = (chat.messages, chat.tools, chat.template_kwargs)
            if must_succeed or _any_string(data, self._control.may_arise_from):
                raise
            return None

    def _checked_render(self, chat: Conversation, add_generation_prompt: bool = False) -> str:
        self._check_roles(chat)
        self._check_parts(chat)
        text = self._render(chat.messages, chat.tools, chat.template_kwargs, add_generation_prompt)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RenderError(f"The conversation holds half a character (a lone surrogate): {error}.") from error
        for number, (given, shown) in enumerate(zip(chat.messages, self._shown(chat.messages))):
            if isinstance(shown.get("content"), list):
                _check_blocks(number, shown["content"], text, is_text=isinstance(given["content"], str))
        return text

    def _shown(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """As the template gets them."""
        return for_template(messages) if self._image_text else messages

    def _check_parts(self, chat: Conversation) -> None:
        """Images need layouts; and where a template may write placeholders, it could write those of videos and sounds, too."""
        for number, message in enumerate(chat.messages):
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                kind = part.get("type") if isinstance(part, dict) else None
                if kind == IMAGE and self._image_text is None:
                    raise RenderError(NO_IMAGES.format(f"Message {number}"))
                if kind not in (None, "text", IMAGE) and self._image_text is not None:
                    raise RenderError(f"Message {number} has a part of type {kind!r}; texts and images are supported.")

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
            return replace(self._rendered(chat, add_generation_prompt=True), spans=[])

        def find_end(marked: MarkedRender) -> list[Span]:
            places = marked.places_of(last)
            ends = [p.end for p in places if p.piece.kind == "content" and p.verbatim]
            if not ends or any(p.end > ends[-1] for p in places if p.piece.kind == IMAGE):
                why = "ends with an image: end it with a text" if ends else "has no content"
                raise RenderError(f"Message {last} of the assistant {why} that could be continued.", marked.text)
            return [(0, ends[-1])]

        rendered = self._rendered(chat, frozenset([last]), "prompt", find_end)
        ((_, end),) = rendered.spans
        owned = rendered.owned_control_tokens
        kept = None if owned is None else [span for span in owned if span[1] <= end]
        return Rendered(rendered.text[:end], [], kept, rendered.image_marks)

    def _expanded(self, rendered: Rendered, images: list[RowImage]) -> Rendered:
        """The same with what the processor writes for the images."""
        if self._image_text is None or not (images or rendered.image_marks):
            return rendered
        expanded = self._image_text.expand(rendered.text, rendered.image_marks, images)
        spans, owned = rendered.spans, rendered.owned_control_tokens
        return Rendered(
            expanded.text,
            None if spans is None else expanded.moved(spans),
            None if owned is None else expanded.control_tokens(owned),
            images=expanded.images,
        )

    # -------------------------------------------------------------------------------------------- inside: encoding

    def _encode(
        self, chats: list[Any], render: Callable[[Any], Rendered], is_plain: bool = False
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
            for number, sample in zip(chunk, self._encode_chunk([results[number] for number in chunk], is_plain)):
                results[number] = sample
        return results

    def _encode_chunk(self, chunk: list[Rendered], is_plain: bool) -> list[Sample | RenderError]:
        """Every text as a whole: what a tokenizer makes of a part of a text says nothing certain about the text."""
        with whole_texts(self.tokenizer) as backend:
            # Offsets cost a third more.
            encode = backend.encode_batch if any(i.spans or i.images for i in chunk) else backend.encode_batch_fast
            encodings = encode([item.text for item in chunk], add_special_tokens=is_plain)
        return [self._sample(item, encoding, is_plain) for item, encoding in zip(chunk, encodings)]

    def _sample(self, item: Rendered, encoding: Any, is_plain: bool) -> Sample | RenderError:
        ids = _ids(encoding)
        try:
            parses_all = is_plain or self.allow_control_tokens_in_content
            if not parses_all and not self._has_expected_control_tokens(item, ids):
                encoding = self._literal_encoding(item)
                ids = _ids(encoding)
            # None: all of it is trained; an empty list: nothing
            trained = trained_tokens(encoding, item.spans) if item.spans else np.full(len(ids), item.spans is None)
            if self._image_text is None:
                return Sample(ids, trained)
            ranges = [token_range(encoding, image.start, image.end) for image in item.images]
            return self._image_text.sample(ids, trained, item.images, ranges, item.text)
        except RenderError as error:
            return error

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


def _ids(encoding: Any) -> np.ndarray:
    return np.array(encoding.ids, dtype=np.int32)


def _images_of(chat: Conversation) -> list[RowImage]:
    return [image for images in images_by_message(chat.messages).values() for image in images]


def trained_tokens(encoding: Any, spans: list[Span]) -> np.ndarray:
    """The mask of tokens that hold at least one character of a span.

    A token across the edge of a span counts: the model has to produce it as a whole, and the prompt alone ends in other ids.
    """
    trained = np.zeros(len(encoding), dtype=bool)
    for start, end in spans:
        trained[slice(*token_range(encoding, start, end))] = True
    return trained


def token_range(encoding: Any, start: int, end: int) -> Span:
    """The first of the tokens that hold characters `start` to `end`, and one past the last."""

    def last_character(token: int) -> int:
        return (encoding.token_to_chars(token) or outside(token))[1]

    def first_character(token: int) -> int:
        """Byte-level tokenizers that trim offsets leave nothing of a space but its end."""
        begin, stop = encoding.token_to_chars(token) or outside(token)
        return begin if begin < stop else begin - 1

    def outside(token: int) -> Span:
        """BOS and EOS, which the tokenizer adds, hold no character."""
        return (-1, 0) if token < encoding.sequence_ids.index(0) else (end + 1, end + 2)

    tokens = range(len(encoding))
    first = bisect_right(tokens, start, key=last_character)
    return first, bisect_left(tokens, end, key=first_character)


def _continuation(marked: MarkedRender, turn: int, continued: list[str]) -> int | None:
    """Where the completion begins inside a message that the prompt began; None if it begins with a message."""
    if not continued:
        return None
    contents = [place for place in marked.places_of(turn) if place.piece.kind == "content"]
    return contents[len(continued) - 1].start + len(continued[-1])


def _check_blocks(number: int, blocks: list[Any], text: str, is_text: bool) -> None:
    """Templates that know texts only drop a list of text blocks, or print it as data: both lose what was said.

    A block that was given as a text may be rewritten like any text.
    """
    if str(blocks) in text or json.dumps(blocks, ensure_ascii=False) in text:
        reason = "prints the list of text blocks in message {} as data"
    elif is_text:
        return
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
