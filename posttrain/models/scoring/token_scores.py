"""Ask a model about positions of a batch, without ever keeping the logits.

`install_scores` gives a model a forward that also accepts `score=ScoreRequest(questions)`: the body runs once, each question gets
the hidden states of its own positions and answers with named numbers. `TokenQuestion` (here) asks the language head for
log-probs, statistics and any other measure of the logits; `HeadQuestion` (`heads.py`) asks a head of our own; `RowsQuestion` asks
for the hidden states themselves, as a teacher is asked. Calls go through `model(...)`, so the hooks of DDP, FSDP, DeepSpeed and
PEFT all fire; without `score` the original forward runs, so `generate` is untouched.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from posttrain.core.batch import PADDED, RowPart, TokenBatch
from posttrain.core.results import TokenScores
from posttrain.models.attention.ragged import segment_kwargs
from posttrain.models.attention.sequence_parallel import put_together
from posttrain.models.inference import body_of
from posttrain.models.scoring.float32_head import head_input
from posttrain.models.scoring.fused_head import can_fuse, summed_nll, token_logps
from posttrain.models.sharding import call_inside, is_sharded_module, plain_class
from posttrain.models.vision.features import family_of, filler_zero, with_images

CHUNK_BYTES = {"cuda": 2**30, "cpu": 64 * 2**20}
"""Size of one chunk of logits: large enough to fill a GPU, small enough for a CPU's cache to help."""


