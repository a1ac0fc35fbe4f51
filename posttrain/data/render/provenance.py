"""Provenance: which characters of a rendered chat the assistant wrote, for any template and without editing it.

A trained turn runs from the end of its generation prompt (what the template itself writes with `add_generation_prompt`) to
the end-of-turn token after its last piece, that token included. Both edges are read off renders of the same template: the
prompt alone ends where the turn begins, and what stands after the last piece both when the turn is the last one and when a
user follows is what closes a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from posttrain.data.render.conversation import Conversation, RenderError, images_by_message, is_image
from posttrain.data.render.marks import UNMARKED, MarkedRender, Marker, Place, common_prefix, read_marks
from posttrain.data.render.special_tokens import ControlTokens

Span = tuple[int, int]
Render = Callable[[list[dict[str, Any]], Any, dict[str, Any] | None, bool], str]
"""(messages, tools, template arguments, add_generation_prompt) -> text"""

PROBE_USER = {"role": "user", "content": "Hello"}
CLOSING_CHARACTERS = ">])}｜"


class Placement(NamedTuple):
    """How one attempt places the marks; `strict` attempts notice when a template trims what is trained."""

    context: str
    trained: str
    names: bool
    strict: bool


ATTEMPTS = (
    Placement("inside", "around", True, True),
    # For templates that look at the start or the end of a text, or at the names of tools:
    Placement("middle", "around", False, True),
    Placement(UNMARKED, "around", False, True),
    # For templates that trim:
    Placement("inside", "inside", True, False),
    Placement("middle", "middle", False, False),
)


class Closer(NamedTuple):
    """What closes a turn: a text, or, where that differs between the last turn and others, the first token after it."""

    text: str
    is_first_token: bool = False


class Provenance:
    """Reads the origin of rendered text. Facts about a template (what opens and closes turns) are kept and re-checked."""

    def __init__(self, render: Render, control: ControlTokens) -> None:
        self._render = render
        self._control = control
        self._prompt_tails: dict[Any, str] = {}
        self._closers: dict[Any, Closer] = {}
        self._headers: dict[Any, str] = {}

    def mark(
        self,
        chat: Conversation,
        plain: str,
        trained_messages: frozenset[int] = frozenset(),
        add_generation_prompt: bool = False,
    ) -> MarkedRender:
        """The places of all pieces of `chat` in `plain`. Raises if no marked render agrees with the plain one."""
        for attempt in ATTEMPTS:
            marker = Marker(trained_messages, attempt.trained, attempt.context, attempt.names, self._control)
            messages = marker.messages(chat.messages)
            tools, kwargs = marker.data(chat.tools), marker.data(chat.template_kwargs)
            try:
                marked = self._render(messages, tools, kwargs, add_generation_prompt)
            except RenderError:  # a test in the template on the text of a message; another placement may pass it
                continue
            found = read_marks(plain, marked, marker)
            if found is None:
                continue
            self._check_images(chat, found, add_generation_prompt)
            for piece in () if attempt.strict else [*(place.piece for place in found.places), *found.lost]:
                if piece.message in trained_messages and piece.text != piece.text.strip():
                    does = f"trims the white space around the {piece.kind} {_excerpt(piece.text)}"
                    raise _refusal(found, piece.message, does)
            return found
        raise RenderError(
            "The chat template renders a conversation differently when its texts are marked, so it is not known which "
            "part of the rendered text was said by whom. Does it rewrite the messages, or does the conversation hold "
            "characters of Unicode's private planes 15 or 16?",
            plain,
        )

    def _check_images(self, chat: Conversation, marked: MarkedRender, add_generation_prompt: bool) -> None:
        """Raises unless the template wrote a mark for each image, in the order of messages.

        Which marks are a message's is seen by a render without its images: it has as many fewer, and differs from there on.
        """
        if not self._control.image_mark:
            return
        images, marks, before = images_by_message(chat.messages), marked.image_marks, 0
        total = sum(map(len, images.values()))
        if len(images) <= 1 and len(marks) == total:
            return
        for number, own in images.items():
            without = self._try_render(_without_images(chat.messages, number), chat, add_generation_prompt)
            if without is not None:
                written = marked.text.count(self._control.image_mark) - without.count(self._control.image_mark)
                shared = len(common_prefix(marked.text, without))
                if written != len(own):
                    raise _image_refusal(marked, chat, number, f"writes {written} of the {len(own)} images of")
                if sum(end <= shared for _, end in marks) != before:
                    raise _image_refusal(
                        marked, chat, number, "moves to another place in the conversation the images of"
                    )
            before += len(own)
        if len(marks) != total:
            raise RenderError(
                f"The chat template writes {len(marks)} placeholders of images for a conversation with {total}.",
                marked.text,
            )

    def turn_spans(self, chat: Conversation, marked: MarkedRender, turns: list[int]) -> list[Span]:
        """The characters of each assistant turn, from the end of its generation prompt to its end-of-turn token."""
        spans: list[Span] = []
        for turn in turns:
            self.check_unchanged(marked, turn)
            start = self.turn_start(chat, marked, turn)
            end = self._turn_end(chat, marked, turn, start)
            inside = [p for p in marked.places if p.piece.message != turn and p.end > start and p.start < end]
            if inside or (spans and start < spans[-1][1]):
                raise _refusal(marked, turn, "mixes the turn with text of other messages")
            spans.append((start, end))
        return spans

    def check_unchanged(self, marked: MarkedRender, turn: int) -> None:
        """Raises if the template dropped, rewrote or repeated something the assistant wrote in this turn."""
        places = marked.places_of(turn)
        kept = [(place.piece.kind, place.piece.text) for place in places if place.verbatim]
        for place in places:
            if not place.verbatim:
                rendered_as = marked.text[place.start : place.end]
                became = f" as {_excerpt(rendered_as)}" if rendered_as else ""
                if place.piece.kind == "tool call arguments":
                    became += " (it wants them as a mapping, not as JSON text)"
                raise _refusal(marked, turn, f"rewrites the {place.piece.kind} {_excerpt(place.piece.text)}{became}")
        for piece in marked.lost:
            # The same text under two names (`reasoning_content` and `thinking`) is said once.
            if piece.message == turn and (piece.kind, piece.text) not in kept:
                raise _refusal(marked, turn, f"drops the {piece.kind} {_excerpt(piece.text)}")
        if len({id(place.piece) for place in places}) != len(places):
            raise _refusal(marked, turn, "repeats a text")

    def turn_start(self, chat: Conversation, marked: MarkedRender, turn: int) -> int:
        """Where the generation prompt of a turn ends."""
        text, own = marked.text, marked.places_of(turn)
        first = own[0].start if own else None
        before = [p for p in marked.places if p.piece.message < turn and (first is None or p.end <= first)]
        limit = 0
        if before:
            last = max(before, key=lambda place: place.end)
            limit = last.end
            for tail in self._tails_of_prompt(chat, marked, turn, last):
                if text.startswith(tail, limit):
                    return limit + len(tail)
                # The template leaves out a part of the prompt in turns that are written already (such as "<think>").
                if first is not None and tail.startswith(text[limit:first]):
                    marked.cuts_prompts = True
                    return first
                common = self._common(tail, text[limit:first])
                if common[max(len(tail) - len(self._header(chat)), 0) :].strip():
                    marked.cuts_prompts = True
                    return limit + len(common)
        elif turn > 0:
            prompt = self._try_render(chat.messages[:turn], chat, True)
            if prompt is not None and text.startswith(prompt):
                return len(prompt)
        elif first is not None:
            start = self._start_of_first_message(chat, marked, first)
            if start is not None:
                return start
        header = self._header(chat)
        found = text.rfind(header, limit, first) if header else -1
        if found < 0 or (first is None and text.count(header, limit) != 1):
            does = f"does not put its generation prompt ({header!r}) before the turn, whose beginning is unknown"
            raise _refusal(marked, turn, does)
        return found + len(header)

    def _start_of_first_message(self, chat: Conversation, marked: MarkedRender, first: int) -> int | None:
        """Where an assistant message begins that no message precedes: where it would begin after a user's message."""
        asked = _part(chat, [PROBE_USER, *chat.messages])
        question = self._try_render([PROBE_USER], asked, False)
        places = self._try_mark(asked, frozenset(number + 1 for number in marked.trained_messages))
        if question is None or places is None or not places.places_of(0) or not places.places_of(1):
            return None
        plain = places.text
        end_of_question, own = places.places_of(0)[-1].end, places.places_of(1)[0].start
        start = self.turn_start(asked, places, 1)
        closing = self._common(plain[end_of_question:], question.rpartition(PROBE_USER["content"])[2])
        before = plain[end_of_question + len(closing) : own]
        header = before[: len(before) - (own - start)] if start <= own else before
        if not header.strip() or not marked.text.endswith(before, 0, first):
            return None
        return first + start - own

    def _tails_of_prompt(self, chat: Conversation, marked: MarkedRender, turn: int, last: Place) -> Iterator[str]:
        """What follows the last piece of the prompt when the template is asked for a generation prompt.

        First the answer kept from a prompt of the same shape, then the answer for this very prompt.
        """
        shape = [(m.get("role"), marked.kinds.get(n, ())) for n, m in enumerate(chat.messages[:turn])]
        key = (tuple(shape[last.piece.message :]), *_template_state(chat))
        if key in self._prompt_tails:
            yield self._prompt_tails[key]
        trained_messages = frozenset(number for number in marked.trained_messages if number < turn)
        prompt = self._try_mark(_part(chat, chat.messages[:turn]), trained_messages, add_generation_prompt=True)
        if prompt is not None and prompt.places:
            self._prompt_tails[key] = tail = prompt.text[max(place.end for place in prompt.places) :]
            yield tail

    def _header(self, chat: Conversation) -> str:
        """What `add_generation_prompt` adds after a user's message; where nothing else tells where a turn begins."""
        key = _template_state(chat)
        if key not in self._headers:
            without = self._try_render([PROBE_USER], chat, False)
            prompt = self._try_render([PROBE_USER], chat, True)
            header = ""
            if without is not None and prompt is not None:
                header = prompt[len(self._common(prompt, without)) :]
            self._headers[key] = header
        return self._headers[key]

    def _turn_end(self, chat: Conversation, marked: MarkedRender, turn: int, start: int) -> int:
        """Where the end-of-turn token after the last piece ends."""
        last = max((place.end for place in marked.places_of(turn)), default=start)
        if not marked.places_of(turn):
            chat, last = self._with_content(chat, marked, turn, start)
        last = max(last, start)
        others = [p.start for p in marked.places if p.piece.message != turn and p.start >= last]
        rest = marked.text[last : min(others, default=None)]
        key = (marked.kinds.get(turn, ()), chat.messages[turn].get("content") == "", *_template_state(chat))
        kept = self._closers.get(key)
        end = None if kept is None else self._closed_at(kept, rest)
        if end is None:
            self._closers[key] = closer = self._closer(chat, turn)
            end = self._closed_at(closer, rest)
        if end is None:
            raise _refusal(marked, turn, f"closes the turn with {_excerpt(rest)}, in which no end of turn is known")
        return last + end

    def _with_content(
        self, chat: Conversation, marked: MarkedRender, turn: int, start: int
    ) -> tuple[Conversation, int]:
        """For a turn without any text: the same chat with one, and where the text would stand. Unchanged if that fails."""
        messages = [*chat.messages]
        messages[turn] = messages[turn] | {"content": PROBE_USER["content"]}
        filled = _part(chat, messages)
        places = self._try_mark(filled, marked.trained_messages)
        if places is None or not places.places_of(turn):
            return chat, start
        before = places.text[self.turn_start(filled, places, turn) : places.places_of(turn)[0].start]
        return (filled, start + len(before)) if marked.text.startswith(before, start) else (chat, start)

    def _closer(self, chat: Conversation, turn: int) -> Closer:
        """What closes this turn: the common beginning of what follows when it is the last and when a user follows."""
        ending = self._rest_after(chat, [*chat.messages[: turn + 1]], turn)
        followed = self._rest_after(chat, [*chat.messages[: turn + 1], PROBE_USER], turn)
        if ending is None:
            return Closer("", is_first_token=True)
        common = ending if followed is None else self._common(ending, followed)
        tokens = self._control.find_added(common)
        if tokens:
            return Closer(common[: tokens[-1][1]])
        if self._control.find_added(ending):
            return Closer("", is_first_token=True)
        return Closer(common.rstrip())

    def _rest_after(self, chat: Conversation, messages: list[dict[str, Any]], turn: int) -> str | None:
        """The text after the last piece of `turn` up to the next piece, when the chat consists of `messages`."""
        part = _part(chat, messages)
        marked = self._try_mark(part, frozenset([turn]))
        if marked is None:
            return None
        ends = [place.end for place in marked.places_of(turn)]
        try:
            last = max(ends) if ends else self.turn_start(part, marked, turn)
        except RenderError:  # the probe gives no answer; the caller uses the other one
            return None
        others = [place.start for place in marked.places if place.start >= last and place.piece.message != turn]
        return marked.text[last : min(others, default=None)]

    def _closed_at(self, closer: Closer, rest: str) -> int | None:
        if not closer.is_first_token:
            return len(closer.text) if rest.startswith(closer.text) else None
        tokens = self._control.find_added(rest)
        if not tokens or rest[: tokens[0][0]].strip():
            return None
        # In "<|user|>\n" the token opens the next turn; in "<|end|><|start|>user<|message|>" it closes this one.
        names_a_role = any(map(str.isalnum, rest[tokens[0][1] :])) or len(tokens) > 1
        is_end_of_text = not rest[tokens[0][1] :].strip()
        return tokens[0][1] if names_a_role or is_end_of_text else None

    def _try_render(
        self, messages: list[dict[str, Any]], chat: Conversation, add_generation_prompt: bool
    ) -> str | None:
        """A render that only informs: None where the template refuses the messages."""
        try:
            return self._render(messages, chat.tools, chat.template_kwargs, add_generation_prompt)
        except RenderError:
            return None

    def _try_mark(
        self, chat: Conversation, trained_messages: frozenset[int], add_generation_prompt: bool = False
    ) -> MarkedRender | None:
        """The places of all pieces in a render that only informs: None where there is none."""
        plain = self._try_render(chat.messages, chat, add_generation_prompt)
        try:
            return None if plain is None else self.mark(chat, plain, trained_messages, add_generation_prompt)
        except RenderError:
            return None

    def _common(self, text: str, other: str) -> str:
        """The common beginning of two texts that ends neither inside an added token nor inside a word."""
        common = common_prefix(text, other)
        if common in (text, other):
            return common
        for start, end in [*self._control.find_added(text), *self._control.find_added(other)]:
            if start < len(common) < end:
                return common[:start]
        while common and not (common[-1].isspace() or common[-1] in CLOSING_CHARACTERS):
            common = common[:-1]
        return common


