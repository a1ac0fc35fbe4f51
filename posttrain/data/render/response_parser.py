"""Reads an assistant turn back into a message, with a syntax that is learned from the chat template itself.

The template is asked to render turns whose reasoning, tool names and arguments are known; where these stand in the render
tells what surrounds them. So a template of an unknown family needs no parser of its own.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from posttrain.data.render.conversation import Conversation, RenderError
from posttrain.data.render.marks import common_prefix
from posttrain.data.render.provenance import Provenance, Render
from posttrain.data.render.special_tokens import ControlTokens

USER = {"role": "user", "content": "Hello"}
REASONING, CONTENT = "Let me ponder-zq", "Here it is-zq"
THOUGHT = {"reasoning_content": REASONING, "thinking": REASONING}  # templates know it by one name or the other
NAMES = ("probe_alpha", "probe_beta")
STRINGS = {"first_key": "value-one", "second_key": "value-two"}
NUMBERS = {"first_key": 7341001, "second_key": 8472002}
DECODER = json.JSONDecoder(strict=False)
ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}

PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
PYTHON_CONSTANT = re.compile(r"\s*(True|False|None)\b")

Call = dict[str, Any]
Schemas = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Turn:
    """A rendered turn, without its generation prompt, and where its pieces begin and end in it."""

    text: str
    places: dict[str, tuple[int, int]]  # by the text of the piece


@dataclass(frozen=True)
class ObjectCalls:
    """Each call is a JSON object with the name and the arguments in it."""

    lead: re.Pattern[str]  # what stands before the first object
    joint: re.Pattern[str]  # what stands between two
    name_key: str
    arguments_key: str

    def read(self, text: str, schemas: Schemas) -> tuple[str, list[Call]] | None:
        lead = self.lead.search(text)
        if lead is None:
            return None
        calls, position = [], lead.end()
        while True:
            found = _read_json(text, position)
            if found is None or not isinstance(found[0], dict) or not isinstance(found[0].get(self.name_key), str):
                return None
            value, position = found
            arguments = value.get(self.arguments_key) or {}
            if isinstance(arguments, str):
                arguments, _ = _read_json(arguments, 0) or (None, 0)
            if not isinstance(arguments, dict):
                return None
            calls.append(_call(value[self.name_key], arguments))
            joint = self.joint.match(text, position)
            if joint is None:
                return text[: lead.start()], calls
            position = joint.end()

    def begins_in(self, text: str) -> bool:
        has_mark = self.lead.search("{") is None  # without one, any object at the beginning of a text looks like a call
        return has_mark and self.lead.search(text) is not None


@dataclass(frozen=True)
class NamedCalls:
    """Each call is a name, something between, and a JSON object of arguments."""

    head: re.Pattern[str]  # from what stands before the name to what stands before the arguments; group 1 is the name
    wrapper: str  # what stands before the first call only

    def read(self, text: str, schemas: Schemas) -> tuple[str, list[Call]] | None:
        heads = list(self.head.finditer(text))
        calls = []
        for head in heads:
            found = _read_json(text, head.end())
            if found is None or not isinstance(found[0], dict):
                return None
            calls.append(_call(head[1].strip(), found[0]))
        return (_without_ending(text[: heads[0].start()], self.wrapper), calls) if calls else None

    def begins_in(self, text: str) -> bool:
        return self.head.search(text) is not None


@dataclass(frozen=True)
class ArgumentCalls:
    """Each call is a name and a list of keys and values, each between marks of their own."""

    head: re.Pattern[str]  # what stands before the name, the name as group 1, what stands after it
    wrapper: str  # what stands before the first call only
    key: re.Pattern[str]  # what stands around a key, and the key as group 1
    quote: str  # what stands before a value that is a string, where other values have nothing
    closing: str  # what stands after a string, or after any value where there is no quote

    def read(self, text: str, schemas: Schemas) -> tuple[str, list[Call]] | None:
        first = head = self.head.search(text)
        calls = []
        while head is not None:
            arguments, position = {}, head.end()
            while (key := self.key.match(text, position)) is not None:
                wanted = schemas.get(head[1], {}).get(key[1], {}).get("type")
                found = self._read_value(text, key.end(), is_text=wanted == "string")
                if found is None:
                    return None
                arguments[key[1]], position = found
            calls.append(_call(head[1], arguments))
            head = self.head.search(text, position)
        return (_without_ending(text[: first.start()], self.wrapper), calls) if calls else None

    def begins_in(self, text: str) -> bool:
        return self.head.search(text) is not None

    def _read_value(self, text: str, position: int, is_text: bool) -> tuple[Any, int] | None:
        if self.quote and not text.startswith(self.quote, position):
            return _read_data(text, position)
        begin = position + len(self.quote)
        end = _unescaped(text, self.closing, begin) if self.quote else text.find(self.closing, begin)
        if end < 0:
            return None
        value = text[begin:end]
        if self.quote:
            return re.sub(r"\\(.)", lambda escape: ESCAPES.get(escape[1], escape[1]), value), end + len(self.closing)
        found = None if is_text else _read_data(value, 0)  # what is no data is a string
        is_data = found is not None and not value[found[1] :].strip()
        return (found[0] if is_data else value.strip("\n")), end + len(self.closing)


CallSyntax = ObjectCalls | NamedCalls | ArgumentCalls
"""How a template writes tool calls. `read` gives the text before the calls, and the calls; None if there are none or they are
malformed; `schemas` (name of a tool -> its properties) tell whether a value without quotes is a string. `begins_in` says whether a
text holds what a call begins with, be it well formed or not.
"""


def _unescaped(text: str, closing: str, position: int) -> int:
    """Where `closing` stands next without a backslash before it; -1 if nowhere."""
    while (end := text.find(closing, position)) >= 0:
        escapes = len(text[:end]) - len(text[:end].rstrip("\\"))
        if escapes % 2 == 0:
            return end
        position = end + 1
    return -1


class ResponseParser:
    """Parses turns of one template. Learns the syntax when it is made."""

    def __init__(self, render: Render, provenance: Provenance, control: ControlTokens) -> None:
        self._render, self._provenance = render, provenance
        specials = "|".join(map(re.escape, control.texts))
        self._stop = re.compile(rf"(?:(?:{specials})\s*)+\Z") if specials else re.compile(r"\Z")
        plain = self._turn({"content": CONTENT})
        lead = "" if plain is None else plain.text[: plain.places[CONTENT][0]]
        self._content_lead = re.compile(rf"\s*{_loose(lead)}\s*" if lead.strip() else r"(?!)")
        self._reasoning_opening = ""
        self._reasoning = [
            pattern for pattern in (self._learn_reasoning(), self._learn_reasoning_before_call()) if pattern
        ]
        self._calls = self._learn_calls()

    @property
    def knows_tool_calls(self) -> bool:
        return self._calls is not None

    def parse(self, text: str, prefix: str = "", schemas: Schemas | None = None) -> dict[str, Any]:
        """The message; a text whose tool calls are malformed becomes plain content.

        `prefix` is the end of the prompt: what it opens (reasoning) need not be opened by the text.
        """
        text = self._stop.sub("", text)
        if self._reasoning_opening and prefix.rstrip().endswith(self._reasoning_opening):
            text = self._reasoning_opening + text
        message: dict[str, Any] = {"role": "assistant", "content": text}
        for pattern in self._reasoning:
            match = pattern.match(text)
            if match:
                if match[1].strip():
                    message["reasoning_content"] = match[1].strip("\n")
                text = text[match.end() :]
                break
        else:
            text = self._content_lead.sub("", text, count=1) if self._content_lead.match(text) else text
        message["content"] = text
        found = None if self._calls is None else self._calls.read(text, schemas or {})
        if found is not None:
            message["content"], message["tool_calls"] = found[0].strip(), found[1]
        return message

    def begins_call(self, text: str) -> bool:
        """Whether the text begins a call; where `parse` found none in it, it is malformed."""
        return self._calls is not None and self._calls.begins_in(text)

    # ---------------------------------------------------------------------------------------------------- learning

    def _turn(self, fields: dict[str, Any]) -> Turn | None:
        """The template's render of one assistant turn; None if it cannot render one."""
        chat = Conversation([USER, {"role": "assistant", **fields}])
        try:
            plain = self._render(chat.messages, None, None, False)
            marked = self._provenance.mark(chat, plain, frozenset([1]))
            ((start, end),) = self._provenance.turn_spans(chat, marked, [1])
        except RenderError:
            return None
        if "tool_calls" in fields and "reasoning_content" not in fields:
            # What the template writes before any content (such as an empty thought) is no part of the calls.
            lead = self._content_lead.match(plain, start)
            start = start if lead is None else lead.end()
        places = {p.piece.text: (p.start - start, p.end - start) for p in marked.places_of(1)}
        return Turn(self._stop.sub("", plain[start:end]), places)

    def _learn_reasoning(self) -> re.Pattern[str] | None:
        turn = self._turn({**THOUGHT, "content": CONTENT})
        if turn is None or REASONING not in turn.places:
            # Templates that cut thoughts out of the content know their end by name.
            return self._learn_thought_in_content()
        (begin, end), (content, _) = turn.places[REASONING], turn.places[CONTENT]
        self._reasoning_opening = turn.text[:begin].strip()
        return _reasoning_pattern(turn.text[:begin], turn.text[end:content])

    def _learn_thought_in_content(self) -> re.Pattern[str] | None:
        messages = [USER, {"role": "assistant", "content": f"<think>\n{REASONING}\n</think>\n\n{CONTENT}"}, USER]
        try:
            text = self._render(messages, None, None, False)
        except RenderError:
            return None
        return re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL) if REASONING not in text else None

    def _learn_reasoning_before_call(self) -> re.Pattern[str] | None:
        """Some templates close the reasoning in another way before a tool call than before an answer."""
        turn = self._turn({**THOUGHT, "content": "", "tool_calls": [_call(NAMES[0], STRINGS)]})
        bare = self._turn({"content": "", "tool_calls": [_call(NAMES[0], STRINGS)]})
        if turn is None or bare is None or REASONING not in turn.places or NAMES[0] not in bare.places:
            return None
        begin, end = turn.places[REASONING]
        between = turn.text[end : turn.places[NAMES[0]][0]]
        before_call = bare.text[: bare.places[NAMES[0]][0]]
        closing = between.removesuffix(_common_suffix(between, before_call))
        return _reasoning_pattern(turn.text[:begin], closing) if closing.strip() else None

    def _learn_calls(self) -> CallSyntax | None:
        for encode in (dict, json.dumps):  # some templates want the arguments as a JSON text
            one = self._turn({"content": "", "tool_calls": [_call(NAMES[0], encode(STRINGS))]})
            if one is None or NAMES[0] not in one.places:
                continue
            two = self._turn({"content": "", "tool_calls": [_call(name, encode(STRINGS)) for name in NAMES]})
            if two is None or NAMES[1] not in two.places:
                two = None
            for learn in (_learn_object_calls, _learn_named_calls):
                syntax = learn(one, two)
                if syntax is not None:
                    return syntax
            numbers = self._turn({"content": "", "tool_calls": [_call(NAMES[0], NUMBERS)]})
            return None if numbers is None else _learn_argument_calls(one, two, numbers)
        return None