class Question(Protocol):
    """What is asked at which positions."""

    @property
    def positions(self) -> Tensor:
        """(N,) flat index into rows * width."""

    def answer(self, model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
        """Named numbers about the hidden states (N, H) of these positions."""


@dataclass(frozen=True)
class ScoreRequest:
    """Questions for one forward pass. Travels as one keyword argument through every wrapper of the model."""

    questions: tuple[Question, ...]
    width: int  # tokens per row, before any virtual tokens that prompt tuning puts in front
    router_loss: bool = False
    # (1, width) how often each token counts in it, where the batch is one row; padded ones have a mask
    token_weights: Tensor | None = None


@dataclass(frozen=True)
class Measure:
    """`function(logits (n, V), log Z (n,), targets (n,), *aligned) -> (n,) or (n, K)`, computed chunk by chunk.

    `aligned` are tensors with a row for each asked position: candidate ids, or the hidden states of a teacher.
    """

    function: Callable[..., Tensor]
    aligned: tuple[Tensor, ...] = ()
    differentiable: bool = False


@dataclass(frozen=True)
class TokenQuestion:
    """What the language head says about N tokens: their log-probs, and further measures of its logits."""

    positions: Tensor
    targets: Tensor  # (N,)
    measures: dict[str, Measure] = field(default_factory=dict)
    temperature: float = 1.0
    chunk_tokens: int | None = None
    summed: bool = False  # the loss is the plain sum of nll: its gradient may be computed in the forward
    label_smoothing: float = 0.0  # only with `summed`
    keep_logits: bool = False  # for the backward, where they are not needed in the forward: memory for time
    vocabulary: int | None = None  # words beyond it are padding: in no normaliser, no statistic and no measure

    def of_part(self, part: RowPart, start: int) -> TokenQuestion:
        """What is asked at the positions of a part of the row, which begins at `start`."""
        measures = {
            name: replace(measure, aligned=tuple(tensor[part.asked] for tensor in measure.aligned))
            for name, measure in self.measures.items()
        }
        asked = {"positions": self.positions[part.asked] - start, "targets": self.targets[part.asked]}
        return replace(self, **asked, measures=measures)

    def answer(self, model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
        head = model.get_output_embeddings()
        if is_sharded_module(head):
            return call_inside(head, rows, lambda gathered, call: self._scores(model, gathered, call))
        return self._scores(model, rows, head)

    def _scores(self, model: nn.Module, hidden: Tensor, call: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """`call` computes logits, as often as is needed."""
        head = LanguageHead.of(model, self.temperature, call, self.vocabulary)
        hidden = head_input(hidden, head.module)
        fused = can_fuse(head) and not any(m.aligned for m in self.measures.values())
        item = hidden.element_size() if fused else 4
        chunk = self.chunk_tokens or default_chunk_tokens(hidden.device, head.vocabulary, item)
        if fused:
            stats = {name: m.function for name, m in self.measures.items() if not m.differentiable}
            if self.summed and torch.is_grad_enabled():
                return summed_nll(hidden, head, self.targets, chunk, stats, self.label_smoothing)
            if len(stats) == len(self.measures):
                keeps = self.keep_logits and torch.is_grad_enabled()
                result = token_logps(hidden, head, self.targets, chunk, stats, keeps)
                return result | ({"nll_sum": -result["logps"].sum()} if self.summed else {})
        result = map_over_logits(
            hidden,
            head,
            self._measured,
            self.targets,
            *(tensor for measure in self.measures.values() for tensor in measure.aligned),
            chunk_tokens=chunk,
            min_chunks=chunks_on_every_process(head.module, len(hidden), chunk),
            keep_logits=self.keep_logits,
        )
        if self.summed and not self.label_smoothing:
            result["nll_sum"] = -result["logps"].sum()
        return result

    def _measured(self, logits: Tensor, targets: Tensor, *aligned: Tensor) -> dict[str, Tensor]:
        # One fused kernel forward and one backward, where logsumexp and gather would write several copies of the logits.
        logps = -cross_entropy(logits, targets, reduction="none")
        result, others = {"logps": logps}, iter(aligned)
        if self.measures:
            log_z = logits.gather(-1, targets[:, None]).squeeze(-1) - logps
        for name, measure in self.measures.items():
            mine = [next(others) for _ in measure.aligned]
            with nullcontext() if measure.differentiable else torch.no_grad():
                result[name] = measure.function(logits, log_z, targets, *mine)
        return result


@dataclass(frozen=True)
class RowsQuestion:
    """The hidden states themselves, before the head: what a divergence from a teacher needs of the teacher."""

    positions: Tensor

    def answer(self, model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
        head = model.get_output_embeddings()
        if head is not None and is_sharded_module(head):
            # FSDP2 may have put the head into one group with the last norm: its forward has not ended until both were called.
            call_inside(head, rows[:0], lambda given, _: given)
        return {"rows": rows}


# ---- statistics: (logits, log-normaliser, targets) -> (n,) ------------------------------------------------------------


def entropy(logits: Tensor, log_z: Tensor, targets: Tensor) -> Tensor:
    """-sum_v p_v log p_v = log Z - sum_v p_v z_v."""
    return log_z - ((logits - log_z[:, None]).exp() * logits).sum(-1)


def is_most_likely(logits: Tensor, log_z: Tensor, targets: Tensor) -> Tensor:
    """1 where the target is the model's first choice."""
    return (logits.argmax(-1) == targets).to(logits.dtype)


def most_likely(logits: Tensor, log_z: Tensor, targets: Tensor) -> Tensor:
    """The model's first choice."""
    return logits.argmax(-1)


def mean_logit(logits: Tensor, log_z: Tensor, targets: Tensor) -> Tensor:
    return logits.mean(-1)


def mean_logps(logits: Tensor, log_z: Tensor, targets: Tensor) -> Tensor:
    """Mean log-prob over the vocabulary, the uniform part of label smoothing."""
    return logits.mean(-1) - log_z


def log_sum_squared_probs(logits: Tensor, log_z: Tensor, targets: Tensor) -> Tensor:
    """log sum_v p_v^2, by which WPO normalises a sampled token's log-prob (arXiv:2406.11827)."""
    return torch.logsumexp(2 * logits, -1) - 2 * log_z


def likeliest_tokens(logits: Tensor, log_z: Tensor, targets: Tensor, *_: Tensor, count: int) -> Tensor:
    """(n, 2 count): ids of the likeliest tokens, which float32 has exactly up to 2 ** 24, and their log-probs."""
    found = logits.topk(count, -1)
    return torch.cat([found.indices.float(), (found.values - log_z[:, None]).float()], -1)


def logps_of_tokens(logits: Tensor, log_z: Tensor, targets: Tensor, ids: Tensor) -> Tensor:
    """(n, k): log-probs of these tokens."""
    return logits.gather(-1, ids) - log_z[:, None]


TOKEN_STATS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "entropy": entropy,
    "is_most_likely": is_most_likely,
    "most_likely": most_likely,
    "mean_logit": mean_logit,
    "mean_logps": mean_logps,
    "log_sum_squared_probs": log_sum_squared_probs,
}


# ---- the question ------------------------------------------------------------------------------------------------------


def score_tokens(
    model: nn.Module,
    batch: TokenBatch,
    stats: tuple[str, ...] = (),
    *,
    differentiable_stats: tuple[str, ...] = (),
    measures: dict[str, Measure] | None = None,
    also: tuple[Question, ...] = (),
    router_loss: bool = False,
    **how: Any,
) -> TokenScores:
    """What does the model say about each trained token? `model` may be wrapped in anything.

    `stats` and `differentiable_stats` are names in TOKEN_STATS, `measures` any others, `also` further questions to the same
    forward; `how` are the options of TokenQuestion.
    """
    named = {name: Measure(TOKEN_STATS[name], differentiable=True) for name in differentiable_stats}
    named |= {name: Measure(TOKEN_STATS[name]) for name in stats}
    targets = targets_within(batch, how.get("vocabulary"))
    question = TokenQuestion(batch.positions, targets, named | (measures or {}), **how)
    return ask(model, batch, question, *also, router_loss=router_loss)


def targets_within(batch: TokenBatch, vocabulary: int | None) -> Tensor:
    """(N,) trained tokens. A student may have written a word beyond: it has no log-prob in what is compared, and that of the last
    word stands there."""
    return batch.targets if vocabulary is None else batch.targets.clamp(max=vocabulary - 1)


def ask(model: nn.Module, batch: TokenBatch, *questions: Question, router_loss: bool = False) -> TokenScores:
    """The answers to all questions, from one forward pass; of a row that processes share, to those of all of them."""
    width, part = batch.input_ids.shape[1], batch.part
    if part is not None:
        questions = _questions_of_part(questions, part, width)
        width //= part.size
    weights = batch.samples_of_tokens() if router_loss and batch.layout != PADDED else None
    request = ScoreRequest(questions, width, router_loss, weights)
    answer = model(**forward_kwargs(batch), use_cache=False, score=request)
    if part is not None:
        answer = {name: put_together(values, part, batch.num_trained) for name, values in answer.items()}
    known = {f.name: answer.pop(f.name) for f in fields(TokenScores) if f.name in answer}
    return TokenScores(**known, stats=answer)


def _questions_of_part(questions: tuple[Question, ...], part: RowPart, width: int) -> tuple[Question, ...]:
    unknown = [type(question).__name__ for question in questions if not hasattr(question, "of_part")]
    if unknown:
        raise NotImplementedError(
            f"{unknown[0]} is asked about whole rows, and this one lies on {part.size} processes."
        )
    return tuple(question.of_part(part, part.run(width).start) for question in questions)


def forward_kwargs(batch: TokenBatch) -> dict[str, Any]:
    """The batch as keyword arguments of a transformers model."""
    kwargs: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    if batch.images is not None:  # turned into features inside of the model's forward: see `models/vision/features`
        kwargs["images"] = batch.images
    if batch.layout == PADDED:
        return kwargs | {"attention_mask": batch.attention_mask}
    kwargs |= segment_kwargs(batch.cu_segments, batch.longest, batch.prefixes, batch.long)
    if batch.part is not None:
        mine = batch.part.run(batch.input_ids.shape[1])
        kwargs |= {name: kwargs[name][..., mine] for name in ("input_ids", "position_ids")} | {"row_part": batch.part}
    return kwargs


def install_scores(model: nn.Module) -> None:
    """Let the innermost model answer `score=ScoreRequest(...)`. Safe to call twice."""
    if hasattr(model, "_forward_without_scores"):
        return
    original = model.forward
    unbound = type(model).forward

    @functools.wraps(unbound)  # `generate` and Trainer read the signature
    def forward(self: nn.Module, *args: Any, score: ScoreRequest | None = None, **kwargs: Any) -> Any:
        if score is None:
            return self._forward_without_scores(*args, **kwargs)
        return answer(self, score, **kwargs)

    # Bound methods, not closures over the model: a deep copy of the model then answers for itself.
    model._forward_without_scores = original
    model.forward = types.MethodType(forward, model)


def answer(model: nn.Module, request: ScoreRequest, **kwargs: Any) -> dict[str, Tensor]:
    """Run the body once, then each question on the hidden states of its positions."""
    if request.router_loss:
        kwargs["output_router_logits"] = True
    if "images" in kwargs or family_of(model) is not None:
        kwargs = with_images(model, kwargs, request.questions[0].positions)
    zero = None if "mm_encoder_outputs" in kwargs else filler_zero(model)
    output = body_of(model)(**kwargs)
    hidden = output.last_hidden_state
    rows, virtual = hidden.flatten(0, 1), hidden.shape[1] - request.width
    result: dict[str, Tensor] = {}
    for question in request.questions:
        places = question.positions
        if virtual:  # tokens that prompt tuning has put at the start of each row
            places = places + (places // request.width + 1) * virtual
        result |= question.answer(model, rows[places] if zero is None else rows[places] + zero)
    if request.router_loss:
        weights = kwargs.get("attention_mask") if request.token_weights is None else request.token_weights
        result["aux_loss"] = router_loss(model, output.router_logits, weights)
    return result


def map_over_logits(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    fn: Callable[..., dict[str, Tensor]],
    *aligned: Tensor,
    chunk_tokens: int,
    min_chunks: int = 0,
    keep_logits: bool = False,
) -> dict[str, Tensor]:
    """Apply `fn(logits, *aligned)` to `chunk_tokens` rows at a time; the logits are recomputed in the backward, or kept for it.

    With no rows at all the head is still called once, on none: collectives of sharded heads need every rank.
    """

    def one(rows: Tensor, *others: Tensor) -> dict[str, Tensor]:
        logits = head(rows)
        return fn(logits.to(torch.promote_types(logits.dtype, torch.float32)), *others)

    chunks = list(zip(*(tensor.split(chunk_tokens) for tensor in (hidden, *aligned)))) or [(hidden, *aligned)]
    chunks += [tuple(tensor[:0] for tensor in (hidden, *aligned))] * (min_chunks - len(chunks))
    if torch.is_grad_enabled() and not keep_logits:
        parts = [checkpoint(one, *chunk, use_reentrant=False) for chunk in chunks]
    else:
        parts = [one(*chunk) for chunk in chunks]
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def chunks_on_every_process(head: nn.Module, rows: int, chunk_tokens: int) -> int:
    """How often the head must be called where each call is a collective: processes with fewer tokens call it on none.

    Where the head is whole, or FSDP2 has gathered it, each process may count alone, and the result is 0.
    """
    weight = getattr(head, "weight", None)
    is_sharded = hasattr(weight, "placements") or hasattr(weight, "ds_id")
    if not is_sharded or not torch.distributed.is_initialized():
        return 0
    count = torch.tensor(-(-rows // chunk_tokens), device=weight.device)
    torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX)
    return int(count)


def default_chunk_tokens(device: torch.device, vocabulary: int, item: int = 4) -> int:
    """Rows whose logits, of `item` bytes each, fill a chunk; on a GPU a multiple of the tiles of its products."""
    rows = CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"]) // (item * vocabulary)
    tile = next((tile for tile in (1024, 128) if rows >= tile), 1)
    return max(rows // tile * tile, 16)


# ---- the head ----------------------------------------------------------------------------------------------------------

LOGIT_SCALES: dict[str, Callable[[float], float]] = {
    "logit_scale": lambda value: value,  # Cohere
    "logits_scaling": lambda value: 1 / value,  # Granite
    "lm_head_multiplier": lambda value: value,  # Falcon H1
    "output_multiplier": lambda value: value,
}
"""Config fields by which a family multiplies its logits after the head."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config fields of the bound of a family's logits: Gemma, RecurrentGemma, xLSTM."""


@dataclass
class LanguageHead:
    """hidden -> logits as the model itself would compute them, with the temperature on top."""

    module: nn.Module
    logits: Callable[[Tensor], Tensor]
    scale: float
    softcap: float | None
    vocabulary: int
    words: int | None = None  # only these first columns of the logits, of all that the head has

    @classmethod
    def of(
        cls,
        causal_lm: nn.Module,
        temperature: float = 1.0,
        call: Callable[[Tensor], Tensor] | None = None,
        words: int | None = None,
    ) -> LanguageHead:
        """`call`: what computes the head's own logits, where that is not the head as a module."""
        config = causal_lm.config.get_text_config()
        scale = 1.0
        for name, factor in LOGIT_SCALES.items():
            if getattr(config, name, None):
                scale *= factor(getattr(config, name))
        softcap = next((cap for name in SOFTCAPS if (cap := getattr(config, name, None))), None)
        head = causal_lm.get_output_embeddings()
        call = head if call is None else call
        sizes = config.vocab_size if words is None else words, words
        if softcap is None:  # the temperature can join the scale; under a soft-cap it must come after it
            return cls(head, call, scale / temperature, None, *sizes)

        def capped(hidden: Tensor) -> Tensor:
            """softcap * tanh(scale * z / softcap) / temperature."""
            return torch.tanh(call(hidden) * scale / softcap) * softcap / temperature

        return cls(head, capped, 1.0, softcap, *sizes)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.logits(hidden)
        if self.words is not None:
            logits = logits[..., : self.words]
        return logits * self.scale if self.scale != 1.0 else logits


# ---- mixtures of experts -----------------------------------------------------------------------------------------------


def router_loss(causal_lm: nn.Module, router_logits: Any, weights: Tensor | None) -> Tensor:
    """The family's own load-balancing loss, of Switch Transformers (arXiv:2101.03961, equations 4 to 6): with f_e the share of
    tokens that expert e is chosen for, and p_e its mean probability, E sum_e f_e p_e.

    `weights` (rows, width): how often each token counts. The tokens of a shared prompt count once for each of its answers.
    """
    config = causal_lm.config.get_text_config()
    load_balancing_loss = sys.modules[plain_class(causal_lm).__module__].load_balancing_loss_func
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    return load_balancing_loss(router_logits, experts, config.num_experts_per_tok, weights)
