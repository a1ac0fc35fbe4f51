"""TurnSuffix: the token ids between two turns of an assistant that calls tools.

What the model wrote stays as it was sampled; what follows it (the rest of the template's end of turn, the results of the tools, the
generation prompt) is found by rendering a short conversation of our own (user, assistant with calls, results) and taking the
ids after the token that closes the assistant's turn. That token is a control token, where every tokenizer cuts, so nothing
before it can change the ids behind it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posttrain.core.sample import Sample
from posttrain.data.images.row_image import RowImage
from posttrain.data.render.conversation import TOOL_ROLE, USER_ROLE, Conversation, RenderError, is_image
from posttrain.data.render.renderer import Renderer
from posttrain.data.render.template_checks import TOOL, shows_tools, tool_dialogue

QUESTION = {"role": "user", "content": "Hello"}
PROBE = ("get_weather", "22 degrees")
LONGEST_NAME = 64
REMEDY = "Set `chat_template_path` to a template with tools, such as 'chatml'."
PROBE_IMAGE = {"type": "image", "image": RowImage(bytes(16), (64, 64))}
IMAGE_FOLLOWS = "The result is an image, which follows."


@dataclass(frozen=True)
class ToolResult:
    """What one call gave, as the model reads it."""

    name: str
    content: str | list[dict[str, Any]]  # a text, or parts with images among them

    @property
    def has_images(self) -> bool:
        return not isinstance(self.content, str)

    def without_images(self) -> ToolResult:
        """The texts alone, where another turn shows the images."""
        texts = [] if isinstance(self.content, str) else [part["text"] for part in self.content if not is_image(part)]
        return ToolResult(self.name, "\n".join(texts) or IMAGE_FOLLOWS) if self.has_images else self

    def images_alone(self) -> list[dict[str, Any]]:
        """What the user's turn has of this result."""
        return [{"type": "text", "text": f"{self.name}:"}, *filter(is_image, self.content)] if self.has_images else []


