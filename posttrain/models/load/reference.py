"""The reference policy: a frozen copy, the model with its adapter off, a frozen `ref` adapter, or numbers computed before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import TokenScores
from posttrain.models.inference import evaluating
from posttrain.models.load.adapters import REFERENCE_ADAPTER, adapter_in_use, freeze_copy_of_adapter, tensors_of_adapter
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.models.sharding import gathered, local_part, part_of, reshard, whole

PRECOMPUTED = "reference_logps"
"""Name under which a Sample keeps the reference's log-prob of each of its tokens."""


GIVEN_SUMS = "ref_logps"
"""Name of the scalar that a row's own reference log-probs become."""


class Reference:
    """Answers the policy's question with frozen weights. Which kind it is, no method ever asks."""

    def scores(self, batch: TokenBatch) -> TokenScores:
        raise NotImplementedError

    def annotated(self, rows: Any) -> Any:
        """Rows to evaluate on, with what this reference wants to find on them."""
        return rows

    def check_sync(self) -> None:
        """Raise where `sync` cannot be; only a copy can move."""
        raise ValueError(
            f"`sync_ref_model` moves a reference that is a model of its own; here it is {self}. Pass `ref_model`, or turn it off."
        )

    def sync(self, policy: nn.Module, alpha: float) -> None:
        """Move the reference towards the policy (TR-DPO)."""
        self.check_sync()


@dataclass
class ModelReference(Reference):
    """Another model, or another state of the trained one (`context` switches to it and back)."""

    model: nn.Module
    description: str
    context: Callable[[], Any] = nullcontext  # a copy of this reference has it of its own model
    chunk_tokens: int | None = None
    temperature: float = 1.0

    def __str__(self) -> str:
        return self.description

    def beside(self, copied: dict[int, Any]) -> ModelReference:
        """For another thread: modules of its own over the same frozen weights. `copied`: what was copied before, by id, such as the
        policy that this is a state of; more is added to it."""
        frozen = {id(weight): weight for weight in self.model.parameters() if not weight.requires_grad}
        copied |= {number: weight for number, weight in frozen.items() if number not in copied}
        return copy.deepcopy(self, copied)

    @torch.no_grad()
    def scores(self, batch: TokenBatch, vocabulary: int | None = None) -> TokenScores:
        """`vocabulary`: words beyond it are in no normaliser."""
        how = {"temperature": self.temperature, "chunk_tokens": self.chunk_tokens, "vocabulary": vocabulary}
        with self.asked():
            return score_tokens(self.model, batch, **how)

    @contextmanager
    def asked(self) -> Iterator[None]:
        """In evaluation mode, and switched to the state that answers."""
        with evaluating(self.model), self.context():
            yield


@dataclass
class MovableReference(ModelReference):
    """Weights of its own, which can be moved towards the policy's."""

    averages: dict[str, Tensor] = field(default_factory=dict)  # see `keep_averages`

    def weights(self) -> dict[str, Tensor]:
        """Its own, by the names of the policy's that they follow."""
        raise NotImplementedError

    def keep_averages(self) -> None:
        """Average in float32 beside weights of less: a small share of a bfloat16's last digit would be lost each time."""
        own = self.weights().items()
        self.averages = {name: w.float() for name, w in own if torch.promote_types(w.dtype, torch.float32) != w.dtype}

    def _moved(self) -> dict[str, Tensor]:
        """What moves, as exactly as it is known; where FSDP2 holds it in pieces, these."""
        reshard(self.model)
        return {**self.weights(), **self.averages}

    def state(self, is_kept: bool = True) -> dict[str, Tensor]:
        """All that has moved, whole. Where it is in pieces every process must ask; those that do not keep it get nothing."""
        found = {}
        for name, tensor in self._moved().items():
            gathered = whole(tensor)  # one after the other, into the memory of the host
            if is_kept:
                found[name] = gathered.cpu() if hasattr(tensor, "placements") else gathered
        return found

    @torch.no_grad()
    def load_state(self, saved: dict[str, Tensor]) -> None:
        for name, tensor in self._moved().items():
            local_part(tensor).copy_(part_of(tensor, saved[name]))
        self._write_averages()

    @torch.no_grad()
    def sync(self, policy: nn.Module, alpha: float) -> None:
        """reference = (1 - alpha) reference + alpha policy, name by name (arXiv:2404.09656). Both are cut alike, if at all."""
        reshard(policy)
        current = dict(policy.named_parameters())
        for name, tensor in self._moved().items():
            local_part(tensor).lerp_(local_part(current[name]).to(tensor.dtype), alpha)
        self._write_averages()

    def _write_averages(self) -> None:
        own = self.weights() if self.averages else {}
        for name, average in self.averages.items():
            local_part(own[name]).copy_(local_part(average))


@dataclass
class FrozenCopy(MovableReference):
    """A model of its own that never gets a gradient."""

    is_given: bool = False  # by the user; else it is the policy before training

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def check_sync(self) -> None:
        """It can move."""


