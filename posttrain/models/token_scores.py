"""Ask a model about the trained tokens of a batch, without ever keeping the logits.

`install_token_scores` gives a causal language model a forward that also accepts `score=ScoreRequest(...)` and then returns a
plain dict of per-token numbers. Calls go through `model(...)`, so the hooks of DDP, FSDP, DeepSpeed and PEFT all fire; without
`score` the original forward runs, so `generate` is untouched.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from posttrain.core.batch import PADDED, TokenBatch
from posttrain.core.results import TokenScores
from posttrain.models.attention import segment_kwargs
from posttrain.models.float32_head import head_input
from posttrain.models.fused_head import can_fuse, summed_nll, token_logps
from posttrain.models.sharding import call_inside, is_sharded_module, plain_class

CHUNK_BYTES = {"cuda": 2**30, "cpu": 64 * 2**20}
"""Size of one chunk of logits: large enough to fill a GPU, small enough for a CPU's cache to help."""


@dataclass(frozen=True)
class ScoreRequest:
    """What is asked about which positions. Travels as one keyword argument through every wrapper of the model."""

    positions: Tensor  # (N,) flat index into rows * width
    targets: Tensor  # (N,)
    width: int  # tokens per row, before any virtual tokens that prompt tuning puts in front
    stats: tuple[str, ...] = ()  # names in TOKEN_STATS, returned detached
    differentiable_stats: tuple[str, ...] = ()
    temperature: float = 1.0
    chunk_tokens: int | None = None
    summed: bool = False  # the loss is the plain sum of nll: its gradient may be computed in the forward
    label_smoothing: float = 0.0  # only with `summed`
    router_loss: bool = False
    keep_logits: bool = False  # for the backward, where they are not needed in the forward: memory for time


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
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    summed: bool = False,
    label_smoothing: float = 0.0,
    differentiable_stats: tuple[str, ...] = (),
    router_loss: bool = False,
    keep_logits: bool = False,
) -> TokenScores:
    """What does the model say about each trained token? `model` may be wrapped in anything."""
    request = ScoreRequest(
        batch.positions,
        batch.targets,
        batch.input_ids.shape[1],
        stats,
        differentiable_stats,
        temperature,
        chunk_tokens,
        summed,
        label_smoothing,
        router_loss,
        keep_logits,
    )
    answer = model(**forward_kwargs(batch), use_cache=False, score=request)
    known = {name: answer.pop(name, None) for name in ("logps", "nll_sum", "aux_loss")}
    return TokenScores(**known, stats=answer)


def forward_kwargs(batch: TokenBatch) -> dict[str, Any]:
    """The batch as keyword arguments of a transformers model."""
    kwargs: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, **batch.media}
    if batch.layout == PADDED:
        return kwargs | {"attention_mask": batch.attention_mask}
    return kwargs | segment_kwargs(batch)


def install_token_scores(causal_lm: nn.Module) -> None:
    """Let the innermost causal LM answer `score=ScoreRequest(...)`. Safe to call twice."""
    if hasattr(causal_lm, "_forward_without_scores"):
        return
    original = causal_lm.forward
    unbound = type(causal_lm).forward

    @functools.wraps(unbound)  # `generate` and Trainer read the signature
    def forward(self: nn.Module, *args: Any, score: ScoreRequest | None = None, **kwargs: Any) -> Any:
        if score is None:
            return self._forward_without_scores(*args, **kwargs)
        return answer(self, score, **kwargs)

    # Bound methods, not closures over the model: a deep copy of the model then answers for itself.
    causal_lm._forward_without_scores = original
    causal_lm.forward = types.MethodType(forward, causal_lm)


def answer(causal_lm: nn.Module, request: ScoreRequest, **kwargs: Any) -> dict[str, Tensor]:
    """Run the body, then the head on the asked positions only."""
    if request.router_loss:
        kwargs["output_router_logits"] = True
    output = getattr(causal_lm, causal_lm.base_model_prefix)(**kwargs)
    hidden = output.last_hidden_state
    selected = hidden.flatten(0, 1)[_shifted(request, hidden.shape[1])]
    head = causal_lm.get_output_embeddings()
    if is_sharded_module(head):
        result = call_inside(head, selected, lambda rows, call: _scores_of_hidden(causal_lm, rows, request, call))
    else:
        result = _scores_of_hidden(causal_lm, selected, request, head)
    if request.router_loss:
        result["aux_loss"] = router_loss(causal_lm, output.router_logits, kwargs.get("attention_mask"))
    return result