class TurnSuffix:
    """Suffixes under one template. Raises ValueError where the template cannot carry on after a tool's result."""

    def __init__(
        self,
        renderer: Renderer,
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, Any] | None = None,
        image_role: str = TOOL_ROLE,
    ) -> None:
        """`tools` are the schemas that prompts are rendered with; `kwargs` go to the template. `image_role`: who shows images of
        results, the tool's own turn or a user's turn after it."""
        self.renderer, self.kwargs, self.image_role = renderer, kwargs or {}, image_role
        self._tools: list[dict[str, Any]] | None = tools or [TOOL]
        self._refuse_templates_without_tools()
        self._closings: dict[str, int] = {}
        results = [ToolResult(*PROBE)]
        try:
            self.closing = self._closing_id(results)
            with_schemas = self._suffix(results, {}).input_ids
            self._tools = None
            # Schemas stand far away from the suffix. Where it is the same without them, they need not be tokenised each time.
            if not np.array_equal(with_schemas, self._suffix(results, {}).input_ids):
                self._tools = tools or [TOOL]
        except RenderError as error:
            raise ValueError(f"Tools cannot be used with this chat template: {error.reason} {REMEDY}") from error

    def why_no_images(self) -> str | None:
        """None where images of results reach the text that the model is shown; else the reason, as the end of a sentence."""
        results = [ToolResult(PROBE[0], [{"type": "text", "text": PROBE[1]}, PROBE_IMAGE])]
        try:
            shown = self.sample(results).images
        except RenderError as error:
            return error.reason
        return None if len(shown) == 1 else "the template drops it"

    def sample(
        self, results: Sequence[ToolResult], is_closed: bool = True, kwargs: dict[str, Any] | None = None
    ) -> Sample:
        """What stands between an assistant's turn and its next one, images in their places; nothing of it is trained.

        RenderError where the template refuses a result. `is_closed`: the turn was sampled with its stop token; otherwise (a stop
        string) the closing token comes first. `kwargs` are arguments for the template that a row brings.
        """
        found = self._suffix(results, kwargs or {}, from_closing=not is_closed)
        # They are counted on from where the episode is, not from the question that it was rendered with.
        positions = None if found.positions is None else found.positions - found.positions[:, :1]
        return replace(found, trained=np.zeros(len(found), dtype=bool), positions=positions)

    def messages(self, results: Sequence[ToolResult]) -> list[dict[str, Any]]:
        """The turns between, as a conversation has them."""
        in_user_turn = self.image_role == USER_ROLE
        written = [result.without_images() if in_user_turn else result for result in results]
        shown = [part for result in results for part in result.images_alone()] if in_user_turn else []
        turns = [{"role": "tool", "name": result.name, "content": result.content} for result in written]
        return turns + ([{"role": "user", "content": shown}] if shown else [])

    def _refuse_templates_without_tools(self) -> None:
        renderer = self.renderer
        if not renderer.has_template:
            raise ValueError(f"Tools need a tokenizer with a chat template; this one has none. {REMEDY}")
        if not shows_tools(renderer):
            raise ValueError(
                f"The chat template does not write the signatures of tools: the model would not know them. {REMEDY}"
            )
        if tool_dialogue(renderer) is None or not renderer.response_parser.knows_tool_calls:
            raise ValueError(
                f"The chat template does not write calls of tools and their results, so they cannot be used. {REMEDY}"
            )

    def _conversation(
        self, results: Sequence[ToolResult], kwargs: dict[str, Any], with_results: bool = True
    ) -> Conversation:
        names = [re.sub(r"[^\w.\-]", "_", result.name)[:LONGEST_NAME] or "unknown" for result in results]
        numbers = [f"call{number:05}" for number in range(len(results))]  # some templates insist on nine characters
        calls = [
            {"type": "function", "id": number, "function": {"name": name, "arguments": {"place": "here"}}}
            for name, number in zip(names, numbers)
        ]
        answers = self.messages([replace(result, name=name) for name, result in zip(names, results)])
        answers = [m | {"tool_call_id": number} for m, number in zip(answers, numbers)] + answers[len(numbers) :]
        messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
        return Conversation(messages + answers * with_results, self._tools, {**self.kwargs, **kwargs} or None)

    def _closing_id(self, results: list[ToolResult]) -> int:
        """The control token that ends a turn with calls; checks that results leave what stands before them alone."""
        ids, control = self._turn(results, {}), np.fromiter(self.renderer.control_ids, dtype=np.int32)
        places = np.flatnonzero(np.isin(ids, control))
        rest = self.renderer.tokenizer.decode(ids[places[-1] + 1 :]) if len(places) else "all of it"
        if rest.strip():
            raise RenderError(f"it closes a turn that calls tools with no token of its own, but with {rest[-40:]!r}.")
        turn = ids[: places[-1] + 1]
        if not np.array_equal(self._encoded(results, {}).input_ids[: len(turn)], turn):
            raise RenderError("it changes the turn that calls a tool when the result is added.")
        return int(ids[places[-1]])

    def _turn(self, results: Sequence[ToolResult], kwargs: dict[str, Any]) -> np.ndarray:
        (turn,) = self.renderer.encode_chats([self._conversation(results, kwargs, with_results=False)], "everything")
        if isinstance(turn, RenderError):
            raise turn
        return turn.input_ids

    def _encoded(self, results: Sequence[ToolResult], kwargs: dict[str, Any]) -> Sample:
        (prompt,) = self.renderer.encode_prompts([self._conversation(results, kwargs)])
        if isinstance(prompt, RenderError):
            raise prompt
        return prompt

    def _suffix(self, results: Sequence[ToolResult], kwargs: dict[str, Any], from_closing: bool = False) -> Sample:
        """Before the results there are as many closing tokens as in the conversation without them."""
        key = repr((len(results), kwargs, self._tools is None))
        if key not in self._closings:
            self._closings[key] = int((self._turn(results, kwargs) == self.closing).sum())
        closings, found = self._closings[key], self._encoded(results, kwargs)
        places = np.flatnonzero(found.input_ids == self.closing)
        if len(places) < closings or not closings:
            raise RenderError("The turn that calls a tool is not closed when a result follows it.")
        return found.slice(int(places[closings - 1]) + (not from_closing), len(found))
