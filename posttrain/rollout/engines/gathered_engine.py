"""GatheredEngine: an engine that reads whole weights, for a model that FSDP holds in pieces.

It has a copy of the model without weights. Before completions are written every process gathers the weights into its own copy, in
the dtype that the model computes in; afterwards they are dropped. Between those two moments, and only then, each GPU holds the
whole model besides its shards: 2 bytes a weight in bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from posttrain.models.critic import CRITIC
from posttrain.models.load.adapters import is_quantized
from posttrain.models.load.model import innermost_model
from posttrain.models.sharding import reshard, whole
from posttrain.rollout.engines.protocol import RolloutEngine, SamplingParams, Session


class GatheredEngine:
    """A RolloutEngine. `load_weights(None, version)` gathers and is a collective; `sleep` gives the memory back."""

    def __init__(
        self, model: nn.Module, make: Callable[[nn.Module], RolloutEngine], device: torch.device, dtype: torch.dtype
    ) -> None:
        """`make` is given the copy, filled once: engines try a model out before they take it."""
        if is_quantized(innermost_model(model)):
            raise ValueError(
                "Quantised weights are not gathered for generation under FSDP. Use `use_vllm=True`, or train without sharding."
            )
        self.model, self.device, self.dtype = model, device, dtype
        self.copy = _without_weights(model, device)
        self._gather()
        self.engine = make(self.copy)
        self._drop()

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def rounds(self) -> bool:
        return getattr(self.engine, "rounds", False)

    def session(self, params: SamplingParams) -> AbstractContextManager[Session]:
        return self.engine.session(params)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        if weights is None:
            self._gather()
        self.engine.load_weights(weights, version)

    def sleep(self) -> None:
        self.engine.sleep()
        self._drop()

    def wake(self) -> None:
        self.engine.wake()

    def _gather(self) -> None:
        gather_into(self.copy, self.model, self.device, self.dtype)

    def whole_copy(self) -> nn.Module:
        """Another copy, with weights, to be kept. A collective."""
        made = copy.deepcopy(self.copy)
        gather_into(made, self.model, self.device, self.dtype)
        return made

    def _drop(self) -> None:
        for parameter in self.copy.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)


@torch.no_grad()
def gather_into(made: nn.Module, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """The weights of `model`, whole, into a copy without weights. A collective."""
    reshard(model)
    source = dict(model.named_parameters())
    for name, parameter in made.named_parameters():
        gathered = whole(source[name])
        parameter.data = gathered.to(device, dtype if gathered.is_floating_point() else gathered.dtype)


def _without_weights(model: nn.Module, device: torch.device) -> nn.Module:
    """A deep copy in which parameters are empty; buffers are copied to the device."""
    empty = {
        id(parameter): nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=device), requires_grad=False)
        for parameter in model.parameters()
    }
    critic = getattr(innermost_model(model), CRITIC, None)
    if critic is not None:  # nothing is generated from it
        empty[id(critic)] = nn.Identity()
    made = copy.deepcopy(model, empty)
    for module in made.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return made.eval()
