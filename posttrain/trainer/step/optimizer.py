"""StepGuard: the optimizer step that is not taken when it is not finite.

The check costs no host synchronisation: the gradient norm is a device scalar already, and fused optimizers take a `found_inf` flag
on the device that turns the step (its counters included) into nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from posttrain.core.faults import fault_point
from posttrain.models.memory.activation_offloading import offloaded_activations
from posttrain.models.sharding import local_part
from posttrain.trainer.options.base import DEEPSPEED, FSDP, BaseConfig
from posttrain.trainer.step.adam8bit import AdamW8bit
from posttrain.trainer.step.master_adamw import MasterAdamW
from posttrain.trainer.step.masters import MasterWeights, has_low_precision


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Euclidean norm of all of them, in float32 or better whatever their dtype."""
    alike: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.dtype, placed(gradient)), []).append(local_part(gradient))
    norms = []
    for (dtype, place), group in alike.items():
        each = torch._foreach_norm(group, 2.0, dtype=torch.promote_types(dtype, torch.float32))
        norms += each if place is None else [over_shards(torch.linalg.vector_norm(torch.stack(each)), *place)]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].dtype) for norm in norms]))


def placed(tensor: Tensor) -> tuple[Any, Any] | None:
    """(mesh, placements) of a tensor of which other processes have other parts; None where it is whole."""
    return (tensor.device_mesh, tensor.placements) if hasattr(tensor, "placements") else None


def over_shards(norm: Tensor, mesh: Any, placements: Any) -> Tensor:
    """The norm of a whole from those of its parts. Collective."""
    square = norm.double().square()
    for dimension, placement in enumerate(placements):
        if placement.is_shard():
            dist.all_reduce(square, group=mesh.get_group(dimension))
    return square.sqrt().to(norm.dtype)


def set_rate(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], rate: float) -> None:
    """Move these parameters of an optimizer that has not stepped yet into groups of their own: one for each they were in, with all
    of its other settings, so that weight decay stays as it was."""
    moved = {id(parameter) for parameter in parameters}
    for group in list(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if id(parameter) in moved]
        if own:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
            optimizer.add_param_group({**group, "params": own, "lr": rate})


class FiniteSteps:
    """Decides, on the device, whether an optimizer step is taken, and reports it to the host later without waiting."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, world_size: int = 1, masters: MasterWeights | None = None
    ) -> None:
        self.optimizer = optimizer
        self.masters = masters
        self.world_size = world_size
        self.on_device = all(group.get("fused") for group in optimizer.param_groups) and getattr(
            optimizer, "_step_supports_amp_scaling", False
        )
        self._pending: list[tuple[Any, Tensor, Any]] = []  # (context, host flag, event)

    def gradients(self) -> list[Tensor]:
        """Every gradient that the coming step will read."""
        found = (
            parameter.grad if self.masters is None else self.masters.gradient_of(parameter)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        )
        return [gradient for gradient in found if gradient is not None]

    @torch.no_grad()
    def clip(self, max_norm: float | None, loss: Tensor, context: Any) -> Tensor:
        """Clip to `max_norm`, arm or disarm the coming step, remember `context` for the report. Returns the norm."""
        gradients = self.gradients()
        norm = total_norm(gradients) if gradients else torch.zeros((), device=loss.device)
        bad = ~(torch.isfinite(norm) & torch.isfinite(loss))
        if self.world_size > 1:  # every process must take the same decision
            flag = bad.to(torch.float32)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            bad = flag > 0
        if max_norm and gradients:
            self._clip(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        self._arm(bad)
        self._remember(bad, context)
        return norm

    def _clip(self, gradients: list[Tensor], factor: Tensor) -> None:
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.clip = factor.float()  # it multiplies while it reads
            return
        if isinstance(self.optimizer, AdamW8bit):  # in float32, what is not
            self.optimizer.clip = factor.float()
            gradients = [gradient for gradient in gradients if gradient.dtype == torch.float32]
        if gradients:
            torch._foreach_mul_([local_part(gradient) for gradient in gradients], factor)

    def _arm(self, bad: Tensor) -> None:
        if self.on_device:
            self.optimizer.found_inf = bad.to(torch.float32)
        elif bool(bad):  # this optimizer cannot skip on the device: the host has to know, and gradients go
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            if self.masters is not None:
                self.masters.drop_gradients()

    def _remember(self, bad: Tensor, context: Any) -> None:
        if bad.is_cuda:
            host = torch.empty((), dtype=torch.bool, pin_memory=True)
            host.copy_(bad, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending.append((context, host, event))
        else:
            self._pending.append((context, bad, None))

    def finished(self, wait: bool = False) -> list[tuple[Any, bool]]:
        """(context, was the step skipped) for the steps whose flag has reached the host, oldest first."""
        done = []
        while self._pending:
            context, flag, event = self._pending[0]
            if event is not None and not event.query():
                if not wait:
                    break
                event.synchronize()
            done.append((context, bool(flag)))
            self._pending.pop(0)
        return done


class StepGuard:
    """The coming optimizer step of a run: its gradients in float32, its loss and rows, and whether it may be taken.

    `finite` is None where an engine does all of that itself: DeepSpeed, and the gradient scaler of fp16.
    """

    masters: MasterWeights | None = None
    finite: FiniteSteps | None = None

    def __init__(self, args: BaseConfig) -> None:
        self.args = args
        self.loss: Tensor | float = 0.0
        self.rows: list[int] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Masters where weights of low precision are trained, and the check of each step."""
        args = self.args
        is_watched = self.finite is not None and self.finite.optimizer is optimizer
        if is_watched or args.sharding == DEEPSPEED or args.fp16:
            return optimizer
        is_low = has_low_precision(p for group in optimizer.param_groups for p in group["params"])
        if is_low and args.sharding == FSDP and not args.bf16:  # with it, accelerate makes float32 shards of them
            raise ValueError(
                "The weights to be trained are of low precision, and `bf16` is off: under FSDP the optimizer would work on them as "
                "they are, and lose small steps. Set `bf16=True`, or load the model in float32."
            )
        if is_low and args.sharding is None:
            self.masters = MasterWeights(optimizer, accumulates=not args.steps_in_one_pass)
        self.finite = FiniteSteps(optimizer, args.world_size, self.masters)
        return optimizer

    @contextmanager
    def around_pass(self, accelerator: Accelerator, model: nn.Module, is_last: bool) -> Iterator[None]:
        """Around the forward and backward of one pass; `is_last` of its micro-batch."""
        with ExitStack() as stack:
            # MasterWeights.all_reduce averages whole steps; without masters DDP reduces with the last pass, FSDP with each.
            is_copied = self.args.world_size > 1 and self.args.sharding != FSDP
            if is_copied and (self.masters is not None or not is_last):
                stack.enter_context(accelerator.no_sync(model))
            if self.args.activation_offloading:
                stack.enter_context(offloaded_activations(self.args.device))
            yield

    def clip(self, max_norm: float | None, step: int) -> Tensor:
        """Clip the gradients of `step` and decide whether it is taken. Returns their norm."""
        if self.masters is not None and self.args.world_size > 1:
            self.masters.all_reduce()
        loss = torch.as_tensor(self.loss, device=self.args.device)
        if fault_point("gradient"):
            self.finite.gradients()[0].fill_(torch.nan)
        norm = self.finite.clip(max_norm, loss, (step, self.rows))
        self.loss = 0.0
        return norm
