"""One decode step, whole on the device: model, head, draw, stop test, positions. The host looks at it every few steps.

Everything the step reads and writes lies in tensors that stay where they are, so that it can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.models.inference import body_of
from posttrain.models.scoring.token_scores import LanguageHead
from posttrain.models.triton_support import runs_triton
from posttrain.models.vision.features import family_of, image_features
from posttrain.rollout.engines.mixture import Mixture, mixed
from posttrain.rollout.engines.native.attention import DecodeStep, Pass, Prefill, Segments, ShapeReader
from posttrain.rollout.engines.native.cache import KeyValueStore
from posttrain.rollout.engines.native.dense_rows import DenseRows, columns_for
from posttrain.rollout.engines.native.rows import Lines, Rows
from posttrain.rollout.engines.native.scheduler import Prefix, Running
from posttrain.rollout.engines.native.states import MixerStates, Parts
from posttrain.rollout.engines.noise import words
from posttrain.rollout.engines.sampling import Drawn, DrawRule, draw


@dataclass
class Sampler:
    """How a session draws: its rule, and the tensors that the rule needs."""

    rule: DrawRule
    stop_ids: Tensor  # (n,) int64
    bias: Tensor | None = None  # (V,)
    seen: Tensor | None = None  # (slots, V) bool
    allowed: Tensor | None = None  # (slots, V) bool

    def part(self, tensor: Tensor | None, rows: int) -> Tensor | None:
        return None if tensor is None else tensor[:rows]


class Program:
    """A step over rows and their pages, of whichever models."""

    rows: Rows
    innermost: nn.Module
    page_bytes: int  # of all keys and values that one page has
    pages: int  # that there is memory for

    @property
    def has_states(self) -> bool:
        """Whether it also keeps states of whole sequences."""
        raise NotImplementedError

    def begin(self, dense_bytes: int) -> None:
        """A session begins; dense rows may take so much memory."""
        raise NotImplementedError

    def grow(self, pages: int) -> None:
        """Memory for `pages`; what is there stays."""
        raise NotImplementedError

    def prefill(self, prefixes: list[Prefix], batch: TokenBatch, segments: Segments, *places: Tensor) -> None:
        """Whole prefixes as one ragged row; `places` are the page and the offset of each token."""
        raise NotImplementedError

    def seat(self, running: Sequence[Running]) -> None:
        """Who runs has changed: these are the rows from now on."""
        raise NotImplementedError

    def lay_out(self, rows: int, table_width: int, steps: int, are_others: bool) -> None:
        """Before `steps` steps: the rows side by side, where the device is a CPU and they fit. `are_others`: than before."""
        raise NotImplementedError

    def keep(self) -> None:
        """After the steps: what they have written goes to its pages, if it is not there already."""
        raise NotImplementedError

    def free(self) -> None:
        """The session is over."""
        raise NotImplementedError

    def logits(self, lines: Lines) -> Tensor:
        """(lines, V) of the next token."""
        raise NotImplementedError

    def run(self, rows: int, table_width: int, sampler: Sampler) -> None:
        """One step: the drawn tokens and their log-probs go to the next line of the results, rows move on by one."""
        logits = self.logits(self.rows.lines(rows, table_width))
        if runs_triton(logits) and sampler.rule.is_plain and sampler.allowed is None:
            from posttrain.rollout.engines.native.sampling_triton import draw_and_advance_triton

            draw_and_advance_triton(logits, self.rows, rows, sampler.rule.temperature, sampler.stop_ids)
        else:
            noise = words(self.rows.field("bases", rows), self.rows.field("numbers", rows))
            seen, allowed = (sampler.part(x, rows) for x in (sampler.seen, sampler.allowed))
            drawn = draw(logits, noise, sampler.rule, sampler.bias, seen, allowed)
            advance_rows(self.rows, rows, drawn, sampler.stop_ids)
            if seen is not None:
                seen.scatter_(1, drawn.ids[:, None], True)
        self.rows.step += 1


class DecodeProgram(Program):
    """The step of one model over one store."""

    def __init__(self, innermost: nn.Module, store: KeyValueStore, rows: Rows) -> None:
        self.innermost, self.store, self.rows = innermost, store, rows
        self.body = body_of(innermost)
        self.placeholder = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=rows.device.device)
        family = family_of(innermost)
        self.has_axes = family is not None and family.three_axis_positions
        self.states: MixerStates | None = None  # of a model with recurrences
        self.dense: DenseRows | None = None
        self.dense_bytes = 0  # that dense rows may take, on a CPU; with 0 its steps attend to pages

    @property
    def page_bytes(self) -> int:
        return self.store.page_bytes

    @property
    def pages(self) -> int:
        return self.store.pages

    @property
    def has_states(self) -> bool:
        return self.states is not None

    def begin(self, dense_bytes: int) -> None:
        self.dense_bytes = dense_bytes

    def grow(self, pages: int) -> None:
        self.store.grow(pages)

    def prefill(self, prefixes: list[Prefix], batch: TokenBatch, segments: Segments, *places: Tensor) -> None:
        seen = (
            {}
            if batch.images is None
            else {"mm_encoder_outputs": {"image": image_features(self.innermost, batch.images)}}
        )
        states: list[dict[int, Parts]] = [{} for _ in prefixes]
        how = Prefill(self.store, segments, *places, self.innermost.config, states)
        self.hidden(batch.input_ids, batch.position_ids, how, **seen)
        if self.states is not None:
            for prefix, left in zip(prefixes, states, strict=True):
                self.states.keep(prefix, left)

    def seat(self, running: Sequence[Running]) -> None:
        if self.states is not None:
            self.states.seat(running)

    def lay_out(self, rows: int, table_width: int, steps: int, are_others: bool) -> None:
        if not are_others and (self.dense is None or self.dense.column + steps <= self.dense.columns):
            return
        self.dense = None  # frees it before the next is made
        positions, prefixes = self.rows.field("positions", rows), self.rows.field("prefixes", rows)
        if self.store.device.type != "cpu":
            return
        if rows * columns_for(positions, steps) * self.store.dense_token_bytes <= self.dense_bytes:
            table = self.rows.table[:rows, :table_width]
            self.dense = DenseRows(self.store, table, positions, prefixes, steps)

    def keep(self) -> None:
        if self.dense is not None:
            self.dense.keep()

    def free(self) -> None:
        self.dense = None
        self.store.free()
        if self.states is not None:
            self.states.free()

    def hidden(
        self, input_ids: Tensor, position_ids: Tensor, kv_cache: ShapeReader | Prefill | DecodeStep, **seen: Any
    ) -> Tensor:
        """(1, tokens) ids and (..., 1, tokens) positions of one ragged row -> (tokens, width). `seen`: features of its images."""
        # A copy, since a compiled layer is compiled again for a view of something of another shape.
        output = self.body(
            input_ids=input_ids, position_ids=position_ids.clone(), attention_mask=self.placeholder,
            use_cache=False, kv_cache=Pass(kv_cache), **seen,
        )  # fmt: skip
        return output.last_hidden_state[0]

    def logits(self, lines: Lines) -> Tensor:
        dense = self.dense if lines.of_each_row == 1 else None  # a column has one token of each row
        cache = DecodeStep(self.store, lines, dense, self.states)
        rotary = lines.positions + lines.shifts if self.has_axes else lines.positions
        hidden = self.hidden(lines.tokens[None], rotary[None], cache)
        if dense is not None:
            dense.advance()
        return LanguageHead.of(self.innermost)(hidden)


class MixedProgram(Program):
    """Two models in one step: the same rows, tokens and pages, each with keys and values of its own under the same tables."""

    def __init__(self, policy: DecodeProgram, second: DecodeProgram, mixture: Mixture) -> None:
        self.parts, self.mixture = (policy, second), mixture
        self.rows, self.innermost = policy.rows, policy.innermost
        # Graphs read the weight where it lies: it may change from session to session.
        self.weight = torch.zeros((), device=policy.store.device)

    @property
    def page_bytes(self) -> int:
        return sum(part.page_bytes for part in self.parts)

    @property
    def pages(self) -> int:
        return self.parts[0].pages

    @property
    def has_states(self) -> bool:
        return any(part.has_states for part in self.parts)

    def begin(self, dense_bytes: int) -> None:
        self.weight.fill_(self.mixture.share())
        for part in self.parts:
            part.begin(dense_bytes * part.page_bytes // self.page_bytes)

    def grow(self, pages: int) -> None:
        for part in self.parts:
            part.grow(pages)

    def prefill(self, *prefixes: Any) -> None:
        policy, second = self.parts
        policy.prefill(*prefixes)
        with self.mixture.context():
            second.prefill(*prefixes)

    def seat(self, running: Sequence[Running]) -> None:
        for part in self.parts:
            part.seat(running)

    def lay_out(self, *rows: Any) -> None:
        for part in self.parts:
            part.lay_out(*rows)

    def keep(self) -> None:
        for part in self.parts:
            part.keep()

    def free(self) -> None:
        for part in self.parts:
            part.free()

    def logits(self, lines: Lines) -> Tensor:
        policy, second = self.parts
        own = policy.logits(lines)
        with self.mixture.context():
            return mixed(own, second.logits(lines), self.weight)


def advance_rows(rows: Rows, count: int, drawn: Drawn, stop_ids: Tensor) -> None:
    """Note what was drawn; each row in use takes its token as its next input, or goes out of use by a stop id."""
    rows.ids[:, :count].index_copy_(0, rows.step, drawn.ids[None])
    rows.logps[0, :, :count].index_copy_(0, rows.step, drawn.sampling_logps[None])
    rows.logps[1, :, :count].index_copy_(0, rows.step, drawn.policy_logps[None])
    tokens, positions, numbers, remaining = (
        rows.field(name, count) for name in ("tokens", "positions", "numbers", "remaining")
    )
    in_use = remaining > 0
    stops = (drawn.ids[:, None] == stop_ids).any(-1)
    left = torch.where(stops, 0, (remaining - 1).clamp(min=0))
    is_active = left > 0
    tokens.copy_(torch.where(is_active, drawn.ids, tokens))
    positions += is_active
    numbers += in_use
    remaining.copy_(left)