def _learn_object_calls(one: Turn, two: Turn | None) -> ObjectCalls | None:
    start = one.text.rfind("{", 0, one.places[NAMES[0]][0])
    found = _read_json(one.text, start) if start >= 0 else None
    if found is None or not isinstance(found[0], dict):
        return None
    keys = {json.dumps(value): key for key, value in found[0].items()}
    name_key = keys.get(json.dumps(NAMES[0]))
    arguments_key = keys.get(json.dumps(STRINGS)) or keys.get(json.dumps(json.dumps(STRINGS)))
    if name_key is None or arguments_key is None:
        return None
    lead, joint = one.text[:start].strip(), None
    if two is not None:
        joint = two.text[found[1] : two.text.rfind("{", 0, two.places[NAMES[1]][0])].strip()
    lead_pattern = re.compile(rf"\s*{_loose(lead)}\s*") if lead else re.compile(r"\A\s*(?=\{)")
    return ObjectCalls(
        lead_pattern, re.compile(rf"\s*{_loose(joint)}\s*" if joint else "(?!)"), name_key, arguments_key
    )


def _learn_named_calls(one: Turn, two: Turn | None) -> NamedCalls | None:
    end = one.places[NAMES[0]][1]
    start = one.text.find("{", end)
    found = _read_json(one.text, start) if start >= 0 else None
    if found is None or found[0] != STRINGS:
        return None
    opening, wrapper = _opening(one, two, found[1])
    between = one.text[end:start].strip()
    if not opening or not between:
        return None
    return NamedCalls(re.compile(rf"{_loose(opening)}([^\s{{}}\"'<>]+?)\s*{_loose(between)}\s*"), wrapper)


