"""`posttrain chat MODEL`: talk to a model in the terminal, or pipe one prompt through it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from jinja2 import TemplateError

from posttrain.cli.errors import UsageError, as_usage_error
from posttrain.cli.options.words import Parser

UNANSWERABLE = (ValueError, TemplateError)
"""Too long for the model, or refused by its chat template, as a system message is by some."""

HELP = (
    "/reset forgets the conversation; /system TEXT sets the system message and resets (without TEXT: none); /image FILE shows an "
    "image with the next message; /quit ends."
)


def parser() -> Parser:
    made = Parser(
        prog="posttrain chat",
        description=f"Talk to a model. {HELP} With a pipe, the standard input is one prompt, and only the answer is printed.",
    )
    made.add_argument(
        "model", metavar="MODEL", help="run folder, checkpoint, model or adapter folder, GGUF file, Hub id"
    )
    made.add_argument("--adapter", help="a PEFT adapter on top of MODEL")
    made.add_argument("--system", help="system message")
    made.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="shown with the first message; several times for several",
    )
    made.add_argument("--temperature", type=float, default=0.7, help="0: the most likely token (default: %(default)s)")
    made.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s, all tokens)")
    made.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="(default: %(default)s)")
    made.add_argument("--seed", type=int, help="the same answers each time")
    made.add_argument("--dtype", help="of the weights (default: that of the files)")
    made.add_argument("--device", help="(default: the GPU where there is one)")
    made.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    return made


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    for name, holds, wanted in (
        ("temperature", options.temperature >= 0, "0 (greedy) or more"),
        ("top-p", 0 < options.top_p <= 1, "above 0 and at most 1"),
        ("max-new-tokens", options.max_new_tokens >= 1, "at least 1"),
    ):
        if not holds:
            raise UsageError(f"--{name} is {getattr(options, name.replace('-', '_'))}; it must be {wanted}.")
    from posttrain.cli.running.loaded_model import open_model

    is_piped = not sys.stdin.isatty()
    prompt = sys.stdin.read().strip() if is_piped else ""
    if is_piped and not prompt:
        raise UsageError("The standard input is empty; pipe a prompt into `posttrain chat`, or start it in a terminal.")
    pictures = as_usage_error(lambda: [picture_of(file) for file in options.image])
    opened = as_usage_error(lambda: open_model(options))
    processor = as_usage_error(opened.processor) if pictures else None
    responder = Responder(opened.load(sees=bool(pictures)), opened.tokenizer, options, processor)
    chat = Chat(responder.respond, options.system, pictures=pictures)
    if is_piped:  # all of it is the prompt: /reset is not a command here
        try:
            chat.answer(prompt)
        except UNANSWERABLE as error:
            print(f"posttrain chat: {error}", file=sys.stderr)
            return 1
        return 0
    return converse(chat, options.model)


def converse(chat: Chat, name: str) -> int:
    """Until /quit, or the end of the input."""
    print(f"{name}. {HELP}")
    while True:
        try:
            text = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        if text and not chat.handle(text):
            return 0


def picture_of(file: str) -> Any:
    """A picture to show, decoded. BadImage, a ValueError, where there is none."""
    from posttrain.data.images.limits import HEADER, ImageLimits
    from posttrain.data.images.opening import open_image

    return open_image(os.path.expanduser(file), ImageLimits(check=HEADER)).rgb()  # which decodes it


@dataclass
class Chat:
    """A conversation: its messages, and the commands that change it."""

    respond: Callable[[list[dict[str, Any]]], str]
    system: str | None = None
    out: TextIO = field(default_factory=lambda: sys.stdout)
    messages: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[Any] = field(default_factory=list)
    """Shown with the first message of each conversation. Without any the model is loaded for texts alone."""
    waiting: list[Any] = field(default_factory=list)
    """Shown with the next message."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [] if not self.system else [{"role": "system", "content": self.system}]
        self.waiting = [*self.pictures]

    def handle(self, text: str) -> bool:
        """Answer, or do what a command says; False: it is over."""
        word, _, rest = text.partition(" ")
        if word in COMMANDS:
            return COMMANDS[word](self, rest.strip())
        if word.startswith("/") and "/" not in word[1:] and word[1:].isalpha():
            print(f"There is no command {word}. {HELP}", file=self.out)
            return True
        try:
            self.answer(text)
        except UNANSWERABLE as error:
            print(str(error), file=self.out)
        return True

    def answer(self, text: str) -> None:
        """What cannot be answered is not remembered."""
        shown = [{"type": "image", "image": picture} for picture in self.waiting]
        asked = [
            *self.messages,
            {"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text},
        ]
        self.messages = [*asked, {"role": "assistant", "content": self.respond(asked)}]
        self.waiting = []

    def _reset(self, rest: str) -> bool:
        self.reset()
        print("The conversation begins again.", file=self.out)
        return True

    def _system(self, rest: str) -> bool:
        self.system = rest or None
        self.reset()
        print(f"System message: {self.system}" if self.system else "There is no system message.", file=self.out)
        return True

    def _image(self, rest: str) -> bool:
        said = f"{rest} is shown with your next message."
        try:
            if not self.pictures:
                raise ValueError("The model was loaded for texts: start the chat with --image FILE to show it images.")
            self.waiting.append(picture_of(rest))
        except ValueError as error:
            said = str(error)
        print(said, file=self.out)
        return True

    def _quit(self, rest: str) -> bool:
        return False

    def _help(self, rest: str) -> bool:
        print(HELP, file=self.out)
        return True


COMMANDS: dict[str, Callable[[Chat, str], bool]] = {
    "/reset": Chat._reset, "/system": Chat._system, "/image": Chat._image, "/quit": Chat._quit, "/exit": Chat._quit,
    "/help": Chat._help,
}  # fmt: skip


class Responder:
    """Writes answers word by word as they are drawn. Control-C ends an answer, not the conversation."""

    def __init__(self, model: Any, tokenizer: Any, options: Any, processor: Any = None) -> None:
        """`processor`: where images are shown."""
        import torch

        from posttrain.evaluation.run import stop_ids

        self.model, self.tokenizer, self.options, self.processor = model, tokenizer, options, processor
        self.stop_ids = [*stop_ids(model, tokenizer)]
        if options.seed is not None:
            torch.manual_seed(options.seed)

    def respond(self, messages: list[dict[str, Any]]) -> str:
        from transformers import TextStreamer

        prompt = self._prompt(messages)
        streamer = RecordingStreamer(TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True))
        try:
            self.model.generate(**prompt, streamer=streamer, **self._sampling())
        except KeyboardInterrupt:
            streamer.end()
        return streamer.text(self.tokenizer)

    def _prompt(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        if self.processor is not None:
            made = self._seen(messages)
        elif self.tokenizer.chat_template:
            made = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:  # a base model continues what it reads
            made = self.tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt")
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        length = made["input_ids"].shape[1]
        if context is not None and length >= context:
            raise ValueError(
                f"The conversation has {length} tokens, and the model reads {context}: /reset begins again."
            )
        if self.processor is not None:
            return {**made.to(self.model.device, self.model.dtype)}  # of numbers alone that are not whole
        return {name: made[name].to(self.model.device) for name in ("input_ids", "attention_mask")}

    def _seen(self, messages: list[dict[str, Any]]) -> Any:
        """What the processor makes of texts and pictures. It is handed pixels, and no name of a file."""
        from posttrain.data.render.conversation import as_parts, for_template

        parts = [part for message in messages for part in as_parts(message["content"])]
        pictures = [part["image"] for part in parts if part["type"] == "image"]
        template = self.processor.chat_template
        if template:
            text = self.tokenizer.apply_chat_template(
                for_template(messages), chat_template=template, add_generation_prompt=True, tokenize=False
            )
        else:
            text = "".join(part.get("text", self.processor.image_token) for part in parts)
        made = self.processor(text=[text], images=[pictures], return_tensors="pt", add_special_tokens=not template)
        made.pop("labels", None)
        return made

    def _sampling(self) -> dict[str, Any]:
        options = self.options
        drawn = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {
            **(drawn if options.temperature > 0 else greedy),
            "max_new_tokens": options.max_new_tokens,
            "eos_token_id": self.stop_ids or None,
            "pad_token_id": self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0,
        }


class RecordingStreamer:
    """A streamer that also remembers what it was given; the first it is given is the prompt."""

    def __init__(self, streamer: Any) -> None:
        self.streamer, self.ids = streamer, []
        self._has_prompt = False

    def put(self, value: Any) -> None:
        if self._has_prompt:
            self.ids += value.reshape(-1).tolist()
        self._has_prompt = True
        self.streamer.put(value)

    def end(self) -> None:
        self.streamer.end()

    def text(self, tokenizer: Any) -> str:
        return tokenizer.decode(self.ids, skip_special_tokens=True)