@dataclass
class FrozenAdapter(MovableReference):
    """A second adapter on the policy's base, which never gets a gradient."""

    name: str = REFERENCE_ADAPTER
    source: str = "default"  # the policy's

    def weights(self) -> dict[str, Tensor]:
        return tensors_of_adapter(self.model, self.name, self.source)


class Precomputed(Reference):
    """Log-probs that were computed before training and travel with the samples; `annotate` computes those of other rows."""

    def __init__(self, annotate: Callable[[Any], Any] | None = None) -> None:
        self._annotate = annotate

    def annotated(self, rows: Any) -> Any:
        return rows if self._annotate is None else self._annotate(rows)

    def __str__(self) -> str:
        return "precomputed log-probs"

    def scores(self, batch: TokenBatch) -> TokenScores:
        if batch.num_units == 0:  # the filler's token: there was nothing to compute anything for
            return TokenScores(logps=torch.zeros(batch.num_trained, device=batch.device))
        if PRECOMPUTED not in batch.per_token:
            raise ValueError(
                "This batch carries no reference log-probs: its dataset was prepared without them. Evaluate with "
                "`trainer.evaluate(dataset)`, or set `precompute_ref_log_probs=False`."
            )
        return TokenScores(logps=batch.per_token[PRECOMPUTED].to(torch.float32))


class GivenSums(Reference):
    """Sums that came with the rows (`ref_chosen_logps`, `ref_rejected_logps`), spread evenly over the tokens of an answer."""

    def __str__(self) -> str:
        return "the log-probs in the columns ref_chosen_logps and ref_rejected_logps"

    def scores(self, batch: TokenBatch) -> TokenScores:
        if GIVEN_SUMS not in batch.scalars:
            raise ValueError(
                "This dataset has no ref_chosen_logps and ref_rejected_logps, unlike the one that is trained on."
            )
        return TokenScores(logps=batch.expand(batch.scalars[GIVEN_SUMS] / batch.counts.clamp(min=1)))


def adapter_off(model: nn.Module) -> ModelReference:
    return ModelReference(model, "the base model under the adapter", partial(adapter_in_use, model, None))


def frozen_adapter(model: nn.Module, name: str = REFERENCE_ADAPTER) -> FrozenAdapter:
    """The policy's adapter as it is now, copied under another name."""
    source = model.active_adapter
    freeze_copy_of_adapter(model, source, name)
    context = partial(adapter_in_use, model, name)
    return FrozenAdapter(model, f"the frozen adapter {name!r}", context, name=name, source=source)


def frozen_copy(model: nn.Module) -> FrozenCopy:
    """Freeze a model and make it the reference."""
    model.requires_grad_(False)
    model.eval()
    return FrozenCopy(model, "a frozen copy")


def create_reference_model(
    model: nn.Module, num_shared_layers: int | None = None, pattern: str | None = None
) -> nn.Module:
    """A frozen deep copy; with `num_shared_layers` the first layers are shared with (and frozen in) the given model."""
    if num_shared_layers is None:
        with gathered(model.parameters()):
            return copy.deepcopy(model).requires_grad_(False).eval()
    prefixes = _layer_prefixes(model, num_shared_layers, pattern)
    shared = {name: p for name, p in model.named_parameters() if _below(name, prefixes, model)}
    memo = {id(parameter): parameter for parameter in shared.values()}
    for parameter in shared.values():
        parameter.requires_grad_(False)
    return copy.deepcopy(model, memo).requires_grad_(False).eval()


def copy_on_host(model: nn.Module) -> nn.Module:
    """A deep copy in host memory; on the device there is never a second one."""
    tensors = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in tensors}
    memo |= {id(parameter): nn.Parameter(memo[id(parameter)], False) for parameter in model.parameters()}
    return copy.deepcopy(model, memo)


def _layer_prefixes(model: nn.Module, count: int, pattern: str | None) -> list[str]:
    candidates = [pattern] if pattern else ["model.layers.{layer}", "transformer.h.{layer}", "gpt_neox.layers.{layer}"]
    names = [name for name, _ in model.named_parameters()]
    for candidate in candidates:
        if any(name.startswith(candidate.format(layer=count)) for name in names):
            return [candidate.format(layer=layer) + "." for layer in range(count)]
    raise ValueError(
        f"No layer {count} was found in {type(model).__name__} under {', '.join(candidates)}. Give `pattern`, with "
        "{layer} in it, and fewer shared layers than the model has."
    )


def _below(name: str, prefixes: list[str], model: nn.Module) -> bool:
    """Layers that are shared, and what comes before them (embeddings)."""
    root = prefixes[0].rsplit(".", 3)[0] if prefixes else ""
    is_embedding = ("embed" in name or "wte" in name or "wpe" in name) and name.startswith(root.split(".")[0])
    return is_embedding or any(name.startswith(prefix) for prefix in prefixes)
