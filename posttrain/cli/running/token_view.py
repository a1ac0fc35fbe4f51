"""Samples as the model sees them, token by token: what is trained, what is context, what max_length cuts off."""

from __future__ import annotations

from typing import Any

import numpy as np

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


def coloured(tokenizer: Any, ids: np.ndarray, kinds: list[str]) -> Any:
    """A rich Text."""
    from rich.text import Text

    text = Text()
    for place, (piece, kind) in enumerate(zip(pieces_of(tokenizer, ids), kinds)):
        if place == MAX_TOKENS:
            text.append(f" ... {len(ids) - MAX_TOKENS} more tokens", style="italic")
            break
        text.append(piece, style=STYLES[kind][place % 2])
    return text


def marked(tokenizer: Any, ids: np.ndarray, kinds: list[str]) -> str:
    """Without colours: runs of one kind, each with its name and its number of tokens."""
    lines, start = [], 0
    pieces = pieces_of(tokenizer, ids[:MAX_TOKENS])
    for place in range(1, len(pieces) + 1):
        if place == len(pieces) or kinds[place] != kinds[start]:
            lines.append(f"{kinds[start]:>8} {place - start:>4} | {''.join(pieces[start:place])!r}")
            start = place
    if len(ids) > MAX_TOKENS:
        lines.append(f"... {len(ids) - MAX_TOKENS} more tokens")
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
