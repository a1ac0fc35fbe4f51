"""AdamW on float32 masters in one pass over the weights.

torch's fused AdamW wants gradients of the masters' dtype and knows nothing of the bfloat16 parameters, so that a step reads and
writes every weight several times: gradients to float32, clipping, the step, the copy back. Here one kernel reads a gradient of any
dtype, clips, steps and writes both copies: 28 instead of about 60 bytes a weight.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any, Protocol

import torch
from torch import Tensor

CHUNK, BLOCK = 2**16, 2048  # weights of one program, and of one round of it


def can_run(optimizer: torch.optim.Optimizer) -> bool:
    """Plain fused AdamW with all of its weights on one CUDA device."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return (
        type(optimizer) is torch.optim.AdamW
        and all(group["fused"] and not group["amsgrad"] and not group["maximize"] for group in optimizer.param_groups)
        and all(0 < beta < 1 for group in optimizer.param_groups for beta in group["betas"])
        and all(parameter.is_cuda and parameter.is_contiguous() for parameter in parameters)
        and importlib.util.find_spec("triton") is not None
    )


class Masters(Protocol):
    """What is asked of MasterWeights."""

    def gradient_of(self, master: Tensor) -> Tensor | None: ...

    def low_of(self, master: Tensor) -> Tensor | None: ...


class MasterAdamW(torch.optim.AdamW):
    """Takes the place of the class of an AdamW whose parameters are masters; its state is AdamW's, under AdamW's names.

    `clip` is a device scalar that multiplies the gradients; `found_inf`, as torch's fused optimizers name it, turns a step into
    nothing. Both are set by FiniteSteps before every step.
    """

    masters: Masters
    clip: Tensor | None = None

    @classmethod
    def take_over(cls, optimizer: torch.optim.AdamW, masters: Masters) -> None:
        optimizer.__class__ = cls
        optimizer.masters = masters
        optimizer._patch_step_function()  # torch hangs hooks and profiling on the class when an optimizer is made

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            raise ValueError("MasterAdamW takes no closure.")
        for group in self.param_groups:
            self._step_group(group)

    def _step_group(self, group: dict[str, Any]) -> None:
        """One launch for the tensors of a group that have the same dtypes."""
        used: dict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor, Tensor]]] = {}
        for master in group["params"]:
            gradient = self.masters.gradient_of(master)
            if gradient is not None:
                low = self.masters.low_of(master)
                low = master if low is None else low
                used.setdefault((low.dtype, gradient.dtype), []).append((master, gradient.contiguous(), low))
        for tensors in used.values():
            self._launch(group, tensors)

    def _launch(self, group: dict[str, Any], tensors: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        from posttrain.trainer.step.adamw_triton import adamw_kernel

        device = tensors[0][0].device
        skip = self.found_inf if getattr(self, "found_inf", None) is not None else torch.zeros((), device=device)
        clip = self.clip if self.clip is not None else torch.ones((), device=device)
        states = [self._state_of(master) for master, _, _ in tensors]
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        corrections = self._corrections(states, skip, beta1, beta2)
        rows = [
            (master, state["exp_avg"], state["exp_avg_sq"], gradient, low)
            for (master, gradient, low), state in zip(tensors, states)
        ]
        addresses = _on_device([[part.data_ptr() for part in parts] for parts in zip(*rows)], device)
        sizes, tensor_of_chunk, start_of_chunk = self._chunks([master.numel() for master, _, _ in tensors], device)
        _, gradient, low = tensors[0]
        adamw_kernel[(len(tensor_of_chunk),)](
            addresses, sizes, corrections, tensor_of_chunk, start_of_chunk, clip, skip, len(tensors),
            lr, lr * group["weight_decay"], beta1, beta2, group["eps"],
            LOW=_triton_dtype(low.dtype), GRADIENT=_triton_dtype(gradient.dtype), CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip

    def _chunks(self, sizes: list[int], device: torch.device) -> tuple[Tensor, ...]:
        """(sizes, tensor of each chunk, its first weight), made once for each set of tensors."""
        known = self.__dict__.setdefault("_known_chunks", {})
        if tuple(sizes) not in known:
            pairs = [(tensor, start) for tensor, size in enumerate(sizes) for start in range(0, size, CHUNK)]
            columns = [sizes, [tensor for tensor, _ in pairs], [start for _, start in pairs]]
            known[tuple(sizes)] = tuple(_on_device(column, device) for column in columns)
        return known[tuple(sizes)]

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    @staticmethod
    def _corrections(states: list[dict[str, Any]], skip: Tensor, beta1: float, beta2: float) -> Tensor:
        """(2, n): 1 - beta1^t and 1 - beta2^t, in float64 before they are rounded: 1 - 0.999^1 loses four digits else.

        A step that is skipped does not count. (Adding a device scalar to a list of tensors would make the host wait for it.)
        """
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1.0)
        torch._foreach_sub_(steps, [skip] * len(steps))
        t = torch.stack(steps).double()
        return torch.stack([-torch.expm1(t * math.log(beta)) for beta in (beta1, beta2)]).float()


def _on_device(numbers: list, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, str(dtype).removeprefix("torch."))
