"""Low-precision parameters with float32 masters and accumulators, and the step that is not taken when it is not finite.

A bfloat16 weight has 8 bits of mantissa: an AdamW step at a learning rate of 1e-6 is smaller than half of its last bit and
vanishes. So the optimizer works on float32 *masters*; gradients of micro-batches are added up in float32 as they appear; after the
step the masters are rounded back into the bfloat16 parameters that the forward pass reads. Float32 parameters are left alone.

The finite check costs no host synchronisation: the gradient norm is a device scalar already, and fused optimizers take a
`found_inf` flag on the device that turns the step (its counters included) into nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posttrain.models.sharding import local_part
from posttrain.trainer.step import master_adamw

LOW_PRECISION = (torch.bfloat16, torch.float16)
REDUCE_BUCKET_ELEMENTS = 2**25


class MasterWeights:
    """Puts float32 masters in the place of an optimizer's low-precision parameters.

    Use it on an optimizer that has not stepped yet. `parameter.grad` is folded into `master.grad` by a hook as soon as autograd
    has written it, so a low-precision gradient never outlives its micro-batch. Where a step is one micro-batch on one process
    (`accumulates=False`) there is nothing to add up: if the optimizer can read it as it is, the gradient stays where it is.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accumulates: bool = True) -> None:
        self.optimizer = optimizer
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (parameter, master)
        self._low_of: dict[int, nn.Parameter] = {}
        self._hooks = []
        in_one_pass = master_adamw.can_run(optimizer)
        self.folds = accumulates or not in_one_pass
        for group in optimizer.param_groups:
            group["params"] = [self._master_of(parameter) for parameter in group["params"]]
        if in_one_pass:
            master_adamw.MasterAdamW.take_over(optimizer, self)
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self._after_step(copies=not in_one_pass)))

    def _master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype not in LOW_PRECISION:
            return parameter
        master = nn.Parameter(parameter.detach().float())
        self.pairs.append((parameter, master))
        self._low_of[id(master)] = parameter
        if not self.folds:
            return master

        def fold(low: Tensor) -> None:
            if master.grad is None:
                master.grad = low.grad.float()
            else:
                master.grad.add_(low.grad)
            low.grad = None

        self._hooks.append(parameter.register_post_accumulate_grad_hook(fold))
        return master

    def low_of(self, master: Tensor) -> nn.Parameter | None:
        """The parameter that `master` is the accurate copy of; None for a parameter that needs no master."""
        return self._low_of.get(id(master))

    def gradient_of(self, master: Tensor) -> Tensor | None:
        """Its accumulated gradient, or the one that autograd wrote for the low-precision parameter."""
        low = self.low_of(master)
        return low.grad if master.grad is None and low is not None else master.grad

    def _after_step(self, copies: bool) -> None:
        if copies:
            self.publish()
        for low, master in self.pairs:
            low.grad = master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters."""
        if self.pairs:
            torch._foreach_copy_([low for low, _ in self.pairs], [master for _, master in self.pairs])

    @torch.no_grad()
    def reload(self) -> None:
        """Take the parameters as they are now, e.g. after weights were loaded into the model."""
        for low, master in self.pairs:
            master.copy_(low)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def all_reduce(self) -> None:
        """Average the accumulated float32 gradients over the processes, in buckets.

        DDP is told not to reduce (it would see the last micro-batch only); the sums of whole steps are averaged here.
        """
        bucket: list[Tensor] = []
        size = 0
        for _, master in self.pairs:
            if master.grad is None:  # a process whose rows trained nothing
                master.grad = torch.zeros_like(master)
            bucket.append(master.grad)
            size += master.grad.numel()
            if size >= REDUCE_BUCKET_ELEMENTS:
                _average(bucket)
                bucket, size = [], 0
        if bucket:
            _average(bucket)


def _average(tensors: list[Tensor]) -> None:
    flat = torch._utils._flatten_dense_tensors(tensors)
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, part in zip(tensors, torch._utils._unflatten_dense_tensors(flat, tensors)):
        tensor.copy_(part)


def has_low_precision(parameters: Iterable[nn.Parameter]) -> bool:
    return any(parameter.requires_grad and parameter.dtype in LOW_PRECISION for parameter in parameters)


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


class FiniteSteps:
    """Decides, on the device, whether an optimizer step is taken, and tells the host later without waiting for it."""

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
        if isinstance(self.optimizer, master_adamw.MasterAdamW):
            self.optimizer.clip = factor.float()  # it multiplies while it reads
        else:
            torch._foreach_mul_([local_part(gradient) for gradient in gradients], factor)

    def _arm(self, bad: Tensor) -> None:
        if self.on_device:
            self.optimizer.found_inf = bad.to(torch.float32)
        elif bool(bad):  # this optimizer cannot skip on the device: the host has to know, and gradients go
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            if self.masters is not None:
                for low, _ in self.masters.pairs:
                    low.grad = None

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