def _learn_argument_calls(one: Turn, two: Turn | None, numbers: Turn) -> ArgumentCalls | None:
    """Keys and values are told apart by what stands around them in a call with strings and in one with numbers."""
    (first_key, first), (second_key, second) = STRINGS.items()
    number_at = numbers.text.find(str(NUMBERS[first_key]))
    number_key_at = numbers.text.rfind(first_key, 0, number_at)
    if first not in one.places or second not in one.places or number_key_at < 0:
        return None
    before_first = one.text[one.places[NAMES[0]][1] : one.places[first][0]]
    between = one.text[one.places[first][1] : one.places[second][0]]
    after = one.text[one.places[second][1] :]
    if first_key not in before_first or second_key not in between:
        return None
    after_name, key_to_string = before_first.split(first_key, 1)
    before_key = between.split(second_key, 1)[0]
    key_open = _common_suffix(after_name, before_key)
    key_close = numbers.text[number_key_at + len(first_key) : number_at]
    closing = common_prefix(before_key.removesuffix(key_open), after)
    opening, wrapper = _opening(one, two, one.places[second][1])
    before_name = _loose(opening)
    if not opening:  # the calls of a list: one is after the wrapper, the next after a comma
        joint = two.text[one.places[second][1] : two.places[NAMES[1]][0]].removeprefix(closing)
        before_name, wrapper = f"(?:{_loose(wrapper)}|{_loose(joint)})", ""
    if not (key_open + key_close).strip() or not closing.strip():
        return None
    head = re.compile(rf"{before_name}\s*([\w.\-]+)\s*{_loose(after_name.removesuffix(key_open))}")
    key = re.compile(rf"[\s,;]*{_loose(key_open)}\s*([\w.\-]+)\s*{_loose(key_close)}\s*")
    return ArgumentCalls(head, wrapper, key, key_to_string.removeprefix(key_close), closing.strip())