def _part(chat: Conversation, messages: list[dict[str, Any]]) -> Conversation:
    """A conversation of `messages` with the tools and template arguments of `chat`."""
    return Conversation(messages, chat.tools, chat.template_kwargs)


def _template_state(chat: Conversation) -> tuple[bool, str]:
    return bool(chat.tools), repr(chat.template_kwargs) if chat.template_kwargs else ""


def _without_images(messages: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """The messages, with a text in the place of what message `number` would have without its images."""
    rest = [part for part in messages[number]["content"] if not is_image(part)] or [{"type": "text", "text": "."}]
    return [*messages[:number], messages[number] | {"content": rest}, *messages[number + 1 :]]


def _image_refusal(marked: MarkedRender, chat: Conversation, number: int, does: str) -> RenderError:
    return RenderError(
        f"The chat template {does} message {number} ({chat.messages[number].get('role')}): the model would be shown other images "
        "than the text speaks of. Move the images into a message of the user, or choose another template "
        "(`chat_template_path`).",
        marked.text,
    )


def _refusal(marked: MarkedRender, turn: int, does: str) -> RenderError:
    return RenderError(
        f"The chat template {does} of the assistant's message {turn}, so no mask of what it said can be trusted."
        if does.startswith(("trims", "rewrites", "drops"))
        else f"In the assistant's message {turn} the chat template {does}, so no mask can be trusted.",
        marked.text,
    )


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}")
