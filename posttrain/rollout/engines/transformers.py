"""The plain engine: the model's ordinary forward with transformers' own cache, batch by batch.

It is the oracle of the native engine, and what runs the architectures that that one cannot: recurrent states, shared keys and
values, images that see themselves whole. The loop is ours, so noise and log-probs are those of every other engine.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.core.batch import PADDED, BatchImages
from posttrain.core.sample import Sample
from posttrain.data.collate import Pixels, collate
from posttrain.models.inference import context_length, evaluating, inference
from posttrain.models.load.model import innermost_model
from posttrain.models.vision.features import family_of, forbidden_tokens, image_features
from posttrain.rollout.engines.mixture import Mixture, mixed
from posttrain.rollout.engines.native import probe
from posttrain.rollout.engines.noise import words
from posttrain.rollout.engines.protocol import Completion, Decode, Prompt, SamplingParams
from posttrain.rollout.engines.request import EndOfText, Request, refuse_unseen, request_or_error
from posttrain.rollout.engines.sampling import Drawn, DrawRule, draw
from posttrain.rollout.engines.structured import Grammar

BATCH_SIZE = 32
STATES = ("past_key_values", "cache_params", "state")
"""Names under which families hand over what they remember of the tokens so far."""


class TransformersEngine:
    """Completes prompts with the trainer's own model and transformers' cache."""

    def __init__(
        self,
        model: nn.Module,
        decode: Decode | None = None,
        batch_size: int = BATCH_SIZE,
        max_context: int | None = None,
        mixture: Mixture | None = None,
        pixels: Pixels | None = None,
    ) -> None:
        """`mixture`: a second model that takes part in every draw; it is run as this one is. `pixels` makes those of prompts with
        images."""
        self.innermost = innermost = innermost_model(model)
        if getattr(innermost.config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(innermost).__name__} is an encoder-decoder; rollouts are written by decoder-only models."
            )
        self.version = 0
        self.model, self.decode, self.batch_size = model, decode, batch_size
        self.context, self.mixture = context_length(innermost, max_context), mixture
        self.vocabulary = innermost.config.get_text_config().vocab_size
        self.pixels, self.family = pixels, family_of(innermost)
        self.forbidden = forbidden_tokens(innermost, pixels)
        self.takes_positions = "position_ids" in inspect.signature(type(innermost).forward).parameters
        # A recurrent state has seen the padding in front of a row: only prompts of one length go together.
        self.pads = not getattr(innermost, "_is_stateful", False)
        reason = self._why_wrong()
        if reason is not None and self.pads:
            self.pads = False
            reason = self._why_wrong()
        if reason is not None:
            raise ValueError(
                f"{type(innermost).__name__} cannot write rollouts here: continued token by token with transformers' cache, "
                f"{reason}. Use vLLM if it runs this family (`use_vllm=True`), or another model."
            )
        if mixture is not None:
            mixture.check(innermost)
            with mixture.context():
                self.second = TransformersEngine(mixture.model, decode, batch_size, max_context, pixels=pixels)
            self.pads = self.pads and self.second.pads
            self.context = min(filter(None, (self.context, self.second.context)), default=None)

    def _why_wrong(self) -> str | None:
        """None when two short prompts, continued token by token, are answered as by a full forward; else the reason."""
        try:
            with evaluating(self.model), inference(next(self.model.parameters()).device):
                gap, allowed = probe.difference(self.model, self._probe_answers)
        except Exception as error:  # an architecture may fail in any way of its own; the sentence carries it
            return f"it ends with {type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
        rounding = f"by {gap:.2g} ({allowed:.1g} is rounding), so that log-probs would be wrong"
        return None if gap <= allowed else f"its answers differ from those of a full forward {rounding}"

    def _probe_answers(self, sequences: list[np.ndarray]) -> list[Tensor]:
        """Prefill all but the last tokens of each sequence, then feed those one by one; together where rows may be padded."""
        params, steps = SamplingParams(max_tokens=probe.CONTINUED), probe.CONTINUED
        groups = [sequences] if self.pads else [[tokens] for tokens in sequences]
        answers: list[Tensor] = []
        for group in groups:
            prompts = [Prompt(tokens[:-steps]) for tokens in group]
            requests = [request_or_error(n, prompt, params, None, self.vocabulary) for n, prompt in enumerate(prompts)]
            batch = PlainBatch(self, params, EndOfText(params, self.decode), None, requests)
            fed = torch.from_numpy(np.stack([tokens[-steps:] for tokens in group])).long().to(batch.device)
            logits = [batch.logits(batch.ids), *(batch.logits(fed[:, n : n + 1]) for n in range(steps - 1))]
            answers += torch.stack(logits, 1)
        return answers

    @contextmanager
    def session(self, params: SamplingParams) -> Iterator[PlainSession]:
        with evaluating(self.model), nullcontext() if self.mixture is None else evaluating(self.mixture.model):
            yield PlainSession(self, params)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        if weights is not None:
            raise ValueError("This engine reads the trainer's weights in place: call load_weights(None, version).")
        self.version = version

    @property
    def sees_prompts_whole(self) -> bool:
        """A prefix-LM: as it is trained, everything before the completion attends in both directions."""
        return self.family is not None and self.family.prefix_sees_itself_whole

    def sleep(self) -> None:
        """Nothing is held between sessions."""

    def wake(self) -> None:
        """Nothing was given back."""


class PlainSession:
    """Prompts wait in a queue; each `advance` runs one batch of them to its end."""

    def __init__(self, engine: TransformersEngine, params: SamplingParams) -> None:
        self._engine, self._params = engine, params
        self._end = EndOfText(params, engine.decode)
        self._grammar = Grammar(params, engine.decode, engine.vocabulary) if params.regex is not None else None
        self._waiting: deque[Request] = deque()
        self._failed: list[tuple[int, Completion]] = []
        self._tickets = 0

    def add(self, prompt: Prompt) -> int:
        ticket, self._tickets = self._tickets, self._tickets + 1
        refuse_unseen(prompt, self._engine.pixels)
        made = request_or_error(ticket, prompt, self._params, self._engine.context, self._engine.vocabulary)
        if prompt.first_token and self._engine.sees_prompts_whole:
            made = (
                f"Prompt {prompt.key} continues an episode, and {type(self._engine.innermost).__name__} sees its whole prompt in "
                "both directions: what it has written would be read otherwise than it is trained. Leave the tools out."
            )
        if isinstance(made, str):
            self._failed.append((ticket, Completion.failed(made, self._engine.version)))
        else:
            self._waiting.append(made)
        return ticket

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._failed)

    @property
    def room(self) -> int:
        return max(self._engine.batch_size - len(self._waiting), 0)

    def advance(self) -> list[tuple[int, Completion]]:
        finished, self._failed = self._failed, []
        if self._waiting:
            asked = (self._params, self._end, self._grammar, self._next_batch())
            batch = (PlainBatch if self._engine.mixture is None else MixedBatch)(self._engine, *asked)
            with inference(batch.device):
                finished += batch.run()
        return finished

    def _next_batch(self) -> list[Request]:
        first = self._waiting[0].prompt
        fits = [request for request in self._waiting if self._engine.pads or len(request.prompt.ids) == len(first.ids)][
            : self._engine.batch_size
        ]
        taken = {id(request) for request in fits}
        self._waiting = deque(request for request in self._waiting if id(request) not in taken)
        return fits


@dataclass(frozen=True)
class LeftPadded:
    """Prompts that end in the same column, as transformers' cache continues them."""

    ids: Tensor  # (rows, width)
    mask: Tensor  # (rows, width)
    axes: Tensor | None  # (3, rows, width) positions of time, row and column, where an image has them
    images: BatchImages | None

    @classmethod
    def of(cls, requests: list[Request], pixels: Pixels | None) -> LeftPadded:
        """Laid out as a padded batch of training, and moved to the right: the order of the images does not change by that."""
        prompts = (request.prompt for request in requests)
        samples = (Sample(p.ids, np.zeros(len(p.ids)), images=p.images, positions=p.positions) for p in prompts)
        batch = collate([(sample,) for sample in samples], ("prompt",), PADDED, pixels=pixels)
        width = batch.input_ids.shape[1]
        source = (torch.arange(width) - (width - batch.lengths[:, None])) % width

        def moved(tensor: Tensor) -> Tensor:
            return tensor.gather(-1, source.expand(tensor.shape))

        axes, images = batch.position_ids, batch.images
        if images is not None and images.token_types is not None:
            images = replace(images, token_types=moved(images.token_types))
        return cls(
            moved(batch.input_ids), moved(batch.attention_mask), moved(axes) if axes.dim() == 3 else None, images
        )


