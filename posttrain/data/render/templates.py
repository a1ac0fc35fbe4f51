"""Built-in chat formats for tokenizers that have none.

The formats are Jinja files of our own writing in `posttrain/chat_templates`. A format is more than its template: the tokens
it writes should be single tokens, and generation has to stop at the token that closes a turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.data.render.renderer import Renderer

TEMPLATES = Path(__file__).resolve().parents[2] / "chat_templates"


@dataclass(frozen=True)
class ChatFormat:
    """A template file, the token that closes a turn (None: the tokenizer's own EOS), and the other tokens it writes."""

    file: str
    stop_token: str | None = None
    tokens: tuple[str, ...] = ()
    needs_bos: bool = False

    @property
    def template(self) -> str:
        return (TEMPLATES / self.file).read_text(encoding="utf-8")


MISTRAL_TOKENS = (
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
DEEPSEEK_TOKENS = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
BUILT_IN_FORMATS: dict[str, ChatFormat] = {
    "chatml": ChatFormat("chatml.jinja", "<|im_end|>", ("<|im_start|>",)),
    "alpaca": ChatFormat("alpaca.jinja"),
    "llama2": ChatFormat("llama2.jinja", needs_bos=True),
    "llama3": ChatFormat("llama3.jinja", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>"), needs_bos=True),
    "mistral": ChatFormat("mistral.jinja", None, MISTRAL_TOKENS, needs_bos=True),
    "zephyr": ChatFormat("zephyr.jinja", None, ("<|system|>", "<|user|>", "<|assistant|>")),
    "gemma": ChatFormat("gemma.jinja", "<end_of_turn>", ("<start_of_turn>",), needs_bos=True),
    "phi3": ChatFormat("phi3.jinja", "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>")),
    "vicuna": ChatFormat("vicuna.jinja", needs_bos=True),
    "deepseek": ChatFormat("deepseek.jinja", None, DEEPSEEK_TOKENS, needs_bos=True),
}


@dataclass(frozen=True)
class FormatNeeds:
    """What a tokenizer and a model still need before a format works as it should."""

    stop_token: str  # generation must stop here: set it as EOS of the generation config
    missing_tokens: tuple[str, ...]  # texts of the format that are not single tokens of this tokenizer yet
    notes: tuple[str, ...]  # the same in sentences


def use_chat_format(tokenizer: Any, name: str) -> FormatNeeds:
    """Sets one of the built-in formats as the tokenizer's chat template and says what it needs.

    No token is added here, since the model's embeddings would have to grow with it; `clone_chat_template` does both.
    """
    if name not in BUILT_IN_FORMATS:
        raise ValueError(f"There is no chat format {name!r}; the built-in ones are {', '.join(BUILT_IN_FORMATS)}.")
    chat_format = BUILT_IN_FORMATS[name]
    stop_token = chat_format.stop_token or tokenizer.eos_token
    if stop_token is None:
        raise ValueError(
            f"The {name} format closes turns with the EOS token, and the tokenizer has none; set tokenizer.eos_token."
        )
    tokenizer.chat_template = chat_format.template
    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    missing = tuple(text for text in (*chat_format.tokens, stop_token) if text not in known)
    notes = []
    if missing:
        notes.append(
            f"The {name} format writes {', '.join(missing)}, which this tokenizer spells in several tokens. It works, but "
            "single tokens are safer: add them with tokenizer.add_special_tokens and resize the model's embeddings."
        )
    if stop_token != tokenizer.eos_token:
        notes.append(
            f"Turns of the {name} format end with {stop_token}, and the tokenizer's EOS is {tokenizer.eos_token}: generation must "
            f"stop at {stop_token} (a trainer sees to that where it is a single token)."
        )
    if chat_format.needs_bos and tokenizer.bos_token is None:
        notes.append(f"The {name} format begins with a BOS token, and this tokenizer has none; it is left out.")
    return FormatNeeds(stop_token, missing, tuple(notes))


FORMATS_OF_MODELS = {
    "llama": "llama2", "mistral": "mistral", "mixtral": "mistral", "gemma": "gemma", "deepseek": "deepseek",
}  # fmt: skip
"""How the model types of families begin -> the format that the family's chats are in, where no control token tells."""


def detect_chat_format(tokenizer: Any, model_type: str | None = None) -> tuple[str, str]:
    """(built-in format for a tokenizer without a template, why that one).

    A format fits where its tokens (those of tools aside, which older models lack) are in the vocabulary; of several formats the
    one with the most is taken (phi3 has zephyr's and one more). Else the family of the model decides, else it is ChatML.
    """
    known = tokenizer.get_vocab().keys() | {token.content for token in tokenizer.added_tokens_decoder.values()}
    fitting: dict[str, tuple[str, ...]] = {}
    for name, chat_format in BUILT_IN_FORMATS.items():
        written = (*chat_format.tokens, *([chat_format.stop_token] if chat_format.stop_token else []))
        needed = tuple(text for text in written if "tool" not in text.lower())
        if needed and known.issuperset(needed):
            fitting[name] = needed
    if fitting:
        name = max(fitting, key=lambda one: len(fitting[one]))
        return name, f"its vocabulary has {', '.join(fitting[name])}"
    for family, name in FORMATS_OF_MODELS.items():
        if (model_type or "").startswith(family):
            return name, f"the model is of type {model_type}"
    return "chatml", "neither its control tokens nor the model's type tell another"


def adopt_chat_format(renderer: Renderer) -> str:
    """Give the tokenizer the built-in format that fits; the sentence that says so."""
    name, why = detect_chat_format(renderer.tokenizer, renderer.model_type)
    needs = use_chat_format(renderer.tokenizer, name)
    notes = "".join(f" {note}" for note in needs.notes).rstrip(".")
    note = f"the tokenizer has no chat template, so the built-in format {name} is used: {why} (another one: `chat_template_path`)"
    return f"{note}.{notes}" if notes else note
