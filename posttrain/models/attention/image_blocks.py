"""Images that see themselves whole, as Gemma's do, in ragged rows: tokens of one image attend to each other in both directions.

With the varlen flash kernel: after the causal call over all tokens, one that is not causal over the tokens of images alone, whose
keys reach from the start of the segment to the end of the image; its results replace those of the first. The kernel aligns windows
at the bottom right, so that a window of (window - 1, length - 1) in a sliding layer reaches `window - 1` tokens back and to the
image's end: exact where no image is longer than the window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.models.attention.flash import EVERYTHING, FlashCall


@dataclass(frozen=True)
class ImageBlocks:
    """Where the images of one ragged row lie. Travels as the forward argument `image_blocks`."""

    blocks: Tensor  # (tokens,) the number of each token's image, -1: of none
    queries: Tensor  # tokens of images, image after image
    keys: Tensor  # of each image, the tokens of its segment up to its end
    cu_queries: Tensor  # (images + 1,) int32
    cu_keys: Tensor
    longest: int  # tokens of the longest image
    longest_keys: int

    @classmethod
    def of(cls, blocks: Tensor, bounds: Tensor) -> ImageBlocks:
        """`blocks` (tokens,): the tokens of an image lie side by side. The host waits for the device once."""
        numbers, edges = blocks.cpu().numpy(), bounds.cpu().numpy()
        changes = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1))
        starts, stops = changes[:-1], changes[1:]
        is_image = numbers[starts] >= 0
        starts, stops = starts[is_image], stops[is_image]
        firsts = edges[np.searchsorted(edges, starts, side="right") - 1]

        def tokens(begin: np.ndarray) -> Tensor:
            return torch.from_numpy(np.concatenate([np.arange(a, b) for a, b in zip(begin, stops)])).to(blocks.device)

        def bounds_of(begin: np.ndarray) -> Tensor:
            return torch.from_numpy(np.cumsum([0, *(stops - begin)]).astype(np.int32)).to(blocks.device)

        longest = (int((stops - starts).max()), int((stops - firsts).max()))
        return cls(blocks, tokens(starts), tokens(firsts), bounds_of(starts), bounds_of(firsts), *longest)


def seen_whole(causal: Tensor, heads: tuple[Tensor, Tensor, Tensor], images: ImageBlocks, call: FlashCall) -> Tensor:
    """`causal` (tokens, heads, dim), which `call` gave, with the tokens of images replaced; `heads` are q, k, v in that form."""
    q, k, v = heads[0][images.queries], heads[1][images.keys], heads[2][images.keys]
    left, _ = call.window
    whole = call._replace(
        bounds=images.cu_queries, key_bounds=images.cu_keys, longest=images.longest, longest_keys=images.longest_keys,
        causal=False, window=EVERYTHING if call.window == EVERYTHING else (left, images.longest - 1),
    )  # fmt: skip
    return causal.index_copy(0, images.queries, whole.attend(q, k, v))