class PlainBatch:
    """Rows padded on their left, run until the last of them has ended."""

    def __init__(
        self,
        engine: TransformersEngine,
        params: SamplingParams,
        end: EndOfText,
        grammar: Grammar | None,
        requests: list[Request],
    ) -> None:
        self.engine, self.end, self.requests = engine, end, requests
        self.device = next(engine.model.parameters()).device
        self.rule = DrawRule.of(params)
        self.bias = self.rule.bias(engine.vocabulary, self.device)
        self.readers = [grammar.reader() for _ in requests] if grammar is not None else None
        prompts = LeftPadded.of(requests, engine.pixels)
        self.ids, self.mask = prompts.ids.to(self.device), prompts.mask.to(self.device)
        self.prompts = prompts
        self.shifts = torch.tensor([[request.rotary_shift] for request in requests], device=self.device)
        self.allowed = None
        if engine.forbidden:
            self.allowed = torch.ones(len(requests), engine.vocabulary, dtype=torch.bool)
            self.allowed[:, engine.forbidden] = False
        self.bases = torch.tensor([request.base for request in requests], device=self.device)
        self.numbers = torch.tensor([request.number for request in requests], device=self.device)
        self.seen = self._seen() if self.rule.penalises else None
        self._states: dict[str, Any] = {}

    def run(self) -> list[tuple[int, Completion]]:
        began = time.perf_counter()
        for request in self.requests:
            request.started = began
        rows, finished = dict(enumerate(self.requests)), []
        inputs = self.ids
        while rows:
            drawn = self._draw(self.logits(inputs))
            if inputs is self.ids:
                for request in self.requests:
                    request.prefill_seconds = time.perf_counter() - began
            finished += self._collect_finished(drawn, rows)
            inputs = drawn.ids[:, None]
            self.numbers = self.numbers + 1
            if self.seen is not None:
                self.seen.scatter_(1, inputs, True)
        return finished

    def logits(self, inputs: Tensor) -> Tensor:
        """(rows, V) after `inputs`: first the prompts, then a token a row."""
        if inputs is not self.ids:
            self.mask = torch.cat([self.mask, torch.ones_like(inputs)], 1)
        output = self.engine.model(**self._arguments(inputs), **self._states, use_cache=True)
        self._states = {name: output[name] for name in STATES if output.get(name) is not None}
        return output.logits[:, -1]

    def _arguments(self, inputs: Tensor) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": inputs}
        # of training: its loss takes no cached tokens
        if getattr(self.engine.model.config, "output_router_logits", False):
            arguments["output_router_logits"] = False
        if self.engine.pads:  # families with a recurrent state read a mask as one of the new tokens alone
            arguments["attention_mask"] = self.mask
        is_prompt = inputs is self.ids
        if self.engine.takes_positions and is_prompt and self.prompts.axes is not None:
            arguments["position_ids"] = self.prompts.axes.to(self.device)
        elif self.engine.takes_positions:
            positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
            arguments["position_ids"] = positions if is_prompt else positions + self.shifts
        return arguments | (self._seen_arguments() if is_prompt else {})

    def _seen_arguments(self) -> dict[str, Any]:
        """What a family that sees is handed with its prompts; a token that is written attends as in any causal model."""
        engine, images, arguments = self.engine, self.prompts.images, {}
        if engine.sees_prompts_whole:
            arguments[engine.family.token_types_key] = torch.zeros_like(self.ids)
        elif images is not None and images.token_types is not None:
            arguments[engine.family.token_types_key] = images.token_types.to(self.device)
        if images is not None:
            encoder = {name: value.to(self.device) for name, value in images.encoder.items()}
            features = image_features(engine.innermost, replace(images, encoder=encoder))
            arguments["mm_encoder_outputs"] = {"image": features}
        return arguments

    def _draw(self, logits: Tensor) -> Drawn:
        allowed = self.allowed
        if self.readers is not None:
            by_grammar = torch.stack([reader.allowed() for reader in self.readers])
            allowed = by_grammar if allowed is None else by_grammar & allowed
        if allowed is not None:
            allowed = allowed.to(self.device)
        return draw(logits, words(self.bases, self.numbers), self.rule, self.bias, self.seen, allowed)

    def _collect_finished(self, drawn: Drawn, rows: dict[int, Request]) -> list[tuple[int, Completion]]:
        """Give the drawn tokens to the rows that are still running, and take the finished ones out."""
        ids, sampling, policy = (x.tolist() for x in (drawn.ids, drawn.sampling_logps, drawn.policy_logps))
        finished = []
        for row, request in list(rows.items()):
            reason = self.end.take(request, ids[row : row + 1], sampling[row : row + 1], policy[row : row + 1])
            if reason is not None:
                finished.append((request.ticket, request.completion(reason, self.engine.version)))
                del rows[row]
            elif self.readers is not None:
                self.readers[row].take(ids[row])
        return finished

    def _seen(self) -> Tensor:
        seen = torch.zeros(len(self.ids), self.engine.vocabulary, dtype=torch.bool, device=self.device)
        for row, request in enumerate(self.requests):
            known = request.prompt.ids[request.prompt.ids < self.engine.vocabulary].astype(np.int64)
            seen[row, torch.from_numpy(known).to(self.device)] = True
        return seen


class MixedBatch(PlainBatch):
    """The same rows through two models, each with a cache of its own; both are fed every token that is drawn."""

    def __init__(self, engine: TransformersEngine, *asked: Any) -> None:
        super().__init__(engine, *asked)
        self.second = PlainBatch(engine.second, *asked)
        self.second.ids = self.ids  # how a batch knows that it is fed its prompts
        self.weight = torch.tensor(engine.mixture.share(), device=self.device)

    def logits(self, inputs: Tensor) -> Tensor:
        own = super().logits(inputs)
        with self.engine.mixture.context():
            return mixed(own, self.second.logits(inputs), self.weight)