def _opening(one: Turn, two: Turn | None, first_call_end: int) -> tuple[str, str]:
    """What stands before the name of every call, and what stands before the first call only."""
    head = one.text[: one.places[NAMES[0]][0]]
    opening = head if two is None else _common_suffix(head, two.text[first_call_end : two.places[NAMES[1]][0]])
    return opening.strip(), head.removesuffix(opening).strip()


def _reasoning_pattern(opening: str, closing: str) -> re.Pattern[str]:
    return re.compile(rf"\s*{_loose(opening)}(.*?){_loose(closing)}\s*", re.DOTALL)


def _loose(text: str) -> str:
    """A pattern for `text` in which white space may be any white space or none."""
    return r"\s*".join(map(re.escape, text.split()))


def _common_suffix(text: str, other: str) -> str:
    return common_prefix(text[::-1], other[::-1])[::-1]


def _without_ending(text: str, ending: str) -> str:
    return text.rstrip().removesuffix(ending) if ending else text


def _read_json(text: str, position: int) -> tuple[Any, int] | None:
    while position < len(text) and text[position].isspace():
        position += 1
    try:
        return DECODER.raw_decode(text, position)
    except (ValueError, RecursionError):  # the latter: ten thousand brackets
        return None


def _read_data(text: str, position: int) -> tuple[Any, int] | None:
    """JSON, or one of Python's constants, which templates write that print a value as it is."""
    constant = PYTHON_CONSTANT.match(text, position)
    if constant is not None:
        return PYTHON_CONSTANTS[constant[1]], constant.end()
    return _read_json(text, position)


def _call(name: str, arguments: Any) -> Call:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}