def _shifted(request: ScoreRequest, width: int) -> Tensor:
    """Positions in rows that prompt tuning made longer by virtual tokens at their start."""
    extra = width - request.width
    if extra == 0:
        return request.positions
    return request.positions + (request.positions // request.width + 1) * extra


def _scores_of_hidden(
    causal_lm: nn.Module, hidden: Tensor, request: ScoreRequest, call: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """`call` computes logits, as often as is needed."""
    head = LanguageHead.of(causal_lm, request.temperature, call)
    hidden = head_input(hidden, head.module)
    fused = can_fuse(head)
    chunk = request.chunk_tokens or default_chunk_tokens(
        hidden.device, head.vocabulary, hidden.element_size() if fused else 4
    )
    if fused:
        stats = {name: TOKEN_STATS[name] for name in request.stats}
        if request.summed and torch.is_grad_enabled():
            return summed_nll(hidden, head, request.targets, chunk, stats, request.label_smoothing)
        if not request.differentiable_stats:
            result = token_logps(
                hidden, head, request.targets, chunk, stats, request.keep_logits and torch.is_grad_enabled()
            )
            return result | ({"nll_sum": -result["logps"].sum()} if request.summed else {})

    def per_token(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        # One fused kernel forward and one backward, where logsumexp and gather would write several copies of the logits.
        logps = -cross_entropy(logits, targets, reduction="none")
        result = {"logps": logps}
        if request.stats or request.differentiable_stats:
            log_z = logits.gather(-1, targets[:, None]).squeeze(-1) - logps
        for name in request.differentiable_stats:
            result[name] = TOKEN_STATS[name](logits, log_z, targets)
        with torch.no_grad():
            for name in request.stats:
                result[name] = TOKEN_STATS[name](logits.detach(), log_z.detach(), targets)
        return result

    chunks = chunks_on_every_process(head.module, len(hidden), chunk)
    result = map_over_logits(
        hidden, head, per_token, request.targets, chunk_tokens=chunk, min_chunks=chunks, keep_logits=request.keep_logits
    )
    if request.summed and not request.label_smoothing:
        result["nll_sum"] = -result["logps"].sum()
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

    Where the head is whole, or FSDP2 has gathered it, each process may count for itself, and 0 is said.
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


@dataclass
class LanguageHead:
    """hidden -> logits as the model itself would compute them, with the temperature on top."""

    module: nn.Module
    logits: Callable[[Tensor], Tensor]
    scale: float
    softcap: float | None
    vocabulary: int

    @classmethod
    def of(
        cls, causal_lm: nn.Module, temperature: float = 1.0, call: Callable[[Tensor], Tensor] | None = None
    ) -> LanguageHead:
        """`call`: what computes the head's own logits, where that is not the head as a module."""
        config = causal_lm.config.get_text_config()
        scale = 1.0
        for name, factor in LOGIT_SCALES.items():
            if getattr(config, name, None):
                scale *= factor(getattr(config, name))
        softcap = getattr(config, "final_logit_softcapping", None)
        head = causal_lm.get_output_embeddings()
        call = head if call is None else call
        if softcap is None:  # the temperature can join the scale; under a soft-cap it must come after it
            return cls(head, call, scale / temperature, None, config.vocab_size)
        return cls(head, _Tempered(call, softcap, scale, temperature), 1.0, softcap, config.vocab_size)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.logits(hidden)
        return logits * self.scale if self.scale != 1.0 else logits


@dataclass
class _Tempered:
    """A soft-capped head: cap * tanh(scale * z / cap) / temperature."""

    head: Callable[[Tensor], Tensor]
    softcap: float
    scale: float
    temperature: float

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden) * self.scale
        return torch.tanh(logits / self.softcap) * self.softcap / self.temperature


# ---- mixtures of experts -----------------------------------------------------------------------------------------------


def router_loss(causal_lm: nn.Module, router_logits: Any, attention_mask: Tensor | None) -> Tensor:
    """The family's own load-balancing loss, over real tokens (a ragged batch has no others)."""
    config = causal_lm.config.get_text_config()
    load_balancing_loss = sys.modules[plain_class(causal_lm).__module__].load_balancing_loss_func
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    return load_balancing_loss(router_logits, experts, config.num_experts_per_tok, mask)
