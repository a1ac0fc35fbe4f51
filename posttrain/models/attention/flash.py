"""One call of a flash kernel over ragged rows: torch's own varlen kernel, or that of a package (`flash_choice`) where that pays.

Both give, beside the output, the log-sum-exp L of each query's scores; the backward needs only output and L, so that a softmax may
be put together from several calls (`prefix`) and its backward be run with the whole one's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posttrain.models.attention import flash_choice
from posttrain.models.attention.flash_choice import Variant
from posttrain.models.attention.flash_packages import Package

HALF = (torch.float16, torch.bfloat16)
EVERYTHING = (-1, -1)


class FlashCall(NamedTuple):
    """Which queries attend to which keys, and how. Of a segment with more keys than queries the last ones are aligned."""

    bounds: Tensor  # int32 start of each segment of queries
    longest: int
    key_bounds: Tensor
    longest_keys: int
    scale: float
    causal: bool = True
    window: tuple[int, int] = EVERYTHING  # tokens that are seen to the left and to the right
    dropout: float = 0.0
    softcap: float = 0.0

    @classmethod
    def of_segments(cls, bounds: Tensor, longest: int, scale: float, **how: Any) -> FlashCall:
        """Segments that attend to themselves."""
        return cls(bounds, longest, bounds, longest, scale, **how)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(tokens, heads, width) -> the same; differentiable."""
        return self.forward(q, k, v)[0]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output, log-sum-exps (heads, tokens), and the random state of dropout: none from a package."""
        if (package := self.package(q, k)) is not None:
            return *package.forward(q, k, v, *self._bounds, *self._how), ()
        if self.softcap:
            raise NotImplementedError("torch's flash kernel has no soft-cap.")
        left, right = self.window
        out, sums, *seed = torch.ops.aten._flash_attention_forward(
            q, k, v, *self._bounds, self.dropout, self.causal, False,
            scale=self.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out, sums, tuple(seed[:2])

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, seed: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v, of a forward that gave `seed`, with the output and sums of the whole softmax."""
        if not seed:
            package = flash_choice.served(self._variant(q, k), self.longest)
            return package.backward(grad_out, q, k, v, out, sums, *self._bounds, *self._how)
        left, right = self.window
        return torch.ops.aten._flash_attention_backward(
            grad_out, q, k, v, out, sums, *self._bounds, self.dropout, self.causal, *seed,
            scale=self.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip

    def can_run(self, q: Tensor, k: Tensor) -> bool:
        """Soft-caps are known to packages alone."""
        return flash_can_run(q) and (not self.softcap or self.package(q, k) is not None)

    def package(self, q: Tensor, k: Tensor) -> Package | None:
        """Whose kernel serves; None: torch's."""
        return None if self.dropout else flash_choice.chosen(self._variant(q, k), self.longest, q.device)

    def _variant(self, q: Tensor, k: Tensor) -> Variant:
        windowed = self.window != EVERYTHING
        return Variant(q.shape[1], k.shape[1], q.shape[2], q.dtype, self.causal, windowed, self.softcap)

    @property
    def _bounds(self) -> tuple[Tensor, Tensor, int, int]:
        return self.bounds, self.key_bounds, self.longest, self.longest_keys

    @property
    def _how(self) -> tuple[float, bool, int, int, float]:
        return self.scale, self.causal, *self.window, self.softcap


def flash_can_run(query: Tensor) -> bool:
    """Whether torch's kernel runs here."""
    width = query.shape[-1]
    return query.is_cuda and query.dtype in HALF and width <= 256 and width % 8 == 0


def tokens_first(*heads: Tensor) -> tuple[Tensor, ...]:
    """(1, heads, tokens, width) -> (tokens, heads, width)."""
    return tuple(x.squeeze(0).transpose(0, 1) for x in heads)


def as_wide(value: Tensor, query: Tensor) -> Tensor:
    """Values of latent attention are narrower than its queries, and flash wants one width: zeros besides change nothing."""
    narrower = query.shape[-1] - value.shape[-1]
    return nn.functional.pad(value, (0, narrower)) if narrower > 0 else value


def as_narrow(output: Tensor, value: Tensor) -> Tensor:
    """Without what `as_wide` has added."""
    width = value.shape[-1]
    return output if output.shape[-1] == width else output[..., :width].contiguous()  # some families view it
