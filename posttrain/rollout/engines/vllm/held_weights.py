"""What a vLLM in this process really holds, compared number by number with tensors of our names.

vLLM fuses, splits and pads when it loads. Instead of knowing how each family does that, its own loader is run once more with
every copy into a parameter replaced by a comparison: nothing is written, and whatever would have changed is a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.serve.engine.tower_names import as_vllm_names


class _CompareOnCopy(TorchDispatchMode):
    """Copies and fills of the model's memory compare; everything else runs as it is."""

    def __init__(self, memory: set[int]) -> None:
        super().__init__()
        self._memory = memory
        self.compared = 0
        self.differs = False
        aten = torch.ops.aten
        self._instead: dict[Any, Callable[[Tensor, Any], Tensor]] = {
            aten.copy_.default: lambda held, new: new.expand(held.shape),
            aten.fill_.Scalar: torch.full_like,
            aten.fill_.Tensor: lambda held, new: new.expand(held.shape),
            aten.zero_.default: lambda held, _: torch.zeros_like(held),
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        wanted_by = self._instead.get(func)
        if wanted_by is None or args[0].untyped_storage().data_ptr() not in self._memory:
            return func(*args, **(kwargs or {}))
        held = args[0]
        wanted = wanted_by(held, args[1] if len(args) > 1 else None)
        self.compared += 1
        self.differs |= not torch.equal(held, wanted.to(held.device, held.dtype))
        return held


def differing_tensors(
    worker: Any,
    tensors: Iterable[tuple[str, Tensor]],
    at_most: int,
    leaves_out: Callable[[str], bool] = lambda name: False,
) -> list[str]:
    """Run in vLLM's worker: names of tensors whose numbers vLLM does not hold, the first `at_most` of them.

    A tensor that vLLM's loader leaves out altogether counts as differing, unless `leaves_out` says of its name that it may be.
    """
    model = worker.model_runner.model
    found: list[str] = []
    with torch.no_grad():
        mode = _CompareOnCopy({parameter.untyped_storage().data_ptr() for parameter in model.parameters()})
        for name, tensor in tensors:
            mode.compared, mode.differs = 0, False
            with mode:
                model.load_weights(as_vllm_names(model, [(name, tensor)]))
            if mode.differs or not (mode.compared or leaves_out(name)):
                found.append(name)
            if len(found) >= at_most:
                break
    return found


def complete(
    tensors: Iterable[tuple[str, Tensor]], wanted: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in their order, each one of those `wanted` (name -> shape, dtype); ValueError for any other, or a missing one."""
    left = dict(wanted)
    for name, tensor in tensors:
        if name not in left:
            kind = "came twice" if name in wanted else "is not a tensor of this model"
            raise ValueError(f"{name} {kind}: these are not the weights of one version.")
        shape, dtype = left.pop(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; it must have {shape}.")
        if tensor.dtype != dtype:
            raise ValueError(
                f"{name} came in {tensor.dtype}; it must come in {dtype} (`exported_weights(model, engine.dtype)`)."
            )
        yield name, tensor
    if left:
        raise ValueError(f"{len(left)} of {len(wanted)} tensors did not come, {next(iter(left))} first.")
