"""Samples as the model sees them, token by token: what is trained, what is context, what max_length cuts off."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.core.sample import Sample
from posttrain.view.token_text import TokenText

CONTEXT, TRAINED, CUT = "context", "trained", "cut"
STYLES = {
    CONTEXT: ("grey58", "grey42"),
    TRAINED: ("bold green", "bold dark_green"),
    CUT: ("strike red", "strike dark_red"),
}
"""Two shades each, in turn from token to token, so that one sees where they part."""
MAX_TOKENS = 400


def kinds_of(trained: np.ndarray, start: int, stop: int) -> list[str]:
    """Of each token of a whole sample, of which [start, stop) is kept. The first token of all is predicted by nothing."""
    names = np.where(trained, TRAINED, CONTEXT).astype(object)
    names[:start], names[stop:] = CUT, CUT
    if start < len(names) and names[start] == TRAINED:
        names[start] = CONTEXT
    return names.tolist()


@dataclass(frozen=True)
class Piece:
    """What is shown of a token, or of all tokens that stand for an image."""

    text: str
    kind: str
    tokens: int = 1


def shown_pieces(tokenizer: Any, sample: Sample, kinds: list[str]) -> tuple[list[Piece], int]:
    """(pieces of the first tokens, how many tokens are left out). An image is one piece, however many placeholders it has."""
    images = {image.start: (number, image) for number, image in enumerate(sample.images, 1)}
    shown = min(len(sample), MAX_TOKENS + sum(image.stop - image.start - 1 for image in sample.images))
    texts, pieces, place = pieces_of(tokenizer, sample.input_ids[:shown]), [], 0
    while place < shown:
        if place in images:
            number, image = images[place]
            pieces.append(Piece(f"[image {number}]", kinds[place], image.stop - place))
        else:
            pieces.append(Piece(texts[place], kinds[place]))
        place += pieces[-1].tokens
    return pieces, len(sample) - place


def coloured(tokenizer: Any, sample: Sample, kinds: list[str]) -> Any:
    """A rich Text."""
    from rich.text import Text

    text = Text()
    pieces, left_out = shown_pieces(tokenizer, sample, kinds)
    for place, piece in enumerate(pieces):
        text.append(piece.text, style=STYLES[piece.kind][place % 2])
    if left_out:
        text.append(f" ... {left_out} more tokens", style="italic")
    return text


def marked(tokenizer: Any, sample: Sample, kinds: list[str]) -> str:
    """Without colours: runs of one kind, each with its name and its number of tokens."""
    pieces, left_out = shown_pieces(tokenizer, sample, kinds)
    lines = []
    for kind, run in itertools.groupby(pieces, key=lambda piece: piece.kind):
        run = list(run)
        lines.append(f"{kind:>8} {sum(piece.tokens for piece in run):>4} | {''.join(piece.text for piece in run)!r}")
    if left_out:
        lines.append(f"... {left_out} more tokens")
    return "\n".join(lines)


def pieces_of(tokenizer: Any, ids: np.ndarray) -> list[str]:
    """The text of each token; a character of several tokens (most outside of Latin scripts) stands with the last of them."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return TokenText(backend).pieces(ids.tolist())
    pieces, start = [], 0
    # A tokenizer in Python: tokens are decoded together until they are whole characters.
    for stop in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:stop].tolist(), skip_special_tokens=False)
        is_whole = stop == len(ids) or not text.endswith("\N{REPLACEMENT CHARACTER}")
        pieces.append(text if is_whole else "")
        start = stop if is_whole else start
    return pieces


def aligned(tokenizer: Any, teachers: Any, ids: list[int]) -> str:
    """How student and teacher cut the text of some tokens, and where both begin a token: "un|believ = unbel|iev  able"."""
    from posttrain.data.alignment import align
    from posttrain.data.render.byte_decoding import bytes_of_tokens

    ours, theirs = bytes_of_tokens(tokenizer), bytes_of_tokens(teachers)
    pieces = [piece for piece in (ours.get(token, b"") for token in ids) if piece]
    text = b"".join(pieces).decode("utf-8", "replace")
    others = [theirs.get(token, b"") for token in teachers(text, add_special_tokens=False)["input_ids"]]
    found, shown = align(pieces, others), []
    for group in found.groups:
        cuts = [
            "|".join(piece.decode("utf-8", "replace") for piece in side[first:last])
            for side, (first, last) in ((pieces, group.student), (others, group.teacher))
        ]
        shown.append(cuts[0] if cuts[0] == cuts[1] else " = ".join(cuts))
    rest = "" if found.is_whole else "; the rest of the text is not the same in both"
    return (
        f"teacher: {len(pieces)} tokens are {len(others)} of the teacher's, compared at {len(found.boundaries)} places{rest}: "
        + "  ".join(shown)
    )
